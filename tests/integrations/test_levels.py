"""The level of a job: the highest that is left, or a lower one; what hooks put back."""

import argparse

import pytest
import torch

from envpipe_megatron.integrations.hooking import replaced
from envpipe_megatron.integrations.levels import (
    ArgumentLimit,
    Level,
    decide,
    limits_of_arguments,
    on,
)

EXPERTS = ArgumentLimit("experts", Level.ORDER, "not proven", on("experts"))
VISION = ArgumentLimit("vision", Level.ORDER, "not proven", on("vision"))
GRAPHS = ArgumentLimit("graphs", Level.UNITS, "captured", on("graphs"))
ONE_GRAPH = ArgumentLimit("one graph", Level.UNIFORM, "no host", on("one_graph"))
LIMITS = (EXPERTS, VISION, GRAPHS, ONE_GRAPH)


def asking(names):
    return argparse.Namespace(**dict.fromkeys(names.split(), True))


@pytest.mark.parametrize(
    ("asked", "checks", "said"),
    [
        ("", True, "level order"),
        ("", False, "level order"),
        ("vision experts", True, "level order; if a self-check holds, for experts, vision"),
        ("experts graphs", True, "level units; against order: graphs (captured)"),
        (
            "experts graphs",
            False,
            "level units; against order: experts (not proven), graphs (captured)",
        ),
        ("experts graphs one_graph", True, "level uniform; against units: one graph (no host)"),
        ("experts one_graph", False, "level uniform; against units: one graph (no host)"),
    ],
)
def test_the_highest_that_is_left_and_what_stands_against_the_next(asked, checks, said):
    """What is decided of Megatron's own table, `test_megatron_lm_limits` has in any combination."""
    assert str(decide(limits_of_arguments(asking(asked), LIMITS), checks=checks)) == said


def test_names_of_objects_classes_and_modules_are_replaced_and_put_back():
    class Stage(torch.nn.Module):
        def forward(self):
            return "own"

    stage = Stage()
    stage.layers = torch.nn.ModuleList([torch.nn.Linear(1, 1)])
    before = dict(vars(stage)), [*stage.layers]
    with replaced(stage, forward=lambda: "other", layers=torch.nn.ModuleList()):
        assert (stage.forward(), len(stage.layers)) == ("other", 0)
        with replaced(Stage, forward=lambda stage: "of all"):
            assert Stage()() == "of all"
    assert (dict(vars(stage)), [*stage.layers], stage.forward()) == (*before, "own")
