from __future__ import annotations

from collections.abc import Iterator

import pytest
from rank_pool import RankPool


@pytest.fixture(scope="session")
def three_ranks() -> Iterator[RankPool]:
    """Three ranks with torch alone."""
    with RankPool(3, timeout_s=20) as pool:
        yield pool
