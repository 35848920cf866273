"""The energy bill of a job: sums of the lines of its nodes' energy logs.

Lines may come from files or, as they are written, from the nodes' agents. A GPU's lines come from
one file, in its order, and GPUs are added up in a fixed order: the sums are the same to the last
bit either way. What is kept grows with the number of GPUs and phases, not with that of lines.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from envpipe_megatron.formats.energy import (
    BEGUN,
    ENDED,
    JOB,
    KEEP_CLOCKS,
    MAX_AMOUNT,
    PHASES,
    SHARES,
    EnergyNote,
    EnergyWindow,
    Phase,
    name_of_run,
    split_phase,
)
from envpipe_megatron.formats.steps import (
    ComparedSteps,
    Comparison,
    RunningMean,
    StepEnergy,
    compare,
    mean_steps,
)

Key = TypeVar("Key", bound=Hashable)

JOULES_PER_KWH = 3.6e6
_UNKNOWN = (math.nan,) * len(SHARES)
#: Facts of a job by which its steps differ: those of a start that had others are another job's.
_ASKED = ("level", "type", "objective", "scheduling", "reconfigure", "num_gpus")
#: Facts by which an iteration's tokens and samples differ.
_OF_ITERATION = ("tokens_per_iteration", "samples_per_iteration")


@dataclass(frozen=True)
class EnergyTotal:
    """A sum of windows.

    Args:
        windows: number of windows.
        num_gpus: number of different GPUs that they come from.
        energy_uncertainty_j: standard, as if the ends of all windows were read independently: more
            than the truth if windows meet, as their common end cancels. None if one is unknown.
        duration_s: GPU-seconds.
        shares_s: GPU-seconds of `SHARES`; None if those of one window are not known.
    """

    windows: int
    num_gpus: int
    energy_j: float
    energy_uncertainty_j: float | None
    duration_s: float
    shares_s: tuple[float, ...] | None

    @property
    def average_power_w(self) -> float:
        """Average power of one GPU while it was metered."""
        return self.energy_j / self.duration_s if self.duration_s else 0.0


class Ranges:
    """A set of whole numbers, kept as ranges: few, if numbers come more or less in order."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []

    def add(self, first: int, last: int) -> None:
        """Add the numbers from first to last."""
        kept = []
        for low, high in self._ranges:
            if high + 1 < first or last + 1 < low:
                kept.append((low, high))
            else:
                first, last = min(first, low), max(last, high)
        self._ranges = [*kept, (first, last)]

    def __len__(self) -> int:
        return sum(high - low + 1 for low, high in self._ranges)


@dataclass
class PhaseBill:
    """One phase of one GPU on one stage; a sum that one unknown window makes unknown is nan.

    Args:
        window: the last one, for the names in it.
        shares_s: seconds of `SHARES`.
        steps: how many they hold, those that were repeated after a restart as often as run.
        step_s: the windows' mean step times.
        compared: those whose baseline is known.
        first: the lowest iteration; None if no line says one.
        begun: windows that begin with it.
    """

    window: EnergyWindow
    windows: int = 0
    energy_j: float = 0.0
    variance_j2: float = 0.0
    duration_s: float = 0.0
    shares_s: tuple[float, ...] = (0.0,) * len(SHARES)
    steps: int = 0
    step_s: RunningMean = field(default_factory=RunningMean)
    compared: ComparedSteps = field(default_factory=ComparedSteps)
    first: int | None = None
    begun: int = 0

    def add(self, window: EnergyWindow) -> None:
        """Add one window; its steps are held against its baseline, if it has one."""
        self.window = window
        self.windows += 1
        self.energy_j += window.energy_j
        uncertainty_j = window.energy_uncertainty_j
        self.variance_j2 += math.nan if uncertainty_j is None else uncertainty_j**2
        self.duration_s += window.duration_s
        shares = zip(self.shares_s, window.shares_s or _UNKNOWN, strict=True)
        self.shares_s = tuple(mine + new for mine, new in shares)
        first, count = window.first_iteration, window.steps
        if not count or first is None:
            return
        self.steps += count
        self.step_s.add(window.duration_s / count)
        if window.baseline is not None:
            measured = window.duration_s, window.energy_j, uncertainty_j
            self.compared.add(StepEnergy(**window.baseline), count, *measured)
        if self.first is None or first < self.first:
            self.first, self.begun = first, 0
        self.begun += first == self.first

    @property
    def step(self) -> StepEnergy | None:
        """An average step; None if no line says how many there were."""
        if not self.steps:
            return None
        uncertainty_j = total_of([self]).energy_uncertainty_j
        return StepEnergy(
            self.steps,
            self.duration_s / self.steps,
            self.step_s.uncertainty,
            self.energy_j / self.steps,
            None if uncertainty_j is None else uncertainty_j / self.steps,
        )


