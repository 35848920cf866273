"""What ranks tell each other reaches all of them, and none takes in what grows with the job."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterator

import collective_ranks
import pytest
from on_request import on_request
from rank_pool import RankPool

from envpipe_megatron.runtime.channel.collectives import FAN_IN, FRAME_BYTES, tree_groups

# One worker runs them all: it has imported what ranks are forked from.
pytestmark = pytest.mark.xdist_group("pipeline")


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(12) as pool:
        yield pool


#: For each replica, the rank of each stage.
LAYOUTS = {
    "one pipeline": [range(12)],
    "neighbours": [range(first, first + 3) for first in range(0, 12, 3)],
    "as Megatron's": [range(first, 12, 6) for first in range(6)],
    "no order": [(11, 0), (9, 1), (2, 4), (10, 3), (8, 5), (7, 6)],
    "no pipeline": [(rank,) for rank in range(12)],
}


def test_a_rank_that_comes_late_is_waited_for(pool):
    assert pool.run(collective_ranks.come_late, 1.5) == [[0, 1], *[[]] * 11]


#: Each layout, and each number that one rank takes in; the others on request.
ENOUGH = {("one pipeline", 3), ("neighbours", 2), ("as Megatron's", 3), ("no order", 2)}
ENOUGH |= {("no pipeline", 8)}


@pytest.mark.parametrize(
    ("layout", "fan_in"),
    [
        pytest.param(*pair, marks=() if pair in ENOUGH else on_request("PIPELINE"))
        for pair in itertools.product(LAYOUTS, (2, 3, 8))
    ],
)
def test_every_rank_has_the_same_of_all_others(pool, layout, fan_in):
    pipelines = [list(pipeline) for pipeline in LAYOUTS[layout]]
    stages = [list(ranks) for ranks in zip(*pipelines, strict=True)]
    stage_of = {rank: stage for stage, ranks in enumerate(stages) for rank in ranks}
    told = pool.run(collective_ranks.exchange, pipelines, fan_in)
    for rank, own in enumerate(told):
        assert own["is_planner"] == (rank == 0)
        assert own["num_replicas"] == len(pipelines)
        assert [rank in pipeline and pipeline for pipeline in pipelines].count(own["in_pipeline"])
        assert own["sum"] == told[0]["sum"]  # to the last bit
        assert own["objects"] == [set(ranks) for ranks in stages]
        assert own["latest"] == 11.0
        assert own["on_all"] == [True, False]
        assert own["first"] == [None, (stage_of[5], 5)]
        assert own["from_planner"] == "0"
        assert own["agreed"] == 0
        assert all(len(group) <= max(fan_in, len(stages)) for group in own["groups"])
        if rank:
            assert own["to_planner"] == own["all"] == []
        if rank == 0 and len(pipelines) > 2:  # however the tree has grouped them
            assert own["median"] == [[1.0]] * len(stages)
    for [[summed, tenth]], ranks in zip(told[0]["sum"], stages, strict=True):
        assert (summed, tenth) == (sum(ranks), pytest.approx(0.1 * sum(ranks)))
    assert told[0]["to_planner"] == [max(ranks) for ranks in stages]
    assert [sorted(ranks) for ranks in told[0]["all"]] == [sorted(ranks) for ranks in stages]


def test_values_of_any_length_come_as_they_were(pool):
    fits = FRAME_BYTES - len(pickle.dumps(b"x" * 200)) + 200 - 8
    sizes = [0, 1, fits - 1, fits, fits + 1, 3 * FRAME_BYTES]
    assert pool.run(collective_ranks.lengths, sizes) == [[True] * len(sizes)] * 12


@pytest.mark.parametrize("size", [*range(1, 70), 511, 512, 513, 1250, 10_000])
def test_each_member_of_a_tree_is_led_by_one_and_leads_few(size):
    groups = [tree_groups(member, size) for member in range(size)]
    assert all(leads.start == 0 for leads in groups[0])
    for member, own in enumerate(groups):
        assert all(len(group) <= FAN_IN for group in own)
        assert all(group in groups[other] for group in own for other in group)
        # It leads all of its groups but the last, by which it is heard of at the top.
        assert [group.start == member for group in own] == [True] * (len(own) - 1) + [
            member == 0
        ] * bool(own)
    most_values_taken_in = max(
        sum(len(group) - 1 for group in own if group.start == member)
        for member, own in enumerate(groups)
    )
    assert most_values_taken_in <= 28
