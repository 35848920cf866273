"""Reads the files of a run's folder, and names those that are missing."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from envpipe_megatron.core.fields import AMOUNT, TEXT, many, read_json
from envpipe_megatron.core.plan import Plan, read_plan
from envpipe_megatron.core.profile import Profile, read_profile
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.files import read_lines
from envpipe_megatron.formats.bill import SUMMARY_FORMAT
from envpipe_megatron.formats.energy import (
    ENDED,
    INDEX,
    EnergyLogs,
    EnergyNote,
    EnergyWindow,
    name_of_run,
    read_energy_logs,
)
from envpipe_megatron.formats.job_file import JOB_FORMAT
from envpipe_megatron.formats.timeline import (
    GpuLabels,
    RankIteration,
    TimelineLogs,
    read_timelines,
)
from envpipe_megatron.report.pipelines import on_one_axis

T = TypeVar("T")

#: Torn lines that are named; the others are counted.
_NAMED_LINES = 3
#: Fields of each stage in a summary's `memory`.
_PEAKS = ("predicted_peak_bytes", "measured_peak_bytes")


@dataclass(frozen=True)
class RunFolder:
    """A run's folder, as far as it can be read.

    Args:
        timelines: recorded iterations and observed clocks, on one axis of time; empty if there are
            none.
        energy: on the same axis; empty if there is none.
        plan: None without one, or without the profile that prices it.
        clocks: how each rank's clock was controlled, as `clocks.jsonl` has it.
        summary: of the job, as `summary.json` has it.
        missing: what is not there or cannot be read, and what the report misses for it.
    """

    path: Path
    timelines: TimelineLogs
    energy: EnergyLogs
    profile: Profile | None
    plan: Plan | None
    clocks: tuple[dict[str, Any], ...]
    summary: dict[str, Any] | None
    missing: tuple[str, ...]

    @property
    def recorded(self) -> tuple[RankIteration, ...]:
        """Recorded iterations of starts in which each rank was the stage that it is in the last.

        With another number of replicas, ranks are other stages.
        """
        stages: dict[str, dict[int, int]] = {}
        for read in self.timelines.iterations:
            stages.setdefault(read.labels.run, {})[read.labels.rank] = read.labels.stage
        last = stages[max(stages)] if stages else {}
        alike = {run for run, own in stages.items() if {**own, **last} == {**last, **own}}
        return tuple(read for read in self.timelines.iterations if read.labels.run in alike)

    @property
    def _labels(self) -> list[GpuLabels | EnergyWindow]:
        return [*(read.labels for read in self.timelines.iterations), *self.energy.windows]

    @property
    def emulated(self) -> bool:
        """True if a rank's GPU is emulated, by its name."""
        return any(labels.gpu.endswith("(emulated)") for labels in self._labels)

    @property
    def dry_run(self) -> bool:
        """True if a rank only logged the clocks that it would have set."""
        return any(labels.clock_backend == "dry_run" for labels in self._labels)

    @property
    def changed_nothing(self) -> bool:
        """True if the job says so; if it was killed, if each rank ran one order at one clock."""
        summary, last = self.summary or {}, self.last_start
        said = summary.get("only_measures")
        # An earlier start's says nothing of one that was killed, or runs.
        if said is not None and summary.get("started", last) == last:
            return said is True
        reads = self.timelines.iterations
        # Batches of one size have as many forwards, though backwards may be in two parts.
        orders = {(read.labels.rank, read.order.count("F"), read.order) for read in reads}
        clocks = {
            (read.labels.rank, mhz)
            for read in reads
            if read.frequency_mhz is not None
            for mhz in read.frequency_mhz.tolist()
        }
        one_order = len({own[:2] for own in orders}) == len(orders)
        return bool(orders) and one_order and len(dict(clocks)) == len(clocks)

    @property
    def last_start(self) -> str:
        """When the last start of those that left lines began; empty if no line says."""
        runs = [labels.run for labels in self._labels]
        return max((run.removeprefix(name_of_run(run)).strip() for run in runs), default="")

    @property
    def num_stages(self) -> int:
        """Number of stages of the pipeline: the most in any file; 0 if none says."""
        seen = [read.labels.stage for read in self.timelines.iterations]
        seen += [window.stage for window in self.energy.windows if window.stage is not None]
        return max(
            1 + max(seen, default=-1),
            self.profile.num_stages if self.profile else 0,
            self.plan.schedule.num_stages if self.plan else 0,
        )


