from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from memory_folder import memory_folder
from rank_pool import RankPool


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
