"""Runs torchrun on one node, whose options its own parser reads.

Importing that parser takes a second, for torch. `cli/jobs/launch.py` calls `split` and, through
`launch/node.py`, `run_torchrun`.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn

from envpipe_megatron import child
from envpipe_megatron.child import TORCHRUN_MARK
from envpipe_megatron.console import say_as_launcher
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.launch.signals import LOOK_S, Signals

logger = logging.getLogger(__name__)

#: Starts torchrun. Without -P, Python would look for its modules in this folder first.
TORCHRUN = (sys.executable, "-P", "-m", "torch.distributed.run")
_SEE_HELP = "See `envpipe launch --help` and `torchrun --help`."
#: torchrun's own default.
_SHUTDOWN_S = 30

#: Beyond what torchrun gives its ranks. While it waits at the end for nodes that were lost, it
#: handles no signal for minutes.
_PATIENCE_S = 10.0
#: How long ranks may take to end after torchrun was killed, before they are killed too, where it
#: gives them no longer: they may be saving a checkpoint.
_RANKS_END_S = 15.0
#: Meanwhile they may have started others.
_LOOK_AGAIN_S = 0.1


class CommandLine(NamedTuple):
    """`[options] SCRIPT ARGS`: the options with their values, and the rest, as they were given."""

    options: tuple[str, ...]
    script: tuple[str, ...]


class HelpAskedError(EnvPipeError):
    """Options ask for help, which torchrun's parser would give for itself only."""


class _Parser(argparse.ArgumentParser):
    """torchrun's own."""

    def __init__(self) -> None:
        try:
            from torch.distributed.run import get_args_parser

            super().__init__(parents=[get_args_parser()], add_help=False)
        except (ImportError, ValueError) as error:
            raise EnvPipeError(
                "torchrun cannot read its options",
                value=str(error),
                remedy="It comes with torch: pip install 'torch>=2.11'. PET_ variables of flags, "
                "such as PET_STANDALONE, must be 0 or 1.",
            ) from error

    def error(self, message: str) -> NoReturn:
        raise EnvPipeError(f"torchrun refuses its options: {message}", remedy=_SEE_HELP)

    def print_help(self, file: Any = None) -> None:
        raise HelpAskedError("There is no help among torchrun's options", remedy=_SEE_HELP)


def read(arguments: Sequence[str], given_only: Collection[str] = ()) -> argparse.Namespace:
    """Return all options as torchrun reads them, its PET_ variables and defaults too.

    Those of `given_only`, such as `node_rank`, are None where the arguments do not have them.
    Raises EnvPipeError if torchrun's parser refuses them, or there is no torch.
    """
    parser = _Parser()
    parser.set_defaults(**dict.fromkeys(given_only))
    return parser.parse_args(arguments)


def split(words: Sequence[str], own: Mapping[str, bool] | None = None) -> CommandLine:
    """Split `[options] [--] SCRIPT ARGS` before the script, which torchrun's parser finds.

    It gets one more word each time: among the script's arguments it would find abbreviations of
    its own options. `own` has other options that may be there, and whether each takes a value.
    Raises EnvPipeError if there is no script, or options lack values or are not known.
    """
    parser = _Parser()
    for name, takes_value in (own or {}).items():
        parser.add_argument(name, action="store" if takes_value else "store_true")
    for end in range(1, len(words)):
        try:
            _, unknown = parser.parse_known_args(words[:end])
            break
        except HelpAskedError:
            raise
        except EnvPipeError:
            pass
    else:
        end = len(words)
        _, unknown = parser.parse_known_args(words)
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    options = tuple(words[: end - 1])
    return CommandLine(
        options[:-1] if options[-1:] == ("--",) else options, tuple(words[end - 1 :])
    )


def check_script(options: argparse.Namespace) -> None:
    """Refuse (EnvPipeError) a file to run that is not there.

    Each rank would say so; and where it lacks on one node, others would wait for it for minutes.
    """
    script: str = options.training_script
    is_file = options.run_path or not (options.module or options.no_python)
    if is_file and script != "-" and not Path(script).exists():
        raise EnvPipeError(
            "There is no such script to run",
            value=script,
            remedy=f"Give its path as seen from {Path.cwd()}; a module needs -m before it.",
        )


