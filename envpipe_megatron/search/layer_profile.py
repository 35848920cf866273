"""A layer profile: what each piece of a model takes and holds, by sizes, and what links take.

A *piece* is what a profile measures as one: an operator or a whole layer. A *block* is a run of
pieces that belong together, a transformer layer for example, and may be repeated; Megatron cuts a
model between blocks. *Sizes* are what a piece's measures depend on: tensor, context and expert
parallel size, and the samples of a microbatch on one GPU. All amounts are those of one GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from envpipe_megatron.core.arrays import BoolArray, FloatArray, IntArray
from envpipe_megatron.core.kinds import Kind
from envpipe_megatron.errors import EnvPipeError

EMBEDDING, LAYER, LOSS = "embedding", "layer", "loss"
#: Megatron's two names of recomputation.
SELECTIVE, FULL = "selective", "full"

#: The share of a piece's time from which on the host counts as what bounds it.
_HOST_BOUND = 0.9


@dataclass(frozen=True, order=True)
class Sizes:
    """Sizes that the measures of a piece depend on."""

    tensor_parallel: int = 1
    microbatch_size: int = 1
    context_parallel: int = 1
    expert_parallel: int = 1

    @property
    def gpus(self) -> int:
        """GPUs that share one microbatch."""
        return self.tensor_parallel * self.context_parallel


@dataclass(frozen=True)
class Recomputation:
    """One way to keep less of a piece, by computing it again before its backward.

    Args:
        name: `SELECTIVE` or `FULL`.
        time_s, energy_j: [num_frequencies] of what is computed again; energy None if unknown.
        activation_bytes: what is kept of a microbatch in flight all the same.
        working_bytes: what is held besides while the piece's own backward runs.
    """

    name: str
    time_s: FloatArray
    energy_j: FloatArray | None
    activation_bytes: float
    working_bytes: float


@dataclass(frozen=True)
class Measure:
    """One piece at some sizes: one GPU, one microbatch.

    Args:
        forward_s, backward_s: [num_frequencies], collectives of tensor and context parallelism in.
        forward_j, backward_j: the same shape; None where no joule was measured.
        parameters: that one GPU holds.
        input_bytes, output_bytes: the message if a stage begins, or ends, with this piece.
        activation_bytes: kept from forward to backward of a microbatch.
        forward_workspace_bytes, backward_workspace_bytes: held only while the piece itself runs.
        recomputation: ways to keep less, from the mildest.
        host_s: in which the host hands over forward and backward, at the highest clock; with the
            piece's own waits for the GPU. None if it is not known.
        expert_parameters: the experts' parameters, which fewer data parallel ranks hold.
        rested_s: [num_frequencies] forward and backward where the GPU rests as long before: at its
            power limit it then runs at a higher clock. None if it is not known.
    """

    forward_s: FloatArray
    backward_s: FloatArray
    forward_j: FloatArray | None = None
    backward_j: FloatArray | None = None
    parameters: float = 0.0
    input_bytes: float = 0.0
    output_bytes: float = 0.0
    activation_bytes: float = 0.0
    forward_workspace_bytes: float = 0.0
    backward_workspace_bytes: float = 0.0
    recomputation: tuple[Recomputation, ...] = ()
    host_s: float | None = None
    expert_parameters: float = 0.0
    rested_s: FloatArray | None = None

    def way(self, name: str | None) -> Recomputation | None:
        """Return the recomputation of a name; None if the piece does not know it."""
        return next((way for way in self.recomputation if way.name == name), None)

    @property
    def both_s(self) -> FloatArray:
        """[num_frequencies] forward and backward, without a rest."""
        return self.forward_s + self.backward_s

    @property
    def both_j(self) -> FloatArray | None:
        """[num_frequencies] of forward and backward; None where one was not measured."""
        if self.forward_j is None or self.backward_j is None:
            return None
        return self.forward_j + self.backward_j

    @property
    def known_rested_s(self) -> FloatArray:
        """The same where the GPU rests as long, if that is known; never longer."""
        return self.both_s if self.rested_s is None else np.minimum(self.rested_s, self.both_s)

    @property
    def is_host_bound(self) -> bool:
        """True if the host hands over hardly faster than the GPU runs, at the highest clock."""
        return self.host_s is not None and bool(self.host_s >= _HOST_BOUND * self.both_s[0])


@dataclass(frozen=True)
class Block:
    """Pieces that belong together, and how often they follow one another."""

    pieces: tuple[str, ...]
    repeat: int = 1


@dataclass(frozen=True)
class BytesPerParameter:
    """Bytes that a GPU holds for a parameter; data parallel ranks can share the optimizer's.

    `least_workspace` is memory that is held beside at the peak where no piece's workspace is as
    large (Aceso counts another copy of the weights).
    """

    weight: float = 2.0
    gradient: float = 4.0
    optimizer: float = 12.0
    least_workspace: float = 0.0


@dataclass(frozen=True)
class Curve:
    """Time of a transfer by its bytes: measured points, rising in bytes; linear in between.

    Below the first point its time, above the last its rate.
    """

    num_bytes: FloatArray
    time_s: FloatArray

    def __call__(self, num_bytes: FloatArray | float) -> FloatArray:
        """Return the time (s) of transfers of some bytes; nothing takes no time."""
        amount = np.asarray(num_bytes, dtype=float)
        time_s = np.interp(amount, self.num_bytes, self.time_s)
        beyond = np.maximum(amount / self.num_bytes[-1], 1.0)
        return np.where(amount > 0, time_s * beyond, 0.0)


@dataclass(frozen=True)
class AllReduce:
    """Times of an all-reduce among some GPUs, which may lie on several nodes."""

    gpus: int
    across_nodes: bool
    points: Curve


@dataclass(frozen=True)
class Links:
    """Times of messages between GPUs; a curve that is missing takes no time.

    Args:
        within_node, across_nodes: a message from stage to stage.
        all_reduce: of the groups that were measured.
    """

    within_node: Curve | None = None
    across_nodes: Curve | None = None
    all_reduce: tuple[AllReduce, ...] = ()

    def message_s(self, num_bytes: FloatArray | float, crosses: bool) -> FloatArray:
        """Return the time of a message; across nodes as within one where only that was measured."""
        curve = (self.across_nodes or self.within_node) if crosses else self.within_node
        return np.zeros(np.shape(num_bytes)) if curve is None else curve(num_bytes)

    def all_reduce_s(self, num_bytes: float, gpus: int, crosses: bool) -> float:
        """Return the time of an all-reduce, scaled from the next larger group that was measured.

        A ring sends 2 (n - 1) / n of the bytes through each link (Patarasuk and Yuan, 2009), so
        groups that were not measured differ by that factor.
        """
        if gpus == 1 or not self.all_reduce:
            return 0.0
        alike = [each for each in self.all_reduce if each.across_nodes == crosses]
        near = min(
            alike or self.all_reduce, key=lambda each: (each.gpus < gpus, abs(each.gpus - gpus))
        )
        ring = ((gpus - 1) / gpus) / ((near.gpus - 1) / near.gpus)
        return float(near.points(num_bytes)) * ring


@dataclass(frozen=True)
class LayerProfile:
    """A model's pieces in the order they run, with their measures.

    Args:
        blocks: in the order they run.
        frequency_mhz: [num_frequencies], the highest first.
        measures: for each of the sizes that were measured, each piece.
        optimizer_s: of the optimizer's step, for each parameter that a GPU updates.
        gradients_s: of zeroing, checking and scaling gradients, for each parameter that a GPU
            holds, whether data parallel ranks share the optimizer or not.
        workspaces_add: whether forwards' workspace is held while backwards run, as it is where an
            allocator's cache is counted; else the larger of the two is.
        frees_outputs: whether a stage frees its output once that is sent, as Megatron does.
        source: where this comes from, for messages.
    """

    blocks: tuple[Block, ...]
    frequency_mhz: IntArray
    measures: Mapping[Sizes, Mapping[str, Measure]]
    bytes_per_parameter: BytesPerParameter
    links: Links
    optimizer_s: float = 0.0
    gradients_s: float = 0.0
    workspaces_add: bool = False
    frees_outputs: bool = False
    gpu: str | None = None
    source: str = "a layer profile"

    @cached_property
    def pieces(self) -> tuple[str, ...]:
        """Every piece of the model in the order they run, repeated ones too."""
        return tuple(p for block in self.blocks for _ in range(block.repeat) for p in block.pieces)

    @property
    def has_energy(self) -> bool:
        """True if all pieces and recomputations have measured joules, and not only zeros."""
        measures = [each for by_piece in self.measures.values() for each in by_piece.values()]
        pieces = [x for each in measures for x in (each.forward_j, each.backward_j)]
        ways = [way.energy_j for each in measures for way in each.recomputation]
        missing = any(x is None for x in pieces + ways)
        return not missing and any(x is not None and bool(x.any()) for x in pieces)

    @cached_property
    def least_rested(self) -> float:
        """The least that any piece takes where a GPU rests, of its time without a rest."""
        measures = (each for by_piece in self.measures.values() for each in by_piece.values())
        return min(float((each.known_rested_s / each.both_s)[0]) for each in measures)

    def at(self, sizes: Sizes) -> Mapping[str, Measure]:
        """Return the measures at some sizes; EnvPipeError if they were not measured."""
        if sizes not in self.measures:
            raise EnvPipeError(
                f"{self.source} was not measured at these sizes",
                value=sizes,
                remedy="Profile them too: envpipe profile --layers.",
            )
        return self.measures[sizes]

    def sums(self, sizes: Sizes) -> Pieces:
        """Return running sums over the pieces at some sizes; EnvPipeError as `at`."""
        if sizes not in self._sums:
            self._sums[sizes] = Pieces(self, sizes)
        return self._sums[sizes]

    @cached_property
    def _sums(self) -> dict[Sizes, Pieces]:
        return {}


@dataclass(frozen=True)
class WaySums:
    """Effects of recomputing: running sums [n + 1] over pieces; others [n] of each.

    `can_be` says which pieces can be recomputed; none of them where it is by no way.
    """

    can_be: BoolArray
    again_s: FloatArray
    saved_bytes: FloatArray
    working_bytes: FloatArray

    @cached_property
    def known(self) -> FloatArray:
        """[n + 1] how many pieces so far can be recomputed."""
        return running(self.can_be)

    @cached_property
    def levels(self) -> list[tuple[float, IntArray]]:
        """Bytes that a piece may hold while it is recomputed, from the least.

        With each, [n + 1] the next piece that holds more; after all pieces if none does.
        """
        count = len(self.working_bytes)
        found = []
        for level in np.unique(self.working_bytes[self.can_be]) if self.can_be.any() else (0.0,):
            more = np.append(np.flatnonzero(self.working_bytes > level), count + 1)
            found.append((float(level), more[np.searchsorted(more, np.arange(count + 1))]))
        return found

    def until(self, first: IntArray, end: IntArray, count: int) -> IntArray:
        """Return where the first `count` pieces that can be recomputed end in each run."""
        until = np.searchsorted(self.known, self.known[first] + count, side="left")
        return np.maximum(np.minimum(until, end), first)


class Pieces:
    """Running sums over a model's pieces at some sizes, [n + 1], and what single ones need, [n].

    `ways` are ways to recompute by name, None to recompute nothing; the sums are without. Enter at
    `LayerProfile.sums`.
    """

    def __init__(self, profile: LayerProfile, sizes: Sizes) -> None:
        self.profile, measures = profile, profile.at(sizes)
        by_piece = self._by_piece = [measures[piece] for piece in profile.pieces]
        self.forward_s = running([m.forward_s[0] for m in by_piece])
        self.time_s = running([m.both_s[0] for m in by_piece])
        self.kept_bytes = running([m.activation_bytes for m in by_piece])
        self.parameters = running([m.parameters for m in by_piece])
        self.expert_parameters = running([m.expert_parameters for m in by_piece])
        self.input_bytes = np.array([0.0, *(m.input_bytes for m in by_piece[1:])])
        #: [n + 1] sent by a stage that ends before a piece, and of that freed.
        self.sent_bytes = np.array([0.0, *(m.output_bytes for m in by_piece[:-1]), 0.0])
        self.freed_bytes = self.sent_bytes * profile.frees_outputs
        self.forward_bytes = np.array([m.forward_workspace_bytes for m in by_piece])
        self.backward_bytes = np.array([m.backward_workspace_bytes for m in by_piece])
        names = (way.name for m in by_piece for way in m.recomputation)
        self.ways = {name: self._way(name) for name in dict.fromkeys((None, *names))}

    @property
    def num_pieces(self) -> int:
        """Pieces of the model, n."""
        return len(self.time_s) - 1

    @cached_property
    def by_clock(self) -> dict[str | None, tuple[FloatArray, ...]]:
        """Running sums [n + 1, num_frequencies] of J and s: forwards, backwards, each way."""
        pairs: dict[str | None, list[tuple[FloatArray | None, FloatArray | None]]] = {
            Kind.FORWARD: [(m.forward_j, m.forward_s) for m in self._by_piece],
            Kind.BACKWARD: [(m.backward_j, m.backward_s) for m in self._by_piece],
        }
        for name in self.ways:
            ways = (m.way(name) for m in self._by_piece)
            pairs[name] = [(way.energy_j, way.time_s) if way else (None, None) for way in ways]
        return {
            key: tuple(self._clocks(values) for values in zip(*of, strict=True))
            for key, of in pairs.items()
        }

    @cached_property
    def saved_s(self) -> FloatArray:
        """[n + 1, num_frequencies] running sums of what a GPU that rests half the time saves."""
        return self._clocks(m.both_s - m.known_rested_s for m in self._by_piece)

    def _clocks(self, values: Iterable[FloatArray | None]) -> FloatArray:
        """Return [n + 1, num_frequencies] running sums of values by clock; None is nothing."""
        nothing = np.zeros(len(self.profile.frequency_mhz))
        of_pieces = [nothing if value is None else value for value in values]
        return np.cumsum([nothing, *of_pieces], axis=0)

    def _way(self, name: str | None) -> WaySums:
        count = len(self._by_piece)
        can_be, again_s, saved_bytes, working_bytes = np.zeros((4, count))
        for at, measure in enumerate(self._by_piece):
            if way := measure.way(name):
                can_be[at], again_s[at] = True, way.time_s[0]
                saved_bytes[at] = max(0.0, measure.activation_bytes - way.activation_bytes)
                working_bytes[at] = way.working_bytes
                if not self.profile.workspaces_add:  # as `configuration.workspace_bytes` takes them
                    working_bytes[at] += measure.backward_workspace_bytes
        return WaySums(can_be.astype(bool), running(again_s), running(saved_bytes), working_bytes)


def running(values: ArrayLike) -> FloatArray:
    """Return [n + 1] running sums that begin with nothing."""
    return np.concatenate([[0.0], np.cumsum(values)])
