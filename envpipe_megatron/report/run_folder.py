"""What is there of a run: the files of its folder, and which of them are missing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from envpipe_megatron.core.plan import Plan, read_plan
from envpipe_megatron.core.profile import Profile, read_profile
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.formats.energy import (
    EnergyFileError,
    EnergyLogs,
    EnergyWindow,
    read_energy_logs,
)
from envpipe_megatron.formats.timeline import TimelineLogs, read_timelines
from envpipe_megatron.report.run_lines import RunLines, named_as_in, of_present_job

#: Torn lines that are named; the others are counted.
_NAMED_LINES = 3


@dataclass(frozen=True)
class RunFolder:
    """A run's folder, as far as it can be read.

    Args:
        timelines: recorded iterations and observed clocks; empty where there are none.
        energy: None without an energy log.
        plan: None without one, or without the profile that prices it.
        clocks: how each rank's clock was controlled, as `clocks.jsonl` has it.
        summary: `summary.json` of a job or quickstart.
        job: `job.json`, which outlives a killed job.
        bill: `bill.json` of the launcher.
        missing: what is not there or cannot be read, and what the report misses for it.
    """

    path: Path
    timelines: TimelineLogs
    energy: EnergyLogs | None
    profile: Profile | None
    plan: Plan | None
    clocks: tuple[dict[str, Any], ...]
    summary: dict[str, Any] | None
    job: dict[str, Any] | None
    bill: dict[str, Any] | None
    missing: tuple[str, ...]

    @property
    def windows(self) -> tuple[EnergyWindow, ...]:
        """What was metered."""
        return () if self.energy is None else self.energy.windows

    @property
    def emulated(self) -> bool:
        """Whether a rank or the summary says that its GPU is emulated."""
        told = (*self.clocks, *([self.summary] if self.summary else []))
        return (
            any(entry.get("emulated") is True for entry in told)
            or any(window.gpu.endswith("(emulated)") for window in self.windows)
            or self._has_back_end("emulated")
        )

    @property
    def dry_run(self) -> bool:
        """Whether a rank only logged the clocks that it would have set."""
        told = any(entry.get("backend") == "dry_run" for entry in self.clocks)
        return told or self._has_back_end("dry_run")

    def _has_back_end(self, name: str) -> bool:
        return any(read.labels.clock_backend == name for read in self.timelines.iterations)

    @property
    def num_stages(self) -> int:
        """Of the pipeline: the most that any file knows of; 0 where none tells."""
        seen = [read.labels.stage for read in self.timelines.iterations]
        seen += [window.stage for window in self.windows if window.stage is not None]
        return max(
            1 + max(seen, default=-1),
            self.profile.num_stages if self.profile else 0,
            self.plan.schedule.num_stages if self.plan else 0,
        )


def read_run_folder(path: Path) -> RunFolder:
    """Read what a run left; EnvPipeError where there is nothing of a run, or no such folder."""
    missing: list[str] = []
    timelines = _timelines(path, missing)
    energy = _energy(path, missing)
    profile = _profile(path, missing)
    plan = _plan(path, profile, missing)
    summary = _object(path / "summary.json", "the job did not end in order", missing)
    job = _object(path / "job.json", "", missing)
    read = RunLines(timelines, energy, _clocks(path, missing))
    lines = of_present_job(read, job or {})
    if others := len(read) - len(lines):
        missing.append(f"{others} lines of other jobs, which wrote to the same folder")
    folder = RunFolder(
        path,
        lines.timelines,
        lines.energy and named_as_in(lines.timelines, lines.energy),
        profile,
        plan,
        lines.clocks,
        summary and _with_step(summary, "baseline", "summary.json", missing),
        job and _with_measured_baseline(job, missing),
        _object(path / "bill.json", "", missing),
        (),
    )
    missing += _untold_stages(folder)
    if not lines.timelines.iterations and not folder.windows:
        raise EnvPipeError(
            f"No run has left timeline*.jsonl or energy*.jsonl in {path}",
            remedy="Give the folder that --output, --envpipe-output or the quickstart wrote; "
            "envpipe simulate draws a profile and a plan alone.",
        )
    return replace(folder, missing=tuple(missing))


def _timelines(path: Path, missing: list[str]) -> TimelineLogs:
    paths = sorted(path.glob("timeline*.jsonl"))
    read = read_timelines(paths)
    if not read.iterations:
        missing.append("timeline.jsonl: no measured timelines, and no units in the trace")
    missing += _torn(read.unreadable)
    return read


def _energy(path: Path, missing: list[str]) -> EnergyLogs | None:
    paths = sorted(path.glob("energy*.jsonl"))
    try:
        read = read_energy_logs(paths)
    except EnergyFileError:
        readable = [file for file in paths if _is_energy_log(file, missing)]
        if not readable:
            missing.append("energy.jsonl: no energies")
            return None
        read = read_energy_logs(readable)
    if not read.windows:
        missing.append("energy.jsonl: no energies, only what agents noted")
    missing += _torn(read.unreadable)
    return read


def _is_energy_log(file: Path, missing: list[str]) -> bool:
    try:
        read_energy_logs([file])
    except EnergyFileError:
        missing.append(f"{file.name}: no line of it can be read, and its energies are missing")
        return False
    return True


def _torn(lines: Sequence[str]) -> list[str]:
    if not lines:
        return []
    named = ", ".join(Path(line).name for line in lines[:_NAMED_LINES])
    return [f"{len(lines)} torn or foreign lines were passed over: {named}"]


def _profile(path: Path, missing: list[str]) -> Profile | None:
    file = path / "profile.csv"
    if not file.exists():
        missing.append("profile.csv: no energy valley, and no plan is priced")
        return None
    try:
        return read_profile(file)
    except EnvPipeError as error:
        missing.append(f"profile.csv cannot be used: {error}")
        return None


def _plan(path: Path, profile: Profile | None, missing: list[str]) -> Plan | None:
    file = path / "plan.json"
    if not file.exists():
        missing.append("plan.json: no planned clocks, and energy is not split into shares")
        return None
    if profile is None:
        missing.append("plan.json cannot be used without its profile")
        return None
    try:
        return read_plan(file, profile)
    except EnvPipeError as error:
        missing.append(f"plan.json cannot be used: {error}")
        return None


def _clocks(path: Path, missing: list[str]) -> tuple[dict[str, Any], ...]:
    found = []
    for file in sorted(path.glob("clocks*.jsonl")):
        for line in file.read_bytes().splitlines():
            try:
                entry = json.loads(line)
            except ValueError:  # torn
                continue
            if isinstance(entry, dict):
                found.append(entry)
    if not found:
        missing.append("clocks.jsonl: whether clocks followed is not known")
    return tuple(found)


def _object(path: Path, lacking: str, missing: list[str]) -> dict[str, Any] | None:
    """A JSON object; without it, `lacking` says what the report misses, if anything."""
    if not path.exists():
        if lacking:
            missing.append(f"{path.name}: {lacking}")
        return None
    try:
        data = json.loads(path.read_bytes())
    except ValueError as error:
        missing.append(f"{path.name} is damaged: {error}")
        return None
    return data if isinstance(data, dict) else None


def _with_step(data: dict[str, Any], name: str, file: str, missing: list[str]) -> dict[str, Any]:
    """A JSON object whose entry of a name is an average step, or None."""
    step = data.get(name)
    if step is None:
        return data
    numbers = (int, float)
    if isinstance(step, dict) and all(
        type(value) in numbers or (value is None and key not in ("iterations", "time_s"))
        for key, value in step.items()
    ):
        return data
    missing.append(f"{file} is damaged: what it says of the baseline is no average step")
    return {**data, name: None}


def _with_measured_baseline(job: dict[str, Any], missing: list[str]) -> dict[str, Any]:
    baseline = job.get("baseline")
    told = baseline if isinstance(baseline, dict) else {"mean": baseline}
    return {**job, "baseline": _with_step(told, "mean", "job.json", missing)}


def _untold_stages(folder: RunFolder) -> list[str]:
    """Which stages recorded no timeline, where others did."""
    seen = {read.labels.stage for read in folder.timelines.iterations}
    lacking = sorted(set(range(folder.num_stages)) - seen)
    if not seen or not lacking:
        return []
    named = ", ".join(map(str, lacking))
    return [f"timelines of stages {named}: without them, no iteration of the pipeline is drawn"]
