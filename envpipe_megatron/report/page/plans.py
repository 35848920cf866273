"""Plots of a profile and a plan: valleys of energy, and the frontier with the plan on it."""

from __future__ import annotations

from collections.abc import Sequence

from bokeh.models import ColumnDataSource
from bokeh.plotting import figure

from envpipe_megatron.core.plan import Plan
from envpipe_megatron.core.profile import Profile
from envpipe_megatron.policies.frontier import FRONTIER_GAP, plan_frontier
from envpipe_megatron.policies.optimal.linear_program import LinearProgramError
from envpipe_megatron.policies.optimal.optimizer import Optimizer
from envpipe_megatron.report.drawing.style import BLUE, GREEN, GREY, SERIES, VERMILION
from envpipe_megatron.report.page.plots import add_legend, add_tips, new_plot

_HEIGHT_PX = 320
#: A frontier of so many units is made within seconds.
_MOST_UNITS, _POINTS = 2_000, 8


def valley_figure(profile: Profile) -> figure:
    """Energy of one microbatch (forward and backward of all chunks) over the clock, by stage."""
    plot = new_plot("SM clock (MHz)", "energy of a microbatch (J)", _HEIGHT_PX, along_x=False)
    valleys = [_valley(profile, stage) for stage in range(profile.num_stages)]
    colours = [SERIES[stage % len(SERIES)] for stage in range(profile.num_stages)]
    plot.multi_line(
        [list(valley) for valley in valleys],
        [list(valley.values()) for valley in valleys],
        color=colours,
    )
    points = ColumnDataSource(
        {
            "mhz": [mhz for valley in valleys for mhz in valley],
            "joules": [joules for valley in valleys for joules in valley.values()],
            "stage": [f"stage {stage}" for stage, valley in enumerate(valleys) for _ in valley],
            "colour": [colours[stage] for stage, valley in enumerate(valleys) for _ in valley],
        }
    )
    dots = plot.scatter(
        "mhz", "joules", source=points, color="colour", size=6, legend_group="stage"
    )
    plot.legend.orientation = "horizontal"
    plot.legend.visible = len(valleys) <= len(SERIES)
    plot.add_layout(plot.legend[0], "below")
    add_tips(plot, dots, ("", "@stage"), ("MHz", "@mhz"), ("J", "@joules{0.000}"))
    return plot


def _valley(profile: Profile, stage: int) -> dict[int, float]:
    """Joules of a microbatch by the clocks that all of its kinds were profiled at."""
    by_kind = [
        energies
        for kind in profile.kinds
        if any((energies := profile.energy_by_clock_j(stage, kind)).values())
    ]
    clocks = sorted(set(by_kind[0]).intersection(*by_kind))
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


def frontier_figure(plans: Sequence[Plan], chosen: Plan) -> figure:
    """Time and energy of an iteration, by the profile: of plans, the one that ran, full clock."""
    plot = new_plot("iteration time (s)", "energy of all stages (J)", _HEIGHT_PX, along_x=False)
    on_it, items = ColumnDataSource(_points(plans, chosen)), []
    plot.line("time_s", "energy_j", source=on_it, color=GREY)
    for label, shown, colour, marker, size in (
        ("frontier", plans, BLUE, "circle", 7),
        ("all at the highest clock", [chosen.baseline], VERMILION, "square", 11),
        ("the plan that ran", [chosen], GREEN, "star", 16),
    ):
        dots = plot.scatter(
            "time_s", "energy_j", source=ColumnDataSource(_points(shown, chosen)),
            color=colour, marker=marker, size=size,
        )  # fmt: skip
        items.append((label, dots))
        add_tips(
            plot,
            dots,
            ("", label),
            ("time (s)", "@time_s{0.0000} (@slower{+0.00} %)"),
            ("energy (J)", "@energy_j{0.0} (@saved{0.00} % saved)"),
        )
    add_legend(plot, items)
    return plot


def _points(plans: Sequence[Plan], chosen: Plan) -> dict[str, list[float]]:
    full = chosen.baseline.cost
    return {
        "time_s": [plan.cost.iteration_time_s for plan in plans],
        "energy_j": [plan.cost.energy_j for plan in plans],
        "slower": [plan.cost.slowdown_percent(full) for plan in plans],
        "saved": [plan.cost.saving_percent(full) for plan in plans],
    }
