"""Charts of plans and profiles: valleys of energy, and frontiers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from envpipe_megatron.core.plan import Plan
from envpipe_megatron.core.profile import Profile
from envpipe_megatron.policies.frontier import FRONTIER_GAP, plan_frontier
from envpipe_megatron.policies.optimal.linear_program import LinearProgramError
from envpipe_megatron.policies.optimal.optimizer import Optimizer
from envpipe_megatron.report.charts import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    SERIES,
    VERMILION,
    Chart,
    Marks,
    columns_of,
    series_colours,
)

#: A frontier of so many units is made within seconds.
_MOST_UNITS, _POINTS = 2_000, 8


def valley_charts(profile: Profile) -> list[Chart]:
    """Energy of one microbatch (forward and backward of all chunks) over the clock, by stage.

    A chart has no more stages than there are colours.
    """
    stages = range(profile.num_stages)
    return [
        _valley_chart(profile, stages[first : first + len(SERIES)])
        for first in stages[:: len(SERIES)]
    ]


def _valley_chart(profile: Profile, shown: range) -> Chart:
    valleys = [_valley(profile, stage) for stage in shown]
    stages = [f"stage {stage}" for stage in shown]
    named = list(zip(stages, series_colours(len(stages)), valleys, strict=True))
    lines = [(*names, [*valley], [*valley.values()]) for *names, valley in named]
    dots = [(*names, *point) for *names, valley in named for point in valley.items()]
    best = [min(valley.items(), key=lambda at: (at[1], -at[0])) for valley in valleys if valley]
    tips = ("", "@name"), ("MHz", "@x"), ("J", "@y{0.000}")
    marks = [
        Marks("line", "", GREY, columns_of("name colour x y", lines)),
        Marks("dot", "", GREY, columns_of("x y", best), marker="diamond", size=11),
        Marks("dot", "", GREY, columns_of("name colour x y", dots), tips, size=4),
    ]
    label, title = "energy of a microbatch (J)", "diamonds: the clock of the least energy"
    if len(shown) < profile.num_stages:
        title = f"stages {shown[0]} to {shown[-1]}; {title}"
    return Chart(f"energy_valley-{shown[0]}", "SM clock (MHz)", label, marks, title)


def _valley(profile: Profile, stage: int) -> dict[int, float]:
    """Joules of a microbatch by the clocks that all of its kinds were profiled at."""
    by_kind = [
        energies
        for kind in profile.kinds
        if any((energies := profile.energy_by_clock_j(stage, kind)).values())
    ]
    clocks = sorted(set.intersection(*map(set, by_kind))) if by_kind else []
    return {mhz: sum(kind[mhz] for kind in by_kind) for mhz in clocks}


def frontier_of(plan: Plan) -> list[Plan]:
    """Plans of a plan's order from the fastest to the cheapest; none for an order too large."""
    if plan.schedule.num_units > _MOST_UNITS or plan.schedule.forward_only:
        return []
    optimizer = Optimizer(plan.schedule, plan.profile, plan.conditions, good_gap=FRONTIER_GAP)
    try:
        return plan_frontier([optimizer], _POINTS)
    except LinearProgramError:
        return []


def frontier_charts(plans: Sequence[Plan], ran: Plan | None = None) -> list[Chart]:
    """Energy and mean power over the time of plans, the fastest first, and of the one that ran."""
    full = plans[0].baseline
    times_s = [plan.cost.iteration_time_s for plan in plans]
    bounds_j = [plan.energy_lower_bound_j for plan in plans]
    charts = []
    for name, field, label in (
        ("frontier", "energy_j", "energy of an iteration (J)"),
        ("frontier-power", "mean_power_w", "mean power of all GPUs (W)"),
    ):
        marks = [
            Marks(
                "line", "", BLUE, {"x": [times_s], "y": [[getattr(p.cost, field) for p in plans]]}
            )
        ]
        if field == "energy_j" and None not in bounds_j:
            bound = {"x": [times_s], "y": [bounds_j]}
            marks.append(Marks("line", "lower bound", GREEN, bound, look="dashed"))
        for what, shown, colour, marker, size in (
            ("plans", plans, BLUE, "circle", 5),
            (f"{full.schedule.name} at the highest clocks", [full], VERMILION, "triangle", 9),
            ("the plan that ran", [ran] if ran else [], ORANGE, "star", 14),
        ):
            points = [
                (
                    plan.cost.iteration_time_s, getattr(plan.cost, field),
                    plan.cost.slowdown_percent(full.cost), plan.cost.saving_percent(full.cost),
                )
                for plan in shown
            ]  # fmt: skip
            columns = columns_of("x y slower saved", points)
            tips = [
                ("", "@name"), ("time (s)", "@x{0.0000} (@slower{+0.00} %)"),
                (label, "@y{0.0}"), ("energy saved (%)", "@saved{0.00}"),
            ]  # fmt: skip
            marks.append(Marks("dot", what, colour, columns, tips, marker, size))
        charts.append(Chart(name, "iteration time (s)", label, marks))
    return charts


def configurations_chart(frontiers: Mapping[str, Sequence[tuple[float, float]]]) -> Chart:
    """Energy over time of the plans of each configuration, by its name."""
    named = list(zip(frontiers, series_colours(len(frontiers)), frontiers.values(), strict=True))
    lines = [(*names, *zip(*points, strict=True)) for *names, points in named]
    dots = [(*names, *point) for *names, points in named for point in points]
    marks = [
        Marks("line", "", GREY, columns_of("name colour x y", lines)),
        Marks("dot", "", GREY, columns_of("name colour x y", dots)),
    ]
    label = "energy of all GPUs in an iteration (J)"
    return Chart("configurations", "iteration time (s)", label, marks)
