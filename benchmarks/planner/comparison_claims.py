"""What a comparison of planners says, one sentence for each point."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from benchmarks.claims import Claim
from benchmarks.planner.plans_compared import FRONTIER_POINTS, Comparison, PlanKind, rival_pairs
from benchmarks.planner.published_savings import WHAT_DIFFERS, Published

FIGURE = "planner_compare"
COMMAND = "python benchmarks/planner/compare.py"
BASIS = "replay of measured A100 and A40 profiles, one evaluator for all plans"
#: The largest of the compared pipelines, by which planning times are told.
_MOST_MICROBATCHES = 96


def comparison_claims(
    comparisons: Sequence[Comparison], published: Sequence[Published], options: str = ""
) -> list[Claim]:
    """The claims of some comparisons, and of what was published for the same workloads.

    Args:
        comparisons: of plans, a workload each.
        published: of the same workloads.
        options: with which the command makes these very comparisons.
    """
    claims = [
        *_saving_claims(comparisons),
        *_lowtime_claims(comparisons),
        *_published_claims(comparisons, published),
        *_planning_claims(comparisons),
    ]
    return [replace(claim, command=f"{COMMAND} {options}".strip()) for claim in claims]


def _groups(comparisons: Sequence[Comparison]) -> list[tuple[str, list[Comparison]]]:
    """The emulated model and the measured ones, in words, where there are any."""
    named = (("GPT-3 175B on 8 stages", True), ("the models that were trained and measured", False))
    groups = [(name, [c for c in comparisons if c.workload.emulated == e]) for name, e in named]
    return [(name, some) for name, some in groups if some]


def _span(values: Sequence[float], digits: int = 1) -> str:
    low, high = (f"{round(value, digits) + 0.0:.{digits}f}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def _saved(comparisons: Sequence[Comparison], kind: PlanKind) -> list[float]:
    return [comparison.row(kind).saving_percent for comparison in comparisons]


def _saving_claims(comparisons: Sequence[Comparison]) -> list[Claim]:
    claims = []
    for name, some in _groups(comparisons):
        joint, envpipe = _saved(some, PlanKind.OURS_JOINT), _saved(some, PlanKind.ENVPIPE)
        lead = [ours - theirs for ours, theirs in zip(joint, envpipe, strict=True)]
        slower = max(c.row(PlanKind.OURS_JOINT).slowdown_percent for c in some)
        peaks = [
            [float(c.row(kind).peak_in_flight) for c in some]
            for kind in (PlanKind.OURS_JOINT, PlanKind.ENVPIPE)
        ]
        claims.append(
            Claim(
                FIGURE,
                COMMAND,
                f"On {name}, order and clocks planned together save {_span(joint)} % with at most "
                f"{max(0.0, slower):.2f} % more time ({_span(peaks[0], 0)} microbatches in "
                f"flight), EnvPipe in full {_span(envpipe)} % ({_span(peaks[1], 0)} in flight): "
                f"{_span(lead)} points less",
                BASIS,
            )
        )
    return claims


def _lowtime_claims(comparisons: Sequence[Comparison]) -> list[Claim]:
    """Against the plans of lowtime that are there, in their own time."""
    differences = [
        pair.energy_percent
        for _, pair in rival_pairs(comparisons)
        if pair.rival.kind is PlanKind.LOWTIME
    ]
    if not differences:
        return []
    return [
        Claim(
            FIGURE,
            COMMAND,
            f"On 1F1B, in the time that lowtime's plan really takes, the optimal policy needs "
            f"{_span([-value for value in differences], 2)} % less energy ({len(differences)} "
            "plans)",
            BASIS,
            "Perseus: its plans lie on the frontier of time and energy",
            agrees=max(differences) > 0,
            why="" if max(differences) > 0 else "lowtime fits exponentials and rounds times down.",
        )
    ]


def _published_claims(
    comparisons: Sequence[Comparison], published: Sequence[Published]
) -> list[Claim]:
    claims = []
    for name, some in _groups(comparisons):
        pairs = [
            (comparison.row(PlanKind.OURS_ON_1F1B).saving_percent, known.perseus.saving_percent)
            for comparison, known in zip(comparisons, published, strict=True)
            if comparison in some and known.perseus is not None
        ]
        if not pairs:
            continue
        ours, theirs = ([pair[side] for pair in pairs] for side in (0, 1))
        as_good = all(one >= other for one, other in pairs)
        claims.append(
            Claim(
                FIGURE,
                COMMAND,
                f"On {name}, in 1F1B's order alone the optimal policy saves {_span(ours)} %",
                BASIS,
                f"Perseus prints {_span(theirs)} % for the same workloads",
                agrees=as_good,
                why="" if as_good else WHAT_DIFFERS,
            )
        )
    return claims


def _planning_claims(comparisons: Sequence[Comparison]) -> list[Claim]:
    most = [c for c in comparisons if c.workload.num_microbatches == _MOST_MICROBATCHES]
    claims = []
    gaps = [
        row.gap_percent for c in comparisons for row in c.rows if row.kind is PlanKind.OURS_JOINT
    ]
    on_1f1b = [c.row(PlanKind.OURS_ON_1F1B).gap_percent for c in comparisons]
    claims.append(
        Claim(
            FIGURE,
            COMMAND,
            f"Joint plans lie {_known_span(gaps)} % above the lower bound of their order, plans on "
            f"1F1B {_known_span(on_1f1b)} %",
            BASIS,
        )
    )
    if most:
        time_of: Callable[[PlanKind], list[float | None]] = lambda kind: [  # noqa: E731
            comparison.row(kind).planning_time_s for comparison in most
        ]
        frontiers: list[float | None] = [f.planning_time_s for c in most for f in c.frontiers]
        claims.append(
            Claim(
                FIGURE,
                COMMAND,
                f"Of 8 stages x {_MOST_MICROBATCHES} microbatches one plan on 1F1B takes "
                f"{_known_span(time_of(PlanKind.OURS_ON_1F1B))} s, with the best order "
                f"{_known_span(time_of(PlanKind.OURS_JOINT))} s, a frontier of {FRONTIER_POINTS} "
                f"plans {_known_span(frontiers)} s",
                f"{BASIS}; planned on this machine's CPU, busy or not",
                "Perseus prints 87 s for a frontier of GPT-3 175B, 6.5 minutes on average",
            )
        )
    return claims


def _known_span(values: Sequence[float | None]) -> str:
    return _span([value for value in values if value is not None], 2)
