"""How long a microbatch of the whole model takes, in Megatron's own function.

More than its pieces: the data, its mask, what the training script makes of the losses, and the
host's looks at them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from envpipe_megatron.integrations.layer_profile.undisturbed import undisturbed_s

_ROUNDS = 5
_FEW, _MANY = 1, 5


def measure_microbatches(
    wrapped: Any, args: argparse.Namespace, forward_step: Callable[..., Any], sizes: Sequence[int]
) -> list[float]:
    """Seconds for each microbatch more, through all layers that were built; every rank calls it.

    Repeats of a size lie between those of the others, so that a host that is slow for a second
    meets few of them.

    Args:
        wrapped: the model in Megatron's data parallel wrapper.
        args: Megatron's; their microbatch size is the one that is measured, meanwhile.
        forward_step: the training script's.
        sizes: microbatch sizes.
    """
    data = {size: _batches(args, size) for size in sizes}
    rounds = [
        [_measure_round(wrapped, args, forward_step, size, data[size]) for size in sizes]
        for _ in range(1 + _ROUNDS)
    ]
    times_s = np.array(rounds[1:])  # the first loads, and allocates
    # Each apart: a difference is too small as well where the shorter run was held up.
    undisturbed = np.apply_along_axis(undisturbed_s, 0, times_s)
    more_s: list[float] = (np.maximum(np.diff(undisturbed)[:, 0], 0.0) / (_MANY - _FEW)).tolist()
    return more_s


def _measure_round(
    wrapped: Any,
    args: argparse.Namespace,
    forward_step: Callable[..., Any],
    size: int,
    data: Iterator[Mapping[str, torch.Tensor]],
) -> tuple[float, float]:
    """How long a few, and many, microbatches of a size take."""
    from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining

    def time_s(num_microbatches: int) -> float:
        begin_s = _now_s()
        forward_backward_no_pipelining(
            forward_step_func=forward_step,
            data_iterator=data,
            model=wrapped,
            num_microbatches=num_microbatches,
            seq_length=args.seq_length,
            micro_batch_size=size,
        )
        return _now_s() - begin_s

    before, args.micro_batch_size = args.micro_batch_size, size
    try:
        return time_s(_FEW), time_s(_MANY)
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


def _now_s() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
