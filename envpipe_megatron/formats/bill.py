"""The energy bill of a job, or of one GPU: sums over the lines of energy logs, and steps compared.

Lines may come from files or, as they are written, from the nodes' agents; ranks give the sums of
their own. A GPU's lines come from one file, in its order, and GPUs are added up in a fixed order:
the sums are the same to the last bit either way. What is kept grows with the number of GPUs and
phases, not with that of lines. `account` puts a bill into words.
"""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from envpipe_megatron.formats.energy import (
    BEGUN,
    ENDED,
    JOB,
    MAX_AMOUNT,
    PHASES,
    EnergyNote,
    EnergyWindow,
    Phase,
    name_of_run,
    phase_in_batch,
    split_phase,
)
from envpipe_megatron.formats.energy_sums import EnergySums, total_of
from envpipe_megatron.formats.steps import (
    Comparison,
    StepEnergy,
    compare,
    mean_steps,
    step_sums,
)

#: Of `summary.json`, which has a bill of what a job's ranks metered.
SUMMARY_FORMAT = "envpipe-summary/1"
#: Options by which steps differ: a start with others is not compared with the last one.
_ASKED = ("level", "type", "objective", "scheduling", "reconfigure", "num_gpus")
#: Facts by which an iteration's tokens and samples differ.
_OF_ITERATION = ("tokens_per_iteration", "samples_per_iteration")


@dataclass
class NodeBill:
    """State of a node by its agents' notes; `lost` counts starts that ended without one."""

    agent: bool = False
    running: bool = False
    exit_code: int | None = None
    lost: int = 0


