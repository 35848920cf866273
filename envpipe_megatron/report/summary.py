"""A run in words and tables, as Markdown to paste."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from envpipe_megatron.core.profile_rows import MEASURED_SPLIT
from envpipe_megatron.errors import plain
from envpipe_megatron.formats.bill import Bill, num_gpus
from envpipe_megatron.formats.energy import SHARES, Phase
from envpipe_megatron.formats.energy_sums import EnergySums, total_of
from envpipe_megatron.report.bubbles import Bubbles
from envpipe_megatron.report.facts import ReportFacts, StepFacts
from envpipe_megatron.report.run_folder import RunFolder

#: Titles of the sections that tell the most.
RESULT, BUBBLES = "Result", "Bubbles"
LEVELS = "What each level would save: a prediction"
#: A stage that takes this share longer than the mean one makes stages uneven.
_EVEN = 5e-4
#: Letters of a cell that goes over several lines if it has more.
_LONGEST_LINE = 40


@dataclass(frozen=True)
class Section:
    """A part of a report: a table, sentences below it, and stills below these.

    Args:
        stills: the caption of each still, by the name of its files.
    """

    title: str
    header: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    lines: tuple[str, ...] = ()
    stills: Mapping[str, str] = field(default_factory=dict)

    @property
    def wordy(self) -> tuple[bool, ...]:
        """For each column: does it hold sentences, which go over several lines?"""
        return tuple(
            max(map(len, column)) > _LONGEST_LINE for column in zip(*self.rows, strict=True)
        )


def sections_of(
    folder: RunFolder, facts: ReportFacts, trace: Sequence[str], stills: Mapping[str, str]
) -> list[Section]:
    """Return all of a report: `trace` says what is in it, `stills` have captions by file."""
    return [
        comparison_section(facts),
        *_bubbles(facts),
        Section("Pictures", stills=stills),
        _stages(facts.bill),
        _clocks(folder),
        _memory(folder),
        Section("Trace", lines=tuple(trace)),
        Section("Notes", lines=tuple(_notes(folder, facts))),
        Section("Not in this report", lines=folder.missing),
    ]


def comparison_section(facts: ReportFacts) -> Section:
    """Show a step of baseline and phases; where nothing was changed, nothing is saved."""
    header = ("step of", "GPUs", "iterations", "time (s)", "energy of all GPUs (J)", "W a GPU")
    named = list(facts.phases.items())
    if facts.baseline is not None:
        named.insert(0, ("baseline, compared with", facts.baseline))
    if not named:
        return Section(RESULT)
    rows = (
        (
            name, str(step.num_gpus), f"{step.mean.iterations:.0f}", f"{step.mean.time_s:.4f}",
            _energy(step), "not known" if (w := step.mean.power_w) is None else f"{w:.1f}",
        )
        for name, step in named
    )  # fmt: skip
    lines = facts.account
    if len(lines) < 2:  # the last is of all that was taken
        said = "the job's log says why steady steps had no baseline."
        if facts.steady is None:
            said = "no steps of the steady phase were metered."
        lines = f"Nothing to compare: {said}", *lines
    if facts.changed_nothing:
        said = "Neither clocks nor order were changed: what differs here is chance."
        lines = (*((said,) if len(named) > 1 else ()), *facts.account[-1:])
    return Section(RESULT, header, tuple(rows), lines)


def _bubbles(facts: ReportFacts) -> tuple[Section, Section]:
    """Show where pipelines wait, and what that is worth."""
    found, predicted = facts.bubbles, facts.predicted
    if found is None:
        return Section(BUBBLES), Section(LEVELS)
    waiting_w = predicted.waiting_power_w
    header = (
        "rank", "pipeline", "stage", "units (s)", "bubbles (s)", "bubbles (%)",
        "bubbles (J)", "on the critical path (%)",
    )  # fmt: skip
    times_s = zip(found.units_s, found.bubbles_s, found.critical_s, strict=True)
    rows = tuple(
        (
            str(gpu.rank), str(gpu.pipeline), str(gpu.stage), f"{units_s:.4f}", f"{bubbles_s:.4f}",
            f"{100 * bubbles_s / found.pipeline_s:.1f}",
            "" if waiting_w is None else f"{waiting_w[gpu.stage] * bubbles_s:.1f}",
            f"{100 * critical_s / found.pipeline_s:.1f}",
        )
        for gpu, (units_s, bubbles_s, critical_s) in zip(found.gpus, times_s, strict=True)
    )  # fmt: skip
    levels = tuple(
        (level, f"{saving_percent:z.1f}", f"{slowdown_percent:z.2f}")
        for level, (saving_percent, slowdown_percent) in predicted.levels.items()
    )
    lines = (
        *(f"Assumed: {one}." for one in predicted.assumed),
        *(f"Not predicted: {one}." for one in predicted.lacking),
    )
    return (
        Section(BUBBLES, header, rows, tuple(_bubble_lines(found, waiting_w))),
        Section(LEVELS, ("level", "energy saved (%)", "slower (%)"), levels, lines),
    )


def _bubble_lines(found: Bubbles, waiting_w: tuple[float, ...] | None) -> Iterator[str]:
    yield (
        f"{100 * found.share:.1f} % of the GPUs' time between a pipeline's first unit and its last "
        f"({found.pipeline_s:.4f} s) are bubbles: means of {found.iterations} iterations at full "
        "clock."
    )
    if waiting_w is not None:
        joules = np.array(waiting_w)[[gpu.stage for gpu in found.gpus]] @ found.bubbles_s
        yield f"In them the GPUs take {joules:.1f} J an iteration, at the power of waiting."
    stage, beyond = found.slowest_stage
    sooner = 1 - found.even_s / found.pipeline_s
    if beyond < _EVEN:
        yield "All stages take equally long: no other split of the layers would be faster."
    else:
        yield (
            f"Stage {stage} is the slowest, {100 * beyond:.1f} % beyond the mean stage; with even "
            f"stages the same order would take {100 * sooner:.1f} % less time."
        )
    for gpu, share in found.stragglers:
        yield (
            f"Rank {gpu.rank} (stage {gpu.stage}, pipeline {gpu.pipeline}, node {gpu.node}) is "
            f"{100 * share:.1f} % slower than others of its stage."
        )


def _stages(bill: Bill | None) -> Section:
    """Show a step of the warm-up and a steady one, on the mean GPU of each stage."""
    header = ("", "stage", "GPUs", "energy (J)", "units (s)", "receives (s)", "rest (s)")
    rows = []
    for phase in (Phase.WARMUP, Phase.STEADY):
        stages = defaultdict[int, list[EnergySums]](list)
        for own in bill.of_phase(phase) if bill else ():
            if own.last and own.last.stage is not None and own.steps:
                stages[own.last.stage].append(own)
        for stage, sums in sorted(stages.items()):
            total = total_of(sums)
            shares_s = [f"{share_s / total.steps:.4f}" for share_s in total.known_shares_s or ()]
            energy_j = f"{total.energy_j / total.steps:.1f}"
            times = shares_s or [""] * len(SHARES)
            rows.append((phase.value, str(stage), str(num_gpus(sums)), energy_j, *times))
    return Section("Stages: an iteration on one GPU", header, tuple(rows))


def _clocks(folder: RunFolder) -> Section:
    """Show how each rank's clock was controlled, and whether it followed."""
    header = ("rank", "stage", "back end", "changes", "samples", "above (%)", "below (%)", "error")
    rows, warnings, powers = [], [], defaultdict[str, list[str]](list)
    several = len({entry.get("run") for entry in folder.clocks}) > 1
    for entry in sorted(folder.clocks, key=lambda e: (str(e.get("run", "")), e.get("rank") or 0)):
        followed = entry.get("followed") or {}
        shares = (
            f"{100 * followed[name]:.1f}" if followed.get("judged") else ""
            for name in ("above_share", "below_share")
        )
        rank = f"{entry.get('run', '') if several else ''} {entry.get('rank', '')}".strip()
        rows.append(
            (
                rank, *(str(entry.get(name, "")) for name in ("stage", "backend", "changes")),
                str(followed.get("judged", "")), *shares,
                str(entry.get("error") or ""),
            )
        )  # fmt: skip
        if followed.get("warning"):
            warnings.append(str(followed["warning"]))
        seen = dict.fromkeys(str(state["text"]) for state in followed.get("power_profiles") or ())
        powers[", then ".join(seen)].append(rank)
    powers.pop("", None)
    lines = [*warnings, *(f"Rank {', '.join(ranks)}: {text}." for text, ranks in powers.items())]
    return Section("Clocks: whether they followed", header, tuple(rows), tuple(lines))


