"""Schedules: the order in which each stage runs its units, as data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from envpipe_megatron.core.arrays import BoolArray, FloatArray
from envpipe_megatron.core.kinds import (
    SPLIT,
    TRAITS,
    WHOLE,
    Kind,
    ScheduleError,
    Unit,
    marked_grid,
    places_of,
    unit,
)

IntArray = NDArray[np.int32]


_KINDS = tuple(Kind)
#: A forward, and both parts of a backward.
_MOST_AS_ONE = 3


class Placement(StrEnum):
    """Layout of a model's chunks on the stages of a pipeline."""

    #: Chunk `c + 1` of the first stage follows chunk `c` of the last (Narayanan et al., SC'21,
    #: section 2.2).
    LOOPED = "looped"
    #: Every other chunk goes back through the stages: chunk 1 of the last stage follows its chunk 0
    #: (Qi et al., ICLR'24, section 6).
    V = "v"
    #: No pipeline: each unit is a whole iteration.
    APART = "apart"


@dataclass(frozen=True)
class Schedule:
    """For each stage, the order of its units; checked to be executable when it is made.

    Every stage runs each forward once, and each backward once: all of them whole, or all of them in
    two parts, or none at all (forward-only). Units are also numbered through the whole pipeline:
    *node* `stage * units_per_stage + position` is the unit at that position of that stage's order.
    ScheduleError names the unit that is missing, unknown, repeated, or can never run.

    Args:
        name: what the order is called, such as `1f1b`.
        num_microbatches: M.
        num_chunks: V, the virtual pipeline stages on each stage.
        stages: the order of each stage.
        placement: where chunks lie, and so which unit feeds which.
    """

    name: str
    num_microbatches: int
    num_chunks: int
    stages: tuple[tuple[Unit, ...], ...]
    placement: Placement = Placement.LOOPED

    def __post_init__(self) -> None:
        counts = (len(self.stages), self.num_microbatches, self.num_chunks)
        if min(counts) < 1:
            raise ScheduleError(
                "A schedule needs at least one stage, one microbatch and one chunk", value=counts
            )
        if self.placement is Placement.APART and any(len(order) > 1 for order in self.stages):
            raise ScheduleError(
                f"Schedule '{self.name}' has units that know nothing of each other",
                value=f"placement {self.placement}",
                remedy="That is of one unit a stage, a whole iteration; leave the placement out.",
            )
        self._check_own_inputs()
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
        """True if the schedule has no backwards, as in evaluation."""
        return self.units_per_stage <= self.num_microbatches * self.num_chunks

    @property
    def split(self) -> bool:
        """True if backwards are two units each."""
        return self.unit_kinds == SPLIT  # a pickled order has kinds of its own

    @cached_property
    def unit_kinds(self) -> tuple[Kind, ...]:
        """The kinds of units that each stage runs."""
        if any(own.kind in SPLIT[1:] for own in self.stages[0]):
            return SPLIT
        return WHOLE[: 1 if self.forward_only else 2]

    def unit_at(self, node: int) -> Unit:
        """Return the unit of a node."""
        stage, position = divmod(node, self.units_per_stage)
        return self.stages[stage][position]

    def stage_of(self, node: int) -> int:
        """Return the stage of a node."""
        return node // self.units_per_stage

    def marked(self, *nodes: int) -> str:
        """Return the orders as a grid with some nodes marked, for messages."""
        places = [divmod(node, self.units_per_stage) for node in nodes]
        return marked_grid(self.stages, places, lambda own: own.label(self.num_chunks))

    def describe(self, node: int) -> str:
        """Return a node for messages: `F3 on stage 1`."""
        return f"{self.unit_at(node).label(self.num_chunks)} on stage {self.stage_of(node)}"

    @cached_property
    def is_backward(self) -> BoolArray:
        """[num_stages, units_per_stage] whether the unit there is a backward."""
        return self.places >= self.num_microbatches * self.num_chunks

    @cached_property
    def kinds(self) -> IntArray:
        """[num_stages, units_per_stage] the kind of the unit there, as its place in `Kind`."""
        return self._by_kind(_KINDS.index(kind) for kind in self.unit_kinds)

    def _by_kind(self, listed: Iterable[int]) -> IntArray:
        """Return [num_stages, units_per_stage] the value listed for the kind of the unit there."""
        kind = self.places // (self.num_microbatches * self.num_chunks)
        return np.array(list(listed), dtype=np.int32)[kind]

    @cached_property
    def combined(self) -> BoolArray:
        """[num_stages, units_per_stage] whether the unit there runs as one with the next.

        The last of such units has the time of them all; those before it take none.
        """
        return np.array([[unit.combined for unit in order] for order in self.stages])

    @cached_property
    def priced_kinds(self) -> IntArray:
        """[num_stages, units_per_stage] what the unit there costs, as the place of a kind.

        Where units run as one, that is of them all for the last, and nothing for the others.
        """
        kinds = self.kinds.copy()
        second = np.roll(self.combined, 1, axis=1) & ~self.combined
        whole = second & (kinds == _KINDS.index(Kind.WEIGHT_GRADIENT))
        kinds[second] = _KINDS.index(Kind.COMBINED)
        kinds[whole & ~np.roll(self.combined, 2, axis=1)] = _KINDS.index(Kind.BACKWARD)
        kinds[self.combined] = _KINDS.index(Kind.NOTHING)
        return kinds

    def pair_clocks(self, frequency_mhz: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return clocks as given, [num_stages, units_per_stage], one for units that run as one."""
        for _ in range(_MOST_AS_ONE - 1):
            following = np.roll(frequency_mhz, -1, axis=1)
            frequency_mhz = np.where(self.combined, following, frequency_mhz)
        return frequency_mhz

    @cached_property
    def cross_dependency(self) -> IntArray:
        """[num_units] the node on a neighbour stage whose end a node waits for, or -1.

        That is the unit that makes its input, or the last of those that this unit runs as one with.
        """
        combined = self.combined.astype(np.int32)
        last = (combined * (1 + np.roll(combined, -1, axis=1))).ravel()
        return self._sender + np.where(self._sender >= 0, last[self._sender], 0)

    @cached_property
    def _sender(self) -> IntArray:
        """[num_units] the node on a neighbour stage that makes a node's input, or -1."""
        sources = self._source.reshape(self.num_stages, -1)
        own = sources // self.units_per_stage == np.arange(self.num_stages)[:, None]
        return np.where(own, -1, sources).ravel().astype(np.int32)

    @cached_property
    def _source(self) -> IntArray:
        """[num_units] the node that makes a node's input, or -1.

        A forward receives its input from the chunk before, a backward its gradient from the chunk
        after. The last chunk's backward needs its own forward only.
        """
        stages = np.arange(self.num_stages)[:, None]
        way = self._by_kind(TRAITS[kind].way for kind in self.unit_kinds)
        chunks = self.chunks.astype(np.int64)
        place = chunks * self.num_stages + self._along(chunks, stages) - way
        chunk, along = np.divmod(place, self.num_stages)
        exists = (way != 0) & (chunk >= 0) & (chunk < self.num_chunks)
        exists &= self.placement is not Placement.APART
        code = self.places + (chunk - chunks) * self.num_microbatches
        stage = self._along(chunk, along)
        node_of_code = self._position_of_code + stages * self.units_per_stage
        source = node_of_code[stage, np.where(exists, code, 0)]
        return np.where(exists, source, -1).astype(np.int32).ravel()

    def _along(self, chunk: NDArray[np.int64], stage: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return a stage's place along its chunk; also the inverse."""
        back = (self.placement is Placement.V) & (chunk % 2 == 1)
        return np.where(back, self.num_stages - 1 - stage, stage)

    def unit_keys(self, parts_per_stage: int, kinds: Sequence[Kind]) -> IntArray:
        """Return [num_stages, units_per_stage] each unit's index in a list of costs, or below zero.

        The list goes by stage, then, where a stage has a part for each chunk, by chunk, then by the
        given kinds; it is below zero for a kind that is not among them.
        """
        part: IntArray = np.arange(self.num_stages, dtype=np.int32)[:, None] * parts_per_stage
        if parts_per_stage > 1:
            part = part + self.chunks
        missing = -len(kinds) * parts_per_stage * self.num_stages
        places = [kinds.index(kind) if kind in kinds else missing for kind in Kind]
        return len(kinds) * part + np.array(places, dtype=np.int32)[self.priced_kinds]

    @cached_property
    def receives(self) -> BoolArray:
        """[num_stages, units_per_stage] whether the unit there gets its input from another."""
        return self.cross_dependency.reshape(self.num_stages, -1) >= 0

    @cached_property
    def sends(self) -> BoolArray:
        """[num_stages, units_per_stage] whether another stage needs that unit's output."""
        return self.cross_successor.reshape(self.num_stages, -1) >= 0

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
                remedy="Each stage must run its units in an order its neighbours can feed.\n"
                + self.marked(*next_node),
            )
        return order

    @cached_property
    def topological_rank(self) -> list[int]:
        """[num_units] the place of each node in `topological_order`."""
        rank = [0] * self.num_units
        for place, node in enumerate(self.topological_order):
            rank[node] = place
        return rank

    @cached_property
    def peak_in_flight(self) -> tuple[int, ...]:
        """For each stage, the most microbatches (x chunks) whose activations it holds at once."""
        if self.forward_only:
            return (0,) * self.num_stages
        return tuple(map(int, self.peak_held()))

    def held(self, one: ArrayLike = 1.0, pending: ArrayLike = 1.0) -> FloatArray:
        """Return [num_stages, units_per_stage] what each stage holds after the unit there.

        Args:
            one: what a microbatch in flight holds; like [num_stages, num_chunks].
            pending: what is held between the two parts of a backward, likewise. Of a whole one
                among split ones there is nothing in between.
        """
        shape = self.num_stages, self.num_chunks
        flies, waits = (
            np.take_along_axis(np.broadcast_to(each, shape), self.chunks, axis=1)
            for each in (one, pending)
        )
        waits = np.where(self.combined | np.roll(self.combined, 1, axis=1), flies, waits)
        # By their places in `Kind`: forward, backward and both parts of one.
        change = np.choose(self.kinds, [flies, -flies, waits - flies, -waits])
        held: FloatArray = change.cumsum(axis=1)
        return held

    def peak_held(self, pending: ArrayLike = 1.0) -> FloatArray:
        """Return [num_stages] the most that each stage holds, in microbatches x chunks in flight.

        `pending` is what is held of one between the two parts of a backward.
        """
        peaks: FloatArray = self.held(1.0, pending).max(axis=1)
        return peaks

    @property
    def microbatches_in_flight(self) -> tuple[float, ...]:
        """The same in microbatches of a whole stage; a chunk counts an equal part of one."""
        return tuple(peak / self.num_chunks for peak in self.peak_in_flight)

    @cached_property
    def out_of_turn(self) -> str | None:
        """Two units that do not come in their microbatches' order, if any, such as `W3 before W2`.

        Frameworks hand out data with forwards and add gradients up as backwards end, so such an
        order comes to other sums than the framework's own. Transformer Engine also lets the weight
        gradient of the microbatch that is forwarded first overwrite those before it.
        """
        shape = (self.num_stages, len(self.unit_kinds), self.num_chunks, self.num_microbatches)
        microbatches = self._position_of_code.reshape(shape).argsort(axis=3)
        for stage, kind, chunk, at in np.argwhere(microbatches != range(shape[3]))[:1].tolist():
            came = int(microbatches[stage, kind, chunk, at])
            first, second = (unit(self.unit_kinds[kind], m, chunk) for m in (came, at))
            labels = [each.label(self.num_chunks) for each in (first, second)]
            return f"stage {stage} runs {' before '.join(labels)}"
        return None

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
    def outer_envelope(self) -> BoolArray:
        """[num_stages, units_per_stage] whether the unit there is on the outer envelope.

        First forward of each stage, all units of the last stage, last backward of each stage
        (Choi et al., ATC'23, section 3).
        """
        on_envelope = np.zeros(self.places.shape, dtype=bool)
        on_envelope[:, [0, -1]] = on_envelope[-1] = True
        return on_envelope

    def labels(self) -> list[list[str]]:
        """Return the orders as plans write them."""
        return [[unit.label(self.num_chunks) for unit in order] for order in self.stages]

    @cached_property
    def places(self) -> IntArray:
        """[num_stages, units_per_stage] the place of the unit there: `places_of`."""
        places = places_of(self.stages, self.num_microbatches, self.num_chunks, self.unit_kinds)
        return np.array(places, dtype=np.int32)

    @cached_property
    def _position_of_code(self) -> NDArray[np.intp]:
        """[num_stages, units_per_stage] the position of each code's unit in its order."""
        return np.argsort(self.places, axis=1)

    @property
    def chunks(self) -> IntArray:
        """[num_stages, units_per_stage] the chunk of the unit there."""
        return (self.places // self.num_microbatches) % self.num_chunks

    def _check_own_inputs(self) -> None:
        """Check that each unit comes after those that it needs on its own stage."""
        kinds, width, nodes = self.unit_kinds, self.units_per_stage, np.arange(self.num_units)
        back = self._by_kind(
            at - kinds.index(TRAITS[kind].after or kind) for at, kind in enumerate(kinds)
        )
        before = self.places - back * (self.num_microbatches * self.num_chunks)
        before = np.take_along_axis(self._position_of_code, before, axis=1).ravel()
        of_kind = nodes // width * width + before
        source = np.where(self._source // width == nodes // width, self._source, -1)
        for needed in (of_kind, source):
            for node in np.flatnonzero(needed > nodes).tolist()[:1]:
                own, first = (
                    self.unit_at(at).label(self.num_chunks) for at in (node, needed[node])
                )
                raise ScheduleError(
                    f"Stage {self.stage_of(node)} runs {own} before {first}",
                    remedy=f"{own} needs what {first} makes: put it later.\n"
                    + self.marked(node, needed[node]),
                )

    def _check_combined(self) -> None:
        block = self.num_microbatches * self.num_chunks
        following = np.roll(self.places, -1, axis=1)
        same = following % block == self.places % block
        kind, kind_after = self.places // block, following // block
        # A forward with a whole backward of other activations, or the two parts of one backward.
        whole = (not self.split) | np.roll(self.combined, -1, axis=1)
        pairs = (kind == 0) & (kind_after == 1) & whole & ~same
        pairs |= (kind == 1) & (kind_after == 2) & same
        pairs[:, -1] = False
        for node in np.flatnonzero(self.combined & ~pairs).tolist()[:1]:
            raise ScheduleError(
                f"Stage {self.stage_of(node)} lists a unit as combined that cannot be",
                value=self.unit_at(node).label(self.num_chunks),
                remedy="A forward runs as one with the whole backward after it, of other "
                "activations, and I with its W after it.\n" + self.marked(node),
            )


def profiled_kinds(schedule: Schedule) -> tuple[Kind, ...]:
    """Return the kinds that the profile of an order that a framework runs has rows of.

    Where backwards are split, whole ones are among them only if the order has some; a profile takes
    those of the others as one part after the other.
    """
    priced = {list(Kind)[place] for place in np.unique(schedule.priced_kinds)}
    return tuple(kind for kind in Kind if kind in priced and kind is not Kind.NOTHING)