class Bill:
    """The sums of a job, of `lines` and what is added; while it grows, threads take snapshots.

    Attributes:
        phases: by GPU, run, phase and stage. A GPU may serve another stage after a restart.
        facts: what the job said of itself.
        iterations: ranges of those of training, by the name of the run; few, if they come in order.
        unreadable: lines that were torn or foreign.
    """

    def __init__(self, lines: Iterable[EnergyWindow | EnergyNote] = ()) -> None:
        self.phases: dict[tuple[tuple[str, str], str, str, int | None], EnergySums] = {}
        self.nodes: dict[str, NodeBill] = {}
        self.facts: dict[str, Any] = {}
        self.iterations: dict[str, list[tuple[int, int]]] = {}
        self.unreadable = 0
        #: Held while a line is added, and while all are copied.
        self._growing = threading.Lock()
        #: Runs of starts whose options differ from the last one's.
        self.other_runs: frozenset[str] = frozenset()
        #: The node whose note had the last one's facts.
        self._facts_node = ""
        #: Whether all iterations had as many tokens.
        self._one_batch = True
        for line in lines:
            self.add(line)

    def add(self, line: EnergyWindow | EnergyNote) -> None:
        """Add one line."""
        with self._growing:
            self._add(line)

    def _add(self, line: EnergyWindow | EnergyNote) -> None:
        node = self.nodes.setdefault(line.node, NodeBill())
        if isinstance(line, EnergyNote):
            node.agent = True
            if line.note == JOB:
                self._add_facts(line)
            elif line.note in (BEGUN, ENDED):
                node.lost += node.running and line.note == BEGUN
                node.running = line.note == BEGUN
                node.exit_code = line.fields.get("exit_code")
            return
        name = name_of_run(line.run)
        if line.run in self.other_runs and line.node == self._facts_node and line.run != name:
            self.other_runs -= {line.run}  # this start's, of which other nodes' lines came first
        key = line.gpu_key, line.run, line.phase, line.stage
        if key not in self.phases:
            self.phases[key] = EnergySums()
        self.phases[key].add(line)
        if line.steps and line.first_iteration is not None and line.last_iteration is not None:
            known = self.iterations.get(name, [])
            self.iterations[name] = _with_range(known, line.first_iteration, line.last_iteration)

    def add_sums(self, sums: Iterable[EnergySums]) -> None:
        """Add sums of a rank, each of one phase; ranks may share a GPU."""
        for own in sums:
            if (last := own.last) is not None:
                whose = last.node, f"rank {last.rank}"
                self.phases[whose, last.run, last.phase, last.stage] = own

    def _add_facts(self, note: EnergyNote) -> None:
        facts = note.fields.get("facts")
        new = self.facts | (facts if isinstance(facts, dict) else {})
        changed = {name for name in self.facts if new[name] != self.facts[name]}
        if not changed.isdisjoint(_ASKED):
            self.other_runs = frozenset(run for _, run, _, _ in self.phases)
            self._facts_node = note.node
        self._one_batch &= not self.phases or changed.isdisjoint(_OF_ITERATION)
        self.facts = new

    def snapshot(self) -> Bill:
        """Return a bill that stays as this one is now, in a hundredth of the time of its tables."""
        with self._growing:
            made = copy.copy(self)  # what is set anew, and never changed, is shared
            made.phases = {key: copy.copy(sums) for key, sums in self.phases.items()}
            made.nodes = {name: replace(node) for name, node in self.nodes.items()}
            made.iterations = self.iterations.copy()
            return made

    @property
    def num_iterations(self) -> int:
        """Return the iterations of all runs; one that is repeated after a restart counts once.

        Any thread may ask while the bill grows.
        """
        runs = list(self.iterations.values())
        return sum(last - first + 1 for own in runs for first, last in own)

    def windows(self) -> list[EnergyWindow]:
        """Return the last line of each of `phases`, for its names."""
        return [sums.last for sums in self.phases.values() if sums.last]

    @property
    def left_out(self) -> frozenset[str]:
        """Return runs of starts with other options or number of ranks than their job's last one."""
        counts = {window.run: window.num_ranks for window in self.windows() if window.num_ranks}
        last = {name_of_run(run): counts[run] for run in sorted(counts)}
        resized = (run for run, count in counts.items() if count != last[name_of_run(run)])
        return self.other_runs.union(resized)

    def of_phase(self, phase: str) -> list[EnergySums]:
        """Return sums of a phase, of starts that are not left out."""
        left_out = self.left_out
        return [
            sums
            for (_, run, name, _), sums in self.phases.items()
            if name == phase and run not in left_out
        ]

    def total(self) -> EnergySums:
        """Return the total of the job."""
        return total_of(self.phases.values())

    def total_by(self, *names: str) -> dict[tuple[Any, ...], EnergySums]:
        """Return totals by what windows say under names, in the order of runs, ranks and phases."""
        placed = [(sums.last, sums) for sums in self.phases.values() if sums.last]
        groups: dict[tuple[Any, ...], list[EnergySums]] = {}
        for window, sums in sorted(placed, key=lambda each: _place(each[0])):
            key = tuple(getattr(window, name) for name in names)
            groups.setdefault(key, []).append(sums)
        return {key: total_of(own) for key, own in groups.items()}

    def running(self) -> list[str]:
        """Return the nodes that have begun and not ended."""
        return [name for name, node in self.nodes.items() if node.running]

    def missing(self) -> list[str]:
        """Return why the bill is incomplete; empty if it is complete, or no agent wrote of it."""
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
        expected, found = self.fact("num_gpus"), len(self.total().gpus)
        if expected is not None and found < expected:
            reasons.append(f"{expected - found} of {expected} GPUs sent nothing")
        return reasons + self.silent()

    def silent(self) -> list[str]:
        """Return how many ranks of each start have no line, though others' lines count them."""
        reasons = []
        starts: dict[str, dict[int, EnergyWindow]] = {}
        for window in self.windows():
            if window.rank is not None:
                starts.setdefault(window.run, {})[window.rank] = window
        for run, ranks in sorted(starts.items()):
            count = max(window.num_ranks or 0 for window in ranks.values()) or max(ranks) + 1
            if len(ranks) < count:
                of_run = f" of {run}" if run else ""
                reasons.append(f"{count - len(ranks)} of {count} ranks{of_run} sent nothing")
        return reasons

    def fact(self, name: str) -> float | None:
        """Return a number above 0 that the job reported and may be true; else None."""
        value: Any = self.facts.get(name)
        return value if type(value) in (int, float) and 0 < value <= MAX_AMOUNT else None

    @property
    def tokens(self) -> float:
        """Return the tokens of a step of full size; 0 if they are not known."""
        return (self.fact("tokens_per_iteration") or 0) if self._one_batch else 0

    @property
    def has_one_batch(self) -> bool:
        """True if all batches that are known have one size, and as many tokens."""
        other = any(split_phase(phase)[1] for _, _, phase, _ in self.phases)
        return self._one_batch and not other

    def steady(self) -> list[EnergyWindow]:
        """Return the last steady line of each GPU and size of batch, as `of_phase`."""
        phases = dict.fromkeys(phase for _, _, phase, _ in self.phases)
        steady = (phase for phase in phases if split_phase(phase)[0] == Phase.STEADY)
        return [own.last for phase in steady for own in self.of_phase(phase) if own.last]

    def steps(self, phase: str) -> StepEnergy | None:
        """Return a step of a phase on an average GPU; None if a GPU does not report its steps.

        Starts that are left out do not count, such as one that only measured. GPUs and starts count
        by their steps: some came late, or had few.
        """
        sums = self.of_phase(phase)
        if not all(own.steps for own in sums):
            return None
        means = _mean(sums, [step_sums(own.step) for own in sums])
        return means[0] if means else None

    def compared(self, batch: str = "") -> tuple[StepEnergy, StepEnergy] | None:
        """Return a steady step, and one as baselines expect it, of steps that had a baseline.

        None without such steps, if a GPU does not report its steps, or the job only measures.
        `batch` is of another size than the full one.
        """
        sums = self.of_phase(phase_in_batch(Phase.STEADY, batch))
        silent = any(own.windows and not own.steps for own in sums)
        if silent or self.facts.get("level") == "observe":
            return None
        return _mean(sums, [own.compared.sums for own in sums])

    def comparison(self, batch: str = "") -> Comparison | None:
        """Compare steady steps with the baselines that were in force; None if none is known."""
        means = self.compared(batch)
        return compare(*means) if means else None

    def comparisons(self) -> dict[str, Comparison]:
        """Return the known comparisons by size of batch, empty for the full one."""
        batches = sorted({split_phase(window.phase)[1] for window in self.steady()})
        found = {batch: self.comparison(batch) for batch in batches}
        return {batch: each for batch, each in found.items() if each}

    def comparison_facts(self) -> dict[str, Any]:
        """Return `comparisons` as JSON: that of batches of full size, and `other_batches`."""
        facts = {batch: asdict(each) for batch, each in self.comparisons().items()}
        return {"comparison": facts.pop("", None), "other_batches": facts}

    def per_unit(self) -> Mapping[str, float]:
        """Return the known of J per iteration, token and sample of training.

        What an iteration has is known where all batches have one size, and of one run only. None
        is known if lines cannot be read or are missing.
        """
        iterations = self.num_iterations
        if not iterations or self.unreadable or self.silent():
            return {}
        energy_j = self.total().energy_j
        units: dict[str, float | None] = {"iteration": 1}
        if self.has_one_batch and len(self.iterations) == 1:
            units["token"] = self.fact("tokens_per_iteration")
            units["sample"] = self.fact("samples_per_iteration")
        return {name: energy_j / iterations / count for name, count in units.items() if count}


