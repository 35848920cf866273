"""The level of a job: the highest that is left, or a lower one that is asked for."""

from __future__ import annotations

import argparse

import pytest

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.integrations.levels import Level, LevelError, Limit, decide, on

LIMITS = (
    Limit("experts", on("experts"), Level.UNITS, "not proven"),
    Limit("one graph", on("graph"), Level.UNIFORM, "no host"),
)


def asking(*names: str) -> argparse.Namespace:
    return argparse.Namespace(**dict.fromkeys(names, True))


def test_the_highest_that_is_left() -> None:
    assert decide(asking(), LIMITS).level is Level.ORDER
    assert decide(asking("experts"), LIMITS).level is Level.UNITS
    assert decide(asking("experts", "graph"), LIMITS).level is Level.UNIFORM


def test_what_stands_against_each_level_above() -> None:
    experts, graph = LIMITS
    found = decide(asking("experts", "graph"), LIMITS)
    assert found.against == {Level.UNITS: (graph,), Level.ORDER: (experts, graph)}
    assert str(found) == "level uniform; against units: one graph (no host)"
    assert str(decide(asking(), LIMITS)) == "level order"


def test_less_is_granted() -> None:
    for asked in Level:
        assert decide(asking(), LIMITS, asked).level is asked
    found = decide(asking("experts"), LIMITS, Level.UNIFORM)
    assert found.against == {Level.UNITS: (), Level.ORDER: LIMITS[:1]}
    assert str(found) == "level uniform; against units: it was not asked for"


def test_more_is_an_error_that_names_what_stands_against_it() -> None:
    with pytest.raises(LevelError, match=r"Level order .*experts \(not proven\), one graph .*unif"):
        decide(asking("experts", "graph"), LIMITS, Level.ORDER)
    assert issubclass(LevelError, EnvPipeError)
