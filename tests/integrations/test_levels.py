"""The level of a job: the highest that is left, or a lower one that is asked for."""

from __future__ import annotations

import argparse

import pytest

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.integrations.levels import Level, LevelError, Limit, decide, on

EXPERTS = Limit("experts", on("experts"), Level.ORDER, "not proven")
VISION = Limit("vision", on("vision"), Level.ORDER, "not proven")
GRAPHS = Limit("graphs", on("graphs"), Level.UNITS, "captured")
ONE_GRAPH = Limit("one graph", on("one_graph"), Level.UNIFORM, "no host")
LIMITS = (EXPERTS, VISION, GRAPHS, ONE_GRAPH)


def asking(*names: str) -> argparse.Namespace:
    return argparse.Namespace(**dict.fromkeys(names, True))


def features(limits: tuple[Limit, ...]) -> list[str]:
    return [limit.feature for limit in limits]


def test_the_highest_that_is_left() -> None:
    assert decide(asking(), LIMITS).level is Level.ORDER
    assert decide(asking("experts"), LIMITS).level is Level.ORDER
    assert decide(asking("experts", "graphs"), LIMITS).level is Level.UNITS
    assert decide(asking("graphs", "one_graph"), LIMITS).level is Level.UNIFORM


def test_what_stands_against_each_level_above() -> None:
    found = decide(asking("experts", "graphs", "one_graph"), LIMITS)
    assert found.against == {Level.UNITS: (ONE_GRAPH,), Level.ORDER: (GRAPHS, ONE_GRAPH)}
    assert str(found) == "level uniform; against units: one graph (no host)"
    assert str(decide(asking(), LIMITS)) == "level order"


def test_level_order_may_depend_on_a_check() -> None:
    found = decide(asking("vision", "experts"), LIMITS)
    assert found.to_check == (EXPERTS, VISION)
    assert found.against == {}
    assert str(found) == "level order; if a self-check holds, for experts, vision"
    assert decide(asking(), LIMITS).to_check == ()


def test_without_checks_what_wants_one_stands_against_level_order() -> None:
    found = decide(asking("experts", "graphs"), LIMITS, checks=False)
    assert (found.level, found.to_check) == (Level.UNITS, ())
    assert features(found.against[Level.ORDER]) == ["experts", "graphs"]
    assert str(found) == "level units; against order: experts (not proven), graphs (captured)"
    assert decide(asking(), LIMITS, checks=False).level is Level.ORDER
    with pytest.raises(LevelError, match=r"Level order .*with: experts \(not proven\)"):
        decide(asking("experts"), LIMITS, Level.ORDER, checks=False)
    # What is lower anyway stays as low.
    assert decide(asking("experts", "one_graph"), LIMITS, checks=False).level is Level.UNIFORM
    assert EXPERTS.highest is Level.ORDER


def test_less_is_granted() -> None:
    for asked in Level:
        assert decide(asking(), LIMITS, asked).level is asked
        assert decide(asking("experts"), LIMITS, asked).level is asked
    found = decide(asking("graphs"), LIMITS, Level.UNIFORM)
    assert found.against == {Level.UNITS: (), Level.ORDER: (GRAPHS,)}
    assert str(found) == "level uniform; no more was asked for"


def test_more_is_an_error_that_names_what_stands_against_it() -> None:
    wanting = asking("experts", "graphs", "one_graph")
    with pytest.raises(LevelError, match=r"Level order .*: graphs \(cap.*, one graph .*uniform"):
        decide(wanting, LIMITS, Level.ORDER)
    with pytest.raises(LevelError) as error:
        decide(wanting, LIMITS, Level.UNITS)
    assert "graphs" not in str(error.value)
    assert "experts" not in str(error.value)
    assert issubclass(LevelError, EnvPipeError)
