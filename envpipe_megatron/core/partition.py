"""Layers over stages: a profile by layer, what a split of it costs, and Megatron's flags for it.

A *split* is the number of transformer layers on each stage, as a tuple. The embedding, where it is
profiled, always runs on the first stage, and the output layer with the loss on the last, as
Megatron places them. Search for good splits is in `policies.partition_search`.
"""

from __future__ import annotations

import csv
import io
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path

import numpy as np

from envpipe_megatron.core.arrays import FloatArray, IntArray
from envpipe_megatron.core.profile import Profile, ProfileError, ProfileRow, make_profile
from envpipe_megatron.core.schedule import Kind
from envpipe_megatron.core.sidecar import Sidecar
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.files import read_text

#: Transformer layers on each stage.
Split = tuple[int, ...]

EMBEDDING, LOSS = "embedding", "loss"
LAYER_COLUMNS = ("layer", "instruction", "frequency", "time", "energy")
_BYTE_COLUMNS = ("memory", "activation")


class PartitionError(EnvPipeError):
    """A layer CSV that is not readable, or a pipeline that its layers cannot fill."""


@dataclass(frozen=True)
class LayerTable:
    """Time and energy of each layer: one GPU, one microbatch.

    Args:
        names: the layers in the order they run: perhaps `embedding`, `0` to `L-1`, perhaps `loss`.
        frequency_mhz: for each kind, [num_frequencies], the highest first; all layers have these.
        time_s: for each kind, [num_layers, num_frequencies].
        energy_j: the same shape.
        memory_bytes: [num_layers] what a layer holds whatever the schedule (weights, gradients,
            optimizer), or None where it is not known.
        activation_bytes: [num_layers] what a layer holds for each microbatch in flight, or None.
        source: where the table came from, for messages.
    """

    names: tuple[str, ...]
    frequency_mhz: Mapping[Kind, IntArray]
    time_s: Mapping[Kind, FloatArray]
    energy_j: Mapping[Kind, FloatArray]
    memory_bytes: FloatArray | None
    activation_bytes: FloatArray | None
    source: str

    @property
    def has_embedding(self) -> bool:
        """Whether the embedding was profiled."""
        return self.names[0] == EMBEDDING

    @property
    def num_transformer_layers(self) -> int:
        """Layers that a split distributes, L."""
        return len(self.names) - self.has_embedding - (self.names[-1] == LOSS)

    @property
    def has_energy(self) -> bool:
        """Whether any energy was measured: a column of zeros means none."""
        return any(bool(energy.any()) for energy in self.energy_j.values())

    def stage_slices(self, split: Split) -> list[slice]:
        """For each stage, its rows of the table."""
        edges = np.cumsum((0, *split)) + self.has_embedding
        edges[0], edges[-1] = 0, len(self.names)
        return [slice(int(a), int(b)) for a, b in pairwise(edges)]


def in_flight_1f1b(num_stages: int, num_microbatches: int) -> IntArray:
    """[num_stages] the most microbatches that 1F1B holds on each stage (Narayanan et al., 2.2)."""
    return np.minimum(num_microbatches, num_stages - np.arange(num_stages))


def stage_memory_bytes(table: LayerTable, split: Split, num_microbatches: int) -> FloatArray:
    """[num_stages] what each stage holds at 1F1B's peak; 0 where the table has no bytes."""
    held = in_flight_1f1b(len(split), num_microbatches)
    return _sums(table, table.memory_bytes, split) + held * _sums(
        table, table.activation_bytes, split
    )


def stage_profile(
    table: LayerTable, split: Split, memory_limit_bytes: float | None = None
) -> Profile:
    """The profile of the stages of a split: times and energies of a stage's layers, summed.

    Its sidecar has the activation bytes of each stage where they are known, and with a memory limit
    what is free beside one microbatch.
    """
    rows = [
        (stage, kind, ProfileRow(int(frequency), float(time_s), float(energy_j)))
        for stage, own in enumerate(table.stage_slices(split))
        for kind in Kind
        for frequency, time_s, energy_j in zip(
            table.frequency_mhz[kind],
            table.time_s[kind][own].sum(axis=0),
            table.energy_j[kind][own].sum(axis=0),
            strict=True,
        )
    ]
    activation = free = None
    if table.activation_bytes is not None:
        activation = _sums(table, table.activation_bytes, split)
        if memory_limit_bytes is not None:
            one = stage_memory_bytes(table, split, num_microbatches=1)
            free = tuple(np.maximum(memory_limit_bytes - one, 0.0).tolist())
    sidecar = Sidecar(
        activation_bytes=None if activation is None else tuple(activation.tolist()),
        free_bytes=free,
    )
    return make_profile(rows, source=f"{table.source} split as {split}", sidecar=sidecar)