def num_gpus(sums: Iterable[EnergySums]) -> int:
    """Return how many members of the job sums are of: a rank may have had several GPUs."""
    return len({own.last.member for own in sums if own.last})


def _mean(
    sums: Sequence[EnergySums], steps: Sequence[Sequence[float]]
) -> tuple[StepEnergy, StepEnergy] | None:
    """Return `mean_steps` of the job's members, each of which may have taken part in many starts.

    `steps` are `ComparedSteps.sums` of each of the sums.
    """
    members = {
        own.last.member for own, (had, *_) in zip(sums, steps, strict=True) if own.last and had
    }
    if not members:
        return None
    _, *added = (math.fsum(each) for each in zip(*steps, strict=True))
    return mean_steps([len(members), *added])


def _with_range(ranges: list[tuple[int, int]], first: int, last: int) -> list[tuple[int, int]]:
    """Return a set of whole numbers, as ranges, with those from first to last added."""
    kept = []
    for low, high in ranges:
        if high + 1 < first or last + 1 < low:
            kept.append((low, high))
        else:
            first, last = min(first, low), max(last, high)
    return [*kept, (first, last)]


def _place(window: EnergyWindow) -> tuple[Any, ...]:
    """Return a key to sort phases of GPUs by."""
    numbers = (-1 if number is None else number for number in (window.rank, window.stage))
    name, batch = split_phase(window.phase)
    phase = PHASES.index(name) if name in PHASES else len(PHASES)
    return window.run, *numbers, *window.gpu_key, phase, name, batch
