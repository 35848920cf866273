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
from envpipe_megatron.formats.steps import RunningMean
from envpipe_megatron.trials.settings import ARMS, CONSTANT, ENVELOPE, OPTIMAL, RELOCK, STOCK

#: An arm that is slower by less is as fast.
FAST_PERCENT = 1.0

Turns = Sequence[Mapping[str, Any]]

#: Claims on two arms: by name, the arm, the other, and in words. What differs is in the name.
_COMPARED = {
    "relock_slowdown": (
        RELOCK, STOCK,
        f"calls that lock the same clock at every unit cost less than {FAST_PERCENT:g} % of time",
    ),
    "envelope_saving": (ENVELOPE, STOCK, "envelope takes less energy"),
    "envelope_slowdown": (ENVELOPE, STOCK, f"envelope is less than {FAST_PERCENT:g} % slower"),
    "optimal_saving": (OPTIMAL, STOCK, "optimal takes less energy"),
    "optimal_slowdown": (OPTIMAL, STOCK, f"optimal is less than {FAST_PERCENT:g} % slower"),
    "constant_saving": (CONSTANT, STOCK, "the constant clock takes less energy"),
    "constant_slowdown": (CONSTANT, STOCK, "the constant clock is slower than stock"),
    "constant_slower_than_optimal": (
        CONSTANT, OPTIMAL,
        "the constant clock, which should take about as much energy, is slower than optimal",
    ),
}  # fmt: skip


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
    def shown(self) -> str:
        """The value, for people."""
        if self.value is None:
            return "not known"
        if self.interval is None:
            return f"{self.value:.4g} {self.unit}"
        return f"{self.value:.2f} +- {(self.interval[1] - self.interval[0]) / 2:.2f} {self.unit}"


def difference(
    turns: Turns, arm: str, other: str, which: str
) -> tuple[float | None, tuple[float, float] | None]:
    """Return mean `saving` or `slowdown` of an arm against another, in percent, and its interval.

    Nothing is known of arms without a common round, and no interval of a single one.
    """
    sign, key = (-1, "energy_j") if which == "saving" else (1, "time_s")
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
    turns: Turns, latency: Sequence[Mapping[str, Any]] | None, *, missing: str, emulated: bool
) -> list[Claim]:
    """Return all claims, from the turns so far.

    Args:
        turns: as ranks report them.
        latency: of each GPU, as `measure_latency` gives it; None if it was not measured.
        missing: why no clock was changed; empty if clocks were.
        emulated: whether GPUs follow a model.
    """
    mark = "emulated: " if emulated else ""
    unchanged = "not shown: clocks were not changed" if missing else ""
    claims = [_latency_claim(latency, unchanged, mark), *_equal_claims(turns, mark)]
    compared = () if missing else turns  # what differs at equal clocks is chance
    for name, (arm, other, says) in _COMPARED.items():
        which = "saving" if name.endswith("saving") else "slowdown"
        value, interval = difference(compared, arm.name, other.name, which)
        failed = _failure(turns, arm.name) or _failure(turns, other.name)
        why, holds = unchanged, None
        if failed:
            why = why or f"not shown: a turn did not run as planned: {failed}"
        elif interval is None:
            why = why or f"not shown: it takes two metered rounds of {arm.name} and {other.name}"
        elif not why:
            fast = which == "slowdown" and arm is not CONSTANT
            holds = interval[1] < FAST_PERCENT if fast else interval[0] > 0
        claims.append(Claim(name, value, interval, "%", holds, why or mark + says))
    return claims


def _failure(turns: Turns, arm: str) -> str:
    """Return what went wrong in a turn of an arm; empty if nothing did."""
    of_arm = [turn for turn in turns if turn["arm"] == arm]
    errors = [stage["clocks"]["error"] for turn in of_arm for stage in turn["stages"]]
    return next(filter(None, [*(turn["failure"] for turn in of_arm), *errors]), "")


def _latency_claim(latency: Sequence[Mapping[str, Any]] | None, unchanged: str, mark: str) -> Claim:
    name, unit = "clock_change", "s"
    if unchanged or latency is None:
        return Claim(name, None, None, unit, None, unchanged or "not shown: it was not measured")
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


def _equal_claims(turns: Turns, mark: str) -> list[Claim]:
    """Claim that all turns trained alike: losses of the same step, and weights at the end."""
    compared = {
        "losses_equal": "losses of every microbatch",
        "weights_equal": "weights behind the last step",
    }
    if len({turn["arm"] for turn in turns}) < len(ARMS):
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
