"""A quickstart that is interrupted, or loses a rank: clocks reset, partial results kept."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
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
from envpipe_megatron.trials import ranks as trial_ranks
from envpipe_megatron.trials.quickstart import Quickstart
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
    told = summary["losses"]["baseline"]
    assert told
    assert all(isinstance(loss, float) for loss in told)
    windows = json_lines(output / "energy.jsonl")
    assert windows
    assert all(window["energy_j"] > 0 for window in windows)
    assert (output / "results.csv").read_text().startswith("Model,Microbatch size")
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


STUBBORN = """
import json, os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if len(sys.argv) == 1:  # torchrun; the rank gets a session of its own, as under torchrun
    subprocess.Popen([sys.executable, __file__, "rank"], start_new_session=True)
else:
    for event in ("rank", "up"):
        told = json.dumps({"event": event, "pid": os.getpid()})
        print("@envpipe", told, flush=True)
time.sleep(600)
"""


@pytest.mark.usefixtures("signals_at_default")
@pytest.mark.parametrize("impatient", [True, False], ids=["second Ctrl-C", "grace is over"])
def test_ranks_that_do_not_end_when_asked_are_killed(tmp_path, monkeypatch, impatient):
    monkeypatch.setattr(trial_ranks, "GRACE_S", 60.0 if impatient else 0.2)
    script = tmp_path / "stubborn.py"
    script.write_text(STUBBORN)
    command = [sys.executable, str(script)]
    monkeypatch.setattr(trial_ranks, "torchrun_command", lambda *_: command)
    pids = []
    starts = time.monotonic()
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))

    def interrupted():
        log = tmp_path / "log"
        with trial_ranks.running_ranks(1, [], os.environ, log, tmp_path) as events:
            pids.append(next(events)["pid"])
            if impatient:
                timer.start()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert time.monotonic() - starts < 30

    def gone():
        try:
            stat = Path(f"/proc/{pids[0]}/stat").read_text()
            return stat.rpartition(")")[2].split()[0] == "Z"
        except OSError:
            return True

    wait_until(gone, 5, "the end of the rank")


@pytest.mark.usefixtures("signals_at_default")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_other_signals_end_a_quickstart_as_ctrl_c_does(number):
    before = signal.getsignal(number)

    def told_to_end():
        with trial_ranks.ended_like_ctrl_c():
            os.kill(os.getpid(), number)
            time.sleep(5)

    with pytest.raises(KeyboardInterrupt):
        told_to_end()
    assert signal.getsignal(number) == before


def test_a_signal_that_is_ignored_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with trial_ranks.ended_like_ctrl_c():
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
