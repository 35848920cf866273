"""Pictures of docs/: what each level does, time against energy of all families, a power budget.

    python benchmarks/schedules/curves.py [PICTURE]...      # a minute or two

Levels are of the job of `pictures.py`; families of GPT-3 175B on A100s, from `../shared/data`; the
budget is that of an emulated job (`benchmarks/online/budgets.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import click
from PIL import Image

from benchmarks.online.budgets import Job, offline
from benchmarks.planner.workloads import workloads_here
from benchmarks.schedules.pictures import MICROBATCHES, make_cases
from envpipe_megatron.core.plan import Plan, one_clock_plans
from envpipe_megatron.core.profile_rows import MEASURED_SPLIT
from envpipe_megatron.policies.planner import make_frontier, make_plan
from envpipe_megatron.report.charts import BLUE, GREY, INK, ORANGE, VERMILION, Chart, Marks
from envpipe_megatron.report.stills import save
from envpipe_megatron.report.units import plan_charts
from envpipe_megatron.report.views import configurations_chart

_PALETTE = 256
#: Time that level uniform may take, against the framework's.
_SLOWER = 1.03
_POINTS = 12
#: Of the budget: GPU, stages; percent of what a GPU takes in Megatron's order at the highest
#: clocks, and for how many iterations each.
_JOB, _BUDGETS, _EACH = ("a100-sxm", 4), (None, 80, 70, 90, None), 30


def levels() -> list[Chart]:
    """Draw one iteration of a job at each level, on one axis."""
    plans = {(case.order, case.clocks): case.plan for case in make_cases()}
    same_time = "optimal, in 1F1B's time"
    own = plans["1F1B", "full"]
    shown = {
        "observe: the framework's order at full clock": own,
        f"uniform: one clock, at most {100 * _SLOWER - 100:.0f} % more time": _one_clock(own),
        "units: a clock for each unit": plans["1F1B", same_time],
        "order: order and clocks, split backwards": plans["joint, split backwards", same_time],
    }
    charts = []
    for (name, plan), chart in zip(shown.items(), plan_charts(shown.values()), strict=True):
        cost = plan.cost
        title = (
            f"{name}   ·   {cost.iteration_time_s:.3f} s, {cost.energy_j:,.0f} J, "
            f"{cost.saving_percent(own.cost):z.1f} % saved"
        )
        charts.append(replace(chart, title=title, x_label=""))
    return [*charts[:-1], replace(charts[-1], x_label="time (ms)")]


def _one_clock(own: Plan) -> Plan:
    """Return the plan of least energy of one clock for all units."""
    longest_s = _SLOWER * own.cost.iteration_time_s
    within = [plan for plan in one_clock_plans(own) if plan.cost.iteration_time_s <= longest_s]
    return min(within, key=lambda plan: plan.cost.energy_j)


def families() -> list[Chart]:
    """Draw the time-energy frontiers of all families on one profile; none without the data."""
    for workload in workloads_here(["gpt3-175b_a100_sxm_mb24"]):
        split, request = MEASURED_SPLIT, workload.request
        joint = request("auto", "optimal")
        asked = {
            "1F1B": request("1f1b", "optimal"),
            "EnvPipe's order": request("envpipe", "optimal"),
            "joint": joint,
            "interleaved, 2 chunks": replace(request("interleaved", "optimal"), num_chunks=2),
            "ZB-H1": replace(request("zb-h1", "optimal"), split=split),
            "joint, split backwards": replace(joint, split=split),
        }
        frontiers = {
            name: [
                (plan.cost.iteration_time_s, plan.cost.energy_j)
                for plan in make_frontier(workload.profile, each, _POINTS)
            ]
            for name, each in asked.items()
        }
        full = make_plan(workload.profile, request()).plan.cost
        point = {"x": [full.iteration_time_s], "y": [full.energy_j]}
        dot = Marks("dot", "1F1B at full clock", INK, point, marker="star", size=12)
        chart = configurations_chart(frontiers)
        return [replace(chart, marks=[*chart.marks, dot])]
    return []


def budget() -> list[Chart]:
    """Draw power and time of the iterations of a job whose budget changes."""
    job, best = Job(*_JOB, 1), offline(*_JOB)
    ran = [each for percent in _BUDGETS for each in job.run(percent, _EACH)]
    job.close()
    own_w, own_s = best.own.mean_power_w / _JOB[1], best.own.iteration_time_s
    at = list(range(len(ran)))
    power_w = [each.energy_j / each.time_s / _JOB[1] for each in ran]
    longer = [100 * (each.time_s / own_s - 1) for each in ran]
    ends = [place * _EACH + end for place in range(len(_BUDGETS)) for end in (0, _EACH)]
    allowed = [own_w * percent / 100 for percent in _BUDGETS if percent for _ in range(2)]
    shares = [0.0 if percent is None else percent for percent in _BUDGETS]
    one = [100 * (best.one_clock(each) - 1) if each else 0.0 for each in shares for _ in range(2)]

    power = [
        Marks("line", "1F1B at full clock", GREY, _line([0, len(at)], [own_w] * 2), look="dotted"),
        Marks("line", "the job", BLUE, _line(at, power_w)),
        Marks("line", "budget", VERMILION, _line(ends[2:-2], allowed), look="dashed"),
    ]
    one_clock = "one clock that keeps the budget"
    time = [
        Marks("line", "the job", BLUE, _line(at, longer)),
        Marks("line", one_clock, ORANGE, _line(ends, one), look="dashed"),
    ]
    every = (0.0, float(len(at)))
    return [
        Chart("power", "", "power of a GPU (W)", power, x_range=every, from_zero=True),
        Chart("time", "iteration", "more time than 1F1B (%)", time, x_range=every),
    ]


def _line(x: Sequence[float], y: Sequence[float]) -> dict[str, list[Sequence[float]]]:
    return {"x": [x], "y": [y]}


PICTURES: dict[str, tuple[str, Callable[[], list[Chart]]]] = {
    "levels": (f"One job at each level: {MICROBATCHES} microbatches (emulated A100s)", levels),
    "families": ("GPT-3 175B, 8 A100s, 24 microbatches: time against energy (replay)", families),
    "budget": ("A power budget of 80, 70, 90 % in training (4 emulated A100s)", budget),
}


@click.command()
@click.argument("names", nargs=-1, type=click.Choice([*PICTURES]), metavar="[PICTURE]...")
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("docs/pictures"),
    show_default=True,
    help="Folder for the pictures.",
)
def main(names: tuple[str, ...], output: Path) -> None:
    """Draw pictures, by default all."""
    for name in names or PICTURES:
        title, charts = PICTURES[name][0], PICTURES[name][1]()
        if charts:
            save(charts, title, output / f"{name}.png")
            with Image.open(output / f"{name}.png") as picture:
                picture.quantize(colors=_PALETTE).save(output / f"{name}.png", optimize=True)


if __name__ == "__main__":
    main()
