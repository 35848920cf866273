"""The targets set for the planner, each with its worst figure over the compared workloads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from benchmarks.planner.plans_compared import (
    EXTRA_FORWARDS,
    FRONTIER_POINTS,
    UNIT_TIME_S,
    AtRivalTime,
    Comparison,
    PlanKind,
    Row,
)


@dataclass(frozen=True)
class Measured:
    """One figure that a target is about, and where it was found."""

    value: float
    where: str


@dataclass(frozen=True)
class Target:
    """A target and what was measured for it.

    Args:
        name: what is asked.
        unit: of figures and limit.
        limit: what a figure must reach.
        at_most: whether figures must be at most the limit; else at least.
        figures: one for each case that the target covers; a target without any is open.
    """

    name: str
    unit: str
    limit: float
    at_most: bool
    figures: tuple[Measured, ...]

    @property
    def asked(self) -> str:
        """The limit in words."""
        return f"{'<=' if self.at_most else '>='} {self.limit:g} {self.unit}"

    @property
    def worst(self) -> Measured | None:
        """The figure furthest on the wrong side."""
        if not self.figures:
            return None
        pick = max if self.at_most else min
        return pick(self.figures, key=lambda figure: figure.value)

    @property
    def missed(self) -> tuple[Measured, ...]:
        """The figures on the wrong side of the limit."""
        return tuple(
            figure
            for figure in self.figures
            if (figure.value > self.limit if self.at_most else figure.value < self.limit)
        )

    @property
    def verdict(self) -> str:
        """PASS, MISS, or a dash where nothing was measured."""
        if not self.figures:
            return "-"
        return "MISS" if self.missed else "PASS"


def planner_targets(comparisons: Sequence[Comparison]) -> list[Target]:
    """All targets, in the order they were set."""
    gpt3 = [comparison for comparison in comparisons if comparison.workload.emulated]
    at_8x96 = [c for c in gpt3 if c.workload.num_microbatches == 96]
    return [
        Target("gap to the bound, joint orders", "%", 0.3, True, _gaps(comparisons, _reordered)),
        *_gap_targets_on_1f1b(comparisons),
        Target(
            "1F1B against lowtime, energy at its realised time",
            "%",
            0.0,
            True,
            _at_rival_time(comparisons, PlanKind.LOWTIME),
        ),
        *_speed_targets(comparisons),
        Target(
            "joint against EnvPipe in full, at the all-maximum time",
            "points",
            0.0,
            False,
            _joint_lead(comparisons, None, PlanKind.ENVPIPE),
        ),
        Target(
            "joint against EnvPipe in full, energy at its realised time",
            "%",
            0.0,
            True,
            _at_rival_time(comparisons, PlanKind.ENVPIPE),
        ),
        Target(
            "joint against EnvPipe in full, GPT-3 175B at 24 and 96",
            "points",
            1.0,
            False,
            _joint_lead(
                [c for c in gpt3 if c.workload.num_microbatches in (24, 96)],
                None,
                PlanKind.ENVPIPE,
            ),
        ),
        Target(
            "joint with one extra forward against ours on 1F1B, GPT-3 175B",
            "points",
            1.5,
            False,
            _joint_lead(gpt3, 1, PlanKind.OURS_ON_1F1B),
        ),
        Target("one plan, 8 x 96", "s", 1.0, True, _planning_times(at_8x96, _on_1f1b)),
        Target("auto, 8 x 96", "s", 10.0, True, _planning_times(at_8x96, _joint)),
        Target(
            f"frontier of {FRONTIER_POINTS} points, 8 x 96",
            "s",
            15.0,
            True,
            tuple(
                Measured(frontier.planning_time_s, f"{c.workload.name}: {frontier.order}")
                for c in at_8x96
                for frontier in c.frontiers
            ),
        ),
    ]


def _gap_targets_on_1f1b(comparisons: Sequence[Comparison]) -> list[Target]:
    hard = [c for c in comparisons if c.workload.emulated and c.workload.gpu == "A40"]
    others = [c for c in comparisons if c not in hard]
    few = [c for c in hard if c.workload.num_microbatches <= 24]
    many = [c for c in hard if c.workload.num_microbatches > 24]
    return [
        Target(f"gap to the bound, 1F1B, {name}", "%", limit, True, _gaps(some, _on_1f1b))
        for name, limit, some in (
            ("A100 SXM and measured", 0.3, others),
            ("GPT-3 175B, A40, at 12-24", 0.8, few),
            ("GPT-3 175B, A40, at 48-96", 1.1, many),
        )
    ]


def _joint(comparison: Comparison) -> Iterable[Row]:
    return (comparison.row(PlanKind.OURS_JOINT, limit) for limit in EXTRA_FORWARDS)


def _reordered(comparison: Comparison) -> Iterable[Row]:
    """Joint plans with an order of their own: without extra forwards a plan is one on 1F1B."""
    return (row for row in _joint(comparison) if any(row.extra_forwards))


def _on_1f1b(comparison: Comparison) -> Iterable[Row]:
    return (comparison.row(PlanKind.OURS_ON_1F1B),)


RowsOf = Callable[[Comparison], Iterable[Row]]


def _gaps(comparisons: Iterable[Comparison], rows_of: RowsOf) -> tuple[Measured, ...]:
    return tuple(
        Measured(row.gap_percent, f"{comparison.workload.name}: {row.label}")
        for comparison in comparisons
        for row in rows_of(comparison)
        if row.gap_percent is not None
    )


def _planning_times(comparisons: Iterable[Comparison], rows_of: RowsOf) -> tuple[Measured, ...]:
    return tuple(
        Measured(row.planning_time_s, f"{comparison.workload.name}: {row.label}")
        for comparison in comparisons
        for row in rows_of(comparison)
        if row.planning_time_s is not None
    )


def _at_rival_time(comparisons: Iterable[Comparison], rival: PlanKind) -> tuple[Measured, ...]:
    pairs: Iterable[tuple[Comparison, AtRivalTime]] = (
        (comparison, pair)
        for comparison in comparisons
        for pair in comparison.at_rival_time
        if pair.rival.kind is rival
    )
    return tuple(
        Measured(
            pair.energy_percent if pair.in_time else float("inf"),
            f"{comparison.workload.name}: {pair.rival.label}",
        )
        for comparison, pair in pairs
    )


def _joint_lead(
    comparisons: Iterable[Comparison], max_extra_forwards: int | None, other: PlanKind
) -> tuple[Measured, ...]:
    return tuple(
        Measured(
            comparison.row(PlanKind.OURS_JOINT, max_extra_forwards).saving_percent
            - comparison.row(other).saving_percent,
            comparison.workload.name,
        )
        for comparison in comparisons
    )


def _speed_targets(comparisons: Sequence[Comparison]) -> list[Target]:
    """Both planners make plan and frontier of 1F1B; lowtime's one run makes both."""
    return [
        Target(
            f"{what} against lowtime's run, {name}",
            "times faster",
            limit,
            False,
            tuple(
                Measured(theirs_s / ours_s(comparison), comparison.workload.name)
                for comparison in comparisons
                if (theirs_s := pick(_lowtime_cpu_s(comparison))) is not None
            ),
        )
        for what, limit, ours_s in (
            ("one plan", 100.0, _plan_time_s),
            (f"frontier of {FRONTIER_POINTS} points", 10.0, _frontier_time_s),
        )
        for name, pick in (("its faster recipe", _faster_recipe), ("recipe zeus", _zeus_recipe))
    ]


def _plan_time_s(comparison: Comparison) -> float:
    time_s = comparison.row(PlanKind.OURS_ON_1F1B).planning_time_s
    assert time_s is not None
    return time_s


def _frontier_time_s(comparison: Comparison) -> float:
    (frontier,) = (f for f in comparison.frontiers if f.order == "1f1b")
    return frontier.planning_time_s


def _lowtime_cpu_s(comparison: Comparison) -> dict[str, float]:
    """CPU time of lowtime's run by recipe, at the default step of time.

    A run that ended at its limit would have taken longer: its limit is a lower bound.
    """
    return {
        str(row.recipe): row.planning_cpu_s
        for row in comparison.lowtime_rows
        if row.unit_time_s == UNIT_TIME_S
    }


def _faster_recipe(cpu_s: dict[str, float]) -> float | None:
    return min(cpu_s.values()) if len(cpu_s) > 1 else None


def _zeus_recipe(cpu_s: dict[str, float]) -> float | None:
    return cpu_s.get("zeus")
