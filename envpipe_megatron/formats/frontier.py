"""Stored frontiers: plans at hand for any time that an iteration may take.

A replica that is slower than the others (a straggler) holds up the gradient reduction of all; until
it recovers, the others lose nothing by being as slow (Chung et al., SOSP'24, section 3.3).

The file is JSON Lines: first a header with the figures of all points, then one plan a line, the
fastest first. The CSV beside it holds the same figures.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from envpipe_megatron.core.evaluation import PlanError
from envpipe_megatron.core.fields import AMOUNT, UNIT_TIME, many, parse_json
from envpipe_megatron.core.plan import Plan, plan_of_fields
from envpipe_megatron.core.profile import Profile
from envpipe_megatron.core.timeline import RELATIVE_TOLERANCE
from envpipe_megatron.files import csv_text, read_text, replace_files

FRONTIER_FORMAT = "envpipe-frontier/1"
_REMEDY = "Give the .jsonl file that envpipe plan --frontier writes beside its CSV."
CSV_COLUMNS = ("iteration_time_s", "energy_j", "energy_lower_bound_j", "mean_power_w")


@dataclass(frozen=True)
class StoredFrontier:
    """A frontier's iteration times, rising, and its plans as text until one is read.

    Args:
        baseline_s: iteration time of the framework's own order at the highest clocks.
    """

    path: Path
    iteration_time_s: tuple[float, ...]
    baseline_s: float
    lines: tuple[str, ...]

    def plan_for(self, iteration_time_s: float, profile: Profile) -> Plan:
        """Return the cheapest plan that takes no longer than a time, or the fastest if none does.

        PlanError: the plan does not fit the profile, or is not one.
        """
        allowed_s = iteration_time_s * (1 + RELATIVE_TOLERANCE)
        index = max(0, bisect_right(self.iteration_time_s, allowed_s) - 1)
        where = Path(f"{self.path}, line {index + 2}")
        return plan_of_fields(parse_json(self.lines[index], where, "Plan", PlanError), profile)


def write_frontier(plans: Sequence[Plan], csv_path: Path) -> Path:
    """Write the CSV of a frontier (plans, the fastest first), and its plans beside it as `.jsonl`.

    Returns the path of the plans.
    """
    figures = [
        (*vars(plan.cost).values(), plan.energy_lower_bound_j, plan.cost.mean_power_w)
        for plan in plans
    ]
    header = {
        "format": FRONTIER_FORMAT,
        **dict(zip(CSV_COLUMNS, zip(*figures, strict=True), strict=True)),
        "baseline": vars(plans[0].baseline.cost),
        "profile_sha256": plans[0].profile.sha256,
    }
    plans_path = csv_path.with_suffix(".jsonl")
    lines = [json.dumps(line) + "\n" for line in (header, *(plan.to_json() for plan in plans))]
    replace_files({csv_path: [csv_text([CSV_COLUMNS, *figures])], plans_path: lines})
    return plans_path


def read_frontier(path: Path) -> StoredFrontier:
    """Read a stored frontier's header; PlanError names the file and the field that is wrong."""
    try:
        header, *lines = read_text(path).splitlines() or [""]
    except (OSError, ValueError) as error:
        raise PlanError(f"Frontier {path} is not readable: {error}", remedy=_REMEDY) from error
    fields = parse_json(header, path, "Frontier", PlanError, _REMEDY)
    if fields.data.get("format") != FRONTIER_FORMAT or not lines:
        raise PlanError(f"{path} is not a stored frontier with plans", remedy=_REMEDY)
    times_s = fields.read("iteration_time_s", many(AMOUNT, len(lines)))
    if list(times_s) != sorted(times_s):
        raise fields.wrong("iteration_time_s", "Times must rise.")
    baseline_s = fields.inside("baseline").read("iteration_time_s", UNIT_TIME)
    return StoredFrontier(path, times_s, baseline_s, tuple(lines))
