"""Measures a model: all pieces at each microbatch size.

Beside the pieces it measures the optimizer's memory, and the time of its step. A size is measured
in passes over the GPU's clocks, so that seconds lie between the repeats of a window. Windows are as
long in each: where a GPU is at its power limit, a shorter one would run at a higher clock. Each
holds several refreshes of the GPU's counter. Enter at `measure_model`.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from envpipe_megatron.core.arrays import BoolArray, FloatArray
from envpipe_megatron.integrations.hooking import refusals
from envpipe_megatron.integrations.layer_profile.model import GptPieces, Microbatches
from envpipe_megatron.integrations.layer_profile.rank_gpu import (
    Looks,
    Marks,
    RankGpu,
    Window,
    free_bytes,
    now_s,
)
from envpipe_megatron.runtime.channel.collectives import of_all_ranks
from envpipe_megatron.search.layer_jobs import LayerJob, add_measures
from envpipe_megatron.search.layer_profile import (
    EMBEDDING,
    LOSS,
    BytesPerParameter,
    LayerProfile,
    Links,
    Measure,
    Recomputation,
)

_STEPS = 4
_PASSES = 3
#: Length of a window; of one in which the GPU rests as long again; of one on a CPU.
_WINDOW_S, _RESTED_WINDOW_S, _CPU_WINDOW_S = 0.5, 0.3, 0.02
_FEWEST, _MOST, _LOOKS = 2, 200, 3
#: The share of the free memory that a microbatch may take.
_MEMORY_SHARE = 0.8
#: Work of a GPU varies by less from repeat to repeat, with its clock. A host that others use, too,
#: starts kernels more slowly for half a second to a second at times: work that waits for it is then
#: longer, by 40 % to twofold, and never shorter.
_HELD_UP = 1.05
#: Power of layers as a multiple of the mean power of all pieces, at least and at most: what lies
#: beyond is the counter's error in a difference of windows.
_POWER_RANGE = (0.5, 2.0)


def measure_model(
    wrapped: Any,
    model: Any,
    optimizer: Any,
    args: argparse.Namespace,
    forward_step: Callable[..., Any],
    job: LayerJob,
) -> None:
    """Measure a model that one rank, or the job's group, holds whole; every rank calls it.

    Args:
        wrapped: the model in Megatron's data parallel wrapper.
        model: the same without, with a row of each kind of layers.
        optimizer, args: Megatron's.
        forward_step: the training script's.
    """
    with refusals():
        pieces, gpu = GptPieces(model), RankGpu(job.clocks_mhz)
    with closing(gpu), closing(Microbatches(wrapped, model, args, forward_step)) as microbatches:
        gradients_s, optimizer_s = measure_step(wrapped, optimizer)
        held = bytes_held(model, optimizer)
        for sizes in job.sizes:
            ways = measure_pieces(pieces, microbatches, sizes.microbatch_size, gpu)
            sent = microbatches.message_bytes
            profile = LayerProfile(
                blocks=pieces.blocks,
                frequency_mhz=np.array(gpu.frequency_mhz),
                measures={
                    sizes: {name: _complete(pieces, name, sent, ways) for name in pieces.names}
                },
                bytes_per_parameter=held,
                links=Links(),
                optimizer_s=optimizer_s,
                gradients_s=gradients_s,
                frees_outputs=True,
                gpu=gpu.name,
                source=job.source,
            )
            if dist.get_rank() == 0:
                with refusals():
                    add_measures(Path(job.output), profile)


def measure_step(model: Any, optimizer: Any) -> tuple[float, float]:
    """Return seconds for each parameter of what surrounds a step's microbatches.

    These are `gradients_s` and `optimizer_s` as `LayerProfile` has them. Gradients are set to zero,
    checked and scaled, as each of several data parallel ranks does for all its parameters; a sum
    over ranks is in it only where this job has several. The first step, which makes the optimizer's
    state, does not count. `model` is the data parallel wrapper, whose gradients are zeros from here
    on.
    """
    parameters: int = sum(weight.numel() for weight in model.parameters())
    gradients_s, optimizer_s = [], []
    for _ in range(_STEPS):
        begin_s = now_s()
        model.zero_grad_buffer()
        optimizer.zero_grad()
        model.finish_grad_sync()
        # One rank by itself scales nothing.
        model.scale_gradients(1.0)
        ready_s = now_s()
        optimizer.step()
        gradients_s.append(ready_s - begin_s)
        optimizer_s.append(now_s() - ready_s)
    return (
        statistics.median(gradients_s[1:]) / parameters,
        statistics.median(optimizer_s[1:]) / parameters,
    )


def bytes_held(model: torch.nn.Module, optimizer: Any) -> BytesPerParameter:
    """Return means over a model's parameters; the optimizer of its only replica has stepped."""
    weights: list[Any] = list(model.parameters())
    count = sum(weight.numel() for weight in weights)
    own = {weight.data_ptr() for weight in weights}
    state = {tensor.data_ptr(): tensor.nbytes for tensor in _state(optimizer)}
    return BytesPerParameter(
        sum(weight.nbytes for weight in weights) / count,
        sum(weight.main_grad.nbytes for weight in weights) / count,
        sum(size for place, size in state.items() if place not in own) / count,
    )


