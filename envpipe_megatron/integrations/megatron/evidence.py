"""What was seen of jobs like another one, and what of it was never tried.

`envpipe explain` prints it. Each figure is on a page of the docs, which says how it was made; a
test holds both against each other. Nothing is decided by it.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass

from envpipe_megatron.integrations.levels import Predicate, above_one, on
from envpipe_megatron.runtime.job.given import Level

_LOOP = "stages alike, 24 microbatches: emulated, by a model fitted to measurements"
_PUBLISHED = "GPT-3 175B, 24 microbatches: computed from measured profiles"
_ORDER_ONLY = "bf16, 8 microbatches, no clock changed: measured"
_EXPERTS = "four grouped experts, bf16, 8 microbatches, no clock changed: measured"
_COST = "clocks asked for at units of 9 ms, and not set: what that costs, measured"


@dataclass(frozen=True)
class Seen:
    """A result on one kind of GPU.

    Args:
        level: of the job.
        gpu: the product.
        stages: p.
        chunks: V; 1 without virtual stages.
        split: whether backwards were in two parts.
        result: against Megatron's own order at the highest clocks.
        how: of which job, and whether it was measured, emulated or computed.
    """

    level: Level
    gpu: str
    stages: int
    chunks: int
    split: bool
    result: str
    how: str

    def __str__(self) -> str:
        chunks = f" of {self.chunks} virtual ones" if self.chunks > 1 else ""
        split = "split backwards, " if self.split else ""
        return f"{self.gpu}, {self.stages} stages{chunks}: {self.result} ({split}{self.how})"


SEEN = (
    Seen(Level.ORDER, "A100 SXM", 4, 1, True, "14.86 % less energy", _LOOP),
    Seen(Level.ORDER, "A100 SXM", 8, 1, True, "26.89 % less energy", _LOOP),
    Seen(Level.ORDER, "A40", 4, 1, True, "19.58 % less energy", _LOOP),
    Seen(Level.ORDER, "A40", 8, 1, True, "25.36 % less energy", _LOOP),
    Seen(Level.ORDER, "A100 SXM", 4, 1, False, "9.70 % less energy", _LOOP),
    Seen(Level.ORDER, "A100 SXM", 8, 1, False, "15.72 % less energy", _LOOP),
    Seen(Level.ORDER, "A40", 4, 1, False, "12.06 % less energy", _LOOP),
    Seen(Level.ORDER, "A40", 8, 1, False, "16.38 % less energy", _LOOP),
    Seen(Level.ORDER, "A100 SXM", 4, 2, False, "5.3 % less energy", _LOOP),
    Seen(Level.ORDER, "A100 SXM", 4, 4, False, "2.8 % less energy", _LOOP),
    Seen(Level.ORDER, "A40", 4, 2, False, "7.9 % less energy", _LOOP),
    Seen(Level.ORDER, "A40", 4, 4, False, "4.3 % less energy", _LOOP),
    Seen(Level.ORDER, "A100 SXM", 8, 1, False, "21.6 % less energy", _PUBLISHED),
    Seen(Level.ORDER, "A40", 8, 1, False, "20.2 % less energy", _PUBLISHED),
    Seen(Level.ORDER, "H200", 2, 1, True, "8.2 % less time, 4.7 % less energy", _ORDER_ONLY),
    Seen(Level.ORDER, "H200", 4, 1, True, "17.7 % less time, 7.1 % less energy", _ORDER_ONLY),
    Seen(Level.ORDER, "H200", 4, 2, True, "7.0 % less time, 3.2 % less energy", _ORDER_ONLY),
    Seen(Level.ORDER, "H200", 4, 1, False, "6.4 % less time, 3.0 % less energy", _ORDER_ONLY),
    Seen(Level.ORDER, "H200", 4, 2, False, "0.6 % less time, within noise", _ORDER_ONLY),
    Seen(Level.ORDER, "H200", 2, 1, False, "6.1 % less time, 2.7 % less energy", _EXPERTS),
    Seen(Level.UNITS, "A100 SXM", 4, 1, False, "1.7 % less energy", _LOOP),
    Seen(Level.UNITS, "A100 SXM", 4, 2, False, "4.1 % less energy", _LOOP),
    Seen(Level.UNITS, "A100 SXM", 4, 4, False, "2.0 % less energy", _LOOP),
    Seen(Level.UNITS, "A40", 4, 1, False, "1.6 % less energy", _LOOP),
    Seen(Level.UNITS, "A40", 4, 2, False, "5.9 % less energy", _LOOP),
    Seen(Level.UNITS, "A40", 4, 4, False, "3.0 % less energy", _LOOP),
    Seen(Level.UNITS, "H200", 2, 2, False, "0.23 % more time", _COST),
)

#: What nobody has tried.
_NO_CLOCK = (
    "changing the clock of a real GPU in training: savings by clocks are emulated or computed"
)
_MOST_GPUS = 4
_MORE_GPUS = f"more than {_MOST_GPUS} GPUs, or several machines"
_DAYS = "training for days: the longest real run had 1,000 iterations"
#: Accepted, and not compared with Megatron's own results.
_NOT_COMPARED: Mapping[str, Predicate] = {
    "selective recomputation": (
        lambda args: getattr(args, "recompute_granularity", None) == "selective"
    ),
    "optimizers other than Adam": (
        lambda args: (getattr(args, "optimizer", None) or "adam") != "adam"
    ),
    "--async-save": on("async_save"),
}


def seen_like(level: Level, args: Namespace, *, splits: bool, clocks: bool) -> list[Seen]:
    """Return what was seen at a level: of each GPU and way what is nearest in stages and chunks.

    Split backwards are only of jobs that may split theirs, and there before whole ones; what was
    measured of the order is of jobs with experts where this one has any. Without `clocks`, no clock
    was changed.
    """
    stages, chunks = args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size
    several = above_one("virtual_pipeline_model_parallel_size")(args)
    measured, other = (_ORDER_ONLY, _EXPERTS)[:: -1 if above_one("num_experts")(args) else 1]
    like = [
        row
        for row in SEEN
        if row.level is level
        and (row.chunks > 1) is several
        and row.split <= splits
        and row.how != other
        and (clocks or row.how == measured)
    ]
    # The last of a key counts.
    like.sort(
        key=lambda row: (row.split, -abs(row.stages - stages), -abs(row.chunks - (chunks or 1)))
    )
    return list({(row.gpu, row.how): row for row in like}.values())


def never_tried(level: Level, args: Namespace, ranks: int) -> list[str]:
    """Return what nobody has tried of a job with this number of ranks."""
    not_compared = [what for what, asks in _NOT_COMPARED.items() if asks(args)]
    return [
        *([] if level is Level.OBSERVE else [_NO_CLOCK]),
        *([_MORE_GPUS] if ranks > _MOST_GPUS else []),
        *(f"{what}: accepted, and not compared" for what in not_compared),
        _DAYS,
    ]
