"""A pipeline of plain tensors for tests of the runtime: no training framework, little time."""

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from envpipe_megatron.core.kinds import Kind, Unit
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.gpu.base import Gpu
from envpipe_megatron.gpu.emulated.emulated_gpu import EmulatedGpu
from envpipe_megatron.gpu.emulated.store import ROOT_VARIABLE, EmulatedState, StateFile
from envpipe_megatron.integrations.device import FORWARD_VARIABLE, PRESET_VARIABLE
from envpipe_megatron.runtime.channel.carrier import StageSpecs, TensorSpec
from envpipe_megatron.runtime.channel.collectives import Collectives, make_collectives
from envpipe_megatron.runtime.channel.links import make_channel
from envpipe_megatron.runtime.channel.p2p import P2PChannel
from envpipe_megatron.runtime.execution import executor
from envpipe_megatron.runtime.execution.executor import EmulatedExecutor
from envpipe_megatron.runtime.job.options import JobOptions
from envpipe_megatron.runtime.job.session import Session

SHAPE, MICROBATCHES = (2, 3), 3
SPECS = StageSpecs.alike(TensorSpec((SHAPE,), (torch.float32,), torch.device("cpu")))


@dataclass
class PlainWork:
    """Checks that each unit gets its own message, and sends on.

    Args:
        stage: this rank's stage; a forward sends its microbatch + stage / 10, a backward minus it.
        before_unit: called with each unit before it is run.
    """

    schedule: Schedule
    stage: int
    before_unit: Callable[[Unit], None] = lambda unit: None
    executed: list[str] = field(default_factory=list)

    def forward(self, unit: Unit, inputs: list[torch.Tensor] | None) -> list[torch.Tensor]:
        return self._run(unit, inputs, self.stage == 0, self.stage - 1)

    def backward(self, unit: Unit, gradients: list[torch.Tensor] | None) -> list[torch.Tensor]:
        return self._run(
            unit, gradients, self.stage == self.schedule.num_stages - 1, self.stage + 1
        )

    def weight_gradient(self, unit: Unit) -> None:
        self.before_unit(unit)

    def _run(
        self, unit: Unit, received: list[torch.Tensor] | None, first: bool, source: int
    ) -> list[torch.Tensor]:
        self.before_unit(unit)
        self.executed.append(str(unit))
        assert (received is None) is first
        if received is not None:
            assert torch.equal(received[0], self._message(unit, source)), unit
        return [self._message(unit, self.stage)]

    def _message(self, unit: Unit, stage: int) -> torch.Tensor:
        sign = 1 if unit.kind is Kind.FORWARD else -1
        return torch.full(SHAPE, sign * (unit.microbatch + stage / 10))

    def sent(self, unit: Unit) -> None:
        pass


class OtherStages:
    """The host group of an emulated pipeline, as one stage sees it, whose inputs have their times.

    Args:
        behind_s: by how much another stage is behind when stages meet.
    """

    def __init__(self, inputs_s: Iterable[float] = (), behind_s: float = 0.0) -> None:
        self.pipeline, self.names_the_loss = self, nullcontext
        self.inputs_s, self.behind_s = [*inputs_s], behind_s
        self.sent: list[tuple[float, int]] = []

    def latest(self, own_s: float) -> float:
        return own_s + self.behind_s

    def send(self, end_s: float, stage: int, tag: int) -> list[Any]:
        self.sent.append((end_s, stage))
        return []

    def receive(self, stage: int, tag: int) -> float:
        return self.inputs_s.pop(0)


#: Twice in each refresh of an emulated GPU's counter.
_STEP_S = 0.05


class FastTime:
    """The host's clock without its sleeps: they are jumped over, in the steps of a meter."""

    def __init__(self) -> None:
        self._jumped_s = 0.0
        #: Called at every step, for a thread that would have run during the sleep.
        self.meanwhile: Callable[[], object] = lambda: None

    def monotonic(self) -> float:
        return time.monotonic() + self._jumped_s

    def sleep(self, duration_s: float) -> None:
        while duration_s > 0:
            self._jumped_s += min(duration_s, _STEP_S)
            duration_s -= _STEP_S
            self.meanwhile()

    def install(self, gpu: EmulatedGpu) -> None:
        """Let this process's emulation run by this clock."""
        jumping = SimpleNamespace(monotonic=self.monotonic, sleep=self.sleep)
        executor.time = jumping  # type: ignore[assignment]
        gpu._monotonic_s = self.monotonic
        StateFile.read = _remembered  # type: ignore[method-assign]
        StateFile._write = _remembering  # type: ignore[method-assign]
        # Its meter looks at each refresh before the next: a long past would only be written anew.
        EmulatedState.kept_segments = 32


def run_fast(session: Session) -> None:
    """Let a session, and its emulated GPU, run by such a clock."""
    fast_time = FastTime()
    for gpu in (session.parts.gpu, session.parts.executor._gpu):  # type: ignore[attr-defined]
        fast_time.install(gpu._reader if gpu.read_only else gpu)
    fast_time.meanwhile = session.parts.meter._try_sample


#: By how much a rank is late that is.
LATE_S = 0.2


