"""One job in every order, by the simulator: pictures and table of docs/understand/schedules.md.

    python benchmarks/schedules/pictures.py

Four stages, eight microbatches, a forward of 50 ms and a backward of 100 ms at full clock on an
emulated A100 SXM, fitted to a published profile; a backward in two parts takes 1 % more. Messages
and changes of clock take no time here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import click
from PIL import Image

from benchmarks.outputs import markdown_table

# isort: split
from presets import preset_profile  # of tests/helpers

from envpipe_megatron.core.conditions import make_conditions
from envpipe_megatron.core.kinds import WHOLE, Kind, unit
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.orders.builders import zero_bubble
from envpipe_megatron.core.plan import Plan, max_frequencies
from envpipe_megatron.core.profile import Profile
from envpipe_megatron.core.profile_rows import MEASURED_SPLIT, SplitBackward
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.gpu.presets import load_preset, sweep_range
from envpipe_megatron.policies.optimal.optimizer import Optimizer
from envpipe_megatron.policies.planner import make_plan
from envpipe_megatron.policies.request import PlanRequest
from envpipe_megatron.report.stills import save
from envpipe_megatron.report.units import plan_charts

GPU = "a100-sxm"
STAGES, MICROBATCHES, CHUNKS = 4, 8, 2
UNIT_TIME_S = {Kind.FORWARD: 0.05, Kind.BACKWARD: 0.1}
#: The time axis of all pictures, over the iteration time of 1F1B.
_AXIS_MARGIN = 1.06
_PALETTE = 256
_COLUMNS = (
    "order",
    "clocks",
    "iteration time (s)",
    "bubble (% of GPU time)",
    "peak in flight, by stage",
    "energy (J)",
    "saved against 1F1B (%)",
)


@dataclass(frozen=True)
class Case:
    """One line of the table; `picture` is the name of its picture's file, without suffix."""

    order: str
    clocks: str
    plan: Plan
    picture: str | None = None

    @property
    def bubble_percent(self) -> float:
        """The share of all GPUs' time in which no unit runs."""
        busy_s = float(self.plan.timeline.duration_s.sum())
        return 100 * (1 - busy_s / (STAGES * self.plan.cost.iteration_time_s))


@click.command()
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("docs/pictures"),
    show_default=True,
    help="Folder for the pictures.",
)
def main(output: Path) -> None:
    """Draw the pictures of docs/understand/schedules.md and print its table."""
    cases = make_cases()
    output.mkdir(parents=True, exist_ok=True)
    draw(cases, output)
    click.echo(table(cases))


def make_cases() -> list[Case]:
    """Every order, with full clocks or planned ones."""
    profile = emulated_profile()
    conditions = make_conditions(profile, blocking_power_w=load_preset(GPU).wait_power_w)

    def full(schedule: Schedule) -> Plan:
        known = profile.with_split_backwards(MEASURED_SPLIT) if schedule.split else profile
        priced = known.for_chunks(schedule.num_chunks)
        return Plan("baseline", schedule, max_frequencies(schedule, priced), priced, conditions)

    gpipe = full(builders.gpipe(STAGES, MICROBATCHES))
    one_f_one_b = full(builders.one_f_one_b(STAGES, MICROBATCHES))
    interleaved = full(builders.interleaved(STAGES, MICROBATCHES, CHUNKS))
    zb_h1 = full(zero_bubble(STAGES, MICROBATCHES))

    time_s = one_f_one_b.cost.iteration_time_s

    def optimal(plan: Plan, deadline_s: float) -> Plan:
        return Optimizer(plan.schedule, plan.profile, plan.conditions).plan(deadline_s)

    def joint(most_extra: int | None = None, split: SplitBackward | None = None) -> Plan:
        request = PlanRequest(
            MICROBATCHES, schedule="auto", policy="optimal", conditions=conditions,
            max_extra_forwards=most_extra, split=split,
        )  # fmt: skip
        return make_plan(profile, request).plan

    envelope = PlanRequest(
        MICROBATCHES, schedule="envpipe", policy="envelope", reconfigure="balanced",
        conditions=conditions,
    )  # fmt: skip
    full_clock, same_time = "full", "optimal, in 1F1B's time"
    own_time_s = interleaved.cost.iteration_time_s
    return [
        Case("no pipelining", full_clock, full(one_at_a_time()), "no_pipelining"),
        Case("GPipe", full_clock, gpipe, "gpipe"),
        Case("GPipe", same_time, optimal(gpipe, time_s)),
        Case("1F1B", full_clock, one_f_one_b, "1f1b"),
        Case("1F1B", same_time, optimal(one_f_one_b, time_s)),
        Case("interleaved", full_clock, interleaved, "interleaved"),
        Case("interleaved", "optimal, in its own time", optimal(interleaved, own_time_s)),
        Case("interleaved", same_time, optimal(interleaved, time_s)),
        Case("EnvPipe's", "envelope, balanced", make_plan(profile, envelope).plan, "envpipe"),
        Case("joint, at most one extra forward", same_time, joint(1)),
        Case("joint", same_time, joint(), "joint"),
        Case("ZB-H1", full_clock, zb_h1, "zb_h1"),
        Case("ZB-H1", same_time, optimal(zb_h1, time_s)),
        Case("joint, split backwards", same_time, joint(split=MEASURED_SPLIT), "joint_split"),
    ]


