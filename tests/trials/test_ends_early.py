"""Ranks that are interrupted or fail: they end, their clocks are reset, and it is said."""

import errno
import os
import signal
import sys

import pytest

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.gpu.emulated.emulated_gpu import EmulatedGpu
from envpipe_megatron.launch import node
from envpipe_megatron.trials.ranks import emit, rank_environment, run_ranks

RANK = """
import sys, time
from envpipe_megatron.gpu.emulated.emulated_gpu import EmulatedGpu
from envpipe_megatron.gpu.emulated.store import default_root
EmulatedGpu.open(default_root(), 0).lock_frequency(1200)
print('@envpipe {"event": "up"}', flush=True)
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs one rank that locks a clock and reports that it is up; the clock is back then."""

    def run_it(take, end="time.sleep(600)"):
        gpu = EmulatedGpu.create("a100-sxm", 0, tmp_path / "emulated")
        (tmp_path / "rank.py").write_text(RANK + end)
        monkeypatch.setattr(node, "TORCHRUN", (sys.executable, str(tmp_path / "rank.py")))
        environment = rank_environment(tmp_path / "emulated")
        locked_mhz = []

        def take_and_look(event):
            locked_mhz.append(gpu.requested_frequency_mhz)
            take(event)

        try:
            run_ranks(1, ["rank.py"], environment, tmp_path / "log", take_and_look)
        finally:
            assert (locked_mhz, gpu.requested_frequency_mhz) == ([1200], None)

    return run_it


@pytest.mark.parametrize("locks", ["none", "nfs"])
def test_ranks_report_on_any_disk(tmp_path, monkeypatch, capsys, locks):
    settings, taken = tmp_path / "settings.json", []
    settings.write_text("{}")

    def flock(file, operation):
        taken.append(locks == "nfs" and file.writable())
        if not taken[-1]:  # NFS has no exclusive lock of a file that is opened for reading
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(sys, "argv", ["worker", str(settings)])
    monkeypatch.setattr("fcntl.flock", flock)
    emit("up", rank=0)
    assert capsys.readouterr().out == '@envpipe {"event": "up", "rank": 0}\n'
    assert taken == [locks == "nfs"]
    assert settings.read_text() == "{}"


@pytest.mark.usefixtures("signals_at_default")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_end_the_ranks_as_ctrl_c_does(run, number):
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt):
        run(lambda event: os.kill(os.getpid(), number))
    assert signal.getsignal(number) == before


def test_a_rank_that_fails_is_said_with_where_to_look(run, tmp_path):
    with pytest.raises(EnvPipeError, match=rf"exit code 3\); clocks are reset.*{tmp_path}/log"):
        run(lambda event: None, "print('why'); sys.exit(3)")
    assert (tmp_path / "log").read_text() == "why\n"


def test_ranks_wait_for_no_other_node_of_a_pod(run, monkeypatch):
    monkeypatch.setenv("PET_NNODES", "2")
    run(lambda event: None, "import os; sys.exit('PET_NNODES' in os.environ)")


def test_what_goes_wrong_with_a_report_ends_the_ranks_and_is_raised(run):
    with pytest.raises(KeyError, match="step"):
        run(lambda event: event["step"])
