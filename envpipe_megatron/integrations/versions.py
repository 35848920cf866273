"""Versions of the frameworks: from the first that was tested, below the next minor one.

What their engines are made of is not promised to stay.
"""

from __future__ import annotations

MEGATRON_CORE = ((0, 16, 1), (0, 17))
DEEPSPEED = ((0, 19, 6), (0, 20))


def as_text(version: tuple[int, ...]) -> str:
    """As pip writes it."""
    return ".".join(map(str, version))
