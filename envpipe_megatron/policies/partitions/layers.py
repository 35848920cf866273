"""Layers over stages: a profile by layer, what a split of it costs, and Megatron's flags for it.

A *split* is the number of transformer layers on each stage, as a tuple. The embedding, where it is
profiled, runs on the first stage, and the output layer with the loss on the last.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path

import numpy as np

from envpipe_megatron.core.arrays import FloatArray, IntArray
from envpipe_megatron.core.fields import AMOUNT, Row, read_table
from envpipe_megatron.core.kinds import WHOLE, Kind
from envpipe_megatron.core.profile import Profile, make_profile
from envpipe_megatron.core.profile_rows import ProfileRow, check_power, lines_of, read_row
from envpipe_megatron.core.sidecar import Sidecar
from envpipe_megatron.errors import EnvPipeError

#: Transformer layers on each stage.
Split = tuple[int, ...]

EMBEDDING, LOSS = "embedding", "loss"
_MOST_DIGITS = 9
LAYER_COLUMNS = ("layer", "instruction", "frequency", "time", "energy")
_BYTE_COLUMNS = ("memory", "activation")


@dataclass(frozen=True)
class LayerTable:
    """Time and energy of each layer: one GPU, one microbatch.

    Args:
        names: the layers in the order they run: perhaps `embedding`, `0` to `L-1`, perhaps `loss`.
        frequency_mhz: for each kind, [num_frequencies], the highest first; all layers have these.
        time_s: for each kind, [num_layers, num_frequencies].
        energy_j: the same shape.
        memory_bytes: [num_layers] what a layer holds whatever the schedule (weights, gradients,
            optimizer), or None if it is not known.
        activation_bytes: [num_layers] what a layer holds for each microbatch in flight, or None.
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
    """[num_stages] what each stage holds at 1F1B's peak; 0 if the table has no bytes."""
    held = in_flight_1f1b(len(split), num_microbatches)
    return _sums(table, table.memory_bytes, split) + held * _sums(
        table, table.activation_bytes, split
    )