def _memory(folder: RunFolder) -> Section:
    """Show peaks of memory: predicted from the warm-up, and measured."""
    peaks_bytes = (
        [own.get(f"{which}_peak_bytes") for which in ("predicted", "measured")]
        for own in (folder.summary or {}).get("memory") or ()
    )
    rows = tuple(
        (str(stage), *(f"{peak / 2**30:.2f}" if peak else "" for peak in peaks))
        for stage, peaks in enumerate(peaks_bytes)
    )
    title = "Memory: the peak of what was allocated"
    return Section(title, ("stage", "predicted (GiB)", "measured (GiB)"), rows)


def marks_of(folder: RunFolder) -> Iterator[str]:
    """Yield warnings that nobody must overlook."""
    if folder.emulated:
        yield (
            "These joules are emulated: no GPU was used. Times are those of a model, in which a "
            f"backward in two parts takes {100 * MEASURED_SPLIT.overhead:g} % more, as on an H200."
        )
    if folder.dry_run:
        yield "This was a dry run: the clocks shown were written down, and none was set."


def _notes(folder: RunFolder, facts: ReportFacts) -> Iterator[str]:
    yield from marks_of(folder)
    yield from facts.notes
    ranks = (folder.summary or {}).get("ranks")
    entries = ranks if isinstance(ranks, list) else []
    notes = (entry.get("notes") for entry in entries if isinstance(entry, Mapping))
    yield from dict.fromkeys(str(note) for of in notes if isinstance(of, list) for note in of)
    if folder.plan is not None:
        planned = folder.plan.schedule
        yield (
            f"Plan: {folder.plan.policy} on {planned.name}, extra forwards "
            f"{plain(planned.extra_forwards)}; peak in flight "
            f"{', '.join(f'{peak:g}' for peak in planned.microbatches_in_flight)}."
        )


def _energy(step: StepFacts) -> str:
    if step.energy_j is None:
        return "not known"
    uncertainty_j = step.mean.energy_uncertainty_j
    if uncertainty_j is None:
        return f"{step.energy_j:.1f}"
    return f"{step.energy_j:.1f} +- {1.96 * step.num_gpus * uncertainty_j:.1f}"
