from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from memory_folder import memory_folder
from rank_pool import RankPool

from envpipe_megatron.runtime.writer import InTurn, Writer


@pytest.fixture(scope="session")
def three_ranks() -> Iterator[RankPool]:
    """Three ranks with torch alone."""
    with RankPool(3, timeout_s=20) as pool:
        yield pool


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """In memory: jobs of thousands of units write to it."""
    with memory_folder() as folder:
        yield folder


@pytest.fixture
def written_at_once(monkeypatch):
    """Files are written before a call returns: by the writer's thread, which ends each time."""
    wake = Writer.wake

    def wake_and_wait(writer: Writer, calls: InTurn) -> None:
        wake(writer, calls)
        writer.close()
        writer._thread = None

    monkeypatch.setattr(Writer, "wake", wake_and_wait)