def emulated_profile() -> Profile:
    """What profiling four equal stages on such a GPU would give, without noise."""
    preset = load_preset(GPU)
    assert preset.control is not None
    # As close as reconfiguring steps.
    control = replace(preset.control, profile_step_mhz=30)
    _, *clocks_mhz = sweep_range(preset.supported_frequencies_mhz, control)
    profile: Profile = preset_profile(GPU, STAGES, UNIT_TIME_S, clocks_mhz)
    return profile


def one_at_a_time() -> Schedule:
    """Each microbatch goes forth and back before the next one starts: only one stage works."""
    order = tuple(unit(kind, m) for m in range(MICROBATCHES) for kind in WHOLE)
    return Schedule("no pipelining", MICROBATCHES, 1, (order,) * STAGES)


def draw(cases: Iterable[Case], folder: Path) -> None:
    """Write a PNG for each case that has one, all on the same axes and colours."""
    drawn = {case.picture: case for case in cases if case.picture}
    axis_s = _AXIS_MARGIN * drawn["1f1b"].plan.cost.iteration_time_s
    charts = plan_charts([case.plan for case in drawn.values()])
    for (name, case), chart in zip(drawn.items(), charts, strict=True):
        path = folder / f"{name}.png"
        caption, *more = chart.title.splitlines()
        lines = filter(None, (caption, _note(case, axis_s), *more))
        chart = replace(chart, title="\n".join(lines), x_range=(0.0, 1e3 * axis_s))
        save([chart], f"Order: {case.order}. Clocks: {case.clocks}.", path)
        # A palette: half the bytes, and a page of six pictures loads at once.
        with Image.open(path) as picture:
            picture.quantize(colors=_PALETTE).save(path, optimize=True)


def _note(case: Case, axis_s: float) -> str:
    if case.plan.cost.iteration_time_s > axis_s:
        return "cut at the right: the other microbatches follow in the same way"
    if case.plan.schedule.num_chunks > 1:
        return f"F3.1 is chunk 1 of microbatch 3, of which a stage has {CHUNKS}"
    return ""


def table(cases: Iterable[Case]) -> str:
    """The cases as a table in Markdown."""
    cases = list(cases)
    reference = next(case.plan.cost for case in cases if case.picture == "1f1b")
    rows = []
    for case in cases:
        cost = case.plan.cost
        cells = (
            case.order,
            case.clocks,
            f"{cost.iteration_time_s:.3f}",
            f"{case.bubble_percent:.1f}",
            ", ".join(f"{peak:g}" for peak in case.plan.schedule.microbatches_in_flight),
            f"{cost.energy_j:.0f}",
            f"{round(cost.saving_percent(reference), 1) + 0.0:.1f}",  # never -0.0
        )
        rows.append(cells)
    return markdown_table(_COLUMNS, rows, texts=(*_COLUMNS[:2], "peak in flight, by stage"))


if __name__ == "__main__":
    main()
