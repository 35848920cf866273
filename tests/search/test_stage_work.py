"""Work of stages, by hand: gradients, weights, and where data are loaded."""

from dataclasses import replace

import numpy as np
import pytest
from whole_layers import whole_layers

from envpipe_megatron.search.candidates import Candidate
from envpipe_megatron.search.configuration import Configuration, Job, StageLayout
from envpipe_megatron.search.cuts import Shape
from envpipe_megatron.search.layer_profile import (
    Block,
    BytesPerParameter,
    Curve,
    LayerProfile,
    Links,
    Measure,
    Sizes,
)
from envpipe_megatron.search.space import MegatronSpace, Space
from envpipe_megatron.search.work import StageWork, stage_work

ONE = np.array([1.0])


PROFILE = LayerProfile(
    blocks=(Block(("a",)),),
    frequency_mhz=np.array([1]),
    measures={Sizes(): {"a": Measure(ONE, 2 * ONE, parameters=10.0)}},
    bytes_per_parameter=BytesPerParameter(),
    links=Links(),
)


@pytest.mark.parametrize(("shared", "tail_s"), [(False, 1000 + 8), (True, 500 + 8)])
def test_all_data_parallel_ranks_handle_all_their_gradients(shared: bool, tail_s: float) -> None:
    profile = replace(PROFILE, optimizer_s=100.0, gradients_s=0.8)
    stage = StageLayout(((0, 1),), Sizes(), 2)
    configuration = Configuration((stage,), 1, distributed_optimizer=shared)
    assert Candidate(configuration, profile, Job(2, 2, 2)).tails_s == pytest.approx([tail_s])


@pytest.mark.parametrize(("shared", "tail_s"), [(False, 0.0), (True, 1.5 + 5.0)])
def test_weights_are_gathered_where_no_gradient_is_reduced(shared: bool, tail_s: float) -> None:
    """Half an all-reduce of their 20 bytes, and as in the other test the optimizer."""
    links = Links(all_reduce={(2, False): Curve(np.array([10.0, 20.0]), np.array([1.0, 3.0]))})
    each = BytesPerParameter(weight=2.0, gradient=0.0)
    profile = replace(PROFILE, bytes_per_parameter=each, links=links, optimizer_s=float(shared))
    stage = StageLayout(((0, 1),), Sizes(), 2)
    configuration = Configuration((stage,), 1, distributed_optimizer=shared)
    assert Candidate(configuration, profile, Job(2, 2, 2)).tails_s == pytest.approx([tail_s])


def test_a_part_of_a_model_that_begins_elsewhere_loads_its_data_too() -> None:
    profile = whole_layers(0)
    loss, number = profile.measures[Sizes()]["loss"], len(profile.pieces)

    def last_of(first: int) -> StageWork:
        return stage_work(profile, StageLayout(((first, number),), Sizes(), 1))

    alone = last_of(number - 1)
    longer = 1 + loss.apart_s / loss.forward_s
    np.testing.assert_allclose(alone.forward_s[0], loss.forward_s * longer)
    np.testing.assert_allclose(alone.forward_j[0], loss.forward_j * longer)
    np.testing.assert_allclose(alone.backward_s[0], loss.backward_s)
    whole = profile.in_parts.sums(Sizes()).time_s[-1]
    assert last_of(0).time_s == pytest.approx(whole - loss.apart_s)
    megatron = MegatronSpace(profile, Job(2, 2, 8), Space())
    for stages, apart_s in ((1, 0.0), (2, loss.apart_s)):
        shape = Shape(Sizes(), stages, 2 // stages, 1, 4)
        whole_s = whole - loss.apart_s + apart_s
        assert megatron.pieces(shape).time_s[-1] == pytest.approx(whole_s)
        by_clock = megatron.pieces(shape).by_clock
        both_s = sum(by_clock[kind][1][-1, 0] for kind in ("forward", "backward"))
        assert both_s == pytest.approx(whole_s)
