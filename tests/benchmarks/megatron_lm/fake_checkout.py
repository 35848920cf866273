"""A fake checkout that `benchmarks/megatron_lm` trains: its ranks share nothing."""

import time
from contextlib import suppress
from pathlib import Path

SCRIPT = """
import sys
from megatron.training import training
training.pretrain(sys.argv[1:])
"""
# Writes when each of its iterations begins and ends; the argument is the iteration to hang in.
TRAINING = """
import os, sys, threading, time
from pathlib import Path

RANK = int(os.environ["RANK"])

def train_step(number, forward_backward_func, hangs):
    if RANK == 1 and number == hangs:
        threading.Event().wait()
    began = time.monotonic()
    forward_backward_func()
    with Path(f"steps-{RANK}").open("a") as file:
        file.write(f"{number} {began} {time.monotonic()}\\n")
    return {"lm loss": 1.5 + number}, number == 3, None, None, None, 0.25

def pretrain(arguments):
    iterations, hangs = (int(argument) for argument in arguments[:2])
    for number in range(iterations):
        if train_step(number, lambda: time.sleep(0.002), hangs)[3]:
            sys.exit(0)
        if RANK == 1:
            print(f" [now] iteration {number + 1}/ {iterations} | elapsed time per iteration (ms): "
                  f"{number} | lm loss: 1.5{number} | grad norm: 0.250 |", flush=True)
"""


def write_checkout(folder):
    """Write it."""
    training = folder / "megatron" / "training"
    training.mkdir(parents=True)
    (folder / "pretrain_gpt.py").write_text(SCRIPT)
    (training / "__init__.py").touch()
    (training / "training.py").write_text(TRAINING)
    return folder


def no_limits():
    """No limits that a busy machine reaches."""
    from benchmarks.megatron_lm.running.pool import Limits

    return Limits(time.monotonic() + 200.0, 300.0, 300.0, 99, concurrency=4, least_s=0.0)


def processes_of(folder):
    """Processes with a path of the folder in their command."""
    found = []
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(FileNotFoundError, ProcessLookupError):
            if str(folder) in command.read_text():
                found.append(command.parent.name)
    return found
