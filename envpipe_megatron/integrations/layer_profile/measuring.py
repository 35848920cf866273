"""Time and memory of one piece, on this rank's GPU, in step with all other ranks.

Forwards and backwards follow one another without a wait of the host for the device, as in training:
where the host cannot start kernels as fast as they run, the measured time shows that, too.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from envpipe_megatron.integrations.device import current_device
from envpipe_megatron.integrations.layer_profile.gpt import Piece

_WARM_UP, _LEAST, _MOST = 2, 4, 200
_HOST_ROUNDS = 3
#: On a CPU, where nothing is learnt of a GPU.
_CPU_WINDOW_S = 0.02
_LAYERS_IN_A_ROW = 4
#: Weight, gradient and optimizer of mixed precision, none of it shared.
_BYTES_PER_PARAMETER = 18
#: Of the free memory, for all kinds together.
_SHARE = 0.25


class Window(NamedTuple):
    """When some runs of a piece began and ended, as `time.monotonic` has it, and how many."""

    begin_s: float
    end_s: float
    runs: int


class Timing(NamedTuple):
    """One run of a piece: medians over a window."""

    forward_s: float
    backward_s: float
    window: Window


class Held(NamedTuple):
    """Memory of one run of a piece, as `Measure` has it; zeros on a CPU, which does not count."""

    activation_bytes: int = 0
    forward_workspace_bytes: int = 0
    backward_workspace_bytes: int = 0


def measure_time(piece: Piece, hidden: torch.Tensor, window_s: float) -> Timing:
    """Run forward and backward for about this long; every rank calls it."""
    gradient = torch.randn_like(_forward(piece, hidden))
    forwards, backwards, _ = _rounds(piece, hidden, gradient, _WARM_UP)
    # A first run that loads or compiles something tells nothing of the next ones.
    count = _count(float(np.min(forwards + backwards)), window_s)
    forwards, backwards, window = _rounds(piece, hidden, gradient, count)
    return Timing(float(np.median(forwards)), float(np.median(backwards)), window)


def measure_rested_s(
    piece: Piece, hidden: torch.Tensor, timing: Timing, window_s: float, frequency_mhz: int
) -> float:
    """Forward and backward where the device rests as long before each, as in a pipeline's bubbles.

    At its power limit it is then faster. It waits itself, so that the host stays ahead. Runs for
    about twice the window; every rank calls it. NaN on a CPU.
    """
    if not torch.cuda.is_available():
        return math.nan
    both_s = timing.forward_s + timing.backward_s
    gradient, count = torch.randn_like(_forward(piece, hidden)), _count(both_s, window_s)
    rest_cycles = int(both_s * frequency_mhz * 1e6)
    forwards, backwards, _ = _rounds(piece, hidden, gradient, count, rest_cycles)
    return float(np.median(forwards + backwards))


def run_forwards(piece: Piece, hidden: torch.Tensor, forward_s: float, window_s: float) -> Window:
    """Run forwards that take so long each, for about this long in all; every rank calls it."""
    count = _count(forward_s, window_s)
    begin_s = time.monotonic()
    for _ in range(count):
        _forward(piece, hidden)
    _synchronize()
    return Window(begin_s, time.monotonic(), count)


def measure_host_s(piece: Piece, hidden: torch.Tensor) -> float:
    """Median time in which the host hands over forward and backward; every rank calls it.

    The device is idle when a round begins: else its queue could be full, and the host wait for it.
    """
    gradient = torch.randn_like(_forward(piece, hidden))
    times_s = []
    for _ in range(_HOST_ROUNDS):
        _synchronize()
        begin_s = time.perf_counter()
        _forward(piece, hidden).backward(gradient)  # type: ignore[no-untyped-call]  # torch's
        times_s.append(time.perf_counter() - begin_s)
    _synchronize()
    return float(np.median(times_s))


def measure_memory(piece: Piece, hidden: torch.Tensor) -> Held:
    """What a run holds, after one that leaves behind what is kept for ever."""
    _forward(piece, hidden).sum().backward()  # type: ignore[no-untyped-call]  # torch's
    if not torch.cuda.is_available():
        return Held()
    cuda = torch.cuda
    cuda.synchronize()
    cuda.reset_peak_memory_stats()
    before = cuda.memory_allocated()
    outputs = _forward(piece, hidden)
    after, forward_peak = cuda.memory_allocated(), cuda.max_memory_allocated()
    cuda.reset_peak_memory_stats()
    outputs.backward(torch.randn_like(outputs))  # type: ignore[no-untyped-call]  # torch's
    return Held(after - before, forward_peak - after, cuda.max_memory_allocated() - after)


def repeats_that_fit(held: Held, wanted: int) -> int:
    """How often a piece can run before its backwards do, on all ranks; 0 to `wanted`."""
    if not torch.cuda.is_available():
        return wanted
    workspace = max(held.forward_workspace_bytes, held.backward_workspace_bytes)
    fit = int((0.8 * _free_bytes() - workspace) // max(held.activation_bytes, 1))
    return lowest(min(max(fit, 0), wanted))


def _rounds(
    piece: Piece, hidden: torch.Tensor, gradient: torch.Tensor, count: int, rest_cycles: int = 0
) -> tuple[Any, Any, Window]:
    """Forward and backward times of each of some rounds, and their window.

    Before each, a GPU rests for so many of its clock's cycles.
    """
    marks = Marks()
    begin_s = time.monotonic()
    for _ in range(count):
        if rest_cycles:
            torch.cuda._sleep(rest_cycles)  # type: ignore[no-untyped-call]  # one thread
            # Ranks whose rests end apart would wait for each other in the piece's collectives.
            dist.all_reduce(torch.zeros(1, device=current_device()))
        marks.add()
        outputs = _forward(piece, hidden)
        marks.add()
        outputs.backward(gradient)  # type: ignore[no-untyped-call]  # torch's
        marks.add()
        del outputs
    gaps_s = np.array([*marks.gaps_s(), math.nan]).reshape(count, 3)
    return gaps_s[:, 0], gaps_s[:, 1], Window(begin_s, time.monotonic(), count)


def _forward(piece: Piece, hidden: torch.Tensor) -> torch.Tensor:
    return piece.forward(hidden.detach().requires_grad_())


class Marks:
    """Instants on the device's stream, which nobody waits for before the end; on a CPU, now."""

    def __init__(self) -> None:
        self._on_gpu = torch.cuda.is_available()
        self._marks: list[Any] = []

    def add(self) -> None:
        """Mark what has been handed to the device until here."""
        if not self._on_gpu:
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._marks.append(event)

    def gaps_s(self) -> list[float]:
        """Time from each mark to the next."""
        _synchronize()
        pairs = pairwise(self._marks)
        return [a.elapsed_time(b) / 1e3 if self._on_gpu else b - a for a, b in pairs]


