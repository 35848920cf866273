from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest
from rank_pool import RankPool


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Four ranks that have megatron-core; the same for all tests of a worker."""
    if find_spec("megatron") is None or find_spec("megatron.core") is None:
        pytest.skip("megatron-core is not installed")
    preload = (
        "megatron.core.models.gpt.gpt_layer_specs",
        "megatron.core.optimizer",
        "envpipe_megatron.integrations.megatron_core",
        "envpipe_megatron.integrations.megatron_cpu",
    )
    with RankPool(4, preload=preload) as ranks:
        yield ranks
