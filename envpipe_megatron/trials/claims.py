"""Claims of a proof, with intervals: from what the ranks reported, nothing else.

A round has one turn of each arm. An arm is compared with another's turn of the same round, so that
what drifts over rounds (heat, above all) falls out; the interval of 95 % is that of Student's t of
these differences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from envpipe_megatron.core.plan import NORMAL_95
from envpipe_megatron.formats.steps import RunningMean, in_words
from envpipe_megatron.trials.settings import CONSTANT, Arm

#: An arm that is slower by less is as fast.
FAST_PERCENT = 1.0

Turns = Sequence[Mapping[str, Any]]

#: Claims on an arm against the first, or the one that is named, by the arm's name and what differs.
_COMPARED = {
    "relock_slowdown": f"calls that lock the same clock at every unit cost less than "
    f"{FAST_PERCENT:g} % of time",
    "constant_saving": "the constant clock takes less energy",
    "constant_slowdown": "the constant clock is slower than stock",
    "constant_slower_than_optimal": "the constant clock, which should take about as much energy, "
    "is slower than optimal",
    "envelope_saving": "envelope takes less energy",
    "envelope_slowdown": f"envelope is less than {FAST_PERCENT:g} % slower",
    "optimal_saving": "optimal takes less energy",
    "optimal_slowdown": f"optimal is less than {FAST_PERCENT:g} % slower",
    "1f1b_slowdown": f"1F1B by EnvPipe's interpreter costs less than {FAST_PERCENT:g} % of time",
    "whole_saving": "the best order of whole backwards takes less energy",
    "whole_speedup": "the best order of whole backwards takes less time",
    "split_saving": "the best order, with split backwards, takes less energy",
    "split_speedup": "the best order, with split backwards, takes less time",
    "envpipe_saving": "order and clocks in a closed loop take less energy",
    "envpipe_slowdown": f"they are less than {FAST_PERCENT:g} % slower",
}
#: Which figure differs, and with which sign that is meant.
_SIGNS = {"saving": (-1, "energy_j"), "speedup": (-1, "time_s"), "slowdown": (1, "time_s")}


@dataclass(frozen=True)
class Claim:
    """One thing that a proof shows, or does not.

    Args:
        name: what a program looks for; stays the same from version to version.
        interval: of 95 %; None of a single figure.
        holds: None where it is not shown: `says` has why.
        says: the claim in words.
    """

    name: str
    value: float | None
    interval: tuple[float, float] | None
    unit: str
    holds: bool | None
    says: str

    @property
    def half(self) -> float | None:
        """Half of the interval."""
        return None if self.interval is None else (self.interval[1] - self.interval[0]) / 2

    @property
    def shown(self) -> str:
        """The value, for people."""
        if self.value is None:
            return "not known"
        half = "" if self.half is None else f" +- {self.half:.2f}"
        return f"{self.value:{'z.2f' if self.unit == '%' else '.4g'}}{half} {self.unit}"

    @property
    def takes(self) -> str:
        """Say how an arm compares with stock; empty if that is not known, or not claimed."""
        which = self.name.partition("_")[2]
        if self.value is None or which not in _SIGNS:
            return ""
        sign, key = _SIGNS[which]
        return in_words(sign * self.value, self.half, key.partition("_")[0])


def difference(
    turns: Turns, arm: str, other: str, which: str
) -> tuple[float | None, tuple[float, float] | None]:
    """Return the mean of one of `_SIGNS`, of an arm against another, in percent, and its interval.

    Nothing is known of arms without a common round, and no interval of a single one.
    """
    sign, key = _SIGNS[which]
    known = {
        (turn["arm"], turn["round"]): turn["step"][key]
        for turn in turns
        if turn["step"] is not None and turn["step"][key] is not None
    }
    mean = RunningMean()
    for name, number in known:
        if name == arm and (other, number) in known:
            mean.add(sign * 100 * (known[arm, number] / known[other, number] - 1))
    if mean.uncertainty is None:
        return (mean.mean if mean.count else None), None
    half = NORMAL_95 * mean.uncertainty
    return mean.mean, (mean.mean - half, mean.mean + half)


def claims_of(
    turns: Turns,
    arms: Sequence[Arm],
    latency: Sequence[Mapping[str, Any]] | None,
    *,
    emulated: bool,
) -> list[Claim]:
    """Return all claims on arms, from the turns so far.

    Args:
        turns: as ranks report them.
        arms: of each round.
        latency: of each GPU, as `measure_latency` gives it; None if it was not measured.
        emulated: whether GPUs follow a model.
    """
    mark, names = "emulated: " if emulated else "", {arm.name for arm in arms}
    claims = [_latency_claim(latency, mark)] if any(arm.relock for arm in arms) else []
    claims += _equal_claims(turns, len(arms), mark)
    for name, says in _COMPARED.items():
        arm, _, which = name.partition("_")
        if arm not in names:
            continue
        other = arms[0].name
        if which not in _SIGNS:
            which, other = "slowdown", which.removeprefix("slower_than_")
        value, interval = difference(turns, arm, other, which)
        failed = _failure(turns, arm) or _failure(turns, other)
        why, holds = "", None
        if failed:
            why = f"not shown: a turn did not run as planned: {failed}"
            value = interval = None
        elif interval is None:
            why = f"not shown: it takes two metered rounds of {arm} and {other}"
        else:
            fast = which == "slowdown" and arm != CONSTANT.name
            holds = interval[1] < FAST_PERCENT if fast else interval[0] > 0
        claims.append(Claim(name, value, interval, "%", holds, why or mark + says))
    return claims


def _failure(turns: Turns, arm: str) -> str:
    """Return what went wrong in a turn of an arm; empty if nothing did."""
    of_arm = [turn for turn in turns if turn["arm"] == arm]
    errors = [stage["clocks"]["error"] for turn in of_arm for stage in turn["stages"]]
    return next(filter(None, [*(turn["failure"] for turn in of_arm), *errors]), "")


def _latency_claim(latency: Sequence[Mapping[str, Any]] | None, mark: str) -> Claim:
    name, unit = "clock_change", "s"
    if latency is None:
        return Claim(name, None, None, unit, None, "not shown: it was not measured")
    settled_s = [gpu["frequency_change_s"] for gpu in latency]
    if None in settled_s:
        text = "a change of clock shows in the time of kernels on every GPU"
        return Claim(name, None, None, unit, False, mark + text)
    text = "kernels take the new clock's time so long after a change, on the slowest GPU"
    return Claim(name, max(settled_s), None, unit, True, mark + text)


def equality(turns: Turns) -> tuple[int, bool, bool]:
    """Compare turns: steps that all made, and if their losses and final weights have equal bits."""
    losses = [turn["losses"] for turn in turns]
    weights = [[stage["weights_sha256"] for stage in turn["stages"]] for turn in turns]
    steps = min(map(len, losses))
    same_losses = all(one[:steps] == losses[0][:steps] for one in losses)
    return steps, same_losses, all(one == weights[0] for one in weights)


def _equal_claims(turns: Turns, num_arms: int, mark: str) -> list[Claim]:
    """Claim that all turns trained alike: losses of the same step, and weights at the end."""
    compared = {
        "losses_equal": "losses of every microbatch",
        "weights_equal": "weights after the last step",
    }
    if len({turn["arm"] for turn in turns}) < num_arms:
        says = "not shown: some arms have not trained"
        return [Claim(name, None, None, "steps", None, says) for name in compared]
    steps, *equal = equality(turns)
    says = f"of all {len(turns)} turns, are equal to the last bit"
    if split := dict.fromkeys(turn["arm"] for turn in turns if turn.get("split")):
        says += f"; backwards are split in {', '.join(split)}"
    return [
        Claim(name, steps, None, "steps", holds, f"{mark}{what}, {says}")
        for (name, what), holds in zip(compared.items(), equal, strict=True)
    ]
