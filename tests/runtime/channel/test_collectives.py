"""What ranks tell each other reaches all of them, and none takes in what grows with the job."""

import itertools
import logging
import pickle
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import channel_ranks
import pytest
import torch.distributed as dist
from on_request import on_request
from rank_pool import RankPool

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.runtime.channel import collectives as runtime_collectives
from envpipe_megatron.runtime.channel.collectives import (
    FAN_IN,
    FRAME_BYTES,
    Collectives,
    CollectivesError,
    DegradedError,
    HostGroup,
    by_planner,
    in_words,
    make_collectives,
    on_every_rank,
    tree_groups,
)

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
    assert pool.run(channel_ranks.come_late, 1.5) == [[0, 1], *[[]] * 11]


def test_all_ranks_know_that_one_could_not_come():
    """It waits no longer for the others than these wait for it."""
    with RankPool(2, timeout_s=4.0) as pool:
        assert pool.run(channel_ranks.one_cannot_come, 4.0) == [[True, True]] * 2


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
    told = pool.run(channel_ranks.exchange, pipelines, fan_in)
    for rank, own in enumerate(told):
        assert own["is_planner"] == (rank == 0)
        assert own["num_replicas"] == len(pipelines)
        assert [rank in pipeline and pipeline for pipeline in pipelines].count(own["in_pipeline"])
        assert own["sum"] == told[0]["sum"]  # to the last bit
        assert told[0]["all"][stage_of[rank]][own["replica"]] == rank
        assert own["objects"] == [set(ranks) for ranks in stages]
        assert own["over_replicas"] == set(stages[stage_of[rank]])
        assert own["latest"] == 11.0
        assert own["on_all"] == [True, False]
        assert own["first"] == [None, (stage_of[5], 5)]
        assert own["from_planner"] == "0"
        assert own["agreed"] == 0
        assert all(len(group) <= max(fan_in, len(stages)) for group in own["groups"])
        if rank:
            assert own["to_planner"] == own["all"] == []
    for [[summed, tenth]], ranks in zip(told[0]["sum"], stages, strict=True):
        assert (summed, tenth) == (sum(ranks), pytest.approx(0.1 * sum(ranks)))
    assert told[0]["to_planner"] == [max(ranks) for ranks in stages]
    assert [sorted(ranks) for ranks in told[0]["all"]] == [sorted(ranks) for ranks in stages]


def test_values_of_any_length_come_as_they_were(pool):
    fits = FRAME_BYTES - len(pickle.dumps(b"x" * 200)) + 200 - 8
    sizes = [0, 1, fits - 1, fits, fits + 1, 3 * FRAME_BYTES]
    assert pool.run(channel_ranks.lengths, sizes) == [[True] * len(sizes)] * 12


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


def test_a_rank_alone_needs_no_connection(monkeypatch):
    monkeypatch.setattr(dist, "get_rank", lambda: 4)
    alone = HostGroup([4], "name", timedelta(seconds=9), leader=4)
    assert (alone.leads, alone.gather("own"), alone.broadcast("own")) == (True, ["own"], "own")


class Told:
    """A pipeline's group, of which the leader came first: the others hear all that it has said."""

    def __init__(self) -> None:
        self.said: list[Any] = []

    def seen_by(self, stage: int) -> Collectives:
        heard = iter(self.said)

        def broadcast(value: Any) -> Any:
            if stage == 0:
                self.said.append(value)
                return value
            return next(heard)

        def gather(value: Any) -> list[Any]:
            return [value] if stage == 0 else []

        group: Any = SimpleNamespace(leads=stage == 0, broadcast=broadcast, gather=gather)
        return Collectives(stage, group, [], 1)


@pytest.mark.parametrize(
    ("error", "others"),
    [
        (EnvPipeError("of a test"), EnvPipeError),
        (ValueError("of a test"), CollectivesError),
    ],
)
def test_an_error_of_the_planner_is_everybodys(error, others):
    told = Told()
    with pytest.raises(type(error), match="of a test") as raised:
        told.seen_by(0).agreed(Mock(side_effect=error))
    assert raised.value is error
    with pytest.raises(others, match="of a test") as raised:
        told.seen_by(1).agreed(lambda: pytest.fail("the planner alone makes it"))
    assert isinstance(error, EnvPipeError) or "ValueError" in str(raised.value)