def _sums(table: LayerTable, values: FloatArray | None, split: Split) -> FloatArray:
    if values is None:
        return np.zeros(len(split))
    return np.array([values[own].sum() for own in table.stage_slices(split)])


def megatron_layout(split: Split) -> str:
    """The value of Megatron's `--pipeline-model-parallel-layout` for a split.

    The syntax of core_v0.16.1 to core_v0.19.0: stages between `|`; `E` embedding, `t` transformer
    layer, `L` loss; `x*n` and `(...)*n` repeat. Embedding and loss are demanded exactly once, first
    and last, whether they were profiled or not.
    """

    def layers(count: int) -> str:
        return "t" * count if count < 2 else f"t*{count}"

    middle = ""
    for count, same in groupby(split[1:-1]):
        repeats = len(list(same))
        stage = f"{layers(count)}|"
        middle += stage if repeats == 1 else f"({stage})*{repeats}"
    return f"E{layers(split[0])}|{middle}{layers(split[-1])}L"


def layout_flags(split: Split) -> str:
    """Megatron's flag for any split, quoted for a shell."""
    return f"--pipeline-model-parallel-layout {shlex.quote(megatron_layout(split))}"


def first_last_flags(split: Split) -> str | None:
    """Megatron's flags for the first and the last stage, or None where they cannot say a split.

    Megatron (core_v0.16.1) wants at least one layer on each of the two, and deals the others evenly
    to the stages between. The flags exclude the layout and `--account-for-*-in-pipeline-split`.
    """
    if min(split) < 1 or len(set(split[1:-1])) > 1:
        return None
    return (
        f"--decoder-first-pipeline-num-layers {split[0]} "
        f"--decoder-last-pipeline-num-layers {split[-1]}"
    )


def megatron_even_split(num_layers: int, num_stages: int) -> tuple[Split, tuple[str, ...]] | None:
    """The split that Megatron makes without a layout, and the flags it needs for that.

    Without flags the stages must divide the layers; `--account-for-embedding-in-pipeline-split` and
    `--account-for-loss-in-pipeline-split` count the embedding and the loss as one layer each.

    Returns:
        None where Megatron refuses all of these.
    """
    for embedding, loss in ((0, 0), (1, 1), (1, 0)):  # the loss alone splits as the embedding
        share, left = divmod(num_layers + embedding + loss, num_stages)
        split = [share] * num_stages
        split[0] -= embedding
        split[-1] -= loss
        if left or min(split) < 1:
            continue
        flags = [
            f"--account-for-{what}-in-pipeline-split"
            for what, counted in ((EMBEDDING, embedding), (LOSS, loss))
            if counted
        ]
        return tuple(split), tuple(flags)
    return None


@dataclass(frozen=True)
class _Line:
    """One line of a layer CSV."""

    where: str
    layer: str
    kind: Kind
    row: ProfileRow
    bytes_by_column: Mapping[str, float]


def read_layers(path: Path) -> LayerTable:
    """Read a layer CSV: `layer,instruction,frequency,time,energy[,memory][,activation]`.

    MHz, s and J for one GPU and one microbatch; bytes. Layers are `0` to `L-1`, and perhaps
    `embedding` and `loss`. Further columns are ignored.

    Raises:
        PartitionError: naming file, line and value of what is wrong, or a layer, instruction or
            frequency that is missing.
    """
    lines = list(_read_lines(path))
    by_layer: dict[str, dict[Kind, dict[int, ProfileRow]]] = {}
    layer_bytes: dict[str, Mapping[str, float]] = {}
    for line in lines:
        known = by_layer.setdefault(line.layer, {kind: {} for kind in Kind})[line.kind]
        if line.row.frequency_mhz in known:
            raise PartitionError(
                f"{line.where}: a second row for layer {line.layer} {line.kind.value} at this "
                "frequency (MHz)",
                value=line.row.frequency_mhz,
                remedy="Keep one.",
            )
        known[line.row.frequency_mhz] = line.row
        first = layer_bytes.setdefault(line.layer, line.bytes_by_column)
        for column, value in line.bytes_by_column.items():
            if value != first[column]:
                raise PartitionError(
                    f"{line.where}: {column} of layer {line.layer} is {first[column]:g} on an "
                    "earlier line",
                    value=value,
                    remedy="Bytes depend on the layer alone: give the same on all its lines.",
                )
    names = _layer_names(by_layer, path)
    frequencies = {
        kind: sorted(by_layer[names[0]][kind], reverse=True) for kind in Kind
    }  # those of any layer: all must have the same
    for name in names:
        for kind in Kind:
            own = sorted(by_layer[name][kind], reverse=True)
            if not own or own != frequencies[kind]:
                raise PartitionError(
                    f"{path}: layer {name} {kind.value} lists other frequencies (MHz) than layer "
                    f"{names[0]}, or none",
                    value=own,
                    remedy=f"A stage runs its layers at one clock: {frequencies[kind]} for each.",
                )
    columns = {
        column: np.array([layer_bytes[name][column] for name in names])
        for column in lines[0].bytes_by_column
    }

    def table(field: str) -> dict[Kind, FloatArray]:
        return {
            kind: np.array(
                [[getattr(by_layer[n][kind][f], field) for f in frequencies[kind]] for n in names]
            )
            for kind in Kind
        }

    return LayerTable(
        names,
        {kind: np.array(frequencies[kind]) for kind in Kind},
        table("time_s"),
        table("energy_j"),
        columns.get("memory"),
        columns.get("activation"),
        str(path),
    )


