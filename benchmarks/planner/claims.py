"""What a comparison of planners says, one sentence for each point."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.claims import Claim
from benchmarks.outputs import span
from benchmarks.planner.plans import FRONTIER_POINTS, Comparison, PlanKind
from benchmarks.planner.workloads import PERSEUS_SAVED_PERCENT, WHAT_DIFFERS

FIGURE = "planner_compare"
COMMAND = "python benchmarks/planner/compare.py"
BASIS = "replay of measured A100 and A40 profiles, one evaluator for all plans"
#: The largest of the compared pipelines, whose planning times are claimed.
_MOST_MICROBATCHES = 96


def comparison_claims(comparisons: Sequence[Comparison], options: str = "") -> list[Claim]:
    """Say what comparisons show, which `options` of the command make."""
    claims = [
        *_saving_claims(comparisons),
        *_published_claims(comparisons),
        *_planning_claims(comparisons),
    ]
    return [replace(claim, command=f"{COMMAND} {options}".strip()) for claim in claims]


def _claim(
    claim: str, paper: str = "", agrees: bool | None = None, why: str = "", basis: str = BASIS
) -> Claim:
    return Claim(FIGURE, COMMAND, claim, basis, paper, agrees, why)


def _groups(comparisons: Sequence[Comparison]) -> list[tuple[str, list[Comparison]]]:
    """The emulated model and the measured ones, in words, where there are any."""
    named = (("GPT-3 175B on 8 stages", True), ("the models that were trained and measured", False))
    groups = [(name, [c for c in comparisons if c.workload.emulated == e]) for name, e in named]
    return [(name, some) for name, some in groups if some]


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
            _claim(
                f"On {name}, order and clocks planned together save {span(joint)} % with at most "
                f"{max(0.0, slower):.2f} % more time ({span(peaks[0], 0)} microbatches in "
                f"flight), EnvPipe in full {span(envpipe)} % ({span(peaks[1], 0)} in flight): "
                f"{span(lead)} points less",
            )
        )
    return claims


def _published_claims(comparisons: Sequence[Comparison]) -> list[Claim]:
    claims = []
    for name, some in _groups(comparisons):
        pairs = [
            (each.row(PlanKind.OURS_ON_1F1B).saving_percent, printed)
            for each in some
            if (printed := PERSEUS_SAVED_PERCENT.get(each.workload.key)) is not None
        ]
        if not pairs:
            continue
        ours, theirs = ([pair[side] for pair in pairs] for side in (0, 1))
        as_good = all(one >= other for one, other in pairs)
        claims.append(
            _claim(
                f"On {name}, in 1F1B's order alone the optimal policy saves {span(ours)} %",
                f"Perseus prints {span(theirs)} % for the same workloads",
                agrees=as_good,
                why="" if as_good else WHAT_DIFFERS,
            )
        )
    return claims


def _planning_claims(comparisons: Sequence[Comparison]) -> list[Claim]:
    gaps = [
        row.plan.gap_percent
        for c in comparisons
        for row in c.rows
        if row.kind is PlanKind.OURS_JOINT
    ]
    on_1f1b = [c.row(PlanKind.OURS_ON_1F1B).plan.gap_percent for c in comparisons]
    claims = [
        _claim(
            f"Joint plans lie {_known_span(gaps)} % above the lower bound of their order, plans on "
            f"1F1B {_known_span(on_1f1b)} %"
        )
    ]
    most = [c for c in comparisons if c.workload.num_microbatches == _MOST_MICROBATCHES]
    if most:
        plans, joint = (
            _known_span([comparison.row(kind).planning_time_s for comparison in most])
            for kind in (PlanKind.OURS_ON_1F1B, PlanKind.OURS_JOINT)
        )
        frontiers = span([f.planning_time_s for c in most for f in c.frontiers], 2)
        claims.append(
            _claim(
                f"Of 8 stages x {_MOST_MICROBATCHES} microbatches one plan on 1F1B takes {plans} "
                f"s, with the best order {joint} s, a frontier of {FRONTIER_POINTS} plans "
                f"{frontiers} s",
                "Perseus prints 87 s for a frontier of GPT-3 175B, 6.5 minutes on average",
                basis=f"{BASIS}; planned on this machine's CPU, busy or not",
            )
        )
    return claims


def _known_span(values: Sequence[float | None]) -> str:
    return span([value for value in values if value is not None], 2)
