from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from memory_folder import memory_folder
from rank_pool import RankPool

from envpipe_megatron.runtime.writer import Writer


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
    put = Writer.put

    def put_and_wait(writer: Writer, *call: Any) -> None:
        put(writer, *call)
        writer.close()

    monkeypatch.setattr(Writer, "put", put_and_wait)