@pytest.mark.parametrize(
    ("size", "widths"),
    [(1, []), (2, [2]), (8, [8]), (9, [3, 3]), (10, [4, 3]), (64, [8, 8]), (100, [5, 5, 4])],
)
def test_the_levels_of_a_tree_are_about_as_wide(size, widths):
    assert [len(group) for group in tree_groups(0, size)] == widths


def test_what_the_planner_makes_may_be_nothing():
    told = Told()
    assert told.seen_by(0).agreed(lambda: None) is None
    assert told.seen_by(1).agreed(lambda: 5) is None


def test_an_error_of_one_rank_ends_what_every_rank_makes():
    alone = Told().seen_by(0)
    assert alone.everywhere(lambda: 5) == 5
    fails = Mock(side_effect=KeyError("of a test"))
    with pytest.raises(KeyError):
        alone.everywhere(fails)
    with pytest.raises(DegradedError, match=r"^Stage 0: KeyError: 'of a test'$"):
        on_every_rank(alone, fails)
    assert on_every_rank(alone, lambda: 5) == 5
    elsewhere: Any = SimpleNamespace(first=lambda own: (2, "of another"))
    elsewhere.everywhere = lambda make: Collectives.everywhere(elsewhere, make)
    with pytest.raises(CollectivesError, match="A rank of stage 2 cannot go on: of another"):
        elsewhere.everywhere(lambda: 5)
    with pytest.raises(DegradedError, match="Stage 2: of another"):
        on_every_rank(elsewhere, lambda: 5)


@pytest.mark.parametrize(("text", "reason"), [("\n gone\nfor ever", "gone"), ("", "RuntimeError")])
@pytest.mark.parametrize("exchange", ["in_pipeline", "from_planner", "on_all"])
def test_a_rank_that_is_gone_is_told_by_its_stage(exchange, text, reason):
    gone = Mock(side_effect=RuntimeError(text))
    group: Any = SimpleNamespace(leads=True, gather=gone, broadcast=gone)
    with pytest.raises(
        CollectivesError, match=rf"^Stage 3 lost another rank of the job: {reason}\. Look"
    ):
        getattr(Collectives(3, group, [], 1), exchange)(True)


def test_groups_of_two_jobs_in_one_process_have_names_of_their_own(monkeypatch):
    monkeypatch.setattr(dist, "get_rank", lambda: 5)
    made: list[Any] = []

    def group(ranks: Any, name: str, timeout: timedelta, *, leader: int) -> Any:
        made.append((list(ranks), name, timeout, leader))
        return SimpleNamespace(leads=leader == 5)

    monkeypatch.setattr(runtime_collectives, "HostGroup", group)
    for _ in range(2):
        found = make_collectives([[1, 5], [3, 0]], timedelta(seconds=9))
        assert (found.num_replicas, found.is_planner) == (2, False)
    assert [(ranks, leader) for ranks, _, _, leader in made] == [([0, 5], 0), ([1, 5], 1)] * 2
    assert len({name for _, name, _, _ in made}) == 4
    assert {timeout for _, _, timeout, _ in made} == {timedelta(seconds=9)}


def test_an_error_is_told_in_words_of_some_length(caplog):
    assert in_words(EnvPipeError("x" * 1001)) == "x" * 1000
    assert not caplog.records
    error = ValueError("of a test")
    assert in_words(error) == "ValueError: of a test"
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert record.exc_info
    assert record.exc_info[1] is error


def test_planning_goes_on_without_what_fails():
    told = Told()
    with pytest.raises(DegradedError, match=r"^ValueError: of a test$"):
        by_planner(told.seen_by(0), Mock(side_effect=ValueError("of a test")))
    with pytest.raises(DegradedError, match=r"^ValueError: of a test$"):
        by_planner(told.seen_by(1), lambda: pytest.fail("the planner alone makes it"))
