"""What each figure shows, in sentences with its numbers, beside what the paper's abstract says.

What else is `expected` follows from the paper's method.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, groupby, pairwise
from pathlib import Path

from benchmarks.figures.experiments import BALANCED, ENVELOPE, GREEDY, MODELS, UNIFORM, Experiment
from benchmarks.figures.rows import DRY_RUN, NO_CONTROL, Row, of_setting, savers, saving_difference
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.plan import NORMAL_95
from envpipe_megatron.core.profile import Profile, read_profile
from envpipe_megatron.policies.planner import make_plan
from envpipe_megatron.policies.request import PlanRequest

#: What the paper allows, and so counts as none (%).
_NO_SLOWDOWN_PERCENT = 1.0

_ONE_NODE = "up to 25.2 % on one node of four GPUs"
_TWO_NODES = "up to 28.4 % on two nodes, 16 GPUs"


@dataclass(frozen=True)
class Finding:
    """One thing that a figure shows.

    Args:
        seen: one sentence with figures.
        paper: what the paper says of the same, or what is expected.
        agrees: whether both agree; None where there is nothing to agree with.
        why: where they do not: why.
    """

    seen: str
    paper: str
    agrees: bool | None
    why: str = ""

    def columns(self) -> dict[str, str]:
        """Return the columns of its row of evidence."""
        verdict = {True: "agrees", False: "contradicts", None: "not compared"}[self.agrees]
        return {"seen": self.seen, "paper": self.paper, "why": self.why, "verdict": verdict}


def findings_of(experiment: Experiment, rows: list[Row]) -> list[Finding]:
    """Return all findings of one figure; the last is that training was the same."""
    return [*_FINDINGS[experiment.name](rows), _losses(rows)]


def _savings_mean_something(rows: Iterable[Row]) -> bool:
    return not any(row.result.control in (DRY_RUN, NO_CONTROL) for row in rows)


def _losses(rows: list[Row]) -> Finding:
    compared = savers(rows)
    same = sum(row.losses_equal for row in compared)
    return Finding(
        f"All losses of {same} of {len(compared)} runs are the baseline's to the last bit",
        "accuracy is preserved",
        same == len(compared),
    )


_EMULATED_MAGNITUDE = (
    "Time and power of these emulated GPUs are guesses, so only directions compare."
)
_REAL_MAGNITUDE = "How much can be saved is another on each GPU, so only directions compare."


def _savings(paper: str) -> Callable[[list[Row]], Iterator[Finding]]:
    def say(rows: list[Row]) -> Iterator[Finding]:
        balanced = of_setting(rows, BALANCED)
        meaningful = _savings_mean_something(rows)
        slowest = max(row.slowdown_percent for row in balanced)
        yield Finding(
            f"EnvPipe is at most {slowest:+.2f} % slower",
            "less than 1 % slower",
            slowest < _NO_SLOWDOWN_PERCENT if meaningful else None,
        )
        sentence = ", ".join(f"{_percent(row)} ({_name(row)})" for row in balanced)
        magnitude = _EMULATED_MAGNITUDE if rows[0].emulated else _REAL_MAGNITUDE
        lost = meaningful and any(row.saving_percent <= 0 for row in balanced)
        yield Finding(
            f"EnvPipe saves {sentence}",
            paper,
            False if lost else None,
            magnitude if meaningful else "",
        )

    return say


def _parts(rows: list[Row]) -> Iterator[Finding]:
    for label, some in _by_model(rows):
        parts = [of_setting(some, setting)[0] for setting in (UNIFORM, ENVELOPE, BALANCED)]
        slower = [row.slowdown_percent for row in parts]
        saved = [_percent(row) for row in parts]
        in_order = slower[0] > slower[1] >= slower[2] and slower[2] < _NO_SLOWDOWN_PERCENT
        yield Finding(
            f"{label}: uniform saves {saved[0]} and is {slower[0]:.1f} % slower; EnvPipe's order "
            f"and envelope {saved[1]}, {slower[1]:.1f} % slower; balanced {saved[2]}, "
            f"{slower[2]:+.2f} %",
            "expected: uniform slows down, the envelope less, and reconfiguring restores the time",
            in_order if _savings_mean_something(some) else None,
        )


def _greedy(rows: list[Row]) -> Iterator[Finding]:
    pairs = list(zip(of_setting(rows, BALANCED), of_setting(rows, GREEDY), strict=True))
    worse = any(_saves_less(balanced, greedy) for balanced, greedy in pairs)
    yield Finding(
        "Balanced saves, against greedy: " + "; ".join(_against(*pair) for pair in pairs),
        "expected: balanced saves at least as much as greedy",
        not worse if _savings_mean_something(rows) else None,
    )


def _against(balanced: Row, greedy: Row) -> str:
    label = MODELS[balanced.job.model].label
    more, error = saving_difference(balanced, greedy)
    sentence = (
        f"{label} {balanced.saving_percent:.1f} against {greedy.saving_percent:.1f} %, "
        f"{more:+.1f} ± {NORMAL_95 * error:.1f} points"
    )
    if balanced.result.reconfigure_steps == greedy.result.reconfigure_steps == 0:
        return f"{sentence} (neither needed a step)"
    return sentence


def _microbatches(rows: list[Row]) -> Iterator[Finding]:
    for label, some in _by_model(rows):
        by_count = sorted(of_setting(some, BALANCED), key=lambda row: row.job.num_microbatches)
        sentence = ", ".join(
            f"{_percent(row)} with M = {row.job.num_microbatches}" for row in by_count
        )
        agrees, why = None, ""
        if _savings_mean_something(some):
            agrees, why = _falls_with_microbatches(by_count)
        yield Finding(
            f"{label} saves {sentence}",
            "expected: the fewer microbatches, the larger the bubbles and the saving",
            agrees,
            why,
        )


def _falls_with_microbatches(by_count: list[Row]) -> tuple[bool | None, str]:
    """Whether savings fall, as far as the meters can tell them apart; else why not."""
    if any(_saves_less(few, many) for few, many in combinations(by_count, 2)):
        return False, _why_they_rise(by_count)
    if _saves_less(by_count[-1], by_count[0]):
        return True, ""
    told = [
        f"M = {few.job.num_microbatches} from {many.job.num_microbatches}"
        for few, many in combinations(by_count, 2)
        if _saves_less(many, few)
    ]
    apart = f"tell only {' and '.join(told)} apart" if told else "cannot tell these savings apart"
    finer = "; longer units (--forward-ms) tell finer" if by_count[0].emulated else ""
    why = f"The meters {apart}{finer}."
    falls = all(few.saving_percent >= many.saving_percent for few, many in pairwise(by_count))
    return None, why if falls else f"{why} {_why_they_rise(by_count)}"


def _why_they_rise(by_count: list[Row]) -> str:
    profile = by_count[0].profile
    if profile is None:
        return "Its profile is gone, so the reason is unknown."
    return why_few_save_less(profile, [row.job.num_microbatches for row in by_count])


def _saves_less(row: Row, other: Row) -> bool:
    """Whether a run saves less than another at 95 % confidence."""
    difference, error = saving_difference(row, other)
    return difference < -NORMAL_95 * error


def _by_model(rows: Iterable[Row]) -> Iterator[tuple[str, list[Row]]]:
    for model, some in groupby(rows, key=lambda row: row.job.model):
        yield MODELS[model].label, list(some)


def _percent(row: Row) -> str:
    return f"{row.saving_percent:.1f} ± {NORMAL_95 * row.saving_uncertainty_percent:.1f} %"


def _name(row: Row) -> str:
    label = MODELS[row.job.model].label
    several = row.job.replicas > 1
    return f"{label}, DP{row.job.replicas} PP{row.job.stages}" if several else label


_FINDINGS: dict[str, Callable[[list[Row]], Iterator[Finding]]] = {
    "fig9_a": _savings(_ONE_NODE),
    "fig9_b": _savings(_ONE_NODE),
    "fig10": _parts,
    "fig11": _greedy,
    "fig12": _savings(_TWO_NODES),
    "fig13": _microbatches,
}


#: Stages whose longest pair of units is this much longer than the shortest differ.
_UNEQUAL = 1.1


def why_few_save_less(profile_file: Path, counts: Sequence[int]) -> str:
    """Why fewer microbatches save less: for each number of them, what stays at full clock."""
    profile = read_profile(profile_file)
    on_envelope = _listed([_envelope_percent(profile.num_stages, count) for count in counts], 0)
    best = _listed([_best_saving_percent(profile, count) for count in counts], 1)
    slack = "; stages that differ have slack in every microbatch" if _stages_differ(profile) else ""
    return (
        f"With M = {_listed(counts, 0)} the outer envelope, which stays at full clock, holds "
        f"{on_envelope} % of the units{slack}. From the same profile, the planner's best order and "
        f"clocks save {best} %."
    )


def _listed(numbers: Sequence[float], decimals: int) -> str:
    return ", ".join(f"{number:.{decimals}f}" for number in numbers)


def _envelope_percent(num_stages: int, num_microbatches: int) -> float:
    schedule = builders.one_f_one_b(num_stages, num_microbatches)
    return 100 * float(schedule.outer_envelope.mean())


def _best_saving_percent(profile: Profile, num_microbatches: int) -> float:
    """At the time of 1F1B at full clock."""
    curves = profile.sidecar.wait_power_w or ({0: 0.0},) * profile.num_stages
    powers = tuple(curve[max(curve)] for curve in curves)
    request = PlanRequest(num_microbatches, "auto", "optimal", blocking_power_w=powers)
    plan = make_plan(profile, request).plan
    return plan.cost.saving_percent(plan.baseline.cost)


def _stages_differ(profile: Profile) -> bool:
    pairs_s = [
        sum(max(rows, key=lambda row: row.frequency_mhz).time_s for rows in kinds.values())
        for kinds in profile.rows
    ]
    return max(pairs_s) > _UNEQUAL * min(pairs_s)