def ranks_of_node(options: argparse.Namespace) -> int:
    """Return how many ranks torchrun starts here: `--nproc-per-node`, or one for each GPU."""
    if options.nproc_per_node.isdigit():
        return int(options.nproc_per_node)
    import torch

    return max(torch.cuda.device_count(), 1)


def handled_signals(arguments: Sequence[str]) -> set[signal.Signals]:
    """Return the signals of `--signals-to-handle`, which torchrun passes to its ranks, and ends."""
    names = {name.strip() for name in read(arguments).signals_to_handle.split(",")}
    never = {signal.SIGKILL, signal.SIGSTOP}
    return {number for number in signal.Signals if number.name in names} - never


def shutdown_s(arguments: Sequence[str]) -> int:
    """Return how long torchrun gives its ranks from a signal to their end, s."""
    # Older torchruns have no such option; and any torchrun refuses a variable that is no number.
    given: int | None = getattr(read(arguments), "shutdown_timeout", None)
    variable = os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "")
    return given if given is not None else int(variable) if variable.isdecimal() else _SHUTDOWN_S


def run_torchrun(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    signals: Signals,
    *,
    take: Callable[[str], object] | None = None,
    log: IO[str] | None = None,
    ranks_s: float | None = None,
) -> int:
    """Run torchrun to its end; return its exit status, 128 plus the signal if it was killed.

    The first signal is passed on and ends it with its ranks; a second one, or 10 s more than its
    `--shutdown-timeout`, kills it. On Linux the death of this process ends it, too. Ranks that
    outlive a torchrun that was signalled or killed are ended here: one that is interrupted while it
    starts them leaves them behind.

    Args:
        arguments: torchrun's options, the script and its arguments.
        environment: added to this process's.
        signals: to this process.
        take: gets each line of the ranks' standard output, in a thread; what it raises ends them,
            and is raised here.
        log: of their standard error, else this process's.
        ranks_s: how long they get to end, where it is not torchrun's to say.
    """
    mark = uuid.uuid4().hex
    if ranks_s is None:
        ranks_s = shutdown_s(arguments)
    process = subprocess.Popen(
        [sys.executable, "-P", child.__file__, str(os.getpid()), *TORCHRUN, *arguments],
        env={**os.environ, **environment, TORCHRUN_MARK: mark},
        stdin=subprocess.DEVNULL if signals.until_stdin_ends else None,
        stdout=subprocess.PIPE if take else None,
        stderr=log,
        text=True,
        start_new_session=True,  # a terminal's Ctrl-C comes here only, and is passed on once
    )
    patience = threading.Timer(ranks_s + _PATIENCE_S, process.kill)
    asked = False
    raised: list[BaseException] = []

    def end() -> None:
        nonlocal asked
        if asked:
            return
        asked = True
        process.send_signal(signals.to_pass_on)
        patience.start()
        say_as_launcher("ending the ranks (once more: kill them)")

    def read_lines(take: Callable[[str], object]) -> None:
        try:
            for line in process.stdout or ():
                take(line)
        except BaseException as error:  # raised again where others can handle it
            raised.append(error)
            end()

    signals.call(end, process.kill)
    reader = threading.Thread(target=read_lines, args=(take,), daemon=True)
    if take:
        reader.start()
    code = None
    while code is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(LOOK_S)
    patience.cancel()
    if asked or code < 0:
        _end_marked(mark, max(_RANKS_END_S, ranks_s))
    if take:
        reader.join(_PATIENCE_S)  # what outlives the ranks may keep the pipe open
    if raised:
        raise raised[0]
    return code if code >= 0 else 128 - code


def _end_marked(mark: str, grace_s: float) -> None:
    """End what a killed torchrun has started, by SIGTERM and then, after the grace, by SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        end_s = time.monotonic() + grace_s
        signalled: set[int] = set()
        while left := _marked(mark):
            for pid in left:
                if pid not in signalled:
                    signalled.add(pid)
                    logger.warning("Process %d has outlived torchrun: %s", pid, number.name)
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)
            if time.monotonic() >= end_s:
                break
            time.sleep(_LOOK_AGAIN_S)


def _marked(mark: str) -> list[int]:
    """Return processes of this machine that inherited the mark; none without /proc."""
    entry = f"{TORCHRUN_MARK}={mark}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if entry in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found
