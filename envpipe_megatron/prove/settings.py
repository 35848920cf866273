"""Settings of a proof: arms that train in turns, sizes and files; and the machine.

Free of torch: the command imports it. The machine must be quiet, and its clocks controllable.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pynvml

from envpipe_megatron import __version__
from envpipe_megatron.core.plan import Plan
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.files import replace_files
from envpipe_megatron.gpu.backends.nvml_library import call_library
from envpipe_megatron.gpu.control import choose_control
from envpipe_megatron.gpu.devices import GpuActivity, read_activity, read_processes, visible_gpus
from envpipe_megatron.gpu.emulated.presets import load_preset
from envpipe_megatron.gpu.site import read_site
from envpipe_megatron.integrations.versions import version_of
from envpipe_megatron.quickstart.settings import Settings

#: How long the measured part of a turn lasts, at least, unless its iterations are given, s.
TURN_S = 15.0
#: Iterations of a turn that its session warms up with, at the highest clock and in 1F1B.
WARMUP_ITERATIONS = 2
#: Iterations behind these in which clocks settle; not measured.
SETTLE_ITERATIONS = 2

_PACKAGES = ("torch", "megatron-core", "nvidia-ml-py", "numpy")


@dataclass(frozen=True)
class Arm:
    """One way to train the same model on the same data.

    Args:
        says: what it does, for people.
        policy: as `PlanRequest` takes it, with `schedule`.
        relock: as `SessionConfig` takes it.
        changes_clock: without, the GPU is opened for reading alone.
        own_plan: whether a file in the folder of plans, named as the arm, says order and clocks.
        from_profile: whether it needs the profile.
    """

    name: str
    says: str
    policy: str = "baseline"
    schedule: str = "1f1b"
    relock: bool = False
    changes_clock: bool = True
    own_plan: bool = False
    from_profile: bool = False


STOCK = Arm(
    "stock", "the framework's order, 1F1B, and no call that sets a clock", changes_clock=False
)
RELOCK = Arm(
    "relock",
    "as stock, with the highest clock locked again at every unit: what the calls alone cost",
    relock=True,
)
CONSTANT = Arm(
    "constant",
    "1F1B at the one lower clock that should take as much energy as optimal: what any operator "
    "could do",
    policy="uniform",
    own_plan=True,
    from_profile=True,
)
ENVELOPE = Arm(
    "envelope",
    "EnvPipe's own: type envelope, scheduling ours, reconfigure default",
    policy="envelope",
    schedule="ours",
    from_profile=True,
)
OPTIMAL = Arm(
    "optimal",
    "order and clocks planned together",
    policy="optimal",
    schedule="auto",
    own_plan=True,
    from_profile=True,
)
#: In the order of a round. A power profile of the vendor is no arm: EnvPipe never changes one.
ARMS = (STOCK, RELOCK, CONSTANT, ENVELOPE, OPTIMAL)


def order_of_round(number: int) -> tuple[Arm, ...]:
    """The arms of a round, from 0: every other round goes backwards, so that a drift cancels."""
    return ARMS if number % 2 == 0 else ARMS[::-1]


def constant_plan(optimal: Plan) -> Plan:
    """The framework's own order at one clock, whose energy is nearest to that of a plan.

    Among the clocks that all stages were profiled at, below the highest and down to that of least
    energy: a lower one would be slower and take more.
    """
    base = optimal.baseline
    stages = range(base.schedule.num_stages)
    *clocks, _ = sorted(set.intersection(*(set(base.profile.clocks_mhz(s)) for s in stages)))
    plans = [
        Plan(
            "uniform",
            base.schedule,
            np.full_like(base.frequency_mhz, clock),
            base.profile,
            base.conditions,
        )
        for clock in clocks
    ]
    least = min(range(len(plans)), key=lambda at: plans[at].cost.energy_j)
    wanted_j = optimal.cost.energy_j
    # The highest first: of clocks that are as near, the faster one is the harder rival.
    return min(reversed(plans[least:]), key=lambda plan: abs(plan.cost.energy_j - wanted_j))


class ProveError(EnvPipeError):
    """A machine on which nothing can be shown, or a proof that did not come to its end."""


@dataclass(frozen=True)
class ProveSettings:
    """Handed from the command to its ranks as a JSON file.

    Args:
        job: the model, its data and the output folder; `preset` counts on emulated GPUs alone.
        dry_run: whether no clock is changed.
        rounds: of all arms.
        iterations: measured ones of each turn; None for as many as take `TURN_S`.
    """

    job: Settings
    emulated: bool
    dry_run: bool
    rounds: int
    iterations: int | None

    @property
    def output(self) -> Path:
        """The folder that all is left in."""
        return Path(self.job.output_dir)

    @property
    def profile_folder(self) -> Path:
        """Folder of the session that profiles."""
        return self.output / "profile"

    def arm_folder(self, arm: str) -> Path:
        """Folder of an arm's sessions."""
        return self.output / "arms" / arm

    def plan_file(self, arm: str) -> Path:
        """The plan that all turns of an arm run."""
        return self.output / "plans" / f"{arm}.json"

    def write(self, path: Path) -> None:
        """Write the JSON file."""
        replace_files({path: [json.dumps(asdict(self), indent=1), "\n"]})

    @classmethod
    def read(cls, path: Path) -> ProveSettings:
        """Read the JSON file."""
        data = json.loads(path.read_text())
        return cls(**{**data, "job": Settings(**data["job"])})


