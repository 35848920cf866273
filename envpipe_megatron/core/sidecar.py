"""The sidecar of a profile: a JSON file of what else was measured about the same job."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.files import read_text

SIDECAR_FORMAT = "envpipe-profile/1"
#: No GPU has such a clock: the number is not in MHz.
MAX_FREQUENCY_MHZ = 1_000_000


class SidecarError(EnvPipeError):
    """A sidecar that is not readable."""


@dataclass(frozen=True)
class Sidecar:
    """What is known of a profiled job beyond its table; every field may be absent.

    Args:
        wait_power_w: for each stage, the power of a GPU that waits in a receive by the clock set
            while it waits, `{frequency_mhz: power_w}`.
        p2p_latency_s: for each boundary between stages.
        tail_time_s: for each stage, the time after its last unit (gradient reduction, optimizer).
        activation_bytes: for each stage, what one microbatch in flight holds.
        free_bytes: for each stage, what is free beside one microbatch. Measured in an order that
            holds k of them, it is what is left at the peak plus k - 1 times the activations.
        frequency_change_s: from the request of a clock until it runs.
        frequency_change_j: energy of one change of clock on one GPU.
    """

    gpu: str | None = None
    tensor_parallel: int = 1
    num_chunks: int = 1
    microbatch_size: int | None = None
    sequence_length: int | None = None
    wait_power_w: tuple[Mapping[int, float], ...] | None = None
    p2p_latency_s: tuple[float, ...] | None = None
    tail_time_s: tuple[float, ...] | None = None
    activation_bytes: tuple[float, ...] | None = None
    free_bytes: tuple[float, ...] | None = None
    frequency_change_s: float | None = None
    frequency_change_j: float | None = None

    @property
    def blocking_power_w(self) -> tuple[float, ...] | None:
        """For each stage, the power of a GPU that waits at the highest clock; None if unknown."""
        curves = self.wait_power_w
        return None if curves is None else tuple(curve[max(curve)] for curve in curves)

    def to_json_text(self) -> str:
        """The sidecar as its file holds it."""
        known = {name: value for name, value in vars(self).items() if value is not None}
        if self.wait_power_w is not None:
            known["wait_power_w"] = wait_power_entries(self.wait_power_w)
        return json.dumps({"format": SIDECAR_FORMAT, **known}, indent=1) + "\n"


def sidecar_path(profile_path: Path) -> Path:
    """Where the sidecar of a profile CSV stands."""
    return profile_path.with_suffix(".json")


def read_sidecar(path: Path) -> Sidecar:
    """Read a sidecar JSON.

    Raises:
        SidecarError: naming the file and the field that is wrong.
    """
    try:
        data = json.loads(read_text(path))
    except (OSError, ValueError) as error:
        raise SidecarError(f"Sidecar {path} is not readable JSON: {error}") from error
    if not isinstance(data, dict) or data.get("format") != SIDECAR_FORMAT:
        found = data.get("format") if isinstance(data, dict) else data
        raise SidecarError(
            f"{path}: field 'format'", value=found, remedy=f"It must be '{SIDECAR_FORMAT}'."
        )
    values: dict[str, Any] = {}
    for name, value in data.items():
        if name == "format":
            continue
        try:
            values[name] = _READERS[name](value)
        except KeyError:
            raise SidecarError(
                f"{path}: unknown field",
                value=name,
                remedy=f"Known: {', '.join(_READERS)}.",
            ) from None
        except (TypeError, ValueError, OverflowError) as error:
            raise SidecarError(f"{path}: field '{name}' is wrong", value=value) from error
    return Sidecar(**values)


def check_lengths(sidecar: Sidecar, num_stages: int, path: Path) -> None:
    """Refuse a sidecar of another pipeline.

    Raises:
        SidecarError: a field with another number of entries than the profile has stages.
    """
    boundaries = {"p2p_latency_s": num_stages - 1}
    for name in ("wait_power_w", "p2p_latency_s", "tail_time_s", "activation_bytes", "free_bytes"):
        value = getattr(sidecar, name)
        expected = boundaries.get(name, num_stages)
        if value is not None and len(value) != expected:
            raise SidecarError(
                f"{path}: field '{name}' has {len(value)} entries",
                remedy=f"A pipeline of {num_stages} stages has {expected}.",
            )


def _non_negative(value: Any) -> float:
    number = float(value)
    if isinstance(value, bool | str) or not math.isfinite(number) or number < 0:
        raise ValueError
    return number


def _per_stage(values: Any) -> tuple[float, ...]:
    if not isinstance(values, list):
        raise TypeError
    return tuple(_non_negative(value) for value in values)


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def read_wait_power(entries: Any) -> tuple[Mapping[int, float], ...]:
    """Waiting power as files hold it, `[{"stage": 0, "frequency_mhz": 1410, "power_w": 83.6}]`.

    Returns:
        for each stage `{frequency_mhz: power_w}`.

    Raises:
        TypeError, ValueError, OverflowError: other JSON.
    """
    by_stage: dict[int, dict[int, float]] = {}
    for entry in entries:
        try:
            stage, frequency, power = entry["stage"], entry["frequency_mhz"], entry["power_w"]
        except KeyError as missing:
            raise ValueError from missing
        if type(stage) is not int or frequency in by_stage.setdefault(stage, {}):
            raise ValueError
        if _count(frequency) >= MAX_FREQUENCY_MHZ:
            raise ValueError
        by_stage[stage][frequency] = _non_negative(power)
    if sorted(by_stage) != list(range(len(by_stage))):
        raise ValueError
    return tuple(by_stage[stage] for stage in range(len(by_stage)))


def wait_power_entries(curves: Sequence[Mapping[int, float]]) -> list[dict[str, int | float]]:
    """The inverse of `read_wait_power`."""
    return [
        {"stage": stage, "frequency_mhz": frequency, "power_w": power}
        for stage, curve in enumerate(curves)
        for frequency, power in curve.items()
    ]


_READERS: dict[str, Any] = {
    "gpu": _text,
    "tensor_parallel": _count,
    "num_chunks": _count,
    "microbatch_size": _count,
    "sequence_length": _count,
    "wait_power_w": read_wait_power,
    "p2p_latency_s": _per_stage,
    "tail_time_s": _per_stage,
    "activation_bytes": _per_stage,
    "free_bytes": _per_stage,
    "frequency_change_s": _non_negative,
    "frequency_change_j": _non_negative,
}
