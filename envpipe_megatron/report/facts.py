"""The figures of a report: steps of each phase, the bill, bubbles, what each level would save.

Enter at `report_facts`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from envpipe_megatron.formats.account import Tariff, account_lines
from envpipe_megatron.formats.bill import Bill, num_gpus
from envpipe_megatron.formats.energy import FRAMEWORK, OUTSIDE_STEPS, Phase
from envpipe_megatron.formats.steps import Comparison, StepEnergy
from envpipe_megatron.report.bubbles import Bubbles, Predicted, find_bubbles, predict
from envpipe_megatron.report.run_folder import RunFolder

_STEADY = Phase.STEADY.value


@dataclass(frozen=True)
class StepFacts:
    """An average step of a phase, over all GPUs of the job.

    Args:
        name: the phase, or `baseline`.
        mean: the step on an average GPU.
    """

    name: str
    num_gpus: int
    mean: StepEnergy

    @property
    def energy_j(self) -> float | None:
        """On all GPUs; None if it is not known."""
        return None if self.mean.energy_j is None else self.num_gpus * self.mean.energy_j


@dataclass(frozen=True)
class ReportFacts:
    """All figures of a run.

    Args:
        phases: an average step of each phase.
        baseline: what is compared with; None if that is not known.
        compared: the steady phase with the baseline; None if that cannot be said.
        account: what the run took and saved, in words; the last line is of all of it.
        bill: what they are of; None without metered windows.
        notes: what a reader of the figures must know.
        bubbles: None if no whole iteration at full clock was recorded.
        predicted: None without bubbles.
        changed_nothing: whether the run only measured, so that nothing was saved.
    """

    phases: tuple[StepFacts, ...] = ()
    baseline: StepFacts | None = None
    steady: StepFacts | None = None
    compared: Comparison | None = None
    account: tuple[str, ...] = ()
    bill: Bill | None = None
    notes: tuple[str, ...] = ()
    bubbles: Bubbles | None = None
    predicted: Predicted | None = None
    changed_nothing: bool = False


def report_facts(folder: RunFolder, tariff: Tariff) -> ReportFacts:
    """Add up what a run's folder tells, and predict what its bubbles are worth."""
    facts = replace(_metered_facts(folder, tariff), changed_nothing=folder.changed_nothing)
    recorded, profile = folder.recorded, folder.profile
    top_mhz = None if profile is None else max(profile.clocks_mhz(0))
    bubbles = find_bubbles(recorded, folder.num_stages, top_mhz)
    if bubbles is None:
        return facts
    predicted = predict(bubbles, profile, recorded[0].labels.gpu)
    return replace(facts, bubbles=bubbles, predicted=predicted)


def _metered_facts(folder: RunFolder, tariff: Tariff) -> ReportFacts:
    """Return figures of phases, from meters; a job is compared as in its bill."""
    bill = Bill(folder.energy.lines)
    if all(window.run in bill.other_runs for window in folder.energy.windows):
        bill.other_runs = frozenset()  # starts that have one name
    notes = [f"The bill is incomplete: {reason}" for reason in bill.missing()]
    if not folder.energy.windows:
        return ReportFacts(notes=tuple(notes))
    if left_out := bill.left_out:
        named = ", ".join(sorted(left_out))
        why = "Asked for something else, or had another number of GPUs"
        notes.append(f"{why}, so these figures leave them out: starts {named}.")
    phases = dict.fromkeys(phase for _, run, phase, _ in bill.phases if run not in left_out)
    known = {
        phase: StepFacts(phase, num_gpus(bill.of_phase(phase)), step)
        for phase in phases
        if phase not in (*OUTSIDE_STEPS, FRAMEWORK) and (step := bill.steps(phase)) is not None
    }
    steady, baseline = known.get(_STEADY), None
    if steady is not None and (means := bill.compared()):
        in_force = (own.compared.baseline for own in bill.of_phase(_STEADY))
        iterations = next(each.iterations for each in in_force if each.time_s)
        mean = replace(means[1], iterations=iterations)
        baseline = StepFacts("baseline", steady.num_gpus, mean)
    tokens = (folder.summary or {}).get("tokens_per_iteration")
    bill.facts = {"tokens_per_iteration": tokens, **bill.facts}
    comparisons = bill.comparisons()
    return ReportFacts(
        tuple(known.values()),
        baseline,
        steady,
        comparisons.get(""),
        tuple(account_lines(bill, tariff, comparisons)),
        bill,
        tuple(notes),
    )
