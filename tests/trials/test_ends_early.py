"""A quickstart that is interrupted, or loses a rank: clocks reset, partial results kept."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from energy_lines import json_lines
from on_request import on_request
from rich.console import Console
from trials_helpers import (
    is_training,
    locks_mhz,
    processes_of,
    short_settings,
    wait_until,
)

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.formats.energy import OUTSIDE_STEPS
from envpipe_megatron.launch import torchrun
from envpipe_megatron.trials.quickstart import Quickstart
from envpipe_megatron.trials.ranks import rank_environment, run_ranks
from envpipe_megatron.trials.run import run_trial

pytestmark = [
    pytest.mark.xdist_group("quickstart"),
    pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="looks for processes in /proc"),
]

START_S = 120.0
"""Ranks import torch and megatron-core at once, on a machine that may be busy."""


def assert_partial_results(output):
    summary = json.loads((output / "summary.json").read_text())
    assert summary["complete"] is False
    assert summary["emulated"] is True
    windows = json_lines(output / "energy.jsonl")
    assert windows
    assert all(each["energy_j"] > 0 for each in windows if each["phase"] not in OUTSIDE_STEPS)
    assert not (output / "text.bin").exists()


#: The command as users start it, but for a job that is soon over.
SHORT_QUICKSTART = """
import sys
from pathlib import Path
from envpipe_megatron.cli import main
from envpipe_megatron.trials import quickstart
from envpipe_megatron.trials.settings import Settings
whole = quickstart.Quickstart
quickstart.Quickstart = lambda _: whole(Settings.read(Path(sys.argv[1])))
main(["quickstart"])
"""


@pytest.mark.usefixtures("signals_at_default")
@on_request("QUICKSTART")
def test_ctrl_c_in_the_middle_of_training(tmp_path):
    output = tmp_path / "out"
    # Two ranks: each takes seconds to start.
    short_settings(tmp_path, num_stages=2, num_layers=2).write(tmp_path / "settings.json")
    command = [sys.executable, "-c", SHORT_QUICKSTART, str(tmp_path / "settings.json")]
    quickstart = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:

        def begun():
            assert quickstart.poll() is None, quickstart.communicate()[0]
            return is_training(output)

        wait_until(begun, START_S, "training with a locked clock")
        assert set(processes_of(output).values()) == {None, 0, 1}
        quickstart.send_signal(signal.SIGINT)
        told, _ = quickstart.communicate(timeout=30)
    finally:
        quickstart.kill()
    assert quickstart.returncode not in (0, None)
    assert "Traceback" not in told
    assert "Interrupted: clocks are reset" in told
    assert str(output) in told
    assert locks_mhz(output) == [None] * 2
    assert not processes_of(output)
    assert_partial_results(output)


@on_request("QUICKSTART")
def test_a_rank_that_is_killed(tmp_path):
    # As few ranks as have one that is no neighbour of the victim: each takes seconds to start.
    settings = short_settings(tmp_path, num_stages=3, num_layers=3, steady_iterations=1000)
    output = tmp_path / "out"

    def kill_a_rank():
        wait_until(lambda: is_training(output), START_S, "training with a locked clock")
        (victim,) = [pid for pid, rank in processes_of(output).items() if rank == 2]
        os.kill(victim, signal.SIGKILL)

    killer = threading.Thread(target=kill_a_rank)
    killer.start()
    with (tmp_path / "screen").open("w") as screen, pytest.raises(EnvPipeError) as caught:
        run_trial(Quickstart(settings), Console(file=screen))
    killer.join()
    assert "clocks are reset" in str(caught.value)
    assert str(output / "log.txt") in str(caught.value)
    assert "SIGKILL" in (output / "log.txt").read_text()
    assert locks_mhz(output) == [None] * 3
    assert not processes_of(output)
    assert_partial_results(output)


RANK = """
import time
print('@envpipe {"event": "up"}', flush=True)
time.sleep(600)
"""


def up(folder, monkeypatch, take):
    """Run one rank that only reports that it is up."""
    (folder / "rank.py").write_text(RANK)
    monkeypatch.setattr(torchrun, "TORCHRUN", (sys.executable, str(folder / "rank.py")))
    run_ranks(1, [], rank_environment(folder / "emulated"), folder / "log", take)


@pytest.mark.usefixtures("signals_at_default")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_other_signals_end_a_quickstart_as_ctrl_c_does(tmp_path, monkeypatch, number):
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt):
        up(tmp_path, monkeypatch, lambda event: os.kill(os.getpid(), number))
    assert signal.getsignal(number) == before


def test_what_goes_wrong_with_a_report_ends_the_ranks_and_is_raised(tmp_path, monkeypatch):
    with pytest.raises(KeyError, match="step"):
        up(tmp_path, monkeypatch, lambda event: event["step"])