def total_of(bills: Iterable[PhaseBill]) -> EnergyTotal:
    """The sum of phases, in any order."""
    bills = list(bills)
    variance_j2 = math.fsum(bill.variance_j2 for bill in bills)
    shares = zip(*(bill.shares_s for bill in bills), strict=True)
    shares_s = tuple(math.fsum(share) for share in shares)
    return EnergyTotal(
        sum(bill.windows for bill in bills),
        len({bill.window.gpu_key for bill in bills}),
        math.fsum(bill.energy_j for bill in bills),
        None if math.isnan(variance_j2) else math.sqrt(variance_j2),
        math.fsum(bill.duration_s for bill in bills),
        None if not shares_s or math.isnan(shares_s[0]) else shares_s,
    )


@dataclass
class NodeBill:
    """State of a node by its agents' notes; `lost` counts starts that ended without one."""

    agent: bool = False
    running: bool = False
    exit_code: int | None = None
    lost: int = 0


class Bill:
    """The sums of a job.

    Attributes:
        phases: by GPU, run, phase and stage. A GPU may serve another stage after a restart.
        facts: what the job said of itself.
        iterations: of training, by the name of the run; one repeated after a restart counts once.
        unreadable: lines that were torn or foreign.
    """

    def __init__(self) -> None:
        self.phases: dict[tuple[tuple[str, str], str, str, int | None], PhaseBill] = {}
        self.nodes: dict[str, NodeBill] = {}
        self.facts: dict[str, Any] = {}
        self.iterations: dict[str, Ranges] = {}
        self.unreadable = 0
        #: Of starts that asked for something else than the last one.
        self.other_runs: frozenset[str] = frozenset()
        #: The node that told of the last one.
        self._told_by = ""
        #: Whether all iterations had as many tokens.
        self._one_batch = True

    def add(self, line: EnergyWindow | EnergyNote) -> None:
        """Add one line."""
        node = self.nodes.setdefault(line.node, NodeBill())
        if isinstance(line, EnergyNote):
            node.agent = True
            if line.note == JOB:
                facts = line.fields.get("facts")
                new = self.facts | (facts if isinstance(facts, dict) else {})
                changed = {name for name in self.facts if new[name] != self.facts[name]}
                if not changed.isdisjoint(_ASKED):
                    self.other_runs = frozenset(run for _, run, _, _ in self.phases)
                    self._told_by = line.node
                self._one_batch &= not self.phases or changed.isdisjoint(_OF_ITERATION)
                self.facts = new
            elif line.note in (BEGUN, ENDED):
                node.lost += node.running and line.note == BEGUN
                node.running = line.note == BEGUN
                node.exit_code = line.fields.get("exit_code")
            return
        again = line.run in self.other_runs and line.node == self._told_by
        if again and line.run != name_of_run(line.run):
            self.other_runs -= {line.run}  # this start's, of which other nodes' lines came first
        key = line.gpu_key, line.run, line.phase, line.stage
        if key not in self.phases:
            self.phases[key] = PhaseBill(line)
        self.phases[key].add(line)
        if line.steps and line.first_iteration is not None:
            of_run = self.iterations.setdefault(name_of_run(line.run), Ranges())
            of_run.add(line.first_iteration, line.first_iteration + line.steps - 1)

    def snapshot(self) -> Bill:
        """A bill that stays as this one is now; made in a hundredth of the time of its tables."""
        made = copy.copy(self)  # what is set anew, and never changed, is shared
        made.phases = {
            key: replace(phase, step_s=copy.copy(phase.step_s), compared=copy.copy(phase.compared))
            for key, phase in self.phases.items()
        }
        made.nodes = {name: replace(node) for name, node in self.nodes.items()}
        made.iterations = {name: copy.copy(own) for name, own in self.iterations.items()}
        return made

    @property
    def num_iterations(self) -> int:
        """Iterations of all runs."""
        return sum(map(len, self.iterations.values()))

    def total(self) -> EnergyTotal:
        """The job's."""
        return total_of(self.phases.values())

    def total_by(self, key: Callable[[EnergyWindow], Key]) -> dict[Key, EnergyTotal]:
        """Totals of what shares a key, in the order of runs, ranks and phases."""
        groups: dict[Key, list[PhaseBill]] = {}
        for phase in sorted(self.phases.values(), key=lambda phase: _place(phase.window)):
            groups.setdefault(key(phase.window), []).append(phase)
        return {name: total_of(phases) for name, phases in groups.items()}

    def running(self) -> list[str]:
        """Nodes that have begun and not ended."""
        return [name for name, node in self.nodes.items() if node.running]

    def missing(self) -> list[str]:
        """Why the bill is incomplete; nothing if it is complete, or no agent wrote of it."""
        reasons = [
            f"{name} was lost: its energy up to its last line is in the bill"
            for name in sorted(self.running())
        ]
        reasons += [
            f"{name} was lost and started again: its energy between them is not in the bill"
            for name, node in sorted(self.nodes.items())
            if node.lost
        ]
        if self.unreadable:
            reasons.append(
                f"{self.unreadable} lines cannot be read: their energy is not in the bill"
            )
        expected, found = self.fact("num_gpus"), self.total().num_gpus
        if expected is not None and found < expected:
            reasons.append(f"{expected - found} of {expected} GPUs sent nothing")
        return reasons + self.silent()

    def silent(self) -> list[str]:
        """How many ranks of each start have no line, though others' lines tell of them."""
        reasons = []
        starts: dict[str, dict[int, EnergyWindow]] = {}
        for (_, run, *_), phase in self.phases.items():
            if phase.window.rank is not None:
                starts.setdefault(run, {})[phase.window.rank] = phase.window
        for run, ranks in sorted(starts.items()):
            count = max(window.num_ranks or 0 for window in ranks.values()) or max(ranks) + 1
            if len(ranks) < count:
                of_run = f" of {run}" if run else ""
                reasons.append(f"{count - len(ranks)} of {count} ranks{of_run} sent nothing")
        return reasons

    def fact(self, name: str) -> float | None:
        """A number above 0 that the job reported and may be true; None if it reported none."""
        value: Any = self.facts.get(name)
        return value if type(value) in (int, float) and 0 < value <= MAX_AMOUNT else None

    def steps(self, phase: str) -> StepEnergy | None:
        """A step of a phase on an average GPU; None if a GPU does not report its steps.

        Of starts that asked for what the last one did: one that only measured is no part of it.
        Starts and GPUs count by their steps: some came late, or had few.
        """
        by_run: dict[str, list[StepEnergy]] = {}
        for (_, run, its_phase, _), bill in self.phases.items():
            if its_phase == phase and run not in self.other_runs:
                if (step := bill.step) is None:
                    return None
                by_run.setdefault(run, []).append(step)
        known = [step for own in by_run.values() for step in own]
        if not known:
            return None
        count = sum(step.iterations for step in known)
        errors_j = [
            step.iterations * step.metering_uncertainty_j
            for step in known
            if step.metering_uncertainty_j is not None
        ]
        ran = {run: max(step.iterations for step in own) for run, own in by_run.items()}
        # GPUs of a start step together: their times scatter together, too.
        errors_s = []
        for run, own in by_run.items():
            known_s = [s.time_uncertainty_s for s in own if s.time_uncertainty_s is not None]
            errors_s += [ran[run] * max(known_s)] if known_s else []
        total = sum(ran.values())
        return StepEnergy(
            total,
            math.fsum(step.iterations * step.time_s for step in known) / count,
            math.hypot(*sorted(errors_s)) / total if errors_s else None,
            math.fsum(step.iterations * (step.energy_j or 0.0) for step in known) / count,
            math.hypot(*sorted(errors_j)) / count if len(errors_j) == len(known) else None,
        )

    def compared(self) -> tuple[StepEnergy, StepEnergy] | None:
        """A steady step, and one as baselines expect it, of steps for which one was in force.

        None without such steps, if a GPU does not report its steps, or the job only measures.
        """
        if self.steps(Phase.STEADY.value) is None or self.facts.get("level") == "observe":
            return None
        sums = [
            phase.compared.sums
            for (_, run, name, _), phase in self.phases.items()
            if name == Phase.STEADY and run not in self.other_runs
        ]
        return mean_steps(np.array([math.fsum(each) for each in zip(*sums, strict=True)]))

    def comparison(self) -> Comparison | None:
        """Steady steps against the baselines that were in force; None if none is known."""
        means = self.compared()
        return compare(*means) if means else None

    def told(self, comparison: Comparison) -> str:
        """Put a comparison of its steady steps into words."""
        steady = [one.window for key, one in self.phases.items() if key[2] == Phase.STEADY]
        clocks_kept = all(window.clock_backend in KEEP_CLOCKS for window in steady)
        gpus = len({window.member for window in steady})
        tokens = self.facts.get("tokens_per_iteration") if self._one_batch else None
        return comparison.told(gpus, tokens, clocks_kept=clocks_kept)

    def per_unit(self) -> Mapping[str, float]:
        """J per iteration, token and sample of training; those that are known.

        What an iteration has is known where all batches have one size, and of one run only. None
        is known if lines cannot be read or are missing, or a run began twice: as well as a start of
        the same job, that may be another job.
        """
        iterations = self.num_iterations
        if not iterations or self.unreadable or self.silent() or self._began_twice():
            return {}
        energy_j = self.total().energy_j
        units: dict[str, float | None] = {"iteration": 1}
        one_batch = self._one_batch and len(self.iterations) == 1
        if one_batch and not any(split_phase(phase)[1] for _, _, phase, _ in self.phases):
            units["token"] = self.fact("tokens_per_iteration")
            units["sample"] = self.fact("samples_per_iteration")
        return {name: energy_j / iterations / count for name, count in units.items() if count}

    def _began_twice(self) -> bool:
        """Say whether the lowest iteration of a run is in two starts, or twice in one."""
        lowest: dict[str, int] = {}
        for (_, run, _, _), phase in self.phases.items():
            if phase.first is not None:
                job = name_of_run(run)
                lowest[job] = min(phase.first, lowest.get(job, phase.first))
        starts: set[tuple[str, str]] = set()
        times: Counter[tuple[Hashable, ...]] = Counter()
        for (gpu, run, name, _), phase in self.phases.items():
            job = name_of_run(run)
            if phase.first is not None and phase.first == lowest[job]:
                starts.add((job, run))
                times[job, gpu, name] += phase.begun  # its stage may be on another GPU by now
        return len(starts) > len(lowest) or max(times.values(), default=0) > 1


def _place(window: EnergyWindow) -> tuple[Any, ...]:
    """Key to sort phases of GPUs by."""
    numbers = (-1 if number is None else number for number in (window.rank, window.stage))
    name, batch = split_phase(window.phase)
    phase = PHASES.index(name) if name in PHASES else len(PHASES)
    return window.run, *numbers, *window.gpu_key, phase, name, batch


def bill_of(lines: Iterable[EnergyWindow | EnergyNote]) -> Bill:
    """Add lines up."""
    bill = Bill()
    for line in lines:
        bill.add(line)
    return bill
