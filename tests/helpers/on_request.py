"""What takes too long to run each time."""

import os
from collections.abc import Container, Iterable

import pytest


def on_request(what: str) -> pytest.MarkDecorator:
    """Skip unless ENVPIPE_<what>_FULL=1 asks for it."""
    return pytest.mark.skipif(not asked_for(what), reason=f"takes long: set ENVPIPE_{what}_FULL=1")


def each_of(values: Iterable, always: Container) -> list:
    """As parameters of a test, all but some on request (ENVPIPE_PIPELINE_FULL=1)."""
    rows = [(value, value if isinstance(value, tuple) else (value,)) for value in values]
    mark = on_request("PIPELINE")
    return [pytest.param(*row, marks=() if value in always else mark) for value, row in rows]


def label(value: object) -> str:
    """Of a test's parameter."""
    return "+".join(map(str, value)) or "plain" if isinstance(value, tuple) else str(value)


def examples(count: int) -> int:
    """How many examples of a property are tried: all with ENVPIPE_CORE_FULL=1, a quarter else."""
    return count if asked_for("CORE") else (count + 3) // 4


def asked_for(what: str) -> bool:
    """Return True if ENVPIPE_<what>_FULL=1 asks for long tests."""
    return os.environ.get(f"ENVPIPE_{what}_FULL", "") not in ("", "0")
