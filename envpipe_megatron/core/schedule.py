"""Units and schedules: the order in which each stage runs its forwards and backwards, as data."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from envpipe_megatron.core.arrays import BoolArray
from envpipe_megatron.errors import EnvPipeError

IntArray = NDArray[np.int32]


#: About twice what 128 stages with 8,192 microbatches each need.
MAX_UNITS = 4_000_000
#: Least memory and time that planning takes per unit (measured: `envpipe plan`, 1F1B).
_UNIT_BYTES, _UNIT_S = 750, 2e-5


class ScheduleError(EnvPipeError):
    """A schedule that cannot run: a unit is missing, repeated, too early, or never ready."""


class Kind(StrEnum):
    """What a unit computes; the values are the `instruction` column of a profile."""

    FORWARD = "forward"
    BACKWARD = "backward"

    @cached_property
    def letter(self) -> str:
        """`F` or `B`, as units are written."""
        return self.value[0].upper()


_KIND_BY_LETTER = {kind.letter: kind for kind in Kind}
_UNIT_PATTERN = re.compile(r"([FB])(\d{1,9})(?:\.(\d{1,9}))?(\+?)")


@dataclass(frozen=True, slots=True)
class Unit:
    """The forward or backward of one microbatch of one chunk, on whichever stage lists it.

    A `combined` forward runs as one with the backward that its stage lists next: the *pair* begins
    when the inputs of both are there, and their outputs leave at its end.
    """

    kind: Kind
    microbatch: int
    chunk: int = 0
    combined: bool = False

    def label(self, num_chunks: int = 1) -> str:
        """The unit as plans write it: `F3`, or `F3.1` if the pipeline has chunks; `+`: combined."""
        chunk = f".{self.chunk}" if num_chunks > 1 else ""
        return f"{self.kind.letter}{self.microbatch}{chunk}{'+' * self.combined}"

    def __str__(self) -> str:
        return self.label(self.chunk + 1)


@lru_cache(maxsize=1 << 16)
def unit(kind: Kind, microbatch: int, chunk: int = 0, combined: bool = False) -> Unit:
    """A shared `Unit`: every stage of a pipeline lists the same ones."""
    return Unit(kind, microbatch, chunk, combined)


def parse_unit(text: str) -> Unit:
    """Read `F3`, `F3.1` or `F3.1+`; ScheduleError if the text is none of them."""
    match = _UNIT_PATTERN.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise ScheduleError(
            "A unit is not readable",
            value=text,
            remedy="Write F or B, the microbatch, .chunk if there are chunks, and + if it is a "
            "combined forward: F3, B0, F3.1, F3.1+.",
        )
    letter, microbatch, chunk, combined = match.groups()
    return unit(_KIND_BY_LETTER[letter], int(microbatch), int(chunk or 0), bool(combined))


def check_size(num_stages: int, num_microbatches: int, num_chunks: int) -> None:
    """Refuse (ScheduleError) a pipeline of more units than can be planned."""
    units = 2 * num_stages * num_microbatches * num_chunks
    if units > MAX_UNITS:
        chunks = f" x {num_chunks} chunks" if num_chunks > 1 else ""
        raise ScheduleError(
            f"{num_stages} stages{chunks} x {num_microbatches} microbatches are {units:,} units, "
            f"and at most {MAX_UNITS:,} are planned: these would take "
            f"{units * _UNIT_BYTES / 1e9:.3g} GB and {units * _UNIT_S / 60:.3g} minutes or more",
            remedy="Give the microbatches of one iteration on one replica.",
        )


@dataclass(frozen=True)
class Schedule:
    """For each stage, the order of its units; checked to be executable when it is made.

    Every stage runs each forward once and either each backward once or none at all (forward-only).
    Units are also numbered through the whole pipeline: *node* `stage * units_per_stage + position`
    is the unit at that position of that stage's order. ScheduleError names the unit that is
    missing, unknown, repeated, or can never run.

    Args:
        name: what the order is called, such as `1f1b`.
        num_microbatches: M.
        num_chunks: V, the virtual pipeline stages on each stage; chunk `c` of the last stage feeds
            chunk `c + 1` of the first (Narayanan et al., SC'21, section 2.2).
        stages: the order of each stage.
        linked: whether units get their inputs from the stages beside theirs; False for units that
            are whole iterations, between which nothing is known.
    """

    name: str
    num_microbatches: int
    num_chunks: int
    stages: tuple[tuple[Unit, ...], ...]
    linked: bool = True

    def __post_init__(self) -> None:
        counts = (len(self.stages), self.num_microbatches, self.num_chunks)
        if min(counts) < 1:
            raise ScheduleError(
                "A schedule needs at least one stage, one microbatch and one chunk", value=counts
            )
        if not self.forward_only:
            self._check_forward_before_backward()
        self._check_combined()
        self.topological_order  # noqa: B018 - computed now, so that a deadlock is found here

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages, p."""
        return len(self.stages)

    @property
    def units_per_stage(self) -> int:
        """Units in each stage's order."""
        return len(self.stages[0])

    @property
    def num_units(self) -> int:
        """Units of the whole pipeline."""
        return self.num_stages * self.units_per_stage

    @property
    def forward_only(self) -> bool:
        """Whether the schedule has no backwards, as in evaluation."""
        return self.units_per_stage == self.num_microbatches * self.num_chunks

    def unit_at(self, node: int) -> Unit:
        """The unit of a node."""
        stage, position = divmod(node, self.units_per_stage)
        return self.stages[stage][position]

    def stage_of(self, node: int) -> int:
        """The stage of a node."""
        return node // self.units_per_stage

    def describe(self, node: int) -> str:
        """A node for messages: `F3 on stage 1`."""
        return f"{self.unit_at(node).label(self.num_chunks)} on stage {self.stage_of(node)}"

    @cached_property
    def is_backward(self) -> BoolArray:
        """[num_stages, units_per_stage] whether the unit there is a backward."""
        return self._codes >= self.num_microbatches * self.num_chunks

    @cached_property
    def combined(self) -> BoolArray:
        """[num_stages, units_per_stage] whether the unit there is a combined forward.

        The backward behind it stands for the pair, in which such a forward takes no time.
        """
        return np.array([[unit.combined for unit in order] for order in self.stages])

    def pair_clocks(self, frequency_mhz: NDArray[np.int64]) -> NDArray[np.int64]:
        """[num_stages, units_per_stage] clocks as given, but a pair's forward at its backward's."""
        return np.where(self.combined, np.roll(frequency_mhz, -1, axis=1), frequency_mhz)

    @cached_property
    def cross_dependency(self) -> IntArray:
        """[num_units] the node on a neighbour stage whose end a node waits for, or -1.

        That is the unit that makes its input, or the backward that this unit is combined with.
        """
        return self._sender + np.where(self._sender >= 0, self.combined.ravel()[self._sender], 0)

    @cached_property
    def _sender(self) -> IntArray:
        """[num_units] the node on a neighbour stage that makes a node's input, or -1.

        A forward receives its input from the stage before, a backward its gradient from the stage
        after; with chunks the last stage and the first are neighbours too. The last backward chunk
        of the last stage needs its own forward only, which stands earlier on the same stage.
        """
        stages = np.arange(self.num_stages)[:, None]
        node_of_code = self._position_of_code + stages * self.units_per_stage
        source_stage = stages + np.where(self.is_backward, 1, -1)
        source_chunk = self.chunks
        source_chunk[source_stage < 0] -= 1
        source_chunk[source_stage >= self.num_stages] += 1
        exists = self.linked & (source_chunk >= 0) & (source_chunk < self.num_chunks)
        source_code = (
            self.is_backward * self.num_chunks + source_chunk % self.num_chunks
        ) * self.num_microbatches + self._codes % self.num_microbatches
        source = node_of_code[source_stage % self.num_stages, source_code]
        return np.where(exists, source, -1).astype(np.int32).ravel()

    def unit_keys(self, parts_per_stage: int) -> IntArray:
        """[num_stages, units_per_stage] where a list of costs has each unit's.

        The list goes by stage, then by kind; with V parts a stage by stage, chunk and kind, and
        with 1 all chunks of a stage cost the same. Of 2 V parts the second half is of combined
        units, by the chunk of each: of the forward, which costs nothing, and of the backward.
        """
        part: IntArray = np.arange(self.num_stages, dtype=np.int32)[:, None] * parts_per_stage
        if parts_per_stage > 1:
            part = part + self.chunks
        if parts_per_stage > self.num_chunks:
            part = part + self.num_chunks * (self.combined | np.roll(self.combined, 1, axis=1))
        return 2 * part + self.is_backward

    @property
    def receives(self) -> BoolArray:
        """[num_stages, units_per_stage] whether the unit there gets its input from another."""
        return self.cross_dependency.reshape(self.num_stages, -1) >= 0

    @cached_property
    def cross_successor(self) -> IntArray:
        """[num_units] the node that needs a node's output, or -1."""
        successor = np.full_like(self._sender, -1)
        receivers = np.flatnonzero(self._sender >= 0)
        successor[self._sender[receivers]] = receivers
        return successor

    @cached_property
    def waiting(self) -> list[tuple[int, ...]]:
        """[num_units] the nodes on other stages that wait for a node's end: two for a pair's."""
        waiting: list[tuple[int, ...]] = [()] * self.num_units
        for node, source in enumerate(self.cross_dependency.tolist()):
            if source >= 0:
                waiting[source] += (node,)
        return waiting

    @cached_property
    def topological_order(self) -> list[int]:
        """All nodes, each after those it depends on; ScheduleError if stages wait in circles."""
        width = self.units_per_stage
        cross = self.cross_dependency.tolist()
        done = bytearray(self.num_units)
        next_node = [stage * width for stage in range(self.num_stages)]
        order: list[int] = []
        runnable = list(range(self.num_stages - 1, -1, -1))
        while runnable:
            stage = runnable.pop()
            node, end = next_node[stage], (stage + 1) * width
            while node < end and (cross[node] < 0 or done[cross[node]]):
                done[node] = 1
                order.append(node)
                for waiting in self.waiting[node]:
                    if next_node[waiting // width] == waiting:
                        runnable.append(waiting // width)
                node += 1
            next_node[stage] = node
        if len(order) < self.num_units:
            stuck = [
                f"{self.describe(node)} waits for {self.describe(cross[node])}"
                for node in next_node  # in a circle, no stage gets to its end
            ]
            raise ScheduleError(
                f"Schedule '{self.name}' would deadlock: " + "; ".join(stuck),
                remedy="Each stage must run its units in an order its neighbours can feed.",
            )
        return order

    @cached_property
    def topological_rank(self) -> list[int]:
        """[num_units] where each node stands in `topological_order`."""
        rank = [0] * self.num_units
        for place, node in enumerate(self.topological_order):
            rank[node] = place
        return rank

    @cached_property
    def peak_in_flight(self) -> tuple[int, ...]:
        """For each stage, the most microbatches (x chunks) whose activations it holds at once."""
        if self.forward_only:
            return (0,) * self.num_stages
        held = np.cumsum(np.where(self.is_backward, -1, 1), axis=1)
        return tuple(int(peak) for peak in held.max(axis=1))

    @property
    def extra_forwards(self) -> tuple[int, ...]:
        """For each stage, the forwards before its first backward beyond those of 1F1B.

        1F1B has `p - s - 1`, and the one that it pairs (Narayanan et al., SC'21, section 2.2).
        """
        before = self.is_backward.argmax(axis=1).tolist()
        if self.forward_only:
            before = [self.units_per_stage + 1] * self.num_stages
        return tuple(
            max(0, forwards - min(self.num_stages - stage, self.num_microbatches))
            for stage, forwards in enumerate(before)
        )

    @cached_property
    def outer_envelope(self) -> frozenset[int]:
        """Nodes of the outer envelope.

        First forward of each stage, all units of the last stage, last backward of each stage
        (Choi et al., ATC'23, section 3).
        """
        width = self.units_per_stage
        last_stage = range((self.num_stages - 1) * width, self.num_stages * width)
        edges = [
            node
            for stage in range(self.num_stages)
            for node in (stage * width, (stage + 1) * width - 1)
        ]
        return frozenset([*edges, *last_stage])

    def labels(self) -> list[list[str]]:
        """The orders as plans write them."""
        return [[unit.label(self.num_chunks) for unit in order] for order in self.stages]

    @cached_property
    def _codes(self) -> IntArray:
        """[num_stages, units_per_stage] each unit as a number, dense by kind, chunk, microbatch."""
        known = all_units(self.num_microbatches, self.num_chunks)
        code_of = {u: code for code, u in enumerate(known)}
        code_of_id = {id(u): code for u, code in code_of.items()}  # hashing an int is far cheaper
        forwards = len(code_of) // 2
        expected = forwards if len(self.stages[0]) <= forwards else 2 * forwards
        rows = np.empty((self.num_stages, expected), dtype=np.int32)
        for stage, order in enumerate(self.stages):
            codes = np.array(
                [code_of_id.get(id(u), -1) for u in order], dtype=np.int32
            )  # -1: not one of the shared units, perhaps an equal one or a combined one
            for position in np.flatnonzero(codes < 0):
                own = order[position]
                codes[position] = code_of.get(unit(own.kind, own.microbatch, own.chunk), -1)
            counts = np.bincount(codes + 1, minlength=expected + 1)
            unknown, repeated = counts[0], np.flatnonzero(counts[1:] > 1)
            missing = np.flatnonzero(counts[1:] == 0)
            if unknown or len(counts) > expected + 1:
                outside = np.flatnonzero((codes < 0) | (codes >= expected))[0]
                raise ScheduleError(
                    f"Stage {stage} lists a unit that the job does not have",
                    value=str(order[outside]),
                    remedy=f"The job has {self.num_microbatches} microbatches and "
                    f"{self.num_chunks} chunk(s), and all stages run the same kinds of units.",
                )
            if repeated.size:
                raise ScheduleError(
                    f"Stage {stage} lists a unit twice",
                    value=known[repeated[0]].label(self.num_chunks),
                    remedy="Every unit runs exactly once.",
                )
            if missing.size:
                raise ScheduleError(
                    f"Stage {stage} lacks a unit",
                    value=known[missing[0]].label(self.num_chunks),
                    remedy=f"Each stage runs {expected} units; this one lists {len(order)}.",
                )
            rows[stage] = codes
        return rows

    @cached_property
    def _position_of_code(self) -> NDArray[np.intp]:
        """[num_stages, units_per_stage] where the unit of each code stands in its stage's order."""
        return np.argsort(self._codes, axis=1)

    @property
    def chunks(self) -> IntArray:
        """[num_stages, units_per_stage] the chunk of the unit there."""
        return (self._codes // self.num_microbatches) % self.num_chunks

    def _check_forward_before_backward(self) -> None:
        forwards = self.num_microbatches * self.num_chunks
        position = self._position_of_code
        early = np.argwhere(position[:, forwards:] < position[:, :forwards])
        if early.size:
            stage, code = (int(x) for x in early[0])
            backward = unit(
                Kind.BACKWARD, code % self.num_microbatches, code // self.num_microbatches
            )
            raise ScheduleError(
                f"Stage {stage} runs {backward.label(self.num_chunks)} before its forward",
                remedy="A backward needs the activations of its own forward: put it later.",
            )

    def _check_combined(self) -> None:
        own_backward = self.num_microbatches * self.num_chunks
        following = np.pad(self._codes[:, 1:], ((0, 0), (0, 1)), constant_values=-1)
        pairs = ~self.is_backward & (following >= own_backward)
        pairs &= following != self._codes + own_backward
        wrong = np.argwhere(self.combined & ~pairs)
        if wrong.size:
            stage, position = (int(x) for x in wrong[0])
            raise ScheduleError(
                f"Stage {stage} lists a unit as combined that cannot be",
                value=self.stages[stage][position].label(self.num_chunks),
                remedy="A forward is combined with the backward behind it, of other activations.",
            )


def all_units(num_microbatches: int, num_chunks: int) -> list[Unit]:
    """Every unit that one stage runs: by kind, then chunk, then microbatch."""
    return [
        unit(kind, microbatch, chunk)
        for kind in Kind
        for chunk in range(num_chunks)
        for microbatch in range(num_microbatches)
    ]
