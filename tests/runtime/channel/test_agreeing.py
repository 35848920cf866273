"""What few ranks tell each other, each in its turn in one process; and what becomes of errors."""

from __future__ import annotations

import logging
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.runtime.channel import collectives as runtime_collectives
from envpipe_megatron.runtime.channel.collectives import (
    Collectives,
    CollectivesError,
    HostGroup,
    make_collectives,
    tree_groups,
)
from envpipe_megatron.runtime.going_on import (
    GoesOnError,
    by_background,
    by_planner,
    in_words,
    on_every_rank,
)


def test_a_rank_alone_needs_no_connection(monkeypatch):
    monkeypatch.setattr(dist, "get_rank", lambda: 4)
    alone = HostGroup([4], "name", timedelta(seconds=9), leader=4)
    assert (alone.leads, alone.gather("own"), alone.broadcast("own")) == (True, ["own"], "own")


class Told:
    """A pipeline's group, of which the leader came first: the others hear what it has said."""

    def __init__(self) -> None:
        self.said: list[Any] = []

    def seen_by(self, stage: int, gathered: Any = None) -> Collectives:
        def broadcast(value: Any) -> Any:
            if stage == 0:
                self.said.append(value)
            return self.said[-1]

        def gather(value: Any) -> list[Any]:
            return [value, *(gathered or [])] if stage == 0 else []

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

    def fails() -> None:
        raise error

    with pytest.raises(type(error), match="of a test") as raised:
        told.seen_by(0).agreed(fails)
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


def test_the_first_of_several_values_is_that_of_the_first_stage():
    assert Told().seen_by(0, [None, 7, 8]).first(None) == (2, 7)


def test_what_the_planner_makes_may_be_nothing():
    told = Told()
    assert told.seen_by(0).agreed(lambda: None) is None
    assert told.seen_by(1).agreed(lambda: 5) is None


def test_an_error_of_one_rank_ends_what_every_rank_makes():
    alone = Told().seen_by(0)
    assert alone.everywhere(lambda: 5) == 5

    def fails() -> None:
        raise KeyError("of a test")

    with pytest.raises(KeyError):
        alone.everywhere(fails)
    with pytest.raises(GoesOnError, match=r"^Stage 0: KeyError: 'of a test'$"):
        on_every_rank(alone, fails)
    assert on_every_rank(alone, lambda: 5) == 5
    elsewhere: Any = SimpleNamespace(first=lambda own: (2, "of another"))
    elsewhere.everywhere = lambda make: Collectives.everywhere(elsewhere, make)
    with pytest.raises(CollectivesError, match="A rank of stage 2 cannot go on: of another"):
        elsewhere.everywhere(lambda: 5)
    with pytest.raises(GoesOnError, match="Stage 2: of another"):
        on_every_rank(elsewhere, lambda: 5)


@pytest.mark.parametrize(("text", "reason"), [("\n gone\nfor ever", "gone"), ("", "")])
@pytest.mark.parametrize("exchange", ["in_pipeline", "from_planner", "on_all"])
def test_a_rank_that_is_gone_is_told_by_its_stage(exchange, text, reason):
    def gone(value: Any) -> Any:
        raise RuntimeError(text)

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

    def fails() -> None:
        raise ValueError("of a test")

    background: Any = SimpleNamespace(start=lambda work: work(), take=lambda wait_s: None)
    for planned in (by_planner, lambda c, make: by_background(c, background, lambda: make)):
        with pytest.raises(GoesOnError, match=r"^ValueError: of a test$"):
            planned(told.seen_by(0), fails)
        with pytest.raises(GoesOnError, match=r"^ValueError: of a test$"):
            planned(told.seen_by(1), lambda: pytest.fail("the planner alone makes it"))


def test_planning_may_take_longer_than_the_others_wait_to_hear_of_it():
    looks = []
    heard: Any = SimpleNamespace(is_planner=True, from_planner=lambda own: looks.append(0) or own)
    takes = iter([None, None, 5])
    slow: Any = SimpleNamespace(start=lambda work: None, take=lambda wait_s: next(takes))
    assert by_background(heard, slow, lambda: pytest.fail, look_s=0.01) == 5
    assert len(looks) == 4
