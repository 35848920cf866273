"""Other values in place of names of a module or a class of Megatron's, for the time of a call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Within, the owner's names have these values; it has all of them."""
    own = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in own.items():
            setattr(owner, name, value)
