"""Views of a run, of profiles and of plans: charts, as plain data."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from envpipe_megatron.core.kinds import Kind
from envpipe_megatron.core.plan import Plan
from envpipe_megatron.core.profile import Profile
from envpipe_megatron.formats.energy import IDLE
from envpipe_megatron.formats.timeline import ClockSamples
from envpipe_megatron.policies.frontier import FRONTIER_GAP, plan_frontier
from envpipe_megatron.policies.optimal.linear_program import LinearProgramError
from envpipe_megatron.policies.optimal.optimizer import Optimizer
from envpipe_megatron.report.bubbles import Bubbles
from envpipe_megatron.report.charts import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PATH,
    SKY,
    VERMILION,
    Chart,
    Choice,
    Colouring,
    Marks,
    View,
    columns_of,
    series_colours,
)
from envpipe_megatron.report.facts import ReportFacts
from envpipe_megatron.report.pipelines import PlacedGpu, gpus_of
from envpipe_megatron.report.run_folder import RunFolder
from envpipe_megatron.report.series import power_chart, step_charts, thinned
from envpipe_megatron.report.units import KINDS, MOST_UNITS, UnitTable, waits_of

#: A frontier of at most this many units is made within seconds.
_MOST_UNITS, _POINTS = 2_000, 8

_KIND_COLOURS = {
    Kind.FORWARD: SKY,
    Kind.BACKWARD: BLUE,
    Kind.INPUT_GRADIENT: ORANGE,
    Kind.WEIGHT_GRADIENT: VERMILION,
}
_TIMELINES = (
    "An iteration before and one after, on one axis. F: forward of a microbatch, B: backward, "
    "or its two parts, I (gradient of the input) and W (of the weights). Hatched: the GPU "
    "waits. Slack and path follow from the measured durations; energy is the "
    "profile's at the clock that was asked for. Ctrl and the wheel, or + and -, zoom; dragging "
    "or arrow keys move; 0 shows all."
)
_TIPS = (
    ("unit", "@label"),
    ("time (ms)", "@begin{0.000} to @end{0.000}"),
    ("clock (MHz)", "@mhz{custom}"),
    ("energy (J)", "@joules{custom}"),
    ("power (W)", "@watts{custom}"),
    ("slack (ms)", "@slack_ms{custom}"),
    ("on the critical path", "@critical{custom}"),
)
_TIP_CODES = {
    "mhz": "return value > 0 ? String(value) : 'not controlled'",
    "critical": "return value ? 'yes' : 'no'",
    **dict.fromkeys(
        ("joules", "watts", "slack_ms"),
        "return isFinite(value) ? value.toPrecision(4) : 'not known'",
    ),
}


def views_of(folder: RunFolder, facts: ReportFacts) -> Iterator[View]:
    """Yield all views of a run but its timelines, the most telling first."""
    if facts.bubbles is not None:
        yield View(
            "bubbles",
            "Where the time goes",
            "Between a pipeline's first unit and its last, at full clock. What the bubbles are "
            "worth is in the tables of bubbles and levels.",
            [bubbles_chart(facts.bubbles)],
        )
    if steps := step_charts(folder.energy.windows):
        yield View(
            "iterations",
            "Iterations of the job",
            "Time and energy of each iteration; a metered window of several is their mean. Phases "
            "are shaded.",
            steps,
        )
    power = power_chart(folder.energy.windows)
    if power is not None:
        yield View(
            "power",
            "Power over time",
            "The mean of each metered window, which is much longer than a unit.",
            [power],
        )
    if folder.timelines.clocks:
        yield View(
            "clocks",
            "Clocks asked for, and seen",
            "Looks at a GPU's clock, in the first hour; at most 800 are shown. Below, "
            "what GPUs said held their clocks back, if they were not idle.",
            clock_charts(folder.timelines.clocks),
        )
    if folder.profile is not None:
        yield View(
            "energy_valley",
            "Energy over the clock",
            "Energy of one microbatch, forward and backward, on each stage, by the profile.",
            [valley_chart(folder.profile)],
        )
    plans = [] if folder.plan is None else frontier_of(folder.plan)
    if plans:
        yield View(
            "frontier",
            "Time against energy",
            "Plans of this order of which no other is both faster and cheaper, by the profile.",
            frontier_charts(plans, folder.plan),
        )


def gpu_rows(gpus: Sequence[PlacedGpu]) -> tuple[str, list[str]]:
    """Return what the rows of GPUs are, and their names."""
    if len({gpu.pipeline for gpu in gpus}) > 1:
        return "pipeline · stage", [f"{gpu.pipeline} · {gpu.stage}" for gpu in gpus]
    return "stage", [str(gpu.stage) for gpu in gpus]


def timelines_view(table: UnitTable) -> View:
    """Return the timelines of a job's recorded iterations."""
    columns = {name: values for name, values in table.columns.items() if name != "envelope"}
    columns["middle"] = (columns["begin"] + columns["end"]) / 2
    columns["group"] = columns.pop("iteration")
    waits = waits_of(table.columns)
    waits["group"] = waits.pop("iteration")
    on_path = columns["critical"] == 1
    path = {name: columns[name][on_path] for name in ("group", "row", "begin", "end")}
    ways = _colourings(columns)
    marks = (
        Marks("box", "GPU waits", GREY, waits, look="hatched"),
        Marks("box", "", SKY, columns, _TIPS, colourings=ways, tip_codes=_TIP_CODES),
        Marks("box", "critical path", PATH, path, look="outlined"),
    )
    ends_ms = [
        float(columns["end"][columns["group"] == number].max())
        for number in range(len(table.iterations))
    ]
    iterations = [
        (str(number), f"{phase}, {at}: {end_ms / 1e3:.4g} s")
        for number, ((phase, at), end_ms) in enumerate(zip(table.iterations, ends_ms, strict=True))
    ]
    label, rows = gpu_rows(table.gpus)
    charts = [
        Chart(
            name, "ms after the first unit", label, marks, name.title(), rows,
            x_range=(0.0, max(ends_ms[shown] for shown in table.shown)),
            x_bounds=(-0.02 * max(ends_ms), 1.02 * max(ends_ms)),
            choice=Choice("iteration", iterations, str(shown)),
        )
        for name, shown in zip(("before", "after"), table.shown, strict=True)
    ]  # fmt: skip
    choices = {"colour": Choice.of("Colour by", [way.title for way in ways])}
    pipelines: dict[int, list[int]] = {}
    for row, gpu in enumerate(table.gpus):
        pipelines.setdefault(gpu.pipeline, []).append(row)
    if len(pipelines) > 1:
        every = f"0 {len(rows) - 1}"
        options = [(f"{own[0]} {own[-1]}", f"pipeline {n}") for n, own in pipelines.items()]
        choices["pipeline"] = Choice("Pipeline", [(every, "all"), *options], every)
    text = _TIMELINES
    if len(table.iterations) < table.recorded:
        text += (
            f" {len(table.iterations)} of {table.recorded} recorded iterations are here: a page "
            f"holds some {MOST_UNITS:,} units."
        )
    return View("timeline", "Timelines", text, charts, choices)


