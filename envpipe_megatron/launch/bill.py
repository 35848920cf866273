"""The energy bill of a job: exact sums of the lines of its nodes' energy logs.

Lines may come from files or, as they are written, from the nodes' agents: the sums are the same,
to the last bit and in whatever order, because they are added up as fractions. What is kept grows
with the number of GPUs and phases, not with that of lines.
"""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, TypeVar

from envpipe_megatron.formats.energy import (
    BEGUN,
    BETWEEN,
    ENDED,
    JOB,
    PHASES,
    PLAN,
    SHARES,
    EnergyNote,
    EnergyWindow,
    Phase,
)
from envpipe_megatron.runtime.energy.intervals import (
    Comparison,
    StepEnergy,
    compare,
    standard_error,
)

Key = TypeVar("Key", bound=Hashable)

JOULES_PER_KWH = 3.6e6
#: Phases whose time lies between iterations.
OUTSIDE_STEPS = (BETWEEN, PLAN)


@dataclass
class EnergyTotal:
    """A sum of windows.

    Args:
        windows: how many.
        gpus: which, by `EnergyWindow.gpu_key`.
        exact_j: J.
        exact_variance_j2: of J, as if the ends of all windows were read independently: more than
            the truth where windows meet, whose common end cancels.
        exact_duration_s: GPU-seconds.
        exact_shares_s: GPU-seconds of `SHARES`.
        uncertain: windows whose uncertainty is not known.
        unshared: windows whose shares are not known.
    """

    windows: int = 0
    gpus: set[tuple[str, str]] = field(default_factory=set)
    exact_j: Fraction = Fraction()
    exact_variance_j2: Fraction = Fraction()
    exact_duration_s: Fraction = Fraction()
    exact_shares_s: tuple[Fraction, ...] = (Fraction(),) * len(SHARES)
    uncertain: int = 0
    unshared: int = 0

    def add(self, window: EnergyWindow) -> None:
        """Add one window."""
        self.windows += 1
        self.gpus.add(window.gpu_key)
        self.exact_j += Fraction(window.energy_j)
        self.exact_duration_s += Fraction(window.duration_s)
        if window.energy_uncertainty_j is None:
            self.uncertain += 1
        else:
            self.exact_variance_j2 += Fraction(window.energy_uncertainty_j) ** 2
        if window.shares_s is None:
            self.unshared += 1
        else:
            self.exact_shares_s = _added(self.exact_shares_s, map(Fraction, window.shares_s))

    def merge(self, other: EnergyTotal) -> None:
        """Add another sum."""
        self.windows += other.windows
        self.gpus |= other.gpus
        self.exact_j += other.exact_j
        self.exact_variance_j2 += other.exact_variance_j2
        self.exact_duration_s += other.exact_duration_s
        self.exact_shares_s = _added(self.exact_shares_s, other.exact_shares_s)
        self.uncertain += other.uncertain
        self.unshared += other.unshared

    @property
    def num_gpus(self) -> int:
        """How many different GPUs."""
        return len(self.gpus)

    @property
    def energy_j(self) -> float:
        """J."""
        return float(self.exact_j)

    @property
    def energy_uncertainty_j(self) -> float | None:
        """Standard uncertainty, J; None if that of one window is not known."""
        return None if self.uncertain else math.sqrt(self.exact_variance_j2)

    @property
    def duration_s(self) -> float:
        """GPU-seconds."""
        return float(self.exact_duration_s)

    @property
    def shares_s(self) -> tuple[float, ...] | None:
        """GPU-seconds of `SHARES`; None if those of one window are not known."""
        if self.unshared or not self.windows:
            return None
        return tuple(float(share) for share in self.exact_shares_s)

    @property
    def average_power_w(self) -> float:
        """Of one GPU while it was metered."""
        return self.energy_j / self.duration_s if self.exact_duration_s else 0.0


def _added(left: Iterable[Fraction], right: Iterable[Fraction]) -> tuple[Fraction, ...]:
    return tuple(map(operator.add, left, right))


