"""Op profiles in the files of Aceso (EuroSys'24) and Sailor (SOSP'25), as layer profiles.

Enter at `read_aceso_profile`; `fold_blocks` makes whole blocks of operators, between which Megatron
cuts a model. A folder holds `{model}_mbs{samples}_tp{size}_algo0.csv`: for each operator
microseconds of a forward and a backward on one tensor parallel rank, all-reduces inside, and MiB of
messages, weights, activations and workspace, split as Megatron splits operators. Beside them lie
`p2p_*.csv`, GiB/s by MiB, and `prim_*.csv`, milliseconds by MiB.

No clock, joule or optimizer is in the files. Memory is counted as Aceso counts it: 8 weights for
each weight of two bytes and 4 for each of four, softmax in the place of its input, dropout with its
mask of half the size.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise
from pathlib import Path

import numpy as np

from envpipe_megatron.core.arrays import FloatArray, IntArray
from envpipe_megatron.search.layer_file import check_profile
from envpipe_megatron.search.layer_profile import (
    EMBEDDING,
    FULL,
    LAYER,
    LOSS,
    SELECTIVE,
    AllReduce,
    Block,
    BytesPerParameter,
    Curve,
    LayerProfile,
    Links,
    Measure,
    Recomputation,
    Sizes,
)

DECODER_LAYER = "decoder_layer"
#: The recomputation of single operators, in runs.
OPERATOR = "operator"
_MIB = 2.0**20
#: Mixed precision keeps weight, gradient, and a copy of the weight with two moments in 32 bits.
_HALF = BytesPerParameter(weight=2, gradient=2, optimizer=12, least_workspace=2)
_SINGLE = BytesPerParameter(weight=4, gradient=4, optimizer=8, least_workspace=4)
#: Which block an operator is part of, by the first pattern that its name begins with.
_BLOCKS = (
    ("encoder-embedding", EMBEDDING),
    ("decoder-embedding", "decoder_embedding"),
    ("enc-final", "encoder_norm"),
    ("dec-final|final|.*post-process", LOSS),
    ("enc-", LAYER),
    ("dec-", DECODER_LAYER),
)
#: Writes over its input, and so keeps nothing of its own.
_IN_PLACE = "enc-attention-softmax"
#: Would join two layers' runs, so Aceso never computes it again; nor these blocks.
_KEPT = "dec-post-MLP-dropout"
_KEPT_BLOCKS = (EMBEDDING, "decoder_embedding", "encoder_norm", LOSS)
_UNKNOWN_MHZ = np.array([1])
#: From the scores of an attention to its context: what Megatron recomputes if it is selective.
_SCORE, _CONTEXT = re.compile(r".*-attention-score.*"), re.compile(r".*-attention-context.*")

Row = tuple[float, ...]


def read_aceso_profile(folder: Path, model: str, num_layers: int = 1) -> LayerProfile:
    """Return the profile of a model, at all sizes that the folder has.

    Args:
        model: as files' names begin: `gpt_1_3B`, `t5_3B`, `OPT-350`.
        num_layers: of encoder and of decoder.
    """
    tables = dict(_read_tables(folder, model))
    memory = _SINGLE if "fp32" in folder.name else _HALF
    blocks = _blocks(next(iter(tables.values())), num_layers)
    return check_profile(
        LayerProfile(
            blocks=blocks,
            frequency_mhz=_UNKNOWN_MHZ,
            measures={
                sizes: {name: _measure(name, row, memory.weight) for name, row in table.items()}
                for sizes, table in tables.items()
            },
            bytes_per_parameter=memory,
            links=_read_links(folder, model),
            workspaces_add=True,
            source=str(folder / model),
        )
    )


def block_name(operator: str) -> str:
    """Return the block that an operator is part of."""
    return next(name for pattern, name in _BLOCKS if re.match(pattern, operator))


def block_edges(profile: LayerProfile) -> tuple[int, ...]:
    """Return the numbers of the pieces at which blocks begin, and the number of pieces."""
    lengths = [len(block.pieces) for block in profile.blocks for _ in range(block.repeat)]
    return (0, *accumulate(lengths))


def _read_tables(folder: Path, model: str) -> Iterator[tuple[Sizes, dict[str, Row]]]:
    pattern = re.compile(re.escape(model) + r"_mbs(\d+)_tp(\d+)_algo0\.csv")
    for path in sorted(folder.glob("*.csv")):
        if match := pattern.fullmatch(path.name):
            sizes = Sizes(tensor_parallel=int(match[2]), microbatch_size=int(match[1]))
            yield sizes, _read_operators(path)


def _read_operators(path: Path) -> dict[str, Row]:
    with path.open(newline="") as file:
        reader = csv.reader(file)
        next(reader, None)
        return {row[0]: tuple(map(float, row[1:9])) for row in reader if row}


def _blocks(operators: Iterable[str], num_layers: int) -> tuple[Block, ...]:
    return tuple(
        Block(tuple(pieces), num_layers if name in (LAYER, DECODER_LAYER) else 1)
        for name, pieces in groupby(operators, key=block_name)
    )


def _measure(name: str, row: Row, weight_bytes: float) -> Measure:
    forward_s, backward_s = (np.array([value_us / 1e6]) for value_us in row[:2])
    received, sent, weights, kept, forward, backward = (mib * _MIB for mib in row[2:])
    if name == "enc-attention-dropout":
        kept *= 1.5
    elif name == _IN_PLACE:
        kept = 0.0
    again = Recomputation(OPERATOR, forward_s, None, activation_bytes=0.0, working_bytes=kept)
    is_kept = name == _KEPT or block_name(name) in _KEPT_BLOCKS
    return Measure(
        forward_s,
        backward_s,
        parameters=weights / weight_bytes,
        input_bytes=received,
        output_bytes=sent,
        activation_bytes=kept,
        forward_workspace_bytes=forward,
        backward_workspace_bytes=backward,
        recomputation=() if is_kept else (again,),
    )


def _read_links(folder: Path, model: str) -> Links:
    pattern = re.compile(f"prim_{re.escape(model)}_all_reduce_(\\d+)gpus\\.csv")
    found = ((pattern.fullmatch(path.name), path) for path in sorted(folder.glob("prim_*.csv")))
    return Links(
        within_node=_read_messages(folder / "p2p_intra_node.csv"),
        across_nodes=_read_messages(folder / "p2p_inter_node.csv"),
        all_reduce=tuple(
            AllReduce(int(match[1]), False, _read_curve(path)) for match, path in found if match
        ),
    )


def _read_curve(path: Path) -> Curve:
    table = np.loadtxt(path, delimiter=",", skiprows=1, ndmin=2)
    _, distinct = np.unique(table[:, 0], return_index=True)
    return Curve(table[distinct, 0] * _MIB, table[distinct, 1] / 1e3)


def _read_messages(path: Path) -> Curve | None:
    """Aceso's own reading of the file, with its faults: steps of bandwidth and no time between.

    From 2 to the n MiB up it takes the bandwidth of half as much. Amounts below 1 MiB count from
    the end of the table: half of one takes the largest amount's bandwidth. It divides GiB/s by
    1,000 to get MiB/us.
    """
    if not path.exists():
        return None
    bands = np.loadtxt(path, delimiter=",", skiprows=1, ndmin=1) * 0.001
    exponents = np.arange(1 - len(bands), len(bands) + 1)
    index = np.where(exponents >= 1, np.minimum(exponents - 1, len(bands) - 1), exponents)
    # A step holds from 2**n up if n is not negative, and else up to 2**n.
    begin_mib, end_mib = _steps(exponents)
    sizes_mib = np.column_stack([begin_mib, end_mib]).ravel()
    return Curve(sizes_mib * _MIB, sizes_mib / np.repeat(bands[index], 2) / 1e6)


def _steps(exponents: IntArray) -> tuple[FloatArray, FloatArray]:
    """First and last MiB of which the logarithm to base 2, cut to whole numbers, is an exponent."""
    begin = np.where(exponents > 0, 2.0**exponents, np.nextafter(2.0 ** (exponents - 1), np.inf))
    end = np.where(exponents < 0, 2.0**exponents, np.nextafter(2.0 ** (exponents + 1), 0.0))
    return begin, end


@dataclass(frozen=True)
class Run:
    """Operators `first` to `end - 1` of a block, computed again as Aceso counts it.

    All outputs but the last are dropped after the forward, and are there again, together, while the
    run's backward runs.
    """

    first: int
    end: int

    def saved(self, activation_bytes: FloatArray) -> float:
        """Return the bytes that are not kept of a microbatch in flight."""
        return float(activation_bytes[self.first : self.end - 1].sum())

    def working(self, activation_bytes: FloatArray) -> float:
        """Return the bytes held besides during its backward.

        A run that ends with its block holds the block's output too, as it does where the next block
        begins with a run.
        """
        end = self.end if self.end == len(activation_bytes) else self.end - 1
        return float(activation_bytes[self.first : end].sum())


def fold_blocks(profile: LayerProfile) -> LayerProfile:
    """One piece for each block, of the block's name, with Megatron's recomputations.

    `selective` computes the inside of attentions again, `full` every operator of the block that can
    be; what is kept and held besides is counted as in a run of operators.
    """
    names = [block_name(block.pieces[0]) for block in profile.blocks]
    return replace(
        profile,
        blocks=tuple(
            Block((name,), block.repeat) for name, block in zip(names, profile.blocks, strict=True)
        ),
        measures={
            sizes: {
                name: _fold(block.pieces, by_piece)
                for name, block in zip(names, profile.blocks, strict=True)
            }
            for sizes, by_piece in profile.measures.items()
        },
    )


def _fold(pieces: Sequence[str], measures: Mapping[str, Measure]) -> Measure:
    parts = [measures[piece] for piece in pieces]
    activation_bytes = np.array([part.activation_bytes for part in parts])
    ways = ((SELECTIVE, _attention_runs(pieces)), (FULL, _longest_runs(parts)))
    return Measure(
        forward_s=_sum([part.forward_s for part in parts]),
        backward_s=_sum([part.backward_s for part in parts]),
        parameters=sum(part.parameters for part in parts),
        input_bytes=parts[0].input_bytes,
        output_bytes=parts[-1].output_bytes,
        activation_bytes=float(activation_bytes.sum()),
        forward_workspace_bytes=max(part.forward_workspace_bytes for part in parts),
        backward_workspace_bytes=max(part.backward_workspace_bytes for part in parts),
        recomputation=tuple(
            _recomputation(name, runs, parts, activation_bytes) for name, runs in ways if runs
        ),
    )


def _recomputation(
    name: str, runs: Sequence[Run], parts: Sequence[Measure], activation_bytes: FloatArray
) -> Recomputation:
    again = [part for run in runs for part in parts[run.first : run.end]]
    return Recomputation(
        name,
        time_s=_sum([part.forward_s for part in again]),
        energy_j=None,
        activation_bytes=float(
            activation_bytes.sum() - sum(run.saved(activation_bytes) for run in runs)
        ),
        working_bytes=max(run.working(activation_bytes) for run in runs),
    )


def _attention_runs(pieces: Sequence[str]) -> list[Run]:
    begins = [index for index, piece in enumerate(pieces) if _SCORE.fullmatch(piece)]
    ends = [index + 1 for index, piece in enumerate(pieces) if _CONTEXT.fullmatch(piece)]
    return [Run(first, end) for first, end in zip(begins, ends, strict=True)]


def _longest_runs(parts: Sequence[Measure]) -> list[Run]:
    """Runs between operators that are always kept."""
    kept = [index for index, part in enumerate(parts) if part.way(OPERATOR) is None]
    return [
        Run(before + 1, after)
        for before, after in pairwise([-1, *kept, len(parts)])
        if after - before > 2
    ]


def _sum(arrays: Sequence[FloatArray]) -> FloatArray:
    total: FloatArray = np.sum(arrays, axis=0)
    return total
