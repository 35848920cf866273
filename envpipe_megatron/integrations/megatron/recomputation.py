"""Recomputation by stage: each recomputes as much as its own memory asks for.

Megatron's flags are for all stages alike. What its layers do is read from their configuration and
attributes when they run, on each rank for itself; so a stage can be told after it was built.
Results stay the same, for what is recomputed is what was forgotten.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from megatron.core.transformer.transformer_block import TransformerBlock

from envpipe_megatron.errors import EnvPipeError

FLAG = "--envpipe-recompute"
_NONE, _FULL, _SELECTIVE = "none", "full", "selective"


class RecomputationError(EnvPipeError):
    """Recomputation by stage that is not one, or does not go with other arguments."""


def add_argument(group: argparse._ArgumentGroup) -> None:
    """Add the flag to Megatron's command line."""
    group.add_argument(
        FLAG,
        metavar="WHAT[,WHAT...]",
        help="What each stage recomputes, in place of --recompute-granularity: none, full:N or "
        "selective:N for the first N layers of each of its virtual stages; `envpipe search` prints "
        "it.",
    )


def by_stage(args: argparse.Namespace) -> list[tuple[str, int]] | None:
    """What each stage recomputes, and of how many layers; None if nothing was said.

    RecomputationError: unreadable, not one for each stage, or beside Megatron's own flag.
    """
    text = getattr(args, "envpipe_recompute", None)
    if text is None:
        return None
    if args.recompute_granularity is not None:
        raise RecomputationError(
            f"{FLAG} goes with no --recompute-granularity",
            value=args.recompute_granularity,
            remedy="Leave out one of the two.",
        )
    stages = [_read(part) for part in text.split(",")]
    if len(stages) != args.pipeline_model_parallel_size:
        raise RecomputationError(
            f"{FLAG} says what {len(stages)} stages recompute",
            value=text,
            remedy=f"The job has {args.pipeline_model_parallel_size}; say it for each.",
        )
    return stages


def recompute(chunks: Sequence[Any], what: str, count: int) -> None:
    """Make the first layers of each chunk of a model recompute, and the others not.

    Args:
        chunks: a rank's, perhaps wrapped.
        what: none, full or selective.
        count: layers of each chunk, at most.
    """
    for chunk in chunks:
        for block in chunk.modules():
            if isinstance(block, TransformerBlock):
                _recompute_in(block, what, count)


def _recompute_in(block: TransformerBlock, what: str, count: int) -> None:
    config = block.config
    full = what == _FULL and count > 0
    config.recompute_granularity = _FULL if full else None
    config.recompute_method = "block" if full else None
    config.recompute_num_layers = count if full else None
    for number, layer in enumerate(block.layers):
        selected = what == _SELECTIVE and number < count
        layer.self_attention.checkpoint_core_attention = selected


def _read(text: str) -> tuple[str, int]:
    what, _, count = text.strip().partition(":")
    if (what == _NONE and not count) or (what in (_FULL, _SELECTIVE) and count.isdecimal()):
        return what, int(count or 0)
    raise RecomputationError(
        f"{FLAG} is wrong", value=text, remedy="Say none, full:N or selective:N for each stage."
    )