def _state(optimizer: Any) -> Iterator[torch.Tensor]:
    """Yield all tensors of the optimizers that a job's optimizer consists of."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = part.optimizer
        for group in inner.param_groups:
            yield from group["params"]
        for values in inner.state.values():
            yield from (value for value in values.values() if isinstance(value, torch.Tensor))


#: Memory that a look counts; zeros on a CPU, which does not count.
_HELD = ("activation_bytes", "forward_workspace_bytes", "backward_workspace_bytes")
#: A piece, and how it is recomputed, if it is.
_Way = tuple[str, str | None]


def measure_pieces(
    pieces: GptPieces, microbatches: Microbatches, size: int, gpu: RankGpu
) -> dict[_Way, Measure]:
    """Measure each piece as it is (None) and with each recomputation; every rank calls it.

    Of layers of a kind, the mean of those in a row. Forward and backward take the same power.
    """
    ways = (None, *dict.fromkeys(way for name in pieces.names for way in pieces.ways(name)))
    with pieces.rows(1):
        single = dict(zip(pieces.slots, _look(microbatches, size), strict=True))
    row = pieces.longest_row if _fits(pieces, single) else 1
    looks: dict[str | None, FloatArray] = {}
    repeats: dict[str | None, list[FloatArray]] = {way: [] for way in ways}
    with pieces.rows(row):
        slots = pieces.slots
        for way in ways:
            with pieces.recomputing(way):
                looks[way] = _look(microbatches, size)
                shortly, _ = microbatches.measure(size, _FEWEST, Marks())  # loads, and compiles
    passes = _Passes(pieces, microbatches, gpu, size, row, float(shortly[:, 0].sum()))
    for _ in range(_PASSES):
        for clock_mhz in gpu.frequency_mhz:
            gpu.set(clock_mhz)
            for way, measured in passes.measure(ways, clock_mhz).items():
                repeats[way].append(measured)
    gpu.set(gpu.frequency_mhz[0])
    with pieces.rows(row):
        for way in ways:  # a host that was held up at the first look has had seconds since
            with pieces.recomputing(way):
                again = _look(microbatches, size)
            looks[way][:, -1] = np.minimum(looks[way][:, -1], again[:, -1])
    found, clocks = {}, len(gpu.frequency_mhz)
    for way in ways:
        by_clock = np.array([_medians(np.array(repeats[way][at::clocks])) for at in range(clocks)])
        for name in dict.fromkeys(slots):
            if way is not None and way not in pieces.ways(name):
                continue
            at_slots = [at for at, slot in enumerate(slots) if slot == name]
            *held, host_s = looks[way][at_slots].mean(axis=0).tolist()
            figures = by_clock[:, :, at_slots].mean(axis=2).T
            if name not in (EMBEDDING, LOSS) and gpu.name is not None:
                # The host gets ahead of a few layers at the loss, and not of a whole model.
                figures = figures * np.maximum(1.0, host_s / (figures[0] + figures[1]))
            forward_s, backward_s, both_j, rested_s = figures
            found[name, way] = Measure(
                forward_s,
                backward_s,
                _known(both_j * forward_s / (forward_s + backward_s)),
                _known(both_j * backward_s / (forward_s + backward_s)),
                **dict(zip(_HELD, held, strict=True)),
                host_s=None if gpu.name is None else host_s,
                rested_s=_known(rested_s),
            )
    return found


def _known(values: FloatArray) -> FloatArray | None:
    return None if np.isnan(values).any() else values


def _complete(
    pieces: GptPieces, name: str, sent_bytes: int, ways: Mapping[_Way, Measure]
) -> Measure:
    """Return a piece's measure with its parameters, messages and recomputations.

    Args:
        sent_bytes: of a message between stages.
    """
    plain = ways[name, None]
    # Where the host is the slower one, a rest lets it get ahead: that is no clock's doing.
    rested_s = None if plain.rested_s is None or plain.is_host_bound else plain.known_rested_s
    return replace(
        plain,
        parameters=pieces.parameters(name),
        expert_parameters=pieces.parameters(name, of_experts=True),
        input_bytes=0 if name == EMBEDDING else sent_bytes,
        output_bytes=0 if name == LOSS else sent_bytes,
        recomputation=tuple(
            _recomputation(way, plain, ways[name, way]) for way in pieces.ways(name)
        ),
        rested_s=rested_s,
    )


def _recomputation(way: str, plain: Measure, again: Measure) -> Recomputation:
    """Return what recomputing a piece adds to it."""
    energy_j = None
    if plain.both_j is not None and again.both_j is not None:
        energy_j = np.maximum(again.both_j - plain.both_j, 0.0)
    return Recomputation(
        way,
        np.maximum(again.both_s - plain.both_s, 0.0),
        energy_j,
        again.activation_bytes,
        max(again.backward_workspace_bytes - plain.backward_workspace_bytes, 0.0),
    )


def _look(microbatches: Microbatches, size: int) -> FloatArray:
    """Return [slots, 4] what pieces hold, in order `_HELD`, and the host's time, s.

    That is of both directions, until the host has handed them over to the device.
    """
    looked, _ = microbatches.measure(size, _LOOKS, Looks())
    _, forward, backward = np.split(looked, [1, 1 + len(looked) // 2])
    received = np.full(len(forward), microbatches.message_bytes * torch.cuda.is_available())
    received[-1] = 0  # nothing comes back to the loss
    held = np.maximum(np.stack([forward[:, 1], forward[:, 3], backward[:, 2] + received], 1), 0.0)
    return np.column_stack([held, forward[:, 0] + backward[:, 0]])


def _fits(pieces: GptPieces, looks: Mapping[str, FloatArray]) -> bool:
    """Check that a microbatch of the longest rows has room, on all ranks."""
    with pieces.rows(pieces.longest_row):
        kept = sum(looks[name][0] for name in pieces.slots)
    beside = max(look[1:3].max() for look in looks.values())
    return all(of_all_ranks(kept + beside <= _MEMORY_SHARE * free_bytes()))


@dataclass(frozen=True)
class _Passes:
    """Runs passes, each at one clock, over a model with rows of layers.

    Args:
        round_s: of a microbatch, about.
    """

    pieces: GptPieces
    microbatches: Microbatches
    gpu: RankGpu
    size: int
    row: int
    round_s: float

    def measure(self, ways: Sequence[str | None], clock_mhz: int) -> dict[str | None, FloatArray]:
        """Return [4, slots] by way: forward, backward (s); both (J); both rested (s)."""
        found, windows = {}, {}
        with self.pieces.rows(self.row):
            layers = np.array([name not in (EMBEDDING, LOSS) for name in self.pieces.slots])
            for way in reversed(ways):  # what is not recomputed last, before its windows
                with self.pieces.recomputing(way):
                    found[way], windows[way] = self._times(_WINDOW_S)
            rested = found[None]
            if torch.cuda.is_available():
                cycles = int(found[None].sum() * clock_mhz * 1e6)
                rested, _ = self._times(_RESTED_WINDOW_S, cycles)
        with self.pieces.rows(1):
            few = self.microbatches.run(self.size, self._count(_WINDOW_S), Marks())
        *of_ways, few_j = self.gpu.energies_j((*windows.values(), few))
        means_w = {
            way: joules / windows[way].run_s for way, joules in zip(windows, of_ways, strict=True)
        }
        own, plain_j = found[None], means_w[None] * windows[None].run_s
        both_w = _powers_w((windows[None], few), (plain_j, few_j), own[0] + own[1], layers)
        return {
            way: np.stack(
                [
                    each[0],
                    each[1],
                    (each[0] + each[1]) * both_w * (means_w[way] / means_w[None]),
                    rested[0] + rested[1] if self.gpu.name else np.full(len(layers), np.nan),
                ]
            )
            for way, each in found.items()
        }

    def _times(self, window_s: float, rest_cycles: int = 0) -> tuple[FloatArray, Window]:
        """Return [2, slots] forwards and backwards, s; and the window.

        A microbatch's data count with both ends of the model: each stage that has one loads them.
        """
        count = self._count(window_s)
        times, window = self.microbatches.measure(self.size, count, Marks(), rest_cycles)
        data_s, *of_slots = times[:, 0]
        both_s = np.reshape(of_slots, (2, -1))
        both_s[0, [0, -1]] += data_s
        return both_s, window

    def _count(self, window_s: float) -> int:
        """Return how many microbatches fill a window, the same on all ranks."""
        window_s = window_s if torch.cuda.is_available() else _CPU_WINDOW_S
        count = min(max(_FEWEST, math.ceil(window_s / self.round_s)), _MOST)
        return min(of_all_ranks(count))


def _powers_w(
    windows: Sequence[Window], joules: Sequence[float], times_s: FloatArray, layers: BoolArray
) -> FloatArray:
    """Return [slots] mean power of layers, and of the pieces around them.

    Args:
        windows: of microbatches with rows of layers, and with one of each kind.
        joules: of a run in each.
        times_s: [slots] of the former.
    """
    runs_s = [window.run_s for window in windows]
    mean_w = of_layers_w = joules[0] / runs_s[0]
    layers_s = float(times_s[layers].sum())
    around_s = max(runs_s[0] - layers_s, 1e-9)
    if runs_s[0] > runs_s[1] * _HELD_UP:  # else there is one layer of each kind
        of_layers_w = (joules[0] - joules[1]) / (runs_s[0] - runs_s[1])
    of_layers_w = float(np.clip(of_layers_w, *np.multiply(_POWER_RANGE, mean_w)))
    around_w = (joules[0] - of_layers_w * layers_s) / around_s
    around_w = float(np.clip(around_w, *np.multiply(_POWER_RANGE, mean_w)))
    return np.where(layers, of_layers_w, around_w)


def _medians(repeats: FloatArray) -> FloatArray:
    """Return [4, slots] medians of the [passes, 4, slots] that were not held up.

    Both directions decide: where the host is slower, the GPU waits in the one or the other.
    """
    both_s = repeats[:, 0] + repeats[:, 1]
    kept = (both_s <= _HELD_UP * both_s.min(axis=0)).T
    medians = [np.median(repeats[own, :, slot], axis=0) for slot, own in enumerate(kept)]
    return np.stack(medians, axis=1)