class Ranges:
    """A set of whole numbers, kept as ranges: few, where numbers come more or less in order."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []

    def add(self, first: int, last: int) -> None:
        """Add the numbers from first to last; none where these are the wrong way round."""
        if last < first:
            return
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
    """One phase of one GPU on one stage.

    Args:
        window: the last one, for the names in it.
        total: of all.
        steps: how many steps they hold, those that were repeated after a restart as often as run.
        mean_step_s: mean of the windows' mean step times.
        scatter_s2: sum of squares of their deviations.
    """

    window: EnergyWindow
    total: EnergyTotal = field(default_factory=EnergyTotal)
    steps: int = 0
    mean_step_s: float = 0.0
    scatter_s2: float = 0.0

    def add(self, window: EnergyWindow) -> None:
        """Add one window."""
        self.window = window
        self.total.add(window)
        first, last = window.first_iteration, window.last_iteration
        if window.phase in OUTSIDE_STEPS:
            return
        if first is not None and last is not None and last >= first:
            self.steps += last - first + 1
            step_s = window.duration_s / (last - first + 1)
            deviation_s = step_s - self.mean_step_s  # Welford's
            self.mean_step_s += deviation_s / self.total.windows
            self.scatter_s2 += deviation_s * (step_s - self.mean_step_s)

    @property
    def step(self) -> StepEnergy | None:
        """An average step; None where no line says how many there were."""
        if not self.steps:
            return None
        n = self.total.windows
        uncertainty_j = self.total.energy_uncertainty_j
        return StepEnergy(
            self.steps,
            self.total.duration_s / self.steps,
            standard_error(math.sqrt(self.scatter_s2 / (n - 1)), n) if n > 1 else None,
            self.total.energy_j / self.steps,
            None if uncertainty_j is None else uncertainty_j / self.steps,
        )


@dataclass
class NodeBill:
    """What is known of a node.

    Args:
        agent: whether an agent wrote of it.
        running: whether its agent has begun and not ended: so far, or for ever.
        exit_code: of its launcher, once it has ended.
        lost: how many of its earlier starts have not ended, before another one began.
    """

    agent: bool = False
    running: bool = False
    exit_code: int | None = None
    lost: int = 0


class Bill:
    """The sums of a job; see the module.

    Attributes:
        phases: by GPU, run, phase and stage. A GPU may serve another stage after a restart.
        nodes: by name.
        facts: what the job told of itself.
        iterations: of training; one that was repeated after a restart is there once.
        unreadable: lines that were torn or foreign.
    """

    def __init__(self) -> None:
        self.phases: dict[tuple[tuple[str, str], str, str, int | None], PhaseBill] = {}
        self.nodes: dict[str, NodeBill] = {}
        self.facts: dict[str, Any] = {}
        self.iterations = Ranges()
        self.unreadable = 0

    def add(self, line: EnergyWindow | EnergyNote) -> None:
        """Add one line."""
        node = self.nodes.setdefault(line.node, NodeBill())
        if isinstance(line, EnergyNote):
            node.agent = True
            if line.note == JOB:
                facts = line.fields.get("facts")
                self.facts.update(facts if isinstance(facts, dict) else {})
            elif line.note in (BEGUN, ENDED):
                node.lost += node.running and line.note == BEGUN
                node.running = line.note == BEGUN
                node.exit_code = line.fields.get("exit_code")
            return
        key = line.gpu_key, line.run, line.phase, line.stage
        if key not in self.phases:
            self.phases[key] = PhaseBill(line)
        self.phases[key].add(line)
        if line.phase in OUTSIDE_STEPS:
            return
        if line.first_iteration is not None and line.last_iteration is not None:
            self.iterations.add(line.first_iteration, line.last_iteration)

    def snapshot(self) -> Bill:
        """A bill that stays as this one is now; made in a hundredth of the time of its tables."""
        made = Bill()
        made.phases = {
            key: replace(phase, total=replace(phase.total, gpus=set(phase.total.gpus)))
            for key, phase in self.phases.items()
        }
        made.nodes = {name: replace(node) for name, node in self.nodes.items()}
        made.facts = dict(self.facts)
        made.iterations = copy.copy(self.iterations)
        return made

    def total(self) -> EnergyTotal:
        """The job's."""
        return self.total_by(lambda window: None).get(None, EnergyTotal())

    def total_by(self, key: Callable[[EnergyWindow], Key]) -> dict[Key, EnergyTotal]:
        """Totals of what shares a key of node, GPU, stage, run and phase.

        In the order of runs, ranks and phases, in whatever order their lines turned up.
        """
        totals: dict[Key, EnergyTotal] = {}
        for phase in sorted(self.phases.values(), key=lambda phase: _place(phase.window)):
            totals.setdefault(key(phase.window), EnergyTotal()).merge(phase.total)
        return totals

    def missing(self) -> list[str]:
        """Why the bill is incomplete; nothing where it is complete, or no agent wrote of it."""
        reasons = [
            f"{name} was lost: its energy up to its last line is in the bill"
            for name, node in sorted(self.nodes.items())
            if node.running
        ]
        reasons += [
            f"{name} was lost and started again: its energy between them is not in the bill"
            for name, node in sorted(self.nodes.items())
            if node.lost
        ]
        expected, found = self.fact("num_gpus"), self.total().num_gpus
        if expected is not None and found < expected:
            reasons.append(f"{expected - found} of {expected} GPUs sent nothing")
        return reasons

    def fact(self, name: str) -> float | None:
        """A number above 0 that the job told of itself; None where it told none."""
        value: Any = self.facts.get(name)
        return value if type(value) in (int, float) and 0 < value < math.inf else None

    def steps(self, phase: str) -> StepEnergy | None:
        """A step of a phase on an average GPU; None where a GPU tells none."""
        told = [bill.step for bill in self.phases.values() if bill.window.phase == phase]
        known = [step for step in told if step is not None]
        if not known or len(known) < len(told):
            return None
        count = len(known)
        errors_j = [m for s in known if (m := s.metering_uncertainty_j) is not None]
        errors_s = [s.time_uncertainty_s for s in known if s.time_uncertainty_s is not None]
        return StepEnergy(
            max(step.iterations for step in known),
            math.fsum(step.time_s for step in known) / count,
            # GPUs of a job step together: their times scatter together, too.
            max(errors_s, default=None),
            math.fsum(step.energy_j or 0.0 for step in known) / count,
            math.hypot(*errors_j) / count if len(errors_j) == count else None,
        )

    def comparison(self) -> Comparison | None:
        """Steady steps against the baseline that the job measured; None where one is not known."""
        steady = self.steps(Phase.STEADY.value)
        if steady is None:
            return None
        try:
            return compare(steady, StepEnergy(**self.facts.get("baseline", {})))
        except (TypeError, ZeroDivisionError):  # it is none that this version knows
            return None


def _place(window: EnergyWindow) -> tuple[Any, ...]:
    """By what phases of GPUs are sorted."""
    numbers = (-1 if number is None else number for number in (window.rank, window.stage))
    name = window.phase
    phase = PHASES.index(name) if name in PHASES else len(PHASES)
    return window.run, *numbers, *window.gpu_key, phase, name


def bill_of(lines: Iterable[EnergyWindow | EnergyNote]) -> Bill:
    """Add lines up."""
    bill = Bill()
    for line in lines:
        bill.add(line)
    return bill


def per_unit(bill: Bill) -> Mapping[str, float]:
    """J per iteration, token and sample of training; those that are known."""
    energy_j, iterations = bill.total().energy_j, len(bill.iterations)
    if not iterations:
        return {}
    units = {
        "iteration": 1,
        "token": bill.fact("tokens_per_iteration"),
        "sample": bill.fact("samples_per_iteration"),
    }
    return {name: energy_j / iterations / count for name, count in units.items() if count}