def now_s() -> float:
    """Now, by the host's clock, when the device has done all that it was handed."""
    _synchronize()
    return time.perf_counter()


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _count(round_s: float, window_s: float) -> int:
    """How many rounds fill a window, the same on all ranks."""
    window_s = window_s if torch.cuda.is_available() else _CPU_WINDOW_S
    return _highest(min(max(_LEAST, math.ceil(window_s / max(round_s, 1e-6))), _MOST))


def lowest(value: int) -> int:
    """The lowest of all ranks' values; every rank calls it."""
    return -_highest(-value)


def _highest(value: int) -> int:
    """The highest of all ranks' values."""
    tensor = torch.tensor([value], device=current_device())
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return int(tensor.item())


def _free_bytes() -> int:
    free, _ = torch.cuda.mem_get_info()
    return free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()


def row_lengths(of_kind: Sequence[int], parameters: Sequence[int]) -> list[int]:
    """For each kind of layers how many are built, the same on all ranks; every rank calls it.

    They run in a row while time is taken, as in training. One layer that ran several times would
    have its gradients summed by autograd, and added to the model's once.

    Args:
        of_kind: layers that the model has of each kind.
        parameters: of one layer of each kind.
    """
    wanted = [min(count, _LAYERS_IN_A_ROW) for count in of_kind]
    if not torch.cuda.is_available():
        return wanted
    each = _SHARE * _free_bytes() / len(of_kind) / _BYTES_PER_PARAMETER
    return [
        lowest(max(1, min(count, int(each // size))))
        for count, size in zip(wanted, parameters, strict=True)
    ]
