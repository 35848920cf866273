"""Versions of DeepSpeed: from the first that was tested, below the next minor one.

What its engine is made of is not promised to stay. Those of Megatron are the patches'.
"""

from __future__ import annotations

DEEPSPEED = ((0, 19, 6), (0, 20))


def as_text(version: tuple[int, ...]) -> str:
    """As pip writes it."""
    return ".".join(map(str, version))
