"""How torchrun is started and ended, and what becomes of ranks whose torchrun was killed."""

import argparse
import os
import signal
import subprocess
import sys
import threading

import pytest
from launch_helpers import needs_shutdown_timeout

from envpipe_megatron import child
from envpipe_megatron.child import Signals
from envpipe_megatron.gpu.guard.messages import wait_readable
from envpipe_megatron.launch import node
from envpipe_megatron.launch.options import handled_signals, read, shutdown_s

DEAF = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
signal.pause()
"""

LONG_S = 120.0

#: Says its pid, and when it gets SIGTERM.
COMMAND = """
import os, signal
def end(*signal):
    os.write(1, b"was told to end\\n")  # the signal may come within a print
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


class Process:
    """A torchrun that the test plays.

    Args:
        code: what it ends with.
        meanwhile: happens while it is waited for.
    """

    def __init__(self, code: int, meanwhile=lambda: None) -> None:
        self.code, self._meanwhile = code, meanwhile
        self.told: list[str] = []
        self.killed = threading.Event()

    def wait(self, timeout_s: float) -> int:
        self._meanwhile()
        return self.code

    def send_signal(self, number: signal.Signals) -> None:
        self.told.append(number.name)

    def kill(self) -> None:
        self.told.append("kill")
        self.killed.set()


@pytest.fixture
def run(monkeypatch):
    """Runs a torchrun; returns what it gave, how it was started, and the marks that were ended."""

    def run_it(process, signals, *options):
        started, ended = [], []

        def start(command, **how):
            started.append((command, how))
            return process

        monkeypatch.setattr(subprocess, "Popen", start)
        monkeypatch.setattr(node, "_end_marked", lambda *how: ended.append(how))
        code = node.run_torchrun([*options, "--nnodes", "1", "a.py"], {"A": "b"}, signals)
        return code, *started, ended

    return run_it


@pytest.mark.parametrize("stdin", [True, False])
@pytest.mark.parametrize(("status", "code"), [(0, 0), (7, 7), (-9, 137), (-1, 129)])
def test_torchruns_exit_status_is_the_launchers(run, monkeypatch, status, code, stdin):
    monkeypatch.setattr(Signals, "_watch_stdin", lambda self: None)  # a test's ends at once
    told, (command, how), ended = run(Process(status), Signals(until_stdin_ends=stdin))
    assert told == code
    assert command == [
        sys.executable, "-P", child.__file__, str(os.getpid()), sys.executable,
        "-P", "-m", "torch.distributed.run", "--nnodes", "1", "a.py",
    ]  # fmt: skip
    mark = how["env"].pop("ENVPIPE_TORCHRUN")
    assert how == {
        "env": {"A": "b"},
        "stdin": subprocess.DEVNULL if stdin else None,
        "stdout": None,
        "stderr": None,
        "text": True,
        "start_new_session": True,
    }
    assert ended == ([(mark, 30)] if status < 0 else [])


def test_the_first_signal_ends_torchrun_and_the_second_kills_it(run, capfd):
    def interrupt():
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)

    process = Process(0, interrupt)
    with Signals() as signals:
        _, (_, how), ended = run(process, signals)
    assert process.told == ["SIGTERM", "kill"]
    assert ended == [
        (how["env"]["ENVPIPE_TORCHRUN"], 30)
    ]  # it may have left some while it started them
    assert "ending the ranks (once more: kill them)" in capfd.readouterr().err
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            assert thread.finished.is_set(), "it would kill whoever has the pid by then"


def test_a_signal_that_another_thread_gets_ends_torchrun_too(run):
    """As one that comes just before the wait, it does not end the wait."""
    with subprocess.Popen(["sleep", "60"]) as process, Signals() as signals:
        wait, waits = process.wait, threading.Event()

        def wait_and_tell(timeout=None):
            waits.set()
            return wait(timeout)

        def get_signal():
            waits.wait()
            signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

        process.wait = wait_and_tell
        threading.Thread(target=get_signal).start()
        assert run(process, signals)[0] == 128 + signal.SIGTERM