def _colourings(columns: dict[str, NDArray[Any]]) -> list[Colouring]:
    """Return all ways to colour units, the most telling first: one clock tells nothing."""
    known = [
        Colouring(title, column, _ends(columns[column][there]))
        for title, column, there in (
            ("clock (MHz)", "mhz", columns["mhz"] > 0),
            ("power (W)", "watts", np.isfinite(columns["watts"])),
            ("slack (ms)", "slack_ms", np.isfinite(columns["slack_ms"])),
        )
        if there.any()
    ]
    colours, names = [_KIND_COLOURS[kind] for kind in KINDS], [kind.value for kind in KINDS]
    by_kind = Colouring("kind", "kind", (-0.5, len(KINDS) - 0.5), colours, names)
    one_clock = np.ptp(columns["mhz"]) == 0
    return [by_kind, *known] if one_clock else [*known[:1], by_kind, *known[1:]]


def _ends(values: NDArray[Any]) -> tuple[float, float]:
    low, high = float(values.min()), float(values.max())
    return low, high if high > low else low + 1.0


def bubbles_chart(found: Bubbles) -> Chart:
    """Draw a bar for each GPU: units on the critical path, other units, bubbles."""
    label, rows = gpu_rows(found.gpus)
    marks, begins_ms = [], np.zeros(len(rows))
    for name, colour, times_s in (
        ("units on the critical path", ORANGE, found.critical_s),
        ("other units", SKY, found.units_s - found.critical_s),
        ("bubbles", GREY, found.bubbles_s),
    ):
        times_ms = 1e3 * times_s
        columns = {
            "row": list(range(len(rows))), "begin": begins_ms, "end": begins_ms + times_ms,
            "rank": [gpu.rank for gpu in found.gpus], "ms": times_ms,
        }  # fmt: skip
        tips = ("rank", "@rank"), (name, "@ms{0.0} ms")
        marks.append(Marks("box", name, colour, columns, tips))
        begins_ms = begins_ms + times_ms
    whole = (0.0, 1.02e3 * found.pipeline_s)
    return Chart("bubbles", "ms of an iteration", label, marks, rows=rows, x_range=whole)


