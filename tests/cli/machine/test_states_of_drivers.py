"""States of drivers that people reported: what doctor, a job and `clocks reset` say and do of each.

The reports are issues and pull requests of public projects; each state names its own.
"""

import json
from dataclasses import dataclass, field
from types import SimpleNamespace

import pynvml
import pytest
from commands import run, run_well
from fake_gpu import look_until

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.gpu import energy_counter
from envpipe_megatron.runtime.clocks.rank_clock import RankClock, hold_everywhere, open_rank_gpu

POWER_CAP = pynvml.nvmlClocksThrottleReasonSwPowerCap
POWER_BRAKE = (
    pynvml.nvmlClocksThrottleReasonHwSlowdown | pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown
)


@dataclass(frozen=True)
class State:
    """A fault of GPU 1 of four, and what comes of it.

    Args:
        doctor: the checks that are a no beside a healthy machine's, and a part of what they say.
        opened: why a job on that GPU does not control its clock; empty if it does.
        error: why the job has no GPU at all, and so trains without EnvPipe.
        told: what the rank's clock says after a unit at 1200 MHz.
        energy: why the rank's counter cannot be read.
        reset: what `clocks reset` says of that GPU; it fails unless `resets`.
    """

    faults: dict[str, int]
    doctor: dict[str, str] = field(default_factory=dict)
    opened: str = ""
    error: str = ""
    told: str = ""
    energy: str = ""
    reset: str = "GPU 1 ({uid}): reset by nvml"
    resets: bool = True


STATES = {
    "healthy": State({}),
    # rossumai/nvgpu#6, koordinator-sh/koordinator#2706: a handle by its index fails for one GPU.
    "fell off the bus": State(
        {"lost": 1},
        doctor={"GPUs": "3 x NVIDIA A100-SXM4-80GB; Cannot identify GPU 1: the GPU is lost"},
        error="the GPU is lost: it fell off the bus",
        reset="not reset: Cannot identify GPU 1: the GPU is lost: it fell off the bus",
        resets=False,
    ),
    # NVIDIA/NVSentinel#155: the driver's probe fails, and it lists one GPU less; arcnmx/nvapi-rs#5:
    # those behind it get other indices.
    "is not there after a boot": State(
        {"gone": 1},
        error="NVML sees no GPU with this UUID",
        reset="GPU 1 ({next}): reset by nvml",
    ),
    # ai-dynamo/aiperf#1350: the counter is NOT_SUPPORTED where all else answers.
    "no energy counter": State(
        {"no_energy": 1},
        doctor={"energy counter": "GPU 1: Cannot read the energy"},
        energy="GPU or driver do not support it",
    ),
    # AMDResearch/hpcfund#21, ROCm/rocm_smi_lib#180: the same value for as long as one looks.
    "a counter that stands still": State(
        {"counter_stands": 1},
        doctor={"energy counter": "GPU 1: The energy counter of NVIDIA A100-SXM4-80GB"},
        energy="has not moved for",
    ),
    # NVIDIA/open-gpu-kernel-modules#1314: a lock returns success, and the clock is below it.
    "arbitrated away": State(
        {"held_mhz": 990},
        told="(no reason reported)",
    ),
    # l4rz/reverse-engineering-dell-idrac-to-get-rid-of-gpu-throttling#3: an A100 at 240 W of 400.
    "a capped site": State(
        {"power_limit_w": 240, "clock_cap_mhz": 1100, "throttle_reasons": POWER_CAP},
        doctor={
            "nothing holds clocks back": "GPU 1: power cap",
            "default power": "no power profile enforced, power limit 240 W (400 W by default)",
        },
        told="(power cap)",
    ),
    # kubeflow/kubeflow#68 lists the reasons as nvidia-smi shows them.
    "a power supply at its limit": State(
        {"clock_cap_mhz": 700, "throttle_reasons": POWER_BRAKE},
        doctor={"nothing holds clocks back": "GPU 1: hardware slowdown, power brake"},
        told="(hardware slowdown, power brake)",
    ),
    # ml-energy/zeus#109, NVIDIA/dcgm-exporter#50: all instances of a GPU have its one clock.
    "MIG": State(
        {"mig": 1},
        doctor={"no GPU refuses locks": "GPU 1: Cannot lock the clock of a GPU in MIG mode"},
        opened="cannot lock the clock of a GPU in MIG mode",
        reset="GPU 1 ({uid}): left as it is: Cannot lock the clock of a GPU in MIG mode",
    ),
    # NVIDIA/NVSentinel#1690, ComputeCanada/puppet-magic_castle#387 have the driver's words, of a
    # reset of the GPU; NVML may answer any change so.
    "in use by another client": State(
        {"in_use": 1},
        opened="another client of the driver has the GPU in use",
        reset="another client of the driver has the GPU in use",
        resets=False,
    ),
}


