"""Emulated GPUs of one process, and how iterations of pipelines run on them, unit by unit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from envpipe_megatron.core.arrays import FloatArray
from envpipe_megatron.core.kinds import SPLIT, Kind
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.gpu.base import ClockState, GpuAddress, PowerState
from envpipe_megatron.gpu.emulated.store import EmulatedState, tick_number
from envpipe_megatron.gpu.presets import GpuPreset, times_by_kind_s
from envpipe_megatron.runtime.energy.meter import EnergyMeter
from envpipe_megatron.runtime.execution.executor import StageRecord
from envpipe_megatron.runtime.execution.stage_run import IterationOrder
from host_executor import make_record


@dataclass
class Conditions:
    """Faults of one GPU in an iteration, by kind where it says so.

    `slower` multiplies times of units, those of both parts of a backward as of whole ones,
    `hungrier` their power; no clock above `limit_mhz` is reached; a counter that is `silent` does
    not refresh; a clock that is `stuck` follows no request. Of an iteration that is `partial` only
    the first unit is reported as it ran, and of one that is `untold`, too, the record does not say
    so.
    """

    slower: dict[Kind, float] = field(default_factory=dict)
    hungrier: float = 1.0
    limit_mhz: float | None = None
    silent: bool = False
    stuck: bool = False
    partial: bool = False
    untold: bool = False

    def unit_time_s(
        self, preset: GpuPreset, kind: Kind, clock_mhz: float, at_max_s: float
    ) -> float:
        """Return the time of a unit at a clock that is asked for."""
        work_s = at_max_s * self.times_longer(kind)
        return preset.unit_time_s(kind.value, self.reached_mhz(clock_mhz), work_s)

    def times_longer(self, kind: Kind) -> float:
        """By how much a unit of a kind takes longer."""
        return self.slower.get(Kind.BACKWARD if kind in SPLIT[1:] else kind, 1.0)

    def busy_power_w(self, preset: GpuPreset, kind: Kind, clock_mhz: float) -> float:
        """Return the power that it draws meanwhile."""
        return self.hungrier * preset.busy_power_w(kind.value, self.reached_mhz(clock_mhz))

    def reached_mhz(self, clock_mhz: float) -> float:
        """The clock that comes of one that is asked for."""
        return clock_mhz if self.limit_mhz is None else min(clock_mhz, self.limit_mhz)


#: What is the matter in an iteration, by (replica, stage).
Faults = Callable[[int], dict[tuple[int, int], Conditions]]


class _LongState(EmulatedState):
    kept_segments = 1_000  # of some thirty iterations; its meter looks once in each


class MemoryGpu:
    """An emulated GPU of this process alone; requests and counters as of any GPU."""

    changes_clock, read_apart, read_only, drives_hardware = True, False, False, False

    def __init__(self, preset: GpuPreset, uid: str, wait_follows: float) -> None:
        self.preset = preset
        self._wait_follows = wait_follows
        self.name = preset.gpu
        self.address = GpuAddress("emulated", uid)
        self.supported_frequencies_mhz = preset.supported_frequencies_mhz
        self.state = _LongState(preset.name, preset.max_frequency_mhz)
        self.conditions = Conditions()
        self._by_clock: dict[tuple[Kind, float], tuple[float, float]] = {}

    def clock_state(self) -> ClockState:
        """As of a GPU that tells nothing but its clock."""
        return ClockState(self.state.requested_mhz, self.state.clock_mhz)

    def power_state(self) -> PowerState:
        """As of a GPU that tells nothing of it."""
        return PowerState()

    def request(self, frequency_mhz: int) -> None:
        """Ask for a clock, at the end of what was committed."""
        if not self.conditions.stuck:
            change_s = self.preset.frequency_change_s
            self.state.request(frequency_mhz, frequency_mhz, change_s)

    def run_unit(self, kind: Kind, time_at_max_s: float, ready_s: float) -> tuple[float, float]:
        """As `EmulatedGpu.run_unit`; start and end, s."""
        self.advance_to(ready_s)
        start_s = self.state.end_s
        self.state.run_unit(partial(self._unit, kind, time_at_max_s))
        return start_s, self.state.end_s

    def _unit(self, kind: Kind, at_max_s: float, clock_mhz: int) -> tuple[float, float]:
        """Time and power of a whole unit at a clock; worked out once for each clock."""
        now = self.conditions
        key = kind, now.reached_mhz(clock_mhz)
        if key not in self._by_clock:
            kind_of, mhz = kind.value, key[1]
            self._by_clock[key] = (
                self.preset.unit_time_s(kind_of, mhz, 1.0),
                self.preset.busy_power_w(kind_of, mhz),
            )
        times, power_w = self._by_clock[key]
        return at_max_s * now.times_longer(kind) * times, now.hungrier * power_w

    def advance_to(self, time_s: float) -> None:
        """Wait until then, at the power of the clocks that run meanwhile."""
        state = self.state
        state.settle()
        if state.pending is not None and state.pending[1] < time_s:
            state.wait_until(state.pending[1], self._waiting_w)
        state.wait_until(time_s, self._waiting_w)

    @property
    def _waiting_w(self) -> float:
        below = 1 - self.state.clock_mhz / self.preset.max_frequency_mhz
        return self.preset.wait_power_w * (1 - self._wait_follows * below)


_HICCUP_S = 0.01
#: More than a window of iterations has.
_KEPT_REFRESHES = 10_000


class VirtualMeter(EnergyMeter):
    """A meter that sees each refresh of a counter, when it is told that time has passed."""

    def __init__(self, gpu: MemoryGpu) -> None:
        self.gpu = gpu
        self._sampled = 0
        super().__init__(gpu)  # type: ignore[arg-type]
        super().close()

    def catch_up(self) -> None:
        """See all refreshes up to now."""
        state, period_s = self.gpu.state, self.gpu.preset.refresh_s
        last = tick_number(state.end_s, period_s)
        for number in range(self._sampled + 1, last + 1):
            if not self.gpu.conditions.silent:
                self._add(state.energy_at(number * period_s))
        for values in (self._times_s, self._energies_j, self._time_uncertainties_s):
            del values[:-_KEPT_REFRESHES]
        self._sampled = last

    def _run(self) -> None:
        """No thread reads."""


@dataclass(frozen=True)
class Iteration:
    """Time and energy of one iteration.

    Attributes:
        phase: what it was for.
        time_s: of the job: that of its slowest replica.
        replicas_s: of each pipeline by itself.
        energy_j: of all GPUs.
    """

    phase: str
    time_s: float
    replicas_s: tuple[float, ...]
    energy_j: float


class Pipelines:
    """The GPUs of all replicas of a pipeline, and how an iteration runs on them.

    Args:
        forward_s: of each stage, at the highest clock; a backward takes `backward_ratio` as long.
        faults: what is the matter in which iteration.
        hiccups: share of units that take 10 ms longer.
        scatter: standard deviation of the time of a unit, as a share of it.
        work: standard deviation of the logarithm of the work of an iteration of a pipeline, and of
            that of a microbatch: the same in two runs, as that of the same data.
        wait_follows: share of the power of waiting at the highest clock that follows the clock.
        tail_s: what the last stage does after its last unit.
        seed: of hiccups and scatter.
    """

    def __init__(
        self,
        preset: GpuPreset,
        forward_s: Sequence[float],
        num_replicas: int = 1,
        *,
        backward_ratio: float = 2.0,
        faults: Faults = lambda iteration: {},
        hiccups: float = 0.0,
        scatter: float = 0.0,
        work: tuple[float, float] = (0.0, 0.0),
        wait_follows: float = 0.0,
        tail_s: float = 0.0,
        seed: int = 7,
    ) -> None:
        self.gpus = [
            [
                MemoryGpu(preset, f"{replica}/{stage}", wait_follows)
                for stage in range(len(forward_s))
            ]
            for replica in range(num_replicas)
        ]
        self._unit_s = [
            times_by_kind_s({Kind.FORWARD: time_s, Kind.BACKWARD: backward_ratio * time_s})
            for time_s in forward_s
        ]
        self._faults, self._hiccups, self._scatter = faults, hiccups, scatter
        self._tail_s, self._random = tail_s, np.random.default_rng(seed)
        self._work, self._seed = work, seed
        self.iterations: list[Iteration] = []
        #: After how many waits that were parked in a unit began at its own clock, and did not.
        self.parked: Counter[bool] = Counter()
        #: So many iterations have begun, whether or not `iterations` still has them.
        self.begun = 0

    @property
    def energy_j(self) -> float:
        """Of all GPUs so far."""
        return sum(gpu.state.energy_j for replica in self.gpus for gpu in replica)

    def run(self, orders: Sequence[IterationOrder]) -> list[list[StageRecord]]:
        """Run an iteration, an order for each replica; the records of [replicas][stages]."""
        now = self._faults(self.begun)
        work = np.random.default_rng([self._seed, self.begun])
        self.begun += 1
        before_j, begin_s = self.energy_j, self.gpus[0][0].state.end_s
        made, ends_s = [], []
        for replica, (gpus, order) in enumerate(zip(self.gpus, orders, strict=True)):
            for stage, gpu in enumerate(gpus):
                gpu.conditions = now.get((replica, stage), Conditions())
            starts, ends = self._run_replica(
                gpus, order, begin_s, self._drawn(work, order.schedule)
            )
            made.append((starts, ends))
            ends_s.append(max(*map(max, ends), ends[-1][-1] + self._tail_s))
        latest_s = max(ends_s)
        for gpus in self.gpus:
            for gpu in gpus:
                gpu.advance_to(latest_s)
        time_s = latest_s - begin_s
        self.iterations.append(
            Iteration(
                orders[0].phase.value,
                time_s,
                tuple(end_s - begin_s for end_s in ends_s),
                self.energy_j - before_j,
            )
        )
        return [
            [
                _record(gpu.conditions, starts, ends, begin_s, time_s)
                for gpu, starts, ends in zip(gpus, *times, strict=True)
            ]
            for gpus, times in zip(self.gpus, made, strict=True)
        ]

    def _drawn(self, random: np.random.Generator, schedule: Schedule) -> FloatArray:
        """The work of each unit of an iteration, as a multiple of the usual one."""
        of_iteration, each = self._work
        of_microbatch = each * random.standard_normal(schedule.num_microbatches)
        logarithms = of_iteration * random.standard_normal() + of_microbatch
        places = [unit.microbatch for units in schedule.stages for unit in units]
        return np.exp(logarithms)[places]

    def _run_replica(
        self,
        gpus: Sequence[MemoryGpu],
        order: IterationOrder,
        begin_s: float,
        work: FloatArray,
    ) -> tuple[list[list[float]], list[list[float]]]:
        schedule = order.schedule
        width = schedule.units_per_stage
        starts: list[list[float]] = [[] for _ in gpus]
        ends: list[list[float]] = [[] for _ in gpus]
        kinds, priced = tuple(Kind), schedule.priced_kinds.tolist()
        cross = schedule.cross_dependency.tolist()
        clocks = order.frequency_mhz.tolist()
        parked = [order.parked(stage) for stage in range(len(gpus))]
        for gpu, own in zip(gpus, clocks, strict=True):
            gpu.request(own[0])
        late = self._random.random(schedule.num_units) < self._hiccups
        scattered = work * (1 + self._scatter * self._random.standard_normal(schedule.num_units))
        for node in schedule.topological_order:
            stage, position = divmod(node, width)
            source, gpu = cross[node], gpus[stage]
            ready_s = begin_s if source < 0 else ends[source // width][source % width]
            kind = kinds[priced[stage][position]]
            at_max_s = self._unit_s[stage][kind] * scattered[node]
            if position in parked[stage]:
                gpu.advance_to(min(ends[stage][-1] + parked[stage][position][1], ready_s))
                gpu.request(clocks[stage][position])
                gpu.advance_to(ready_s)
                self.parked[gpu.state.clock_mhz == clocks[stage][position]] += 1
            start_s, end_s = gpu.run_unit(kind, at_max_s, ready_s)
            if late[node]:
                end_s += _HICCUP_S
                gpu.advance_to(end_s)
            following = (position + 1) % width
            gpu.request(parked[stage].get(following, (clocks[stage][following],))[0])
            starts[stage].append(start_s)
            ends[stage].append(end_s)
        return starts, ends


def _record(
    now: Conditions, starts: list[float], ends: list[float], begin_s: float, time_s: float
) -> StageRecord:
    """As a rank measures it; where units did not run, as `FrameworkUnits.complete` leaves it."""
    starts_s, ends_s = ([at - begin_s for at in times] for times in (starts, ends))
    if now.partial:
        for unit in range(1, len(ends_s)):
            starts_s[unit] = ends_s[-1] + 2e-6 * unit
            ends_s[unit] = starts_s[unit] + 1e-6
    record = make_record(starts_s, ends_s, begin_s, time_s)
    return replace(record, whole=now.untold or not now.partial)
