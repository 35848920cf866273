"""What the phases of a job work with: what it wants, what it has come to, and its parts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from envpipe_megatron.core.plan import Plan
from envpipe_megatron.core.profile import Profile
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.core.sidecar import Sidecar
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.formats.energy import Phase
from envpipe_megatron.gpu.base import Gpu
from envpipe_megatron.policies.planner import PlanRequest, check_request
from envpipe_megatron.policies.reconfigure import Ended
from envpipe_megatron.runtime.channel.collectives import Collectives
from envpipe_megatron.runtime.channel.messages import StageSpecs
from envpipe_megatron.runtime.channel.p2p import P2PChannel
from envpipe_megatron.runtime.clocks.controller import ClockController
from envpipe_megatron.runtime.energy.meter import EnergyMeter
from envpipe_megatron.runtime.execution.executor import Executor
from envpipe_megatron.runtime.job.job_file import StoredJob
from envpipe_megatron.runtime.memory.peak import JobMemory, StageMemory
from envpipe_megatron.runtime.profiling.profiler import ProfilerSettings

#: A job of weeks must not grow.
_KEPT_ITERATIONS = 10_000


class SessionError(EnvPipeError):
    """A job that changes shape, or one that EnvPipe cannot run."""


@dataclass(frozen=True)
class SessionConfig:
    """What a job wants of EnvPipe.

    Args:
        request: type, order and reconfiguring; its number of microbatches and blocking power are
            replaced by the job's own.
        warmup_iterations: of the framework's order at maximum clock; the first is not looked at.
        profiler: how long to profile.
        profile_file: a profile to use in place of the online one.
        plan_file: a plan to run as it stands; needs the profile file that prices it.
        output_dir: where profile, plan, grids and energy log are left.
        min_dwell_s: least time between two changes of a clock.
        relock: call the driver at every request, also where the clock stays. Beside a job without,
            it shows what the calls alone cost: some drivers hold up NCCL at each of them.
        facts: what the framework knows of the job, for the sidecar of the online profile.
        gpu_preset: the kind of GPU whose range of clocks is profiled; by default this GPU's.

    Raises:
        PlannerError: wishes that contradict each other.
        SessionError: a plan without its profile, or too short a warm-up.
    """

    request: PlanRequest
    warmup_iterations: int = 3
    profiler: ProfilerSettings = field(default_factory=ProfilerSettings)
    profile_file: Path | None = None
    plan_file: Path | None = None
    output_dir: Path | None = None
    min_dwell_s: float = 0.0
    relock: bool = False
    facts: Sidecar = field(default_factory=Sidecar)
    gpu_preset: str | None = None

    def __post_init__(self) -> None:
        check_request(self.request)
        if self.plan_file is not None and self.profile_file is None:
            raise SessionError(
                "A plan by file needs the profile that prices it",
                value=str(self.plan_file),
                remedy="Give the profile file too.",
            )
        needed = least_warmup(self.request)
        if self.warmup_iterations < needed:
            raise SessionError(
                f"The warm-up needs at least {needed} iteration(s) with reconfiguring "
                f"'{self.request.reconfigure}'",
                value=self.warmup_iterations,
                remedy="What a receive without a bubble takes is measured after the first.",
            )


def least_warmup(request: PlanRequest) -> int:
    """How many iterations the warm-up needs: what a wait without a bubble takes is seen in it."""
    return 1 if request.reconfigure == "default" else 2


@dataclass
class SessionState:
    """What the job has come to, for whoever reports it."""

    phase: Phase = Phase.WARMUP
    iteration: int = -1
    profile: Profile | None = None
    plan: Plan | None = None
    reconfigure_steps: int = 0
    reconfigure_ended: Ended | None = None
    notes: tuple[str, ...] = ()
    #: One for each stage; None where memory is not known.
    memory: tuple[StageMemory, ...] | None = None
    #: This rank's latest iterations: phase, time on the GPU's time base in s, wall time in s.
    iterations: deque[tuple[Phase, float, float]] = field(
        default_factory=lambda: deque(maxlen=_KEPT_ITERATIONS)
    )


@dataclass(frozen=True)
class Job:
    """What the phases of one rank work with; `say` and `print_grid` are the planner's alone.

    Args:
        kept_order: of a framework that runs its units itself; None where ours are executed.
        stored: what an earlier start left, whose profile and plan `config` names as its files.
    """

    config: SessionConfig
    state: SessionState
    stage: int
    num_stages: int
    num_microbatches: int
    specs: StageSpecs
    gpu: Gpu
    channel: P2PChannel
    executor: Executor
    clock: ClockController
    meter: EnergyMeter
    collectives: Collectives
    say: Callable[[str], None]
    print_grid: Callable[[str], None]
    memory: JobMemory
    kept_order: Schedule | None
    stored: StoredJob | None

    @property
    def keeps_profile(self) -> bool:
        """Whether the profile file is an earlier start's, and not the user's."""
        return self.stored is not None and bool(self.stored.profile)

    @property
    def keeps_plan(self) -> bool:
        """Whether the plan file is an earlier start's, and not the user's."""
        return self.stored is not None and bool(self.stored.plan)

    def predict_memory(self, schedule: Schedule) -> None:
        """Say what an order holds, and have it ready; raises as `JobMemory.predict`."""
        self.memory.predict(schedule)
        self.state.memory = self.memory.stages
