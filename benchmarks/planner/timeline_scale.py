"""How timelines and plans scale: time and memory of the core, on one CPU core.

Three questions of anyone with a large pipeline: what a full timeline costs (64 stages x 1024
microbatches are 131,072 units), what a change of one unit costs, and how long each policy plans at
8 x 96. Peak memory is taken in a fresh process each, for the high-water mark never falls.

    python benchmarks/planner/timeline_scale.py --repeat 5
"""

from __future__ import annotations

import multiprocessing
import random
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.planner.peak_memory import peak_mib
from envpipe_megatron.core import builders
from envpipe_megatron.core.longest_path import LongestPath
from envpipe_megatron.core.plan import Plan
from envpipe_megatron.core.profile import Profile, ProfileRow, make_profile, read_profile
from envpipe_megatron.core.schedule import Kind, Schedule
from envpipe_megatron.core.timeline import Timeline
from envpipe_megatron.policies.planner import PlanRequest, make_plan

SIZES = ((8, 96), (16, 512), (64, 1024))
POLICIES = (
    ("baseline", "default"),
    ("uniform", "default"),
    ("envelope", "default"),
    ("envelope", "greedy"),
    ("envelope", "balanced"),
)
Result = TypeVar("Result")


def _durations(schedule: Schedule) -> np.ndarray:
    """[num_stages, units_per_stage] 50 ms forwards and 100 ms backwards, 5 % noise."""
    noise = np.random.default_rng(0).uniform(0.95, 1.05, schedule.is_backward.shape)
    return np.asarray(np.where(schedule.is_backward, 0.1, 0.05) * noise)


def _timed(action: Callable[[], Result]) -> tuple[float, Result]:
    start = time.perf_counter()
    result = action()
    return time.perf_counter() - start, result


def _measure_timeline(num_stages: int, num_microbatches: int, repeat: int) -> dict[str, float]:
    """Times in s (the timeline's a median), and the peak memory of this process in MiB."""
    imports_mib = peak_mib()
    schedule_s, schedule = _timed(lambda: builders.one_f_one_b(num_stages, num_microbatches))
    durations = _durations(schedule)
    timeline_s = statistics.median(
        _timed(lambda: Timeline(schedule, durations))[0] for _ in range(repeat)
    )
    return {
        "schedule": schedule_s,
        "timeline": timeline_s,
        "peak": peak_mib(),
        "imports": imports_mib,
    }


def _updates_per_second(num_stages: int, num_microbatches: int, seconds: float) -> float:
    """Changes of one random unit a second, by a tenth of its time up and down.

    Earliest and latest ends are kept up to date.
    """
    schedule = builders.one_f_one_b(num_stages, num_microbatches)
    path = LongestPath(schedule, _durations(schedule).ravel().tolist())
    path.find_ends()
    path.find_latest_ends([0.0] * num_stages)
    path.change(0, 0.05)  # the ranks of the topological order are made at the first
    rng = random.Random(0)
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        path.change(rng.randrange(schedule.num_units), rng.uniform(0.045, 0.055))
        count += 1
    return count / (time.perf_counter() - start)


def _in_fresh_process(function: Callable[..., Result], *arguments: object) -> Result:
    # spawn: a forked child would start with the memory of this process.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *arguments).result()


def _made_up_profile(num_stages: int) -> Profile:
    """An A100-like valley: power rises with the cube of the clock above 60 % static power."""
    rows = []
    for stage in range(num_stages):
        for kind, weight in ((Kind.FORWARD, 0.05), (Kind.BACKWARD, 0.1)):
            for frequency in range(900, 1411, 15):
                ratio = frequency / 1410
                time_s = weight / ratio**0.8
                rows.append(
                    (stage, kind, ProfileRow(frequency, time_s, time_s * (150 + 250 * ratio**3)))
                )
    return make_profile(rows, source="a made-up profile")


@click.command()
@click.option("--repeat", default=5, show_default=True, help="Timelines a size; the median counts.")
@click.option("--update-seconds", default=2.0, show_default=True, help="Time for updates, a size.")
@click.option(
    "--profile",
    "profile_path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Profile CSV to plan with; without one a made-up 8-stage profile.",
)
@click.option("--num-microbatches", default=96, show_default=True, help="For the plans.")
def main(
    repeat: int, update_seconds: float, profile_path: Path | None, num_microbatches: int
) -> None:
    """Print tables of what timelines and plans cost."""
    console = Console()
    table = Table("p x M", title="Timeline of 1F1B", title_justify="left")
    for heading in (
        "units",
        "schedule (s)",
        "timeline (s)",
        "peak (MiB)",
        "of it imports",
        "updates (1/s)",
    ):
        table.add_column(heading, justify="right")
    for stages, microbatches in SIZES:
        measured = _in_fresh_process(_measure_timeline, stages, microbatches, repeat)
        updates = _updates_per_second(stages, microbatches, update_seconds)
        table.add_row(
            f"{stages} x {microbatches}",
            f"{2 * stages * microbatches:,}",
            f"{measured['schedule']:.3f}",
            f"{measured['timeline']:.4f}",
            f"{measured['peak']:.0f}",
            f"{measured['imports']:.0f}",
            f"{updates:,.0f}",
        )
    console.print(table)
    profile = read_profile(profile_path) if profile_path else _made_up_profile(8)
    console.print(_plan_table(profile, num_microbatches))


def _plan_table(profile: Profile, num_microbatches: int) -> Table:
    table = Table(
        "policy",
        "order",
        title=f"Plans, {profile.num_stages} x {num_microbatches}, {profile.source}",
        title_justify="left",
    )
    for heading in ("plan (s)", "steps", "saving (%)", "slowdown (%)"):
        table.add_column(heading, justify="right")
    for order in ("1f1b", "envpipe"):
        for policy, reconfigure in POLICIES:
            request = PlanRequest(num_microbatches, order, policy, reconfigure, 80.0)
            seconds, (plan, steps) = _timed(partial(_plan, profile, request))
            baseline = plan.baseline.cost
            table.add_row(
                policy if reconfigure == "default" else f"{policy}, {reconfigure}",
                order,
                f"{seconds:.3f}",
                str(steps),
                f"{plan.cost.saving_percent(baseline):.2f}",
                f"{round(plan.cost.slowdown_percent(baseline), 2) + 0.0:.2f}",  # + 0.0: no -0.00
            )
    return table


def _plan(profile: Profile, request: PlanRequest) -> tuple[Plan, int]:
    """A priced plan and the reconfigure steps it took."""
    planned = make_plan(profile, request)
    _ = planned.plan.cost
    return planned.plan, planned.reconfigured.steps if planned.reconfigured else 0


if __name__ == "__main__":
    main()
