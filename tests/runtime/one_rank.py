"""One rank of a job by hand, for the phases to run in: what other ranks say, its GPU and memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from plain_stages import SPECS
from presets import preset_profile

from emulated_job import Immediate
from envpipe_megatron.core.kinds import Kind
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.runtime.channel.collectives import Collectives
from envpipe_megatron.runtime.energy.meter import MeterError
from envpipe_megatron.runtime.job.options import JobOptions
from envpipe_megatron.runtime.job.parts import PhaseParts, SessionState
from envpipe_megatron.runtime.job.restarts import JobFolder

CLOCKS = (1005, 1200, 1410)
STAGES, MICROBATCHES = 2, 4
TIMES_S = {Kind.FORWARD: 0.1, Kind.BACKWARD: 0.2}
OWN = builders.one_f_one_b(STAGES, MICROBATCHES)


def profile_of(stages: int = STAGES, clocks: Sequence[int] = CLOCKS[:2]) -> Any:
    """Units take `TIMES_S` at the highest clock of the GPU."""
    return preset_profile("a100-sxm", stages, TIMES_S, clocks)


def finish(going: Any) -> Any:
    """Return what a phase does that runs no iteration."""
    with pytest.raises(StopIteration) as ended:
        next(going)
    return ended.value.value


@dataclass(frozen=True)
class Known:
    """Return what a stage's memory was measured to be."""

    activation_bytes: float
    free_bytes: float
    pending_bytes: tuple[float, ...] | None = None
    unit_bytes: tuple[tuple[float, ...], ...] | None = None


class Memory:
    """Notes what is done with it."""

    def __init__(self) -> None:
        self.stages: Any = None
        self.calls: list[Any] = []
        self.predicted: list[str] = []
        self.predicting: Exception | None = None

    def learn(self, schedule: Schedule, specs: Any) -> None:
        assert specs is SPECS
        self.calls.append(("learn", schedule.name))
        self.stages = (Known(10.0, 100.0), Known(20.0, 200.0))

    def predict(self, schedule: Schedule) -> None:
        self.predicted.append(schedule.name)
        if self.predicting is not None:
            raise self.predicting

    def compare(self) -> None:
        self.calls.append(("compare",))


def same(own: Any) -> Any:
    return own


def merge_nothing(replicas: Any) -> Any:
    return replicas[0]


@dataclass
class Rank:
    """Stage 0 of a job of two stages and some replicas.

    Args:
        other: what the other stage says, by what this one does.
        replicas: what the other replicas of this stage say, likewise.
    """

    options: JobOptions
    own_order: Schedule | None = None
    other: Callable[[Any], Any] = same
    replicas: Sequence[Callable[[Any], Any]] = (same,)
    changes_clock: bool = True
    is_planner: bool = True
    supported: tuple[int, ...] = CLOCKS
    memory: Any = field(default_factory=Memory)
    said: list[str] = field(default_factory=list)
    state: SessionState = field(default_factory=SessionState)
    specs: Any = SPECS
    batch: str = ""
    stage: int = 0
    num_stages: int = STAGES
    channel: Any = field(
        default_factory=lambda: SimpleNamespace(make_room=lambda order, specs: True, capacity=None)
    )
    executor: Any = None
    energy: Any = field(default_factory=lambda: SimpleNamespace(baselines={}))
    background: Any = Immediate
    named, kept_order = PhaseParts.named, PhaseParts.kept_order
    megatron_order, schedule = PhaseParts.megatron_order, PhaseParts.schedule
    num_microbatches, top_mhz = PhaseParts.num_microbatches, PhaseParts.top_mhz

    @cached_property
    def clocks_mhz(self) -> list[set[int]]:
        return self.collectives.by_stage({*self.gpu.supported_frequencies_mhz}, merge_nothing)

    def __post_init__(self) -> None:
        pipeline: Any = SimpleNamespace(
            leads=True, gather=lambda own: [own, self.other(own)], broadcast=same
        )
        replicas: Any = SimpleNamespace(leads=True, broadcast=same)
        replicas.gather = lambda own: [own, *(replica(own) for replica in self.replicas)]
        self.collectives = Collectives(0, pipeline, [replicas], 1 + len(self.replicas))
        self.collectives.is_planner = True  # where files go is what that rank says
        self.gpu = SimpleNamespace(
            name="NVIDIA of a test",
            changes_clock=self.changes_clock,
            supported_frequencies_mhz=self.supported,
            read_only=False,
        )
        self.folder: Any = JobFolder(self.options.output, self.collectives)
        self.collectives.is_planner = self.is_planner
        self.clock = SimpleNamespace(error=None, problems=tuple)
        self.meter = SimpleNamespace(
            refreshes=lambda begin_s: (np.zeros(0), np.zeros(0)),
            window=Mock(side_effect=MeterError("Of a test")),
        )
        self.say = self.said.append
