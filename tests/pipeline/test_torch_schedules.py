"""Orders run as tables in torch.distributed.pipelining: results are those of its own schedules."""

from functools import partial

import pytest
import torch_ranks
from core_cases import uniform_profile

from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.orders.builders import zero_bubble, zero_bubble_v
from envpipe_megatron.core.schedule import Placement, Schedule
from envpipe_megatron.formats.torch_csv import read_torch_csv, torch_csv
from envpipe_megatron.policies.planner import make_plan
from envpipe_megatron.policies.request import PlanRequest

pytestmark = pytest.mark.xdist_group("torch")

RANKS, MICROBATCHES = 4, 8
#: The virtual stages of each rank, where there are two.
CHUNKS = {
    Placement.LOOPED: [[rank, rank + RANKS] for rank in range(RANKS)],
    Placement.V: [[rank, 2 * RANKS - 1 - rank] for rank in range(RANKS)],
}


def auto() -> Schedule:
    profile = uniform_profile(RANKS, {1400: (0.1, 40.0), 1000: (0.12, 30.0)})
    order = make_plan(profile, PlanRequest(MICROBATCHES, "auto", "optimal")).plan.schedule
    assert any(order.extra_forwards)
    return order


ORDERS = {
    "extra forwards": partial(builders.envpipe, RANKS, MICROBATCHES, [4, 3, 1, 0]),
    "auto": auto,
    "interleaved": partial(builders.interleaved, RANKS, MICROBATCHES, 2),
    "pairs": partial(builders.interleaved, RANKS, MICROBATCHES, 2, combined=True),
    "split": partial(zero_bubble, RANKS, MICROBATCHES, 7),
    "zb-v": partial(zero_bubble_v, RANKS, MICROBATCHES),
}


@pytest.fixture(scope="module")
def own(pool):
    """Return what torch's 1F1B comes to; its interleaved order comes to the same."""
    whole, chunks = (
        results(pool.run(torch_ranks.train, MICROBATCHES, None, virtual))
        for virtual in ([[rank] for rank in range(RANKS)], CHUNKS[Placement.LOOPED])
    )
    assert chunks == whole
    return whole


def results(ranks):
    losses = [loss for found, _ in ranks for loss in found]
    gradients = {layer: bits for _, found in ranks for layer, bits in found.items()}
    assert len(losses) == MICROBATCHES
    assert sorted(gradients) == list(range(torch_ranks.LAYERS))
    return losses, gradients


@pytest.mark.parametrize("name", ORDERS)
def test_a_table_comes_to_the_same_bits(pool, own, tmp_path, name):
    order = ORDERS[name]()
    path = tmp_path / "order.csv"
    path.write_text(torch_csv(order))
    assert read_torch_csv(path).stages == order.stages
    virtual = CHUNKS[order.placement] if order.num_chunks > 1 else [[rank] for rank in range(RANKS)]
    found = pool.run(torch_ranks.train, MICROBATCHES, str(path), virtual)
    assert results(found) == own