@needs_shutdown_timeout
def test_a_torchrun_that_does_not_end_is_killed(run, monkeypatch):
    monkeypatch.setattr(node, "_PATIENCE_S", 0.0)

    def interrupt():
        os.kill(os.getpid(), signal.SIGTERM)
        assert process.killed.wait(20)

    process = Process(-9, interrupt)
    with Signals() as signals:
        run(process, signals, "--shutdown-timeout=0")
    assert process.told == ["SIGTERM", "kill"]


@pytest.mark.usefixtures("signals_at_default")
@pytest.mark.parametrize(
    ("number", "name"), [(signal.SIGUSR1, "SIGUSR1"), (signal.SIGINT, "SIGTERM")]
)
def test_a_signal_that_torchrun_handles_reaches_it_as_it_is(run, number, name):
    """As one of a batch system before a time limit; but ranks may hang on at a SIGINT."""
    process = Process(1, lambda: os.kill(os.getpid(), number))
    with Signals([signal.SIGUSR1, signal.SIGINT]) as signals:
        assert run(process, signals)[0] == 1
    assert process.told == [name]


def test_what_torchrun_is_told_to_handle():
    named = handled_signals(
        read(["--signals-to-handle", "SIGUSR1, SIGTERM,SIGKILL,SIGNOT", "a.py"])
    )
    assert named == {signal.SIGUSR1, signal.SIGTERM}


@pytest.mark.parametrize(
    ("options", "variable", "patience_s", "grace_s"),
    [
        ([], None, 40, 30),
        pytest.param([], "100", 110, 100, marks=needs_shutdown_timeout),
        ([], "1m", 40, 30),  # torchrun refuses it itself
        pytest.param(["--shutdown-timeout", "200"], "100", 210, 200, marks=needs_shutdown_timeout),
        pytest.param(["--shutdown-timeout=5"], None, 15, 5, marks=needs_shutdown_timeout),
    ],
)
def test_ranks_have_the_time_that_torchrun_gives_them(
    run, monkeypatch, options, variable, patience_s, grace_s
):
    """Or a checkpoint that they save is cut off."""

    def interrupt():
        os.kill(os.getpid(), signal.SIGTERM)
        waiting.extend(
            thread.interval
            for thread in threading.enumerate()
            if isinstance(thread, threading.Timer) and not thread.finished.is_set()
        )

    if variable is not None:
        monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", variable)
    waiting: list[float] = []
    with Signals() as signals:
        *_, ((_, grace),) = run(Process(0, interrupt), signals, *options)
    assert (waiting, grace) == ([patience_s], grace_s)


def test_a_torchrun_without_that_option_gives_its_ranks_30_s(monkeypatch):
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "5")
    assert shutdown_s(argparse.Namespace()) == 30  # as torch 2.11's, which reads no such variable


def test_what_outlives_a_killed_torchrun_is_told_to_end_then_killed(caplog):
    def start(mark, *command):
        environment = {**os.environ, node.TORCHRUN_MARK: mark}
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)

    with (
        start("its own", sys.executable, "-c", DEAF) as deaf,
        start("its own", "sleep", "60") as rank,
        start("another's", "sleep", "60") as stranger,
    ):
        try:
            assert deaf.stdout.readline() == "ready\n"
            node._end_marked("its own", 1.0)
            assert rank.wait(30) == -signal.SIGTERM
            assert deaf.wait(30) == -signal.SIGKILL
            assert stranger.poll() is None
            assert sorted(record.getMessage() for record in caplog.records) == sorted(
                f"Process {process.pid} has outlived torchrun: {name}"
                for process, name in ((deaf, "SIGTERM"), (rank, "SIGTERM"), (deaf, "SIGKILL"))
            )
        finally:
            for process in (deaf, rank, stranger):
                process.kill()


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


def run_child(parent: int, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", child.__file__, str(parent), *command],
        capture_output=True,
        text=True,
        timeout=LONG_S,
        check=False,
    )


def test_a_command_runs_as_it_is():
    done = run_child(
        os.getpid(), "sh", "-c", 'echo "$0 $*"; echo to err >&2; exit 7', "a b", "c", "-d"
    )
    assert (done.returncode, done.stdout, done.stderr) == (7, "a b c -d\n", "to err\n")


def test_a_command_whose_parent_has_died_already_does_not_run():
    done = run_child(os.getpid() + 1, "echo", "ran")
    assert (done.returncode, done.stdout) == (128 + signal.SIGTERM, "")
