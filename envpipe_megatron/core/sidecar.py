"""The sidecar of a profile: a JSON file of what else was measured about the same job."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from envpipe_megatron.core.fields import (
    AMOUNT,
    COUNT,
    FREQUENCY,
    POWER,
    SHORT_TIME,
    TEXT,
    TIME,
    Fields,
    Number,
    many,
    of_type,
    read_json,
)
from envpipe_megatron.errors import EnvPipeError

SIDECAR_FORMAT = "envpipe-profile/1"


@dataclass(frozen=True)
class Sidecar:
    """Facts of a profiled job beyond its table; every field may be absent.

    Args:
        wait_power_w: for each stage, the power of a GPU that waits in a receive by the clock set
            while it waits, `{frequency_mhz: power_w}`.
        p2p_latency_s: latency of each boundary between stages.
        tail_time_s: for each stage, the time after its last unit (gradient reduction, optimizer).
        activation_bytes: for each stage, what one microbatch in flight holds: of one chunk, if
            there are several.
        free_bytes: for each stage, what is free beside one microbatch of one chunk. Measured in an
            order that holds k of them, it is what is left at the peak plus k - 1 times the
            activations.
        pending_bytes: for each stage, what is held between the two parts of a backward, of one
            microbatch of one chunk.
        frequency_change_s: time from the request of a clock until it runs.
        frequency_change_j: energy of one change on one GPU.
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
    pending_bytes: tuple[float, ...] | None = None
    frequency_change_s: float | None = None
    frequency_change_j: float | None = None

    @property
    def blocking_power_w(self) -> tuple[float, ...] | None:
        """For each stage, the power of a GPU that waits at the highest clock; None if unknown."""
        curves = self.wait_power_w
        return None if curves is None else tuple(curve[max(curve)] for curve in curves)

    def for_chunks(self, num_chunks: int) -> Sidecar:
        """Return the sidecar of a job without chunks for one whose chunks are equal parts of it."""

        def part(of_whole: tuple[float, ...] | None) -> tuple[float, ...] | None:
            return of_whole and tuple(each / num_chunks for each in of_whole)

        held, free = self.activation_bytes, self.free_bytes
        if held is not None and free is not None:
            rest = 1 - 1 / num_chunks  # of the one microbatch beside which it was free
            free = tuple(f + rest * each for f, each in zip(free, held, strict=True))
        return replace(
            self,
            num_chunks=num_chunks,
            activation_bytes=part(held),
            free_bytes=free,
            pending_bytes=part(self.pending_bytes),
        )

    def to_json_text(self) -> str:
        """Return the sidecar as its file holds it."""
        known = {name: value for name, value in vars(self).items() if value is not None}
        if self.wait_power_w is not None:
            known["wait_power_w"] = wait_power_entries(self.wait_power_w)
        return json.dumps({"format": SIDECAR_FORMAT, **known}, indent=1) + "\n"


def sidecar_path(profile_path: Path) -> Path:
    """Return the path of a profile CSV's sidecar."""
    return profile_path.with_suffix(".json")


def read_wait_power(entries: Any, power: Number = AMOUNT) -> tuple[Mapping[int, float], ...]:
    """Read `[{"stage": 0, "frequency_mhz": 1410, "power_w": 83.6}]` as curves by stage."""
    by_stage: dict[int, dict[int, float]] = {}
    try:
        for entry in many(of_type(dict, ""))(entries):
            stage = Number(whole=True)(entry["stage"])
            frequency, power_w = FREQUENCY(entry["frequency_mhz"]), power(entry["power_w"])
            if frequency in by_stage.setdefault(stage, {}):
                raise ValueError(f"stage {stage} is twice at {frequency} MHz")
            by_stage[stage][frequency] = power_w
        return tuple(by_stage[stage] for stage in range(len(by_stage)))
    except (KeyError, TypeError, ValueError) as wrong:
        raise ValueError(
            f"a list of stage, frequency_mhz and power_w, of each stage and clock once: {wrong}"
        ) from None


def wait_power_entries(curves: Sequence[Mapping[int, float]]) -> list[dict[str, int | float]]:
    """Return what `read_wait_power` reads."""
    return [
        {"stage": stage, "frequency_mhz": frequency, "power_w": power}
        for stage, curve in enumerate(curves)
        for frequency, power in curve.items()
    ]


_READERS: dict[str, Any] = {
    "gpu": TEXT,
    "tensor_parallel": COUNT,
    "num_chunks": COUNT,
    "microbatch_size": COUNT,
    "sequence_length": COUNT,
    "wait_power_w": partial(read_wait_power, power=POWER),
    "p2p_latency_s": many(SHORT_TIME),
    "tail_time_s": many(TIME),
    "activation_bytes": many(AMOUNT),
    "free_bytes": many(AMOUNT),
    "pending_bytes": many(AMOUNT),
    "frequency_change_s": SHORT_TIME,
    "frequency_change_j": AMOUNT,
}


def read_sidecar(path: Path, num_stages: int | None = None) -> Sidecar:
    """Read a sidecar JSON; EnvPipeError names a field that is wrong or of other stages."""
    return sidecar_of_fields(read_json(path, "Sidecar"), num_stages)


def sidecar_of_fields(fields: Fields, num_stages: int | None = None) -> Sidecar:
    """Read a sidecar as `read_sidecar` does, from its fields."""
    fields.check_format(SIDECAR_FORMAT)
    sidecar = fields.make(Sidecar, _READERS, also=("format",))
    for name, value in vars(sidecar).items():
        expected = None if num_stages is None else num_stages - (name == "p2p_latency_s")
        if isinstance(value, tuple) and expected not in (None, len(value)):
            raise EnvPipeError(
                f"{fields.path}: field '{name}' has {len(value)} entries",
                remedy=f"A pipeline of {num_stages} stages has {expected}.",
            )
    return sidecar
