"""Proofs on two GPUs of the fake NVML library: whole ones, dry ones, and ones that are killed."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import pytest
from energy_lines import json_lines
from fake_nvml.fake_nvml import FakeNvml
from fake_nvml.models import MODELS, FakeModel
from on_request import asked_for, on_request
from trials_helpers import processes_of, wait_until, write_text

from envpipe_megatron.gpu.guard.lease import list_leases
from envpipe_megatron.trials.settings import Settings

pytestmark = [
    pytest.mark.xdist_group("quickstart"),
    pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="looks for processes in /proc"),
]

KILLS = 50 if asked_for("GPU") else 1
DEADLINE_S = 240.0
#: From its first locked clock to its end.
LONGEST_S = 10.0
#: Few clocks: each is profiled.
FEW = FakeModel(
    name="NVIDIA A100-SXM4-80GB",
    graphics_mhz={1215: (1410, 1200, 990, 780)},
    running_memory_mhz=1215,
    power_limit_w=400,
    faults={"no_instant_power": 1, "temperature_c": 40},
)


class Proofs:
    """Starts proofs on a node of two fake GPUs, and waits for their ends."""

    def __init__(self, folder, library, monkeypatch):
        monkeypatch.setitem(MODELS, "few", FEW)
        self.folder, self.output = folder, folder / "out"
        self.nvml = FakeNvml(folder / "nvml", library, ["few", "few"])
        self.nvml._node.refresh_ns = 20_000_000
        (folder / "run").mkdir(mode=0o700)
        monkeypatch.setenv("ENVPIPE_LEASE_DIR", str(folder / "leases"))
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder / "run"))
        monkeypatch.delenv("ENVPIPE_FORBID_CLOCK_CONTROL", raising=False)
        path = os.pathsep.join([*sys.path, str(Path(__file__).parent)])
        self._environment = {**os.environ, **self.nvml.environment, "PYTHONPATH": path}

    def start(self, *, changes_clocks=True):
        """Start a proof; its output folder."""
        # Without a sweep, few steps tell the counters' joules.
        size = {"sequence_length": 16, "num_microbatches": 4}
        size = size if changes_clocks else {"sequence_length": 96, "num_microbatches": 8}
        job = Settings(
            str(self.output), str(write_text(self.folder / "text.txt")), None, num_stages=2,
            num_layers=2, hidden_size=32, **size,
        )  # fmt: skip
        settings = self.folder / "asked.json"
        asked = job.as_proof(1, 2, changes_clocks=changes_clocks)
        settings.write_text(json.dumps(asdict(asked)))
        with (self.folder / "log").open("w") as log:
            self.command = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("prove_run.py")), str(settings)],
                env=self._environment, stdout=log, stderr=log,
            )  # fmt: skip
        return self.output

    def wait(self):
        """Wait until nothing of the proof runs; the command's exit code."""
        code = self.command.wait(DEADLINE_S)
        until(lambda: not processes_of(self.output), "the end of torchrun and its ranks")
        return code

    def locked(self):
        return [uid for uid in self.nvml.uuids if self.nvml.locked_mhz(uid) is not None]


def until(condition, what):
    wait_until(condition, DEADLINE_S, what)


@pytest.fixture(scope="module")
def proofs(fake_nvml_library, tmp_path_factory):
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield Proofs(tmp_path_factory.mktemp("proofs"), fake_nvml_library, monkeypatch)


def kill_something(proofs, draw):
    """Kill a process of a proof; return which, and by what."""
    found, hard = processes_of(proofs.output), signal.SIGKILL
    ranks = [pid for pid, rank in found.items() if rank is not None]
    launcher, command = [pid for pid, rank in found.items() if rank is None], [proofs.command.pid]
    victims = {
        "command by SIGKILL": [(command, hard)],
        "command by SIGTERM": [(command, signal.SIGTERM)],
        "command by SIGINT": [(command, signal.SIGINT)],
        "launcher": [(launcher, hard)],
        "a rank": [([draw.choice(ranks)] if ranks else [], hard)],
        "all ranks": [(ranks, hard)],
        "everything": [(command, hard), (launcher, hard), (ranks, hard)],
    }
    name = draw.choice(sorted(victims))
    for pids, number in victims[name]:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
    return name


@on_request("QUICKSTART")
def test_a_proof_without_clocks_proves_orders_and_changes_nothing(proofs):
    before, read_before = len(proofs.nvml.changes()), len(proofs.nvml.history())
    for uid in proofs.nvml.uuids:
        proofs.nvml.set_fault(uid, "throttle_reasons", 4)
    output = proofs.start(changes_clocks=False)
    assert proofs.wait() == 0, (output / "log.txt").read_text()
    proofs.nvml.clear_faults()
    assert len(proofs.nvml.changes()) == before
    reads = {call.function for call in proofs.nvml.history()[read_before:]}
    assert {"nvmlDeviceGetTotalEnergyConsumption", "nvmlDeviceGetTemperature"} <= reads
    document = json.loads((output / "claims.json").read_text())
    assert (document["complete"], document["clocks_changed"]) == (True, False)
    claims = {claim["name"]: claim for claim in document["claims"]}
    assert claims["losses_equal"]["holds"] is True
    assert claims["weights_equal"]["holds"] is True
    assert claims["split_speedup"]["value"] is not None
    assert claims["split_saving"]["value"] is not None
    assert "the right of a test" in (output / "summary.md").read_text()
    turns = json_lines(output / "turns.jsonl")
    executed = {turn["arm"]: turn["stages"][0]["executed"] for turn in turns}
    # Of stock, each iteration is one unit: megatron-core's own function runs all of it.
    assert {arm: len(units) > 1 for arm, units in executed.items()} == {
        "stock": False, "1f1b": True, "whole": True, "split": True,
    }  # fmt: skip
    assert [turn["failure"] for turn in turns] == [""] * 4
    followed = [stage["clocks"]["followed"] for turn in turns for stage in turn["stages"]]
    assert {reason for seen in followed for reason in seen["throttle_reasons"]} == {"power cap"}


def test_no_clock_stays_locked_whenever_it_is_killed(proofs):
    seed = int.from_bytes(os.urandom(4), "big")
    print(f"seed {seed}")
    draw = random.Random(seed)
    for number in range(KILLS):
        output = proofs.start()
        until(lambda: proofs.locked() or proofs.command.poll() is not None, "a locked clock")
        assert proofs.command.poll() is None, (output / "log.txt").read_text()
        time.sleep(draw.uniform(0, LONGEST_S))
        turns = output / "turns.jsonl"
        told = turns.read_text().splitlines() if turns.exists() else []
        locked = len(proofs.locked())
        name = kill_something(proofs, draw)
        proofs.wait()
        until(lambda: not list_leases(), f"{name}: the end of leases")
        assert proofs.locked() == [], f"kill {number}, {name}"
        kept = turns.read_text().splitlines() if turns.exists() else []
        assert kept[: len(told)] == told
        if len(kept) > 1:  # a SIGKILL may come between a turn and its page
            document = json.loads((output / "claims.json").read_text())
            assert document["complete"] <= (len(kept) == 5)
        print(f"{number}: {name}, {locked} clocks locked, {len(told)} turns told")