def _layer_names(found: Mapping[str, object], path: Path) -> tuple[str, ...]:
    """The layers in the order they run."""
    numbered = sorted(int(name) for name in found if name not in (EMBEDDING, LOSS))
    if not numbered or numbered != list(range(len(numbered))):
        missing = min(set(range(len(numbered) + 1)) - set(numbered))
        raise PartitionError(
            f"{path} has no layer {missing}",
            value=sorted(found),
            remedy="Number the transformer layers from 0 without gaps.",
        )
    return (
        *([EMBEDDING] if EMBEDDING in found else []),
        *(str(number) for number in numbered),
        *([LOSS] if LOSS in found else []),
    )


def _read_lines(path: Path) -> Iterator[_Line]:
    try:
        lines = list(csv.reader(io.StringIO(read_text(path), newline="")))
    except (OSError, ValueError, csv.Error) as error:
        raise PartitionError(
            f"Layer table {path} is not readable: {error}", remedy="Give a layer CSV."
        ) from error
    header = [name.strip() for name in lines[0]] if lines else []
    width = len(LAYER_COLUMNS)
    if tuple(header[:width]) != LAYER_COLUMNS:
        raise PartitionError(
            f"{path}, line 1: not the header of a layer table",
            value=",".join(header),
            remedy=f"The first line must start with {','.join(LAYER_COLUMNS)}; "
            f"{' and '.join(_BYTE_COLUMNS)} (bytes) may follow.",
        )
    byte_columns = {name: header.index(name) for name in _BYTE_COLUMNS if name in header}
    filled = [
        (n, cells) for n, cells in enumerate(lines[1:], start=2) if any(map(str.strip, cells))
    ]
    if not filled:
        raise PartitionError(f"{path} has no rows", remedy="List every layer and instruction.")
    for number, cells in filled:
        yield _parse_line([cell.strip() for cell in cells], byte_columns, f"{path}, line {number}")


def _parse_line(cells: Sequence[str], byte_columns: Mapping[str, int], where: str) -> _Line:
    needed = max((len(LAYER_COLUMNS) - 1, *byte_columns.values())) + 1
    if len(cells) < needed:
        raise PartitionError(
            f"{where}: too few columns", value=",".join(cells), remedy=f"The header has {needed}."
        )
    layer, instruction, frequency, time_s, energy_j = cells[: len(LAYER_COLUMNS)]
    if layer not in (EMBEDDING, LOSS) and not (layer.isascii() and layer.isdigit()):
        raise PartitionError(
            f"{where}: unknown layer",
            value=layer,
            remedy=f"Use {EMBEDDING}, the number of a transformer layer, or {LOSS}.",
        )
    if instruction not in set(Kind):
        raise PartitionError(
            f"{where}: unknown instruction", value=instruction, remedy="Use forward or backward."
        )
    clock = _number(frequency, f"{where}: frequency (MHz)")
    if not clock.is_integer():
        raise PartitionError(f"{where}: frequency (MHz) must be a whole number", value=frequency)
    try:
        row = ProfileRow(
            int(clock),
            _number(time_s, f"{where}: time (s)"),
            _number(energy_j, f"{where}: energy (J)"),
        )
    except ProfileError as error:
        raise PartitionError(f"{where}: {error}") from error
    sizes = {
        name: _number(cells[column], f"{where}: {name} (bytes)")
        for name, column in byte_columns.items()
    }
    name = layer if layer in (EMBEDDING, LOSS) else str(int(layer))
    return _Line(where, name, Kind(instruction), row, sizes)


def _number(text: str, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise PartitionError(f"{what} must be a number of at least 0", value=text)
    return value