def gpt_for_gpus(output_dir: str, text: str, num_stages: int) -> Settings:
    """A GPT whose units last for tens of milliseconds on a large GPU: longer than clocks settle."""
    return Settings(
        output_dir,
        text,
        num_stages=num_stages,
        num_layers=4 * num_stages,
        hidden_size=4096,
        num_attention_heads=32,
        sequence_length=1024,
        microbatch_size=4,
        num_microbatches=4 * num_stages,
        learning_rate=1e-4,
    )


@dataclass(frozen=True)
class Machine:
    """The machine that is measured on.

    Args:
        emulated: whether GPUs follow a model.
        gpu_names: one for each pipeline rank.
        activity: of each real GPU, before anything ran.
        load: of the host, as the mean number of processes that would run; None if it is no matter.
        missing: why no clock is changed; empty if clocks are.
        versions: of all that figures rest on.
    """

    emulated: bool
    gpu_names: tuple[str, ...]
    activity: tuple[GpuActivity, ...]
    load: float | None
    missing: str
    versions: dict[str, str]


_DRY_RUN = "a dry run was asked for"


def emulated_machine(preset: str, num_stages: int, *, dry_run: bool) -> Machine:
    """A machine of emulated GPUs, whose time does not depend on how busy the host is.

    Raises GpuError if there is no such preset.
    """
    name = f"{load_preset(preset).gpu} (emulated)"
    missing = _DRY_RUN if dry_run else ""
    return Machine(True, (name,) * num_stages, (), None, missing, _versions())


def real_machine(*, dry_run: bool) -> Machine:
    """This machine's GPUs, as CUDA shows them to this process.

    Raises ProveError: fewer than two GPUs, no right to change their clocks and no dry run, or the
    machine is not quiet. GpuError: NVML cannot be read.
    """
    chosen = choose_control("auto", read_site())
    missing = "" if chosen.backend else f"{chosen.why}. {' '.join(chosen.remedies)}".strip()
    if missing and not dry_run:
        raise ProveError(
            f"Clocks may not be changed here: {chosen.why}",
            remedy=" ".join(
                [*chosen.remedies, "Or add --dry-run, which reads all and changes no clock."]
            ),
        )
    devices = visible_gpus().devices
    if len(devices) < 2:
        raise ProveError(
            "A pipeline needs two GPUs or more; CUDA shows fewer to this process",
            value=len(devices),
            remedy="Give it more, or try --gpu a100-sxm, which emulates them.",
        )
    activity = tuple(read_activity(device.uid) for device in devices)
    load = os.getloadavg()[0]
    _check_quiet(activity, load)
    driver = call_library("read the driver's version", pynvml.nvmlSystemGetDriverVersion)
    return Machine(
        False,
        tuple(one.name for one in activity),
        activity,
        load,
        missing or (_DRY_RUN if dry_run else ""),
        {**_versions(), "driver": driver},
    )


def _check_quiet(activity: tuple[GpuActivity, ...], load: float) -> None:
    """Refuse by a ProveError a machine on which something else runs.

    Args:
        activity: of each GPU.
        load: the host's mean number of processes that would run, over the last minute.
    """
    found = [text for one in activity for text in one.unrest()]
    cores = os.cpu_count() or 1
    if load >= cores:
        found.append(f"the host's load is {load:.1f}, on {cores} cores")
    if found:
        raise ProveError(
            "The machine is not quiet, so what is measured would not be EnvPipe's",
            value=found,
            remedy="End what runs there, or wait until it has ended; a GPU that is held back while "
            "idle needs cooling, or another power limit.",
        )


def newcomers(machine: Machine) -> list[str]:
    """In words, the real GPUs that more computes on than the one rank of the proof."""
    now = {before.index: len(read_processes(before.uid)) for before in machine.activity}
    return [f"{count} processes on GPU {index}" for index, count in now.items() if count > 1]


def _versions() -> dict[str, str]:
    installed = {package: found for package in _PACKAGES if (found := version_of(package))}
    return {"envpipe-megatron": __version__, **installed}
