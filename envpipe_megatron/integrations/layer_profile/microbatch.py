"""How long a microbatch of the whole model takes, in Megatron's own function.

More than its pieces: the data, its mask, what the training script makes of the losses, and the
host's looks at them.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, NamedTuple

import numpy as np
import torch

from envpipe_megatron.integrations.layer_profile.measuring import make_marks, now_s
from envpipe_megatron.integrations.layer_profile.undisturbed import undisturbed_s

_ROUNDS = 5
_FEW, _MANY = 1, 5


class Times(NamedTuple):
    """Of a microbatch through all layers that were built: the whole, and until the model begins."""

    whole_s: float
    data_s: float


def measure_microbatches(
    wrapped: Any, args: argparse.Namespace, forward_step: Callable[..., Any], sizes: Sequence[int]
) -> list[Times]:
    """What each microbatch more takes, by size; every rank calls it.

    Repeats of a size lie between those of the others, so that a host that is slow for a second
    meets few of them.

    Args:
        wrapped: the model in Megatron's data parallel wrapper.
        args: Megatron's; their microbatch size is the one that is measured, meanwhile.
        forward_step: the training script's.
        sizes: microbatch sizes.
    """
    data = {size: _batches(args, size) for size in sizes}
    with closing(_Loading(wrapped, forward_step)) as loading:
        rounds = [
            [_measure_round(wrapped, args, loading, size, data[size]) for size in sizes]
            for _ in range(1 + _ROUNDS)
        ]
    times_s = np.array(rounds[1:])  # the first loads, and allocates
    # Each apart: a difference is too small as well where the shorter run was held up.
    few_s, many_s, data_s = np.apply_along_axis(undisturbed_s, 0, times_s).T
    whole_s = np.maximum(many_s - few_s, 0.0) / (_MANY - _FEW)
    return [Times(*each) for each in zip(whole_s.tolist(), data_s.tolist(), strict=True)]


class _Loading:
    """A script's `forward_step`, and how long it takes on the device until the model begins."""

    def __init__(self, wrapped: Any, forward_step: Callable[..., Any]) -> None:
        self._forward_step = forward_step
        #: Of each call where it began, and where the model did, if the script calls it as it is.
        self._calls = [make_marks()]
        self.close = wrapped.register_forward_pre_hook(lambda *_: self._calls[-1].add()).remove

    def __call__(self, *args: Any) -> Any:
        self._calls.append(make_marks())
        self._calls[-1].add()
        return self._forward_step(*args)

    def last_s(self) -> float:
        """The median since the last call of this."""
        times_s = [gap_s for marks in self._calls for gap_s in marks.gaps_s()[:1]]
        self._calls = [make_marks()]
        return statistics.median(times_s or [0.0])


def _measure_round(
    wrapped: Any,
    args: argparse.Namespace,
    loading: _Loading,
    size: int,
    data: Iterator[Mapping[str, torch.Tensor]],
) -> tuple[float, float, float]:
    """How long a few, and many, microbatches of a size take, and the data of one of many."""
    from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining

    def time_s(num_microbatches: int) -> float:
        begin_s = now_s()
        forward_backward_no_pipelining(
            forward_step_func=loading,
            data_iterator=data,
            model=wrapped,
            num_microbatches=num_microbatches,
            seq_length=args.seq_length,
            micro_batch_size=size,
        )
        return now_s() - begin_s

    before, args.micro_batch_size = args.micro_batch_size, size
    try:
        few_s = time_s(_FEW)
        loading.last_s()
        return few_s, time_s(_MANY), loading.last_s()
    finally:
        args.micro_batch_size = before


def _batches(args: argparse.Namespace, size: int) -> Iterator[Mapping[str, torch.Tensor]]:
    """Samples of zeros as Megatron's dataset of a GPT gives them, in memory that is pinned."""
    length = args.seq_length
    tokens = torch.zeros(size, length, dtype=torch.int64)
    batch = {
        "tokens": tokens,
        "labels": tokens.clone(),
        "loss_mask": torch.ones(size, length),
        "position_ids": torch.arange(length).repeat(size, 1),
    }
    if args.create_attention_mask_in_dataloader:
        batch["attention_mask"] = torch.ones(size, 1, length, length, dtype=torch.bool).triu(1)
    if torch.cuda.is_available():
        batch = {name: values.pin_memory() for name, values in batch.items()}
    while True:
        yield dict(batch)  # the script changes it
