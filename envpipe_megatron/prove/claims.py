"""What a proof shows, as claims with intervals: from what the ranks told, nothing else.

A round has one turn of each arm. An arm is compared with the stock turn of the same round, so that
what drifts over rounds (heat, above all) falls out; the interval of 95 % is that of Student's t of
these differences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from envpipe_megatron.core.uncertainty import NORMAL_95
from envpipe_megatron.prove.arms import ARMS, CONSTANT, ENVELOPE, OPTIMAL, RELOCK, STOCK
from envpipe_megatron.runtime.energy.steps import RunningMean

#: An arm that is slower by less is as fast.
FAST_PERCENT = 1.0


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
        half = (self.interval[1] - self.interval[0]) / 2
        return f"{self.value:.2f} +- {half:.2f} {self.unit}"


@dataclass(frozen=True)
class Difference:
    """By how much an arm differs from stock, over rounds; intervals are None of a single round."""

    saving: tuple[float, tuple[float, float] | None]
    slowdown: tuple[float, tuple[float, float] | None]


Turns = Sequence[Mapping[str, Any]]


def difference(turns: Turns, arm: str, other: str = STOCK.name) -> Difference | None:
    """Saving and slowdown of an arm against another's, in percent; None without a common round."""
    steps = {
        (turn["arm"], turn["round"]): turn["step"]
        for turn in turns
        if turn["step"] is not None and turn["step"]["energy_j"] is not None
    }
    rounds = [number for name, number in steps if name == arm and (other, number) in steps]
    if not rounds:
        return None
    pairs = [(steps[arm, number], steps[other, number]) for number in rounds]
    return Difference(
        _mean_percent([100 * (1 - own["energy_j"] / base["energy_j"]) for own, base in pairs]),
        _mean_percent([100 * (own["time_s"] / base["time_s"] - 1) for own, base in pairs]),
    )


def _mean_percent(values: Sequence[float]) -> tuple[float, tuple[float, float] | None]:
    mean = RunningMean()
    for value in values:
        mean.add(value)
    if mean.uncertainty is None:
        return mean.mean, None
    half = NORMAL_95 * mean.uncertainty
    return mean.mean, (mean.mean - half, mean.mean + half)


def claims_of(
    turns: Turns, latency: Sequence[Mapping[str, Any]] | None, *, missing: str, emulated: bool
) -> list[Claim]:
    """All claims, from the turns so far.

    Args:
        turns: as ranks told them.
        latency: of each GPU, as `measure_latency` gives it; None if it was not measured.
        missing: why no clock was changed; empty if clocks were.
        emulated: whether GPUs follow a model.
    """
    mark = "emulated: " if emulated else ""

    def compared(
        name: str,
        arm: str,
        which: str,
        holds: Callable[[tuple[float, float]], bool],
        says: str,
        other: str = STOCK.name,
    ) -> Claim:
        found = difference(turns, arm, other)
        value, interval = (None, None) if found is None else getattr(found, which)
        known, text = None, mark + says
        failed = _control_errors(turns, arm)
        if missing:
            text = f"not shown: clocks were not changed ({missing})"
        elif failed:
            text = f"not shown: clock control ended in a turn of {arm}: {failed}"
        elif interval is None:
            text = f"not shown: it takes two rounds of {arm} and {other}"
        else:
            known = holds(interval)
        return Claim(name, value, interval, "%", known, text)

    def above_zero(interval: tuple[float, float]) -> bool:
        return interval[0] > 0

    def fast(interval: tuple[float, float]) -> bool:
        return interval[1] < FAST_PERCENT

    claims = [_latency_claim(latency, missing, mark), *_equal_claims(turns, mark)]
    says = f"calls that lock the same clock at every unit cost less than {FAST_PERCENT:g} % of time"
    claims.append(compared("relock_slowdown", RELOCK.name, "slowdown", fast, says))
    for arm in (ENVELOPE, OPTIMAL):
        name = arm.name
        claims.append(
            compared(f"{name}_saving", name, "saving", above_zero, f"{name} takes less energy")
        )
        says = f"{name} is less than {FAST_PERCENT:g} % slower"
        claims.append(compared(f"{name}_slowdown", name, "slowdown", fast, says))
    constant = CONSTANT.name
    says = "the constant clock takes less energy"
    claims.append(compared("constant_saving", constant, "saving", above_zero, says))
    says = "the constant clock is slower than stock"
    claims.append(compared("constant_slowdown", constant, "slowdown", above_zero, says))
    says = "the constant clock, which should take about as much energy, is slower than optimal"
    name = "constant_slower_than_optimal"
    claims.append(compared(name, constant, "slowdown", above_zero, says, other=OPTIMAL.name))
    return claims


def _control_errors(turns: Turns, arm: str) -> str:
    errors = (
        stage["clocks"]["error"]
        for turn in turns
        if turn["arm"] == arm
        for stage in turn["stages"]
        if stage["clocks"]["error"]
    )
    return next(errors, "")


def _latency_claim(latency: Sequence[Mapping[str, Any]] | None, missing: str, mark: str) -> Claim:
    name, unit = "clock_change", "s"
    if missing:
        text = f"not shown: clocks were not changed ({missing})"
        return Claim(name, None, None, unit, None, text)
    if latency is None:
        return Claim(name, None, None, unit, None, "not shown: it was not measured")
    settled_s = [gpu["frequency_change_s"] for gpu in latency]
    if None in settled_s:
        text = "a change of clock shows in the time of kernels on every GPU"
        return Claim(name, None, None, unit, False, mark + text)
    text = "kernels take the new clock's time so long after a change, on the slowest GPU"
    return Claim(name, max(settled_s), None, unit, True, mark + text)


def _equal_claims(turns: Turns, mark: str) -> list[Claim]:
    """That all turns trained alike: losses of the same step, and weights at the end."""
    arms = {turn["arm"] for turn in turns}
    names = ("losses_equal", "weights_equal")
    if len(arms) < len(ARMS):
        text = "not shown: some arms have not trained"
        return [Claim(name, None, None, "steps", None, text) for name in names]
    losses = [turn["losses"] for turn in turns]
    steps = min(map(len, losses))
    same = all(of_turn[:steps] == losses[0][:steps] for of_turn in losses)
    weights = [[stage["weights_sha256"] for stage in turn["stages"]] for turn in turns]
    text = f"of all {len(turns)} turns are equal to the last bit"
    return [
        Claim(names[0], steps, None, "steps", same, f"{mark}losses of every microbatch, {text}"),
        Claim(
            names[1],
            steps,
            None,
            "steps",
            all(of_turn == weights[0] for of_turn in weights),
            f"{mark}weights behind the last step, {text}",
        ),
    ]