def stage_profile(
    table: LayerTable, split: Split, memory_limit_bytes: float | None = None
) -> Profile:
    """The profile of the stages of a split: times and energies of a stage's layers, summed.

    Its sidecar has the activation bytes of each stage if they are known, and with a memory limit
    what is free beside one microbatch.
    """
    rows = [
        (stage, kind, ProfileRow(int(frequency), float(time_s), float(energy_j)))
        for stage, own in enumerate(table.stage_slices(split))
        for kind in WHOLE
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

    Embedding and loss are demanded exactly once, first and last, whether they were profiled or not.
    """
    stages = ["t" * count for count in split]
    return layout_text(["E" + stages[0], *stages[1:-1], stages[-1] + "L"])


def layout_text(stages: Sequence[str]) -> str:
    """Letters of stages as Megatron's layout: `Et*3|(tt|)*2tL`.

    The syntax of core_v0.16.1 to core_v0.19.0: stages between `|`; `E` embedding, `t` transformer
    layer, `m` layer that predicts a further token, `L` loss; `x*n` and `(...)*n` repeat.
    """

    def short(stage: str) -> str:
        runs = [(letter, len(list(same))) for letter, same in groupby(stage)]
        return "".join(x * n if n < 2 else f"{x}*{n}" for x, n in runs)

    middle = ""
    for stage, same in groupby(stages[1:-1]):
        repeats = len(list(same))
        text = f"{short(stage)}|"
        middle += text if repeats == 1 else f"({text})*{repeats}"
    return f"{short(stages[0])}|{middle}{short(stages[-1])}"


def layout_flags(split: Split) -> str:
    """Megatron's flag for any split, quoted for a shell."""
    return f"--pipeline-model-parallel-layout {shlex.quote(megatron_layout(split))}"


def first_last_flags(split: Split) -> str | None:
    """Megatron's flags for the first and the last stage, or None if they cannot express a split.

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
    `--account-for-loss-in-pipeline-split` count the embedding and the loss as one layer each. None
    if Megatron refuses all of these.
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


def read_layers(path: Path) -> LayerTable:
    """Read a layer CSV: `layer,instruction,frequency,time,energy[,memory][,activation]`.

    MHz, s and J for one GPU and one microbatch; bytes. Layers are `0` to `L-1`, and perhaps
    `embedding` and `loss`. EnvPipeError names file, line and value of what is wrong, or a layer,
    instruction or frequency that is missing.
    """
    _, lines = read_table(path, "layer table", LAYER_COLUMNS, _BYTE_COLUMNS)
    by_layer: dict[str, dict[Kind, dict[int, ProfileRow]]] = {}
    layer_bytes: dict[str, dict[str, float]] = {}
    for line, kind in lines_of(lines):
        layer, row = _layer(line), read_row(line)
        known = by_layer.setdefault(layer, {kind: {} for kind in WHOLE})[kind]
        if row.frequency_mhz in known:
            raise EnvPipeError(
                f"{line.where}: a second row for layer {layer} {kind.value} at this frequency "
                "(MHz)",
                value=row.frequency_mhz,
                remedy="Keep one.",
            )
        known[row.frequency_mhz] = row
        columns = [name for name in _BYTE_COLUMNS if name in line.cells]
        own = {name: line.read(name, AMOUNT, "bytes") for name in columns}
        first = layer_bytes.setdefault(layer, own)
        for name, value in own.items():
            if value != first[name]:
                raise EnvPipeError(
                    f"{line.where}: {name} of layer {layer} is {first[name]:g} on an earlier line",
                    value=value,
                    remedy="Bytes depend on the layer alone: give the same on all its lines.",
                )
    rows = [row for kinds in by_layer.values() for of in kinds.values() for row in of.values()]
    if rows:  # of a layer without weights, a difference of two measurements may be as good as none
        energy_j, time_s = (
            math.fsum(getattr(r, of) for r in rows) for of in ("energy_j", "time_s")
        )
        check_power(str(path), energy_j, time_s, EnvPipeError)
    names = _layer_names(by_layer, path)
    frequencies = {
        kind: sorted(by_layer[names[0]][kind], reverse=True) for kind in WHOLE
    }  # those of any layer: all must have the same
    for name in names:
        for kind in WHOLE:
            listed = sorted(by_layer[name][kind], reverse=True)
            if not listed or listed != frequencies[kind]:
                raise EnvPipeError(
                    f"{path}: layer {name} {kind.value} lists other frequencies (MHz) than layer "
                    f"{names[0]}, or none",
                    value=listed,
                    remedy=f"A stage runs its layers at one clock: {frequencies[kind]} for each.",
                )

    def table(field: str) -> dict[Kind, FloatArray]:
        return {
            kind: np.array(
                [[getattr(by_layer[n][kind][f], field) for f in frequencies[kind]] for n in names]
            )
            for kind in WHOLE
        }

    def column(name: str) -> FloatArray | None:
        known = name in layer_bytes[names[0]]
        return np.array([layer_bytes[layer][name] for layer in names]) if known else None

    return LayerTable(
        names,
        {kind: np.array(frequencies[kind]) for kind in WHOLE},
        table("time_s"),
        table("energy_j"),
        column("memory"),
        column("activation"),
        str(path),
    )


def _layer(line: Row) -> str:
    """The name of a line's layer; a number without zeros in front."""
    layer = line.cells["layer"]
    if layer in (EMBEDDING, LOSS):
        return layer
    if not (layer.isascii() and layer.isdigit() and len(layer) <= _MOST_DIGITS):
        raise EnvPipeError(
            f"{line.where}: unknown layer",
            value=layer,
            remedy=f"Use {EMBEDDING}, the number of a transformer layer, or {LOSS}.",
        )
    return str(int(layer))


def _layer_names(found: Mapping[str, object], path: Path) -> tuple[str, ...]:
    """The layers in the order they run."""
    numbered = sorted(int(name) for name in found if name not in (EMBEDDING, LOSS))
    if not numbered or numbered != list(range(len(numbered))):
        missing = min(set(range(len(numbered) + 1)) - set(numbered))
        raise EnvPipeError(
            f"{path} has no layer {missing}",
            value=sorted(found),
            remedy="Number the transformer layers from 0 without gaps.",
        )
    return (
        *([EMBEDDING] if EMBEDDING in found else []),
        *(str(number) for number in numbered),
        *([LOSS] if LOSS in found else []),
    )
