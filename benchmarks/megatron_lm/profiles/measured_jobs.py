"""What a measuring job left: its profile at the clock there was, and what its iterations took."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from envpipe_megatron.core.kinds import WHOLE
from envpipe_megatron.core.profile import Profile, make_profile
from envpipe_megatron.core.profile_rows import ProfileRow
from envpipe_megatron.formats.energy import EnergyWindow, read_energy_logs
from envpipe_megatron.formats.timeline import RankIteration, read_timelines


def at_its_clock(profile: Profile, *, every_row: bool) -> Profile:
    """The profile at its highest clock alone; with `every_row`, made of all rows.

    A dry run asks for clocks and changes none, so each row is one more measurement at the clock
    there is: times and the energy of a pair are their means, and the pair's energy is split as if
    both kinds drew the same power.
    """
    rows = []
    for stage, kinds in enumerate(profile.rows):
        taken = {kind: kinds[kind] if every_row else kinds[kind][:1] for kind in WHOLE}
        time_s = {kind: float(np.mean([r.time_s for r in taken[kind]])) for kind in WHOLE}
        pairs = list(zip(*taken.values(), strict=True))
        pairs_j = [forward.energy_j + backward.energy_j for forward, backward in pairs]
        metering_j = [row.energy_uncertainty_j or 0.0 for pair in pairs for row in pair]
        error_j = math.hypot(_scatter(pairs_j), math.hypot(*metering_j) / len(pairs))
        for kind in WHOLE:
            share = time_s[kind] / sum(time_s.values())
            row = ProfileRow(
                kinds[kind][0].frequency_mhz,
                time_s[kind],
                float(np.mean(pairs_j)) * share,
                error_j * share,
            )
            rows.append((stage, kind, row))
    sidecar = replace(profile.sidecar, frequency_change_s=None, frequency_change_j=None)
    return make_profile(rows, source="measured at one clock", sidecar=sidecar)


def _scatter(values: Sequence[float]) -> float:
    """Standard uncertainty of a mean, by how the values scatter; 0 for a single one."""
    return float(np.std(values, ddof=1) / len(values) ** 0.5) if len(values) > 1 else 0.0


def runs_of(folder: Path, num_microbatches: int) -> list[dict[str, Any]]:
    """What a job took: its warm-up in Megatron's order, and its steady phase in EnvPipe's.

    Times and energies are medians over iterations: some are held up by what happens once.
    """
    summary = json.loads((folder / "summary.json").read_text())
    windows = read_energy_logs(sorted(folder.glob("energy*.jsonl"))).windows
    recorded = read_timelines(sorted(folder.glob("timeline*.jsonl"))).iterations
    runs = []
    for phase, order in (("warm-up", "1f1b"), ("steady", "envpipe")):
        gpus = [rank["gpu"]["phases"][phase] for rank in summary["ranks"]]
        memory = summary["memory"] or [{}] * len(gpus)
        steps = [one for one in recorded if one.phase == phase]
        known = "baseline_in_flight", "baseline_peak_bytes"
        if phase == "steady":
            known = "in_flight", "measured_peak_bytes"
        runs.append(
            {
                "order": order,
                "num_microbatches": num_microbatches,
                "iterations": gpus[0]["iterations"],
                "iteration_time_s": _median_step_s(steps),
                "mean_iteration_time_s": max(gpu["time_s"] for gpu in gpus),
                "energy_j": _median_energy_j([one for one in windows if one.phase == phase]),
                "mean_energy_j": sum(gpu["energy_j"] for gpu in gpus),
                "in_flight": [stage.get(known[0]) for stage in memory],
                "peak_bytes": [stage.get(known[1]) for stage in memory],
                "timeline": _median_timeline(steps),
            }
        )
    return runs


def _median_step_s(iterations: Sequence[RankIteration]) -> float:
    """From the begin of an iteration to the next one's, on the first stage."""
    begun_s = {one.iteration: one.begin_s for one in iterations if one.labels.stage == 0}
    steps_s = [begun_s[i + 1] - begun_s[i] for i in begun_s if i + 1 in begun_s]
    return float(np.median(steps_s))


def _median_energy_j(windows: Sequence[EnergyWindow]) -> float:
    by_rank: dict[int | None, list[float]] = {}
    for one in windows:
        steps = 1 + (one.last_iteration or 0) - (one.first_iteration or 0)
        by_rank.setdefault(one.rank, []).append(one.energy_j / steps)
    return sum(float(np.median(energies_j)) for energies_j in by_rank.values())


def _median_timeline(iterations: Sequence[RankIteration]) -> list[dict[str, Any]]:
    """For each stage, its units with median starts and ends after the iteration's first unit.

    The first iteration of a phase is left out: what is used for the first time takes longer.
    """
    by_number: dict[int, list[RankIteration]] = {}
    for one in iterations:
        by_number.setdefault(one.iteration, []).append(one)
    whole = [
        sorted(ranks, key=lambda one: one.labels.stage)
        for number, ranks in sorted(by_number.items())[1:]
        if len(ranks) == len(by_number[min(by_number)])
    ]
    starts, ends = [], []
    for ranks in whole:
        first_s = min(one.begin_s + 1e-6 * one.start_us[0] for one in ranks)
        starts.append([one.begin_s - first_s + 1e-6 * one.start_us for one in ranks])
        ends.append([one.begin_s - first_s + 1e-6 * one.end_us for one in ranks])
    start_s, end_s = np.median(starts, axis=0), np.median(ends, axis=0)
    return [
        {
            "units": one.order,
            "start_s": np.round(start_s[stage], 6).tolist(),
            "end_s": np.round(end_s[stage], 6).tolist(),
        }
        for stage, one in enumerate(whole[0])
    ]


def as_lines(measured: Mapping[str, Any]) -> str:
    """JSON with a line for each field and run."""
    runs = ",\n".join(f"  {json.dumps(run)}" for run in measured["runs"])
    rest = [
        f" {json.dumps(k)}: {json.dumps(value)}" for k, value in measured.items() if k != "runs"
    ]
    return "{\n" + ",\n".join([*rest, f' "runs": [\n{runs}\n ]']) + "\n}\n"
