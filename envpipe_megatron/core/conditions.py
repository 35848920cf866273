"""Conditions: what surrounds the units of a job, for the evaluator and for planners alike.

A profile prices units one by one; what lies between and after them is here. Everything but the
blocking power is off by default.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from envpipe_megatron.core.arrays import FloatArray, IntArray
from envpipe_megatron.core.fields import AMOUNT, COUNT, MAX_FREQUENCY_MHZ, Fields, Number, many
from envpipe_megatron.core.profile import Profile
from envpipe_megatron.core.sidecar import read_wait_power, wait_power_entries
from envpipe_megatron.errors import EnvPipeError

_GPUS = Number(whole=True, positive=True, below=1_000_000)

WaitCurves: TypeAlias = tuple[Mapping[int, float], ...]

#: What `make_conditions` can take from a profile's sidecar: the field here, and the one there.
SIDECAR_FIELDS = {
    "latency": ("latency_s", "p2p_latency_s"),
    "tail": ("tail_time_s", "tail_time_s"),
    "tensor-parallel": ("gpus_per_stage", "tensor_parallel"),
    "wait-power": ("wait_power_w", "wait_power_w"),
    "change": ("change_time_s", "frequency_change_s"),
}


@dataclass(frozen=True)
class Conditions:
    """Conditions around the units of a job with `len(blocking_power_w)` stages.

    Values are checked (EnvPipeError) and brought to one form, so that equal conditions compare
    equal: what is off becomes None, and one latency for all hops a latency for each.

    Args:
        blocking_power_w: for each stage, the power of one GPU that waits in a receive.
        latency_s: p2p latency, one number for every hop or one for each boundary between stages.
        tail_time_s: for each stage, the time after its last unit (gradient reduction, optimizer).
            The iteration lasts until the last tail has ended, and tails are billed as waiting.
        gpus_per_stage: for each stage, its tensor-parallel degree: that many GPUs follow the
            stage's plan, and its energies count as often.
        wait_power_w: for each stage, the power of one waiting GPU by the clock set while it waits,
            `{frequency_mhz: power_w}`: linear between the measured clocks, constant beyond them. It
            replaces the blocking power. `evaluation.evaluate` says which clock that is.
        change_time_s: time from a request until the clock runs; see `evaluation.evaluate`.
        change_energy_j: energy of one change of clock on one GPU.
        group_size: microbatches that pass a chunk before the next in the framework's own order,
            which plans are compared with; None for what `plan.framework_schedule` makes of theirs.
            It does not count when conditions are compared.
    """

    blocking_power_w: tuple[float, ...]
    latency_s: float | tuple[float, ...] = 0.0
    tail_time_s: tuple[float, ...] | None = None
    gpus_per_stage: tuple[int, ...] | None = None
    wait_power_w: WaitCurves | None = None
    change_time_s: float = 0.0
    change_energy_j: float = 0.0
    group_size: int | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        stages = len(self.blocking_power_w)
        if not stages:
            raise EnvPipeError("blocking_power_w names no stage")
        checked: dict[str, Any] = {
            "blocking_power_w": _amounts("blocking_power_w", self.blocking_power_w, stages, "W"),
            "latency_s": _amounts("latency_s", self.latency_s, stages - 1, "s"),
            "change_time_s": _amounts("change_time_s", self.change_time_s, 1, "s")[0],
            "change_energy_j": _amounts("change_energy_j", self.change_energy_j, 1, "J")[0],
        }
        if self.tail_time_s is not None:
            tail_s = _amounts("tail_time_s", self.tail_time_s, stages, "s")
            checked["tail_time_s"] = tail_s if any(tail_s) else None
        if self.gpus_per_stage is not None:
            gpus = _counts(self.gpus_per_stage, stages)
            checked["gpus_per_stage"] = gpus if any(count > 1 for count in gpus) else None
        if self.wait_power_w is not None:
            checked["wait_power_w"] = _curves(self.wait_power_w, stages)
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages, p."""
        return len(self.blocking_power_w)

    @property
    def tail_by_stage_s(self) -> FloatArray:
        """[num_stages] the tails, zeros if there are none."""
        return np.array(self.tail_time_s or (0.0,) * self.num_stages)

    @property
    def gpus_by_stage(self) -> IntArray:
        """[num_stages] GPUs that follow each stage's plan, one by default."""
        return np.array(self.gpus_per_stage or (1,) * self.num_stages)

    def waiting_power_w(self, frequency_mhz: IntArray) -> FloatArray:
        """Return the power (W) of a waiting GPU at [num_stages, any] clocks, in the same shape."""
        if self.wait_power_w is None:
            by_stage = np.array(self.blocking_power_w)[:, None]
            return np.broadcast_to(by_stage, frequency_mhz.shape).copy()
        return np.stack(
            [
                np.interp(clocks, list(curve), list(curve.values()))
                for clocks, curve in zip(frequency_mhz, self.wait_power_w, strict=True)
            ]
        )