def be_late(executor: Any, own: Schedule, late_from: int) -> None:
    """Let the first stage begin a unit late in the middle of every order that is not `own`.

    Args:
        late_from: the number of the first iteration in which it may be late.
    """
    begin_iteration, begin_unit, begun = executor.begin_iteration, executor.begin_unit, count()
    late_for = -1

    def iteration(schedule: Schedule, stage: int) -> None:
        nonlocal late_for
        late = next(begun) >= late_from and stage == 0 and schedule.stages != own.stages
        late_for = schedule.units_per_stage // 2 if late else -1
        begin_iteration(schedule, stage)

    def unit() -> Any:
        found = begin_unit()
        if len(executor._times_s) == late_for:
            executor._gpu.advance_to(executor._gpu.committed_end_s() + LATE_S)
        return found

    executor.begin_iteration, executor.begin_unit = iteration, unit


def emulate(rank: int, root: Path, preset: Path | str, forward_s: Iterable[float]) -> None:
    """Let this process find an emulated GPU, as a launcher's environment does."""
    os.environ |= {
        "LOCAL_RANK": str(rank),
        ROOT_VARIABLE: str(root),
        PRESET_VARIABLE: str(preset),
        FORWARD_VARIABLE: ",".join(map(str, forward_s)),
    }


#: The state of each file that this process has read or written last, and what tells that file from
#: the next of its name.
_known_states: dict[Path, tuple[tuple[int, ...], EmulatedState]] = {}
_read, _write = StateFile.read, StateFile._write


def _copy(of: EmulatedState) -> EmulatedState:
    made = EmulatedState(**vars(of))
    made.segments = [*of.segments]
    return made


def _version(file: StateFile) -> tuple[int, ...]:
    found = file.path.stat()
    return found.st_ino, found.st_mtime_ns, found.st_size


def _remembered(file: StateFile) -> EmulatedState:
    """Return what `read` does, without looking anew at all numbers of a file that is read often.

    Without sleeps the emulated GPUs' files would else be most of what a rank computes.
    """
    known = _known_states.get(file.path)
    with suppress(FileNotFoundError):  # `read` says what is wrong
        if known is not None and known[0] == _version(file):
            return _copy(known[1])
    return _read(file)


def _remembering(file: StateFile, new: EmulatedState, *, keep: bool) -> None:
    """Do what `_write` does, for this process to read it again as it was."""
    _write(file, new, keep=keep)
    _known_states[file.path] = _version(file), _copy(new)


def channel(timeout_s: float, collectives: Collectives | None = None) -> P2PChannel:
    collectives = collectives or lone_pipeline(dist.get_world_size())
    return make_channel(dist.group.WORLD, collectives, timeout=timedelta(seconds=timeout_s))


def expect(channel: P2PChannel, units: Sequence[Unit], specs: StageSpecs) -> None:
    """Have a channel expect these units' inputs, of no schedule, until its step ends."""
    small = builders.one_f_one_b(2, 1)
    channel._inputs = small, list(units)
    channel.begin_step(small, specs)


@lru_cache
def lone_pipeline(stages: int, timeout_s: float = 30.0) -> Collectives:
    """Of all ranks, kept: each gloo group has threads that wake a hundred times a second."""
    return make_collectives([range(stages)], timedelta(seconds=timeout_s))


def session(
    rank: int,
    config: JobOptions,
    root: Path,
    *,
    timeout_s: float = 10.0,
    collectives_timeout_s: float = 30.0,
    preset: str = "a100-sxm",
    time_at_max_s: Mapping[Kind, float] | None = None,
    fast: bool = True,
    gpu_index: int | None = None,
    seen_as: Callable[[EmulatedGpu], Gpu] = lambda gpu: gpu,
    **options: Any,
) -> tuple[Session, EmulatedGpu]:
    """A session of this rank, whose stage is its rank, and its emulated GPU.

    Args:
        gpu_index: of the emulated GPU, by default the rank.
        seen_as: what the session gets for the emulated GPU.
    """
    stages = dist.get_world_size()
    collectives = lone_pipeline(stages, collectives_timeout_s)
    gpu = EmulatedGpu.create(preset, rank if gpu_index is None else gpu_index, root)
    fast_time = FastTime()
    if fast:
        fast_time.install(gpu)
    times = time_at_max_s or {Kind.FORWARD: 0.002, Kind.BACKWARD: 0.004}
    made = Session(
        config,
        seen_as(gpu),
        lambda settle: EmulatedExecutor(gpu, times, collectives, settle),
        channel(timeout_s, collectives),
        collectives,
        **options,
    )
    fast_time.meanwhile = made.parts.meter._try_sample
    return made, gpu


def options(output: Path | None = None, **asked: Any) -> JobOptions:
    """Return options of a job that comes to its steady phase in few iterations."""
    usual = {"type": "envelope", "reconfigure": "default", "num_microbatches": MICROBATCHES}
    short = {"baseline_steps": 1, "profile_steps": 1, "window_s": 0.3}
    return JobOptions(output=output, **{**usual, **short, **asked})


def iterate(
    session: Session,
    rank: int,
    count: int = 1,
    before_unit: Callable[[Unit], None] = lambda unit: None,
    microbatches: int = MICROBATCHES,
) -> None:
    """Run iterations of plain tensors."""
    for _ in range(count):
        session.run_iteration(
            microbatches, SPECS, lambda schedule: PlainWork(schedule, rank, before_unit)
        )