def clock_charts(samples: Sequence[ClockSamples]) -> list[Chart]:
    """Draw clocks asked for and seen of each GPU, and what held them back except for idling."""
    gpus = gpus_of(read.labels for read in samples)
    # Of each rank: when, clocks seen and asked for (NaN: none), what held it back.
    by_rank = defaultdict[int, list[tuple[float, float, float, str]]](list)
    for read in samples:
        asked_mhz = (math.nan if mhz is None else float(mhz) for mhz in read.requested_mhz)
        reasons = read.throttle_reasons or ("",) * len(read.time_s)
        seen_mhz = map(float, read.observed_mhz)
        by_rank[read.labels.rank] += zip(read.time_s, seen_mhz, asked_mhz, reasons, strict=True)
    looks = []
    for gpu in gpus:
        every = sorted(by_rank[gpu.rank])
        looks.append([every[place] for place in thinned(len(every))])
    first_s = min(own[0][0] for own in looks)
    lines, held = [], []
    for row, (gpu, own) in enumerate(zip(gpus, looks, strict=True)):
        at_s = np.array([look[0] for look in own]) - first_s
        for place, name, colour in ((1, "seen", BLUE), (2, "asked for", ORANGE)):
            # Each look's clock up to the next look.
            x = np.repeat(at_s, 2)[1:].astype(np.float32)
            y = np.repeat([look[place] for look in own], 2)[:-1].astype(np.float32)
            lines.append((name, colour, x, y, f"rank {gpu.rank}, stage {gpu.stage}"))
        # A box goes up to the next look, but nobody looks after a start's first hour.
        usual_s = float(np.median(np.diff(at_s))) if len(at_s) > 1 else 0.0
        for begin_s, (*_, reasons) in zip(at_s.tolist(), own, strict=True):
            if reasons and IDLE not in reasons.split(", "):
                held.append((reasons, row, gpu.rank, begin_s, begin_s + usual_s))
    tips = ("", "@group"), ("", "@name"), ("s", "$x{0.00}"), ("MHz", "$y{0}")
    marks = [Marks("line", "", GREY, columns_of("name colour x y group", lines), tips)]
    last_s = max(own[-1][0] for own in looks)
    x_label, x_range = "s after the first look", (0.0, max(last_s - first_s, 1e-3))
    choice = Choice.of("Clock of", list(dict.fromkeys(line[-1] for line in lines)))
    charts = [
        Chart("clocks", x_label, "MHz", marks, x_range=x_range, from_zero=True, choice=choice)
    ]
    if held:
        label, rows = gpu_rows(gpus)
        most = [reasons for reasons, _ in Counter(box[0] for box in held).most_common()]
        colours = dict(zip(most, series_colours(len(most)), strict=True))
        held.sort(key=lambda box: most.index(box[0]))
        columns = columns_of("name row rank begin end", held)
        columns["colour"] = [colours[reasons] for reasons in columns["name"]]
        of_box = ("rank", "@rank"), ("held back by", "@name"), ("s", "$x{0.00}")
        boxes = [Marks("box", "", GREY, columns, of_box)]
        charts.append(
            Chart("held-back", x_label, label, boxes, "held back by", rows, x_range=x_range)
        )
    return charts