def make_conditions(
    profile: Profile,
    *,
    blocking_power_w: float | Sequence[float],
    use: Collection[str] = (),
    **given: Any,
) -> Conditions:
    """Make conditions of a profile's sidecar, if asked for, and of values that override it.

    Args:
        blocking_power_w: one number, or one for each stage.
        use: which of `SIDECAR_FIELDS` to take from the sidecar; its latency is always taken if
            known, and `change` takes the energy of a change along.
        given: other fields, as `Conditions` takes them; one number of `tail_time_s` or
            `gpus_per_stage` counts for all stages. None leaves a field out.

    Raises EnvPipeError for a wrong value, a name not known in `use`, or a fact the sidecar lacks.
    """
    sidecar = profile.sidecar
    known = {name: value for name, value in given.items() if value is not None}
    if sidecar.p2p_latency_s is not None:
        known.setdefault("latency_s", sidecar.p2p_latency_s)
    for name in use:
        if name not in SIDECAR_FIELDS:
            raise EnvPipeError(
                "Unknown condition", value=name, remedy=f"Known: {', '.join(SIDECAR_FIELDS)}."
            )
        field, fact = SIDECAR_FIELDS[name]
        if known.setdefault(field, getattr(sidecar, fact)) is None:
            raise EnvPipeError(
                f"The sidecar of {profile.source} lacks '{fact}', which '{name}' needs",
                remedy="Measure it, give the value itself, or leave the condition out.",
            )
    if "change" in use:
        known.setdefault("change_energy_j", sidecar.frequency_change_j or 0.0)
    power_w = _amounts("blocking_power_w", blocking_power_w, profile.num_stages, "W")
    return Conditions(power_w, **known)


def known_conditions(profile: Profile) -> Conditions:
    """Return all conditions that a sidecar knows; without a power there, waiting is free."""
    sidecar = profile.sidecar
    return make_conditions(
        profile,
        blocking_power_w=sidecar.blocking_power_w or 0.0,
        use=[
            use for use, (_, fact) in SIDECAR_FIELDS.items() if getattr(sidecar, fact) is not None
        ],
    )


def conditions_to_json(conditions: Conditions) -> dict[str, Any]:
    """Return the fields of conditions that are on, as a plan's file holds them."""
    data = {
        "p2p_latency_s": conditions.latency_s if np.any(conditions.latency_s) else None,
        "tail_time_s": conditions.tail_time_s,
        "gpus_per_stage": conditions.gpus_per_stage,
        "wait_power_w": wait_power_entries(conditions.wait_power_w or ()) or None,
        "frequency_change_s": conditions.change_time_s or None,
        "frequency_change_j": conditions.change_energy_j or None,
        "group_size": conditions.group_size,
    }
    return {name: value for name, value in data.items() if value is not None}


def read_conditions(fields: Fields, num_stages: int) -> Conditions:
    """Read what `conditions_to_json` made; fields that are absent are off."""
    amounts = many(AMOUNT, num_stages)
    curves = fields.read("wait_power_w", read_wait_power, None)
    if curves is not None and len(curves) != num_stages:
        raise fields.wrong("wait_power_w", f"It must list each of the {num_stages} stages.")
    return Conditions(
        fields.read("blocking_power_w", amounts),
        fields.read("p2p_latency_s", many(AMOUNT, num_stages - 1), (0.0,) * (num_stages - 1)),
        fields.read("tail_time_s", amounts, None),
        fields.read("gpus_per_stage", many(_GPUS, num_stages), None),
        curves,
        fields.read("frequency_change_s", AMOUNT, 0.0),
        fields.read("frequency_change_j", AMOUNT, 0.0),
        group_size=fields.read("group_size", COUNT, None),
    )


def _amounts(name: str, given: Any, count: int, unit: str) -> tuple[float, ...]:
    """Check amounts of zero or more; one number counts for all."""
    try:
        values = (given,) * count if np.ndim(given) == 0 else given
        amounts = tuple(float(value) for value in values)
    except (TypeError, ValueError, OverflowError):
        amounts = (math.nan,)
    if len(amounts) != count or not all(0 <= value < math.inf for value in amounts):
        raise _wrong(name, given, f"{count} number(s) of {unit}, zero or more")
    return amounts


def _counts(given: Any, stages: int) -> tuple[int, ...]:
    counts = (given,) * stages if np.ndim(given) == 0 else tuple(given)
    if len(counts) != stages or not all(isinstance(n, int | np.integer) and n >= 1 for n in counts):
        raise _wrong("gpus_per_stage", given, f"{stages} positive whole number(s)")
    return tuple(map(int, counts))


def _curves(given: WaitCurves, stages: int) -> WaitCurves:
    """Check curves; return them lowest clock first, as `np.interp` needs them."""
    if len(given) != stages or not all(given):
        needed = f"{stages} curve(s), one a stage, each with at least one clock"
        raise _wrong("wait_power_w", given, needed)
    curves = []
    for curve in given:
        clocks = sorted(curve)
        powers_w = _amounts("wait_power_w", [curve[f] for f in clocks], len(clocks), "W")
        if not 0 < clocks[0] <= clocks[-1] < MAX_FREQUENCY_MHZ:
            raise EnvPipeError("wait_power_w has a clock that no GPU has", value=clocks)
        curves.append(dict(zip(clocks, powers_w, strict=True)))
    return tuple(curves)


def _wrong(name: str, given: Any, needed: str) -> EnvPipeError:
    words = re.sub("_[wsj]$", "", name).replace("_", " ")
    return EnvPipeError(f"The {words} ({name}) is wrong", value=given, remedy=f"It takes {needed}.")
