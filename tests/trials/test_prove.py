"""One short proof on emulated A100s, in full, and what `envpipe prove` refuses before it starts."""

import io
import json
import os
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from commands import run_badly
from memory_folder import memory_folder
from on_request import asked_for
from presets import write_changed_preset
from rich.console import Console
from trials_helpers import short_settings, turn, write_text

from envpipe_megatron.core.plan import read_plan
from envpipe_megatron.core.profile import read_profile
from envpipe_megatron.gpu.backends import nvml
from envpipe_megatron.gpu.base import GpuError
from envpipe_megatron.gpu.registry import Activity, Device
from envpipe_megatron.trials import machine as trial_machine
from envpipe_megatron.trials import run as trial_run
from envpipe_megatron.trials.machine import emulated_machine, newcomers, real_machine
from envpipe_megatron.trials.run import Trial, run_trial
from envpipe_megatron.trials.settings import ARMS, ORDER_ARMS, Settings

pytestmark = pytest.mark.xdist_group("quickstart")

ROUNDS = 2
CHECKS = [{"name": "GPUs", "ok": True, "evidence": "two of a test"}]


class Finished:
    def __init__(self, output):
        self.output = output
        self.document = json.loads((output / "claims.json").read_text())
        self.claims = {claim["name"]: claim for claim in self.document["claims"]}
        lines = (output / "turns.jsonl").read_text().splitlines()
        self.turns = [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def finished():
    """A proof on two emulated GPUs of three clocks, each of which is profiled."""
    if not asked_for("QUICKSTART"):
        # A proof without clocks on the fake NVML library is trained in full each time.
        pytest.skip("takes long: set ENVPIPE_QUICKSTART_FULL=1")
    with memory_folder() as folder, pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("ENVPIPE_LEASE_DIR", str(folder / "leases"))
        small = {"num_layers": 2, "hidden_size": 32, "sequence_length": 16, "num_microbatches": 4}
        steps = {"frequency_step_mhz": 420, "min_frequency_mhz": 570, "refresh_s": 0.05}
        preset = str(write_changed_preset(folder / "three.toml", steps))
        job = short_settings(folder, num_stages=2, preset=preset, **small)
        machine = emulated_machine(job.preset, 2, True)
        settings = job.as_proof(ROUNDS, 3, changes_clocks=True)
        run_trial(Trial(settings, machine, CHECKS), Console(file=io.StringIO(), width=400))
        yield Finished(folder / "out")


def test_all_turns_train_the_same_and_it_is_claimed(finished):
    first = finished.turns[0]
    assert [turn["arm"] for turn in finished.turns[:5]] == [arm.name for arm in ARMS]
    assert len(first["losses"]) == 6
    assert all(len(of_step) == 4 for of_step in first["losses"])
    # An arm whose plan is made beside training makes more steps.
    assert all(turn["losses"][:6] == first["losses"] for turn in finished.turns)
    assert first["losses"][-1] != first["losses"][0]
    for name in ("losses_equal", "weights_equal"):
        assert (finished.claims[name]["holds"], finished.claims[name]["value"]) == (True, 6)


def test_each_arm_is_what_it_says(finished):
    profile = read_profile(finished.output / "profile" / "profile.csv")
    constant = read_plan(finished.output / "plans" / "constant.json", profile)
    optimal = read_plan(finished.output / "plans" / "optimal.json", profile)
    times_s = {turn["arm"]: turn["step"]["time_s"] for turn in finished.turns}
    changes = {
        turn["arm"]: sum(stage["clocks"]["changes"] for stage in turn["stages"])
        for turn in finished.turns
    }
    assert changes["stock"] == 0
    # Four forwards and four backwards of two ranks in six iterations, each with a call.
    assert changes["relock"] >= 6 * 8 * 2
    assert changes["constant"] < changes["optimal"]
    assert times_s["relock"] == pytest.approx(times_s["stock"], rel=1e-6)
    assert times_s["optimal"] == pytest.approx(optimal.cost.iteration_time_s, rel=0.02)
    assert times_s["constant"] == pytest.approx(constant.cost.iteration_time_s, rel=0.02)
    assert times_s["constant"] > 1.05 * times_s["stock"]
    assert constant.frequency_mhz.min() == constant.frequency_mhz.max() < 1410
    split = {turn["arm"] for turn in finished.turns if turn["split"]}
    assert split == ({"optimal"} if optimal.schedule.split else set())


def test_claims_have_intervals_from_rounds_and_say_emulated(finished):
    document, claims = finished.document, finished.claims
    assert document["format"] == "envpipe-claims/1"
    assert (document["complete"], document["emulated"]) == (True, True)
    assert claims["optimal_saving"]["value"] > 5
    low, high = claims["optimal_saving"]["interval"]
    assert low < claims["optimal_saving"]["value"] < high
    names = ("optimal_slowdown", "constant_slowdown", "constant_slower_than_optimal")
    assert all(claims[name]["holds"] is True for name in names)
    assert claims["clock_change"]["value"] == pytest.approx(0.01, abs=1e-3)
    says = [claim["says"] for claim in claims.values()]
    assert [text for text in says if not text.startswith("emulated: ")] == []


# --- what is refused ------------------------------------------------------------------------------


@pytest.fixture
def node(own_node, monkeypatch):
    """Four quiet A100s whose clocks this process may change; nothing is ever started or changed."""
    made = own_node(True)
    monkeypatch.setattr(trial_machine.os, "getloadavg", lambda: (0.1, 0.1, 0.1))
    monkeypatch.setattr(trial_run, "_train", lambda *arguments: None)
    # The doctor takes a second to look at all, and refuses nothing.
    monkeypatch.setattr(sys.modules["envpipe_megatron.cli.jobs.results"], "all_checks", list)
    yield made
    assert made.changes() == []


def refused(*words):
    return run_badly("prove", *words)


def test_a_quiet_machine_is_taken(node):
    node.set_fault(node.uuids[0], "throttle_reasons", 1)  # idle
    node.set_fault(node.uuids[0], "busy_percent", 1)
    machine = real_machine(None)
    assert machine.gpu_names == ("NVIDIA A100-SXM4-80GB",) * 4
    assert machine.missing == ""
    assert machine.versions["driver"] == "580.00.00-fake"


@pytest.mark.parametrize(
    ("fault", "value", "said"),
    [
        ("process", 4711, "GPU 2 is used by process 4711"),
        ("busy_percent", 35, "GPU 2 is 35 % busy"),
        ("throttle_reasons", 0x40, "GPU 2 is held back by hardware thermal slowdown"),
    ],
)
def test_a_gpu_that_is_not_quiet_is_refused(node, tmp_path, fault, value, said):
    node.set_fault(node.uuids[2], fault, value)
    message = refused("--output", tmp_path / "out")
    assert said in message
    assert "not quiet" in message
    assert "End what runs there" in message
    assert not (tmp_path / "out").exists()
    assert said in refused("--without-clocks", "--output", tmp_path / "out")


def test_a_busy_host_is_refused(node, monkeypatch, tmp_path):
    cores = os.cpu_count()
    monkeypatch.setattr(trial_machine.os, "getloadavg", lambda: (cores + 0.5, 0, 0))
    assert f"load is {cores + 0.5:.1f}, on {cores} cores" in refused("--output", tmp_path / "out")


@pytest.mark.parametrize("what", ["ENVPIPE_FORBID_CLOCK_CONTROL is set", "no CAP_SYS_ADMIN"])
def test_without_rights_it_says_what_is_missing_and_proves_orders(
    node, monkeypatch, tmp_path, what
):
    if "FORBID" in what:
        monkeypatch.setenv("ENVPIPE_FORBID_CLOCK_CONTROL", "1")
    else:
        monkeypatch.setattr(nvml, "has_sys_admin", lambda: False)
    message = refused("--with-clocks", "--output", tmp_path / "out")
    assert what in message
    assert "leave --with-clocks out" in message
    assert not (tmp_path / "out").exists()
    missing = real_machine(None).missing
    assert what in missing
    refused("--text", write_text(tmp_path / "text.txt", 110_000), "--output", tmp_path / "out")
    settings = Settings.read(tmp_path / "out" / "prove.json")
    assert settings.changes_clocks is False
    assert (settings.num_stages, settings.arms) == (4, ORDER_ARMS)


@pytest.mark.parametrize("option", ["--with-clocks", "--without-clocks", None])
def test_a_right_to_clocks_is_used_unless_they_are_to_be_left_alone(node, tmp_path, option):
    refused(*filter(None, [option]), "--text", write_text(tmp_path / "text.txt", 110_000),
            "--output", tmp_path / "out")  # fmt: skip
    settings = Settings.read(tmp_path / "out" / "prove.json")
    assert settings.changes_clocks is (option != "--without-clocks")
    assert real_machine(False).missing == "--without-clocks was given"


def test_one_gpu_is_no_pipeline(node, monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    message = refused("--output", tmp_path / "out")
    assert "two GPUs or more" in message
    assert "--gpu a100-sxm" in message


def test_an_interrupted_proof_keeps_what_was_told(tmp_path, monkeypatch):
    job = short_settings(tmp_path, num_stages=2, num_layers=2)
    told = turn("stock", 0, 1.0, 9.0)
    for stage in told["stages"]:
        followed = {"throttle_reasons": {"power cap": 3}, "warning": None}
        stage["temperature_c"] = [None, None]
        stage["clocks"] |= {"followed": followed}

    def train(proof, console):
        proof.begin(console)
        proof.take(told)
        raise KeyboardInterrupt

    monkeypatch.setattr(trial_run, "_train", train)
    device = Device("nvml", 0, "GPU-0", "A100", "")
    # The rank, and another one that came later.
    crowded = SimpleNamespace(activity=lambda: Activity((11, 4711)))
    monkeypatch.setattr(trial_machine, "look_at", lambda uid: crowded)
    screen = io.StringIO()
    machine = replace(emulated_machine(job.preset, 2, False), devices=(device,))
    with pytest.raises(KeyboardInterrupt):
        run_trial(
            Trial(job.as_proof(1, 3, changes_clocks=False), machine, CHECKS),
            Console(file=screen, width=400),
        )
    assert "Interrupted: clocks are reset" in screen.getvalue()
    output = tmp_path / "out"
    row = "| 0 stock | 2 | 1.0000 | 18.0 |  | power cap | 2 | 2 processes on GPU 0 |"
    assert row in (output / "summary.md").read_text()
    assert json.loads((output / "claims.json").read_text())["complete"] is False
    assert not (output / "text.bin").exists()


def test_a_gpu_that_does_not_tell_its_processes_costs_no_turn(node, monkeypatch):
    def fails(*_):
        raise GpuError("The GPU is lost")

    machine = real_machine(False)
    monkeypatch.setattr(nvml, "call_gpu", fails)
    assert newcomers(machine) == []
