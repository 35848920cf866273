"""The command that ends with its parent, however that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from envpipe_megatron import child
from envpipe_megatron.gpu.guard.process_identity import wait_readable

LONG_S = 20.0

#: Says its pid, and when it gets SIGTERM.
COMMAND = """
import os, signal
def end(*signal):
    print("was told to end", flush=True)
    os._exit(0)
signal.signal(signal.SIGTERM, end)
print(os.getpid(), flush=True)
while True:
    signal.pause()
"""
PARENT = f"""
import os, subprocess, sys
program = [sys.executable, "-P", {child.__file__!r}, str(os.getpid())]
command = [*program, sys.executable, "-c", {COMMAND!r}]
subprocess.Popen(command).wait()
"""


def read_line(pipe) -> str:
    assert wait_readable([pipe.fileno()], LONG_S)
    return pipe.readline()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_command_is_told_to_end_when_its_parent_dies(number):
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        command = int(read_line(parent.stdout))
        assert command != parent.pid
        ended = os.pidfd_open(command)
        try:
            assert not wait_readable([ended], 0)
            parent.send_signal(number)
            assert parent.wait(LONG_S) == -number
            assert wait_readable([ended], LONG_S)
        finally:
            os.close(ended)
        assert read_line(parent.stdout) == "was told to end\n"


def run(parent: int, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", child.__file__, str(parent), *command],
        capture_output=True,
        text=True,
        timeout=LONG_S,
        check=False,
    )


def test_a_command_runs_as_it_is():
    done = run(os.getpid(), "sh", "-c", 'echo "$0 $*"; echo to err >&2; exit 7', "a b", "c", "-d")
    assert (done.returncode, done.stdout, done.stderr) == (7, "a b c -d\n", "to err\n")


def test_a_command_whose_parent_has_died_already_does_not_run():
    done = run(os.getpid() + 1, "echo", "ran")
    assert (done.returncode, done.stdout) == (128 + signal.SIGTERM, "")