def read_run_folder(path: Path) -> RunFolder:
    """Read what a run left; EnvPipeError if there is nothing of a run, or no such folder."""
    missing: list[str] = []

    def logs(name: str) -> list[Path]:
        found = sorted(path.glob(f"{name}*.jsonl"))
        missing.extend(f"{file.name} is no file" for file in found if not file.is_file())
        return [file for file in found if file.is_file()]

    timelines = read_timelines(logs("timeline"))
    if not timelines.iterations:
        missing.append("timeline.jsonl: no measured timelines, and no units in the trace")
    missing += _torn(timelines.unreadable)
    energy = read_energy_logs(logs("energy"))
    for file in energy.foreign:
        missing.append(f"{file.name}: no line of it can be read, and its energies are missing")
    if not energy.windows:
        noted = ", only what agents noted" if energy.lines else ""
        missing.append(f"energy.jsonl: no energies{noted}")
    missing += _torn(energy.unreadable)
    lacking = "no energy valley, and no plan is priced"
    profile = _read(path / "profile.csv", lacking, read_profile, missing)
    plan, file = None, path / "plan.json"
    if profile is not None:
        lacking = "no planned order and clocks"
        plan = _read(file, lacking, partial(read_plan, profile=profile), missing)
    else:
        missing.append(f"{file.name} is not there, or cannot be used without its profile")
    clocks, unreadable = read_lines(logs("clocks"), _clock_summary)
    missing += _torn(unreadable)
    if not clocks:
        missing.append("clocks.jsonl: whether clocks followed is not known")
    notes = (line for line in energy.lines if isinstance(line, EnergyNote))
    lacking = "the job did not end in order"
    if any(note.note == ENDED and note.fields.get("exit_code") == 0 for note in notes):
        lacking = "the job wrote to another folder (--envpipe-output), or to none"
    summary = _read(path / "summary.json", lacking, _read_summary, missing)
    starts = _read(path / "job.json", "", _read_starts, missing) or ()
    folder = RunFolder(path, timelines, energy, profile, plan, clocks, summary, ())
    folder, others = _of_present_job(folder, starts)
    if folder.summary is not summary:
        missing.append(f"summary.json is of another job: {lacking}")
    if others:
        missing.append(f"{others} lines of other jobs, which wrote to the same folder")
    seen = {read.labels.stage for read in folder.timelines.iterations}
    if seen and (silent := set(range(folder.num_stages)) - seen):
        named = ", ".join(map(str, sorted(silent)))
        missing.append(
            f"timelines of stages {named}: without them, no iteration of the pipeline is drawn"
        )
    if not folder.timelines.iterations and not folder.energy.windows:
        raise EnvPipeError(
            f"No run has left timeline*.jsonl or energy*.jsonl in {path}",
            remedy="Give the folder that --output, --envpipe-output or the quickstart wrote; "
            "envpipe simulate draws a profile and a plan.",
        )
    return replace(folder, missing=tuple(missing))


def _torn(lines: Sequence[str]) -> list[str]:
    if not lines:
        return []
    named = ", ".join(Path(line).name for line in lines[:_NAMED_LINES])
    return [f"{len(lines)} torn or foreign lines were passed over: {named}"]


def _read(file: Path, lacking: str, read: Callable[[Path], T], missing: list[str]) -> T | None:
    """Read a file; without it, `lacking` says what the report misses, if anything."""
    if not file.exists():
        if lacking:
            missing.append(f"{file.name}: {lacking}")
        return None
    try:
        return read(file)
    except EnvPipeError as error:
        missing.append(f"{file.name} cannot be used: {error}")
        return None


def _clock_summary(line: bytes) -> dict[str, Any]:
    """Read a line of `clocks.jsonl`; one of `TORN` if it is something else."""
    entry: dict[str, Any] = json.loads(line)
    INDEX(entry.get("rank", 0))
    followed = entry.get("followed") or {}
    for share in ("above_share", "below_share") if followed.get("judged") else ():
        AMOUNT(followed[share])
    for state in followed.get("power_profiles") or ():
        TEXT(state["text"])
    return entry


def _read_starts(file: Path) -> tuple[str, ...]:
    fields = read_json(file, "File")
    fields.check_format(JOB_FORMAT)
    return fields.read("starts", many(TEXT))


def _read_summary(file: Path) -> dict[str, Any]:
    fields = read_json(file, "File")
    fields.check_format(SUMMARY_FORMAT)
    for stage in fields.entries("memory") if fields.data.get("memory") else ():
        for name in _PEAKS:
            if stage.data.get(name) is not None:
                stage.read(name, AMOUNT)
    return fields.data


def _of_present_job(folder: RunFolder, starts: tuple[str, ...]) -> tuple[RunFolder, int]:
    """Leave out earlier jobs' lines and summary, and bring the others' instants to one axis.

    Returns the number of lines that were left out, too. `job.json` has the starts of a job that
    sets clocks, the last one last: it is the present job if no line is of a later start. Lines
    whose run names no start are kept. Where runs have several names, as those of
    several jobs, the last line's are kept.
    """
    timelines, energy = folder.timelines, folder.energy
    runs = [read.labels.run for read in timelines.iterations]
    runs += [window.run for window in folder.energy.windows]
    name = name_of_run(runs[-1]) if runs else ""
    of_job_file = bool(starts) and folder.last_start <= starts[-1]

    def own(run: object) -> bool:
        run = str(run)
        of_start = run.endswith(starts) == of_job_file or name_of_run(run) == run
        return of_start and name_of_run(run) == name

    runs += [read.labels.run for read in timelines.clocks]
    runs += [str(entry.get("run", "")) for entry in folder.clocks]
    timelines = replace(
        timelines,
        iterations=tuple(read for read in timelines.iterations if own(read.labels.run)),
        clocks=tuple(read for read in timelines.clocks if own(read.labels.run)),
    )
    lines = (line for line in energy.lines if isinstance(line, EnergyNote) or own(line.run))
    timelines, of_one_axis = on_one_axis(timelines, lines)
    energy = replace(energy, lines=of_one_axis)
    clocks = tuple(entry for entry in folder.clocks if own(entry.get("run", "")))
    started = (folder.summary or {}).get("started", "")
    summary = folder.summary if own(f"{name} {started}".strip()) else None
    present = replace(folder, timelines=timelines, energy=energy, clocks=clocks, summary=summary)
    return present, sum(not own(run) for run in runs)
