from __future__ import annotations

from collections.abc import Iterator

import pytest
from rank_pool import RankPool


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Four ranks that have megatron-core; the same for all tests of a worker."""
    pytest.importorskip("megatron.core")
    with RankPool(4, preload=("megatron.core.models.gpt", "megatron.core.optimizer")) as ranks:
        yield ranks