@pytest.fixture
def node(own_node, monkeypatch):
    monkeypatch.setattr(energy_counter, "STALL_S", 0.5)
    return own_node(True)


@pytest.fixture
def state(node, request):
    state = STATES[request.param]
    for fault, value in state.faults.items():
        node.set_fault(node.uuids[1], fault, value)
    return state


each_state = pytest.mark.parametrize("state", STATES, indirect=True)


def noes():
    checks = json.loads(run_well("doctor", "--json").stdout)["checks"]
    return {check["name"]: check for check in checks if not check["ok"] and check["area"] == "gpu"}


@each_state
def test_doctor(node, state):
    found = noes()
    assert found.keys() == state.doctor.keys()
    for name, said in state.doctor.items():
        assert said in found[name]["evidence"]
        assert found[name]["remedy"]
    assert node.changes() == []


def ask(clock, frequency_mhz):
    clock.request(frequency_mhz)
    clock.wait_idle()


def alone():
    """The collectives of a rank that has no others."""
    return SimpleNamespace(
        is_planner=True,
        everywhere=lambda make: make(),
        to_planner=lambda mine, merge: [mine],
        first=lambda without: without and (0, without),
    )


@each_state
def test_a_job_on_that_gpu(node, state):
    uid = node.uuids[1]
    if state.error:
        with pytest.raises(EnvPipeError, match=state.error):
            open_rank_gpu(uid, alone(), "auto")
        return
    gpu, chosen = open_rank_gpu(uid, alone(), "auto")
    clock, gpu, refused = hold_everywhere(gpu, alone(), RankClock, required=False)
    assert state.opened in (chosen.warning or refused)
    assert gpu.read_only == bool(state.opened)
    if not gpu.read_only:
        ask(clock, 1200)
        look_until(lambda: clock._watch.sample() or clock._watch.summary()["judged"] >= 12)
        (told,) = clock.problems() or ("",)
        assert ("the clock was held below its request in" in told) is bool(state.told)
        assert told.endswith(state.told)
    if state.energy:
        with pytest.raises(EnvPipeError, match=state.energy):
            gpu.read_energy()
    clock.close()
    assert node.locked_mhz(uid) is None


@pytest.mark.parametrize(
    ("fault", "said"),
    [("lost", "the GPU is lost"), ("in_use", "in use"), ("timeout", "NVML says")],
)
def test_what_comes_while_a_job_runs_ends_its_control_and_not_the_job(node, fault, said, caplog):
    """As in the reports above, and of a driver that hangs: leptonai/gpud#604."""
    uid = node.uuids[1]
    gpu, _ = open_rank_gpu(uid, alone(), "auto")
    clock = RankClock(gpu)
    ask(clock, 1200)
    node.set_fault(uid, fault)
    ask(clock, 900)
    assert said in clock.problems()[0]
    assert "Clock control of" in caplog.text
    node.set_fault(uid, fault, 0)
    clock.close()
    assert node.locked_mhz(uid) is None


@each_state
def test_reset(node, state):
    result = run("clocks", "reset")
    assert (result.exit_code == 0) is state.resets, result.output
    assert state.reset.format(uid=node.uuids[1], next=node.uuids[2]) in result.stdout
    done = {call.uuid for call in node.changes() if call.result == 0}
    others = {uuid for uuid in node.uuids if uuid != node.uuids[1]}
    assert done == (set(node.uuids) if "{uid}): reset" in state.reset else others)


def test_a_sites_command_follows_an_index_that_changes(node, monkeypatch, tmp_path):
    """arcnmx/nvapi-rs#5: an index names another GPU when one before it is gone."""
    log = tmp_path / "log"
    program = tmp_path / "clock"
    program.write_text(f"#!/bin/sh\necho \"$@\" >> '{log}'\n")
    program.chmod(0o755)
    site = tmp_path / "site.toml"
    site.write_text(
        'format = "envpipe-site/1"\n[gpu_control]\nbackends = ["command"]\n'
        f'lock_command = ["{program}", "{{index}}", "{{mhz}}"]\n'
        f'reset_command = ["{program}", "{{index}}"]\n'
    )
    site.chmod(0o644)
    monkeypatch.setenv("ENVPIPE_SITE_CONFIG", str(site))
    gpu, _ = open_rank_gpu(node.uuids[2], alone(), "auto")
    gpu.lock_frequency(1200)
    node.set_fault(node.uuids[0], "gone")
    gpu.reset_frequency()
    assert log.read_text().splitlines() == ["2 1200", "1"]