def valley_chart(profile: Profile) -> Chart:
    """Draw the energy of a microbatch (forward and backward of all chunks) over the clock."""
    valleys = {
        f"stage {stage}": [*profile.valley_j(stage).items()] for stage in range(profile.num_stages)
    }
    best = [min(valley, key=lambda at: (at[1], -at[0])) for valley in valleys.values() if valley]
    lines, dots = _curves(valleys, [("", "@name"), ("MHz", "@x"), ("J", "@y{0.000}")], size=4)
    diamonds = Marks("dot", "", GREY, columns_of("x y", best), marker="diamond", size=11)
    label, title = "energy of a microbatch (J)", "diamonds: the clock of the least energy"
    return Chart("energy_valley", "SM clock (MHz)", label, [lines, diamonds, dots], title)


def frontier_of(plan: Plan) -> list[Plan]:
    """Return plans of a plan's order, fastest to cheapest; none for an order too large."""
    if plan.schedule.num_units > _MOST_UNITS or plan.schedule.forward_only:
        return []
    optimizer = Optimizer(plan.schedule, plan.profile, plan.conditions, good_gap=FRONTIER_GAP)
    try:
        return plan_frontier([optimizer], _POINTS)
    except LinearProgramError:
        return []


def frontier_charts(plans: Sequence[Plan], ran: Plan | None = None) -> list[Chart]:
    """Draw energy and mean power over the time of plans, the fastest first, and what ran."""
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
                    what, plan.cost.iteration_time_s, getattr(plan.cost, field),
                    plan.cost.slowdown_percent(full.cost), plan.cost.saving_percent(full.cost),
                )
                for plan in shown
            ]  # fmt: skip
            columns = columns_of("name x y slower saved", points)
            tips = [
                ("", "@name"), ("time (s)", "@x{0.0000} (@slower{+0.00} %)"),
                (label, "@y{0.0}"), ("energy saved (%)", "@saved{0.00}"),
            ]  # fmt: skip
            marks.append(Marks("dot", what, colour, columns, tips, marker, size))
        charts.append(Chart(name, "iteration time (s)", label, marks))
    return charts


def configurations_chart(frontiers: Mapping[str, Sequence[tuple[float, float]]]) -> Chart:
    """Draw energy over time of the plans of each configuration, by its name."""
    label = "energy of all GPUs in an iteration (J)"
    return Chart("configurations", "iteration time (s)", label, _curves(frontiers))


def _curves(
    curves: Mapping[str, Sequence[tuple[float, float]]],
    tips: Sequence[tuple[str, str]] = (),
    size: int = 5,
) -> list[Marks]:
    """Mark the lines of named curves, each in a colour, and their points."""
    named = list(zip(curves, series_colours(len(curves)), curves.values(), strict=True))
    lines = [(*names, *map(list, zip(*own, strict=True))) for *names, own in named if own]
    dots = [(*names, *point) for *names, points in named for point in points]
    return [
        Marks("line", "", GREY, columns_of("name colour x y", lines)),
        Marks("dot", "", GREY, columns_of("name colour x y", dots), tips, size=size),
    ]
