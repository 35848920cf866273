"""Kinds of units as data, and units: what one stage computes for one microbatch of one chunk."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, lru_cache
from typing import Any

from envpipe_megatron.errors import EnvPipeError

#: Stages and positions of a schedule that a message shows: they fit a terminal of 100 columns.
_SHOWN_STAGES, _SHOWN_POSITIONS = 16, 11


class ScheduleError(EnvPipeError):
    """A schedule that cannot run: a unit is missing, repeated, too early, or never ready."""


def marked_grid(
    orders: Sequence[Sequence[Any]],
    places: Sequence[tuple[int, int]],
    write: Callable[[Any], str] = str,
) -> str:
    """Write orders as a grid, stage by position, with the units at `places` in brackets.

    A place past the end of an order is where a unit is missing. Of many stages or positions, only
    those near the places are shown.
    """
    stages = _near([stage for stage, _ in places], len(orders), _SHOWN_STAGES)
    marked = [position for _, position in places]
    longest = max(1 + max(marked), *(len(orders[stage]) for stage in stages))
    positions = _near(marked, longest, _SHOWN_POSITIONS)
    rows = [["position", *map(str, positions)]]
    for stage in stages:
        cells = [*map(write, orders[stage][positions.start : positions.stop])]
        cells += [""] * (len(positions) - len(cells))
        for at, position in enumerate(positions):
            if (stage, position) in places:
                cells[at] = f"[{cells[at]}]"
        rows.append([f"stage {stage}", *cells])
    width = max(len(cell) for row in rows for cell in row[1:])
    lines = ["".join([f"{row[0]:<9}", *(f" {cell:>{width}}" for cell in row[1:])]) for row in rows]
    return "\n".join(map(str.rstrip, lines))


def _near(at: Sequence[int], count: int, most: int) -> range:
    """Return at most `most` of `count` numbers: the first asked for, and those around it."""
    start = max(0, min(min(at) - most // 3, count - most))
    return range(start, min(count, start + most))


class Kind(StrEnum):
    """Kind of a unit's work; the values are the `instruction` column of a profile.

    A backward is run whole, or as two units: the gradient of its input, which the stage before
    waits for, and that of its weights, for which nobody waits (Qi et al., ICLR'24, section 2).
    """

    FORWARD = "forward"
    BACKWARD = "backward"
    INPUT_GRADIENT = "input-gradient"
    WEIGHT_GRADIENT = "weight-gradient"
    #: A forward and a backward that run as one: a price, not a unit of an order.
    COMBINED = "combined"
    #: Zero: such units run as one with the next of their stage, which carries the cost of all.
    NOTHING = "nothing"

    @cached_property
    def letter(self) -> str:
        """`F`, `B`, `I` or `W`, as units are written."""
        return self.value[0].upper()


@dataclass(frozen=True, slots=True)
class Traits:
    """Dependencies of a unit of a kind.

    Args:
        way: 1 if its input comes from the unit of the chunk before and its output goes to that of
            the chunk after, -1 the other way round, 0 if it has neither.
        after: the kind that must have run before it for the same microbatch and chunk.
    """

    way: int
    after: Kind | None


#: The kinds of units that orders list, and what is to be known of each.
TRAITS = {
    Kind.FORWARD: Traits(1, None),
    Kind.BACKWARD: Traits(-1, Kind.FORWARD),
    Kind.INPUT_GRADIENT: Traits(-1, Kind.FORWARD),
    Kind.WEIGHT_GRADIENT: Traits(0, Kind.INPUT_GRADIENT),
}
#: The kinds that a framework runs by itself; activations and gradients are sent by these names.
WHOLE = (Kind.FORWARD, Kind.BACKWARD)
#: The one of them whose messages a unit of a kind receives and sends.
MESSAGES = {kind: WHOLE[traits.way < 0] for kind, traits in TRAITS.items() if traits.way}
#: The kinds of an order whose backwards are split.
SPLIT = (Kind.FORWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)

KIND_BY_LETTER = {kind.letter: kind for kind in TRAITS}
_UNIT_PATTERN = re.compile(r"([FBIW])(\d{1,9})(?:\.(\d{1,9}))?(\+?)")


@dataclass(frozen=True, slots=True)
class Unit:
    """One kind of work of one microbatch of one chunk, on whichever stage lists it.

    A `combined` unit runs as one with the unit that its stage lists next. They begin when the
    inputs of all are there, and their outputs leave at their end. So a forward runs with a
    backward, and a gradient of an input with that of the weights: a whole backward among others
    that are split.
    """

    kind: Kind
    microbatch: int
    chunk: int = 0
    combined: bool = False

    def label(self, num_chunks: int = 1) -> str:
        """Return the unit as plans write it: `F3`, with chunks `F3.1`, combined `F3.1+`."""
        chunk = f".{self.chunk}" if num_chunks > 1 else ""
        return f"{self.kind.letter}{self.microbatch}{chunk}{'+' * self.combined}"

    def __str__(self) -> str:
        return self.label(self.chunk + 1)


@lru_cache(maxsize=1 << 16)
def unit(kind: Kind, microbatch: int, chunk: int = 0, combined: bool = False) -> Unit:
    """Return a shared `Unit`: every stage of a pipeline lists the same ones."""
    return Unit(kind, microbatch, chunk, combined)


def places_of(
    stages: Sequence[Sequence[Unit]],
    num_microbatches: int,
    num_chunks: int,
    kinds: Sequence[Kind],
) -> list[list[int]]:
    """Return [num_stages][units_per_stage] the place of each unit of some orders among all.

    Places are by kind, then chunk, then microbatch.
    ScheduleError: a stage lists a unit twice, lacks one, or has one that the job does not have.
    """

    def label(own: Unit) -> str:
        return own.label(num_chunks)

    known = [
        unit(kind, microbatch, chunk)
        for kind in kinds
        for chunk in range(num_chunks)
        for microbatch in range(num_microbatches)
    ]
    code_of = {u: code for code, u in enumerate(known)}
    code_of_id = {id(u): code for u, code in code_of.items()}  # hashing an int is far cheaper
    every, rows = frozenset(code_of.values()), []
    for stage, order in enumerate(stages):
        codes = [code_of_id.get(id(u), -1) for u in order]
        for position, own in enumerate(order) if -1 in codes else ():
            if codes[position] < 0:  # an equal unit that is not shared, or a combined one
                codes[position] = code_of.get(unit(own.kind, own.microbatch, own.chunk), -1)
        if -1 in codes:
            at = codes.index(-1)
            raise ScheduleError(
                f"Stage {stage} lists a unit that the job does not have",
                value=str(order[at]),
                remedy=f"The job has {num_microbatches} microbatches and "
                f"{num_chunks} chunk(s), and all stages run the same kinds of units.\n"
                + marked_grid(stages, [(stage, at)], label),
            )
        listed = set(codes)
        if len(codes) > len(listed) or listed != every:
            twice = [code for code, count in Counter(codes).items() if count > 1]
            said, code = "lists a unit twice", min(twice, default=-1)
            if not twice:
                said, code = "lacks a unit", min(every - listed)
            found = [at for at, own in enumerate(codes) if own == code] or [len(order)]
            raise ScheduleError(
                f"Stage {stage} {said}",
                value=label(known[code]),
                remedy=f"Each stage runs {len(known)} units, each once; this one lists "
                f"{len(order)}.\n" + marked_grid(stages, [(stage, at) for at in found], label),
            )
        rows.append(codes)
    return rows


def parse_unit(text: str) -> Unit:
    """Read `F3`, `F3.1` or `F3.1+`; ScheduleError if the text is none of them."""
    match = _UNIT_PATTERN.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise ScheduleError(
            "A unit is not readable",
            value=text,
            remedy="Write F, B, I or W, the microbatch, .chunk if there are chunks, and + if it "
            "runs as one with the next: F3, B0, W3.1, F3.1+.",
        )
    letter, microbatch, chunk, combined = match.groups()
    return unit(KIND_BY_LETTER[letter], int(microbatch), int(chunk or 0), bool(combined))
