"""A layer profile: what each piece of a model takes and holds, by sizes, and what links take.

A *piece* is what a profile measures as one: an operator or a whole layer. A *block* is a run of
pieces that belong together, a transformer layer for example, and may be repeated; Megatron cuts a
model between blocks. *Sizes* are what a piece's measures depend on: tensor, context and expert
parallel size, and the samples of a microbatch on one GPU. All amounts are those of one GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, groupby, pairwise

import numpy as np

from envpipe_megatron.core.arrays import FloatArray, IntArray
from envpipe_megatron.errors import EnvPipeError

EMBEDDING, LAYER, LOSS = "embedding", "layer", "loss"
#: Names of recomputation: Megatron's two, and that of single operators, in runs (`stages.choices`).
SELECTIVE, FULL, OPERATOR = "selective", "full", "operator"

#: Of a piece's time, from which on the host counts as what bounds it.
_HOST_BOUND = 0.9
#: Times of a microbatch beside a smaller one's, beyond what the samples account for; a GPU's times
#: vary by less.
_MOST, _LEAST = 1.2, 0.9
#: A model of more pieces in all is a mistake in a file, and would fill the memory.
_MOST_PIECES = 100_000


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
        name: `SELECTIVE`, `FULL` or `OPERATOR`.
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
        expert_parameters: of the parameters those of experts, which fewer data parallel ranks hold.
        rested_s: [num_frequencies] forward and backward where the GPU rests as long before: at its
            power limit it then runs at a higher clock. None if it is not known.
        apart_s: more of the forward where the model's first piece is in another part of the model:
            data are loaded in both.
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
    apart_s: float = 0.0

    def way(self, name: str | None) -> Recomputation | None:
        """The recomputation of a name; None if the piece does not know it."""
        return next((way for way in self.recomputation if way.name == name), None)

    @property
    def both_s(self) -> FloatArray:
        """[num_frequencies] forward and backward, without a rest."""
        return self.forward_s + self.backward_s

    @property
    def known_rested_s(self) -> FloatArray:
        """The same where the GPU rests as long, if that is known; never longer."""
        return self.both_s if self.rested_s is None else np.minimum(self.rested_s, self.both_s)

    def longer(self, more_s: FloatArray | float) -> Measure:
        """The same with a longer forward, rested or not; its joules grow with its time."""
        forward_s = self.forward_s + more_s
        forward_j = None if self.forward_j is None else self.forward_j * forward_s / self.forward_s
        rested_s = None if self.rested_s is None else self.rested_s + more_s
        return replace(self, forward_s=forward_s, forward_j=forward_j, rested_s=rested_s)

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
        """Time in s of transfers of some bytes; nothing takes no time."""
        amount = np.asarray(num_bytes, dtype=float)
        time_s = np.interp(amount, self.num_bytes, self.time_s)
        beyond = np.maximum(amount / self.num_bytes[-1], 1.0)
        return np.where(amount > 0, time_s * beyond, 0.0)


@dataclass(frozen=True)
class Links:
    """Times of messages between GPUs; a curve that is missing takes no time.

    Args:
        within_node, across_nodes: a message from stage to stage.
        all_reduce: by (GPUs, whether they lie on several nodes).
    """

    within_node: Curve | None = None
    across_nodes: Curve | None = None
    all_reduce: Mapping[tuple[int, bool], Curve] = field(default_factory=dict)

    def message_s(self, num_bytes: FloatArray | float, crosses: bool) -> FloatArray:
        """Time of a message; across nodes as within one where only that was measured."""
        curve = (self.across_nodes or self.within_node) if crosses else self.within_node
        return np.zeros(np.shape(num_bytes)) if curve is None else curve(num_bytes)

    def all_reduce_s(self, num_bytes: float, gpus: int, crosses: bool) -> float:
        """Time of an all-reduce; that of the next larger group measured, scaled to this one's.

        A ring sends 2 (n - 1) / n of the bytes through each link (Patarasuk and Yuan, 2009), so
        groups that were not measured differ by that factor.
        """
        if gpus == 1 or not self.all_reduce:
            return 0.0
        near = [key for key in self.all_reduce if key[1] == crosses] or list(self.all_reduce)
        key = min(near, key=lambda key: (key[0] < gpus, abs(key[0] - gpus)))
        ring = ((gpus - 1) / gpus) / ((key[0] - 1) / key[0])
        return float(self.all_reduce[key](num_bytes)) * ring


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

    @cached_property
    def block_edges(self) -> tuple[int, ...]:
        """Piece numbers at which blocks begin, and the number of pieces."""
        lengths = [len(block.pieces) for block in self.blocks for _ in range(block.repeat)]
        return (0, *accumulate(lengths))

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

    @cached_property
    def in_parts(self) -> LayerProfile:
        """The same for a model that is cut: what is `apart_s` here is in forwards there."""
        measures = {
            sizes: {
                piece: replace(each.longer(each.apart_s), apart_s=0.0) if each.apart_s else each
                for piece, each in by_piece.items()
            }
            for sizes, by_piece in self.measures.items()
        }
        return replace(self, measures=measures)

    def at(self, sizes: Sizes) -> Mapping[str, Measure]:
        """The measures at some sizes; EnvPipeError if they were not measured."""
        if sizes not in self.measures:
            raise EnvPipeError(
                f"{self.source} was not measured at these sizes",
                value=sizes,
                remedy="Profile them too: envpipe profile --layers.",
            )
        return self.measures[sizes]

    def column(self, sizes: Sizes, name: str) -> FloatArray:
        """[num_pieces] a measure of each piece; with a second axis of clocks where it has."""
        measures = self.at(sizes)
        names, numbers = self._numbered
        return np.array([getattr(measures[piece], name) for piece in names], dtype=float)[numbers]

    @cached_property
    def _numbered(self) -> tuple[tuple[str, ...], IntArray]:
        """The different pieces, and which of them each piece is."""
        names = tuple(dict.fromkeys(self.pieces))
        number = {name: index for index, name in enumerate(names)}
        return names, np.array([number[piece] for piece in self.pieces])


def check_profile(profile: LayerProfile) -> LayerProfile:
    """The profile, or an EnvPipeError that says which piece or size is missing or misshapen."""
    ways = (SELECTIVE, FULL, OPERATOR)
    names = {piece for block in profile.blocks for piece in block.pieces}
    if not names or not profile.measures:
        raise EnvPipeError(f"{profile.source} has no pieces or no measures")
    num_pieces = sum(len(block.pieces) * block.repeat for block in profile.blocks)
    if num_pieces > _MOST_PIECES:
        raise EnvPipeError(
            f"{profile.source}: the blocks have more than {_MOST_PIECES} pieces in all",
            value=num_pieces,
            remedy="Correct the blocks' repeat.",
        )
    width = len(profile.frequency_mhz)
    if width == 0 or (np.diff(profile.frequency_mhz) >= 0).any():
        raise EnvPipeError(
            f"{profile.source}: frequency_mhz must fall, the highest first",
            value=list(profile.frequency_mhz),
        )
    for sizes, by_piece in profile.measures.items():
        if set(by_piece) != names:
            raise EnvPipeError(
                f"{profile.source}: at {sizes} not the pieces of the blocks are measured",
                value=sorted(set(by_piece) ^ names),
                remedy="Measure each piece at each of the sizes, once.",
            )
        for piece, measure in by_piece.items():
            for values in _by_frequency(measure):
                if values.shape != (width,):
                    raise EnvPipeError(
                        f"{profile.source}: '{piece}' at {sizes} needs {width} values, one a clock",
                        value=values.tolist(),
                    )
            for time_s in (measure.forward_s, measure.backward_s, measure.known_rested_s):
                if (time_s <= 0).any():
                    raise EnvPipeError(
                        f"{profile.source}: times of '{piece}' at {sizes} must be above 0",
                        value=time_s.tolist(),
                        remedy="Measure it again.",
                    )
            for way in measure.recomputation:
                if way.name not in ways:
                    raise EnvPipeError(
                        f"{profile.source}: no recomputation of '{piece}' at {sizes} has this name",
                        value=way.name,
                        remedy=f"Known: {', '.join(ways)}.",
                    )
    return profile


def _by_frequency(measure: Measure) -> Iterable[FloatArray]:
    optional = [measure.forward_j, measure.backward_j, measure.rested_s]
    for way in measure.recomputation:
        yield way.time_s
        optional.append(way.energy_j)
    yield measure.forward_s
    yield measure.backward_s
    yield from (values for values in optional if values is not None)


def implausible_rows(profile: LayerProfile) -> list[str]:
    """A line for each row whose time cannot be right beside that of the next microbatch size.

    A larger microbatch takes longer than a smaller one, and not much longer for each sample. Other
    sizes are not compared: where the host is what bounds, more GPUs may well take longer.
    Forward and backward together, at the highest clock: which of them waits for a host that is
    slow differs from row to row. Nothing of profiles without a GPU's name: the times of a CPU, and
    of another project's single operators, vary more.
    """
    if profile.gpu is None:
        return []
    found = []
    ordered = sorted(profile.measures, key=lambda sizes: (_shared(sizes), sizes.microbatch_size))
    for _, alike in groupby(ordered, _shared):
        for small, large in pairwise(alike):
            samples = large.microbatch_size / small.microbatch_size
            for piece, measure in profile.at(large).items():
                times = float((measure.both_s / profile.at(small)[piece].both_s)[0])
                if times > _MOST * samples:
                    found.append(_sentence(piece, large, small, times))
                elif times < _LEAST:
                    found.append(_sentence(piece, small, large, 1 / times))
    return found


def _shared(sizes: Sizes) -> tuple[int, int, int]:
    return sizes.tensor_parallel, sizes.context_parallel, sizes.expert_parallel


def _sentence(piece: str, sizes: Sizes, other: Sizes, times: float) -> str:
    parts = zip(("tensor", "context", "expert"), _shared(sizes), strict=True)
    at = "".join(f"{name} parallel {size}, " for name, size in parts if size > 1)
    return (
        f"{piece} at {at}microbatch {sizes.microbatch_size} takes {times:.1f} times as long as at "
        f"microbatch {other.microbatch_size}"
    )
