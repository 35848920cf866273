"""The figures of a report: steps of each phase, the bill, bubbles, what each level would save.

Enter at `report_facts`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from envpipe_megatron.formats.account import Tariff, account_lines
from envpipe_megatron.formats.bill import Bill, num_gpus
from envpipe_megatron.formats.energy import FRAMEWORK, OUTSIDE_STEPS, Phase
from envpipe_megatron.formats.steps import Comparison, StepEnergy
from envpipe_megatron.report.bubbles import Bubbles, Predicted, find_bubbles, predict
from envpipe_megatron.report.run_folder import RunFolder


@dataclass(frozen=True)
class StepFacts:
    """An average step over all GPUs of the job; `mean` is on an average one."""

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
        bill: what they are of.
        notes: what a reader of the figures must know.
        bubbles: None if no whole iteration at full clock was recorded; then nothing is `predicted`.
        changed_nothing: whether the run only measured, so that nothing was saved.
    """

    phases: Mapping[str, StepFacts] = field(default_factory=dict)
    baseline: StepFacts | None = None
    compared: Comparison | None = None
    account: tuple[str, ...] = ()
    bill: Bill = field(default_factory=Bill)
    notes: tuple[str, ...] = ()
    bubbles: Bubbles | None = None
    predicted: Predicted = field(default_factory=Predicted)
    changed_nothing: bool = False

    @property
    def steady(self) -> StepFacts | None:
        """A step of the steady phase; None if there is none."""
        return self.phases.get(Phase.STEADY)


def report_facts(folder: RunFolder, tariff: Tariff) -> ReportFacts:
    """Add up what a run's folder tells, and predict what its bubbles are worth.

    A job is compared as in its bill.
    """
    bill = Bill(folder.energy.lines)
    if all(window.run in bill.other_runs for window in folder.energy.windows):
        bill.other_runs = frozenset()  # starts that have one name
    notes = [f"The bill is incomplete: {reason}" for reason in bill.missing()]
    if left_out := bill.left_out:
        named = ", ".join(sorted(left_out))
        why = "Asked for something else, or had another number of GPUs"
        notes.append(f"{why}, so these figures leave them out: starts {named}.")
    known = {
        phase: StepFacts(num_gpus(bill.of_phase(phase)), step)
        for phase in dict.fromkeys(phase for _, run, phase, _ in bill.phases if run not in left_out)
        if phase not in (*OUTSIDE_STEPS, FRAMEWORK) and (step := bill.steps(phase)) is not None
    }
    baseline = None
    if Phase.STEADY in known and (means := bill.compared()):
        in_force = (own.compared.baseline for own in bill.of_phase(Phase.STEADY))
        iterations = next(each.iterations for each in in_force if each.time_s)
        baseline = replace(known[Phase.STEADY], mean=replace(means[1], iterations=iterations))
    tokens = (folder.summary or {}).get("tokens_per_iteration")
    bill.facts = {"tokens_per_iteration": tokens, **bill.facts}
    comparisons = bill.comparisons()
    recorded, profile = folder.recorded, folder.profile
    top_mhz = None if profile is None else max(profile.clocks_mhz(0))
    bubbles = find_bubbles(recorded, folder.num_stages, top_mhz)
    return ReportFacts(
        phases=known,
        baseline=baseline,
        compared=comparisons.get(""),
        account=tuple(account_lines(bill, tariff, comparisons)) if folder.energy.windows else (),
        bill=bill,
        notes=tuple(notes),
        bubbles=bubbles,
        predicted=predict(bubbles, profile, recorded[0].labels.gpu) if bubbles else Predicted(),
        changed_nothing=folder.changed_nothing,
    )
