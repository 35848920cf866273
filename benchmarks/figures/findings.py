"""What each figure shows, in sentences with its numbers, beside what the paper says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import groupby, pairwise

from claims import Claim

from figures.experiments import BALANCED, ENVELOPE, GREEDY, MODELS, UNIFORM, Experiment
from figures.followups import why_few_save_less
from figures.outcome import DRY_RUN, NO_CONTROL
from figures.rows import Row, of_setting, savers

#: What the paper allows, and so counts as none (%).
_NO_SLOWDOWN_PERCENT = 1.0
#: Savings closer than this are equal (percentage points): the energy meter tells no finer.
_EQUAL_POINTS = 0.5

_ONE_NODE = "saves up to 25.2 % on one node of four GPUs, less than 1 % slower"
_TWO_NODES = "saves up to 28.4 % on 16 GPUs, less than 1 % slower"


def claims_of(experiment: Experiment, rows: list[Row], command: str) -> list[Claim]:
    """All claims of one figure; the last is that training was the same."""
    say = _CLAIMS[experiment.name]
    basis = " and ".join(dict.fromkeys(row.hardware for row in rows))
    meaningless = any(row.result.control in (DRY_RUN, NO_CONTROL) for row in rows)
    found = [
        Claim(
            experiment.name,
            command,
            sentence,
            basis,
            paper,
            None if meaningless else agrees,
            "" if agrees or meaningless else why,
        )
        for sentence, paper, agrees, why in say(rows)
    ]
    compared = savers(rows)
    same = sum(row.losses_equal for row in compared)
    return [
        *found,
        Claim(
            experiment.name,
            command,
            f"All losses of {same} of {len(compared)} runs are the baseline's to the last bit",
            basis,
            "accuracy is preserved",
            same == len(compared),
        ),
    ]


#: A sentence, what the paper says, whether both agree, and why they do not.
_Said = tuple[str, str, bool, str]

_MAGNITUDE = "Time and power of these emulated GPUs are guesses, so only directions compare."


def _savings(paper: str) -> Callable[[list[Row]], Iterator[_Said]]:
    def say(rows: list[Row]) -> Iterator[_Said]:
        balanced = of_setting(rows, BALANCED)
        slowest = max(row.slowdown_percent for row in balanced)
        least = min(row.saving_percent for row in balanced)
        yield (
            f"EnvPipe saves {_each(balanced)}, at most {slowest:+.2f} % slower",
            paper,
            slowest < _NO_SLOWDOWN_PERCENT and least > 0,
            _MAGNITUDE,
        )

    return say


def _parts(rows: list[Row]) -> Iterator[_Said]:
    for _, some in _by_model(rows):
        uniform, envelope, balanced = (
            of_setting(some, setting)[0] for setting in (UNIFORM, ENVELOPE, BALANCED)
        )
        label = MODELS[uniform.job.model].label
        slower = [row.slowdown_percent for row in (uniform, envelope, balanced)]
        yield (
            f"{label}: uniform saves {uniform.saving_percent:.1f} % and is {slower[0]:.1f} % "
            f"slower; EnvPipe's order and envelope {envelope.saving_percent:.1f} %, "
            f"{slower[1]:.1f} % slower; balanced {balanced.saving_percent:.1f} %, "
            f"{slower[2]:+.2f} %",
            "uniform slows down, the envelope less, and reconfiguring brings the time back",
            slower[0] > slower[1] >= slower[2] and slower[2] < _NO_SLOWDOWN_PERCENT,
            "",
        )


def _greedy(rows: list[Row]) -> Iterator[_Said]:
    pairs = list(zip(of_setting(rows, BALANCED), of_setting(rows, GREEDY), strict=True))
    sentence = "; ".join(
        f"{MODELS[b.job.model].label} {b.saving_percent:.1f} against {g.saving_percent:.1f} %"
        for b, g in pairs
    )
    yield (
        f"Balanced saves, against greedy: {sentence}",
        "balanced saves at least as much as greedy",
        all(b.saving_percent >= g.saving_percent - _EQUAL_POINTS for b, g in pairs),
        "",
    )


def _microbatches(rows: list[Row]) -> Iterator[_Said]:
    for _, some in _by_model(of_setting(rows, BALANCED)):
        by_count = sorted(some, key=lambda row: row.job.num_microbatches)
        counts = [row.job.num_microbatches for row in by_count]
        profile = by_count[0].profile
        sentence = ", ".join(
            f"{row.saving_percent:.1f} % with M = {row.job.num_microbatches}" for row in by_count
        )
        falls = all(
            less.saving_percent >= more.saving_percent - _EQUAL_POINTS
            for less, more in pairwise(by_count)
        )
        yield (
            f"{MODELS[some[0].job.model].label} saves {sentence}",
            "the fewer microbatches, the larger the bubbles and the saving",
            falls,
            "" if falls or profile is None else why_few_save_less(profile, counts),
        )


def _by_model(rows: Iterable[Row]) -> Iterator[tuple[str, list[Row]]]:
    for model, some in groupby(rows, key=lambda row: row.job.model):
        yield model, list(some)


def _each(rows: Iterable[Row]) -> str:
    return ", ".join(f"{row.saving_percent:.1f} % ({_name(row)})" for row in rows)


def _name(row: Row) -> str:
    label = MODELS[row.job.model].label
    several = row.job.replicas > 1
    return f"{label}, DP{row.job.replicas} PP{row.job.stages}" if several else label


_CLAIMS: dict[str, Callable[[list[Row]], Iterator[_Said]]] = {
    "fig9_a": _savings(_ONE_NODE),
    "fig9_b": _savings(_ONE_NODE),
    "fig10": _parts,
    "fig11": _greedy,
    "fig12": _savings(_TWO_NODES),
    "fig13": _microbatches,
}
