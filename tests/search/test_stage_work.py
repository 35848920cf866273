"""What stages hold that compute operators again: runs of them keep their last output."""

from dataclasses import replace

import numpy as np
import pytest
from whole_layers import whole_layers

from envpipe_megatron.search.configuration import Configuration, Job, StageLayout
from envpipe_megatron.search.cuts import Shape
from envpipe_megatron.search.layer_profile import (
    OPERATOR,
    Block,
    BytesPerParameter,
    Curve,
    LayerProfile,
    Links,
    Measure,
    Recomputation,
    Sizes,
)
from envpipe_megatron.search.space import MegatronSpace, Space
from envpipe_megatron.search.work import StageWork, stage_work, tails_s

ONE = np.array([1.0])


def _operator(kept_bytes: float) -> Measure:
    again = Recomputation(OPERATOR, ONE, None, activation_bytes=0.0, working_bytes=kept_bytes)
    return Measure(ONE, 2 * ONE, activation_bytes=kept_bytes, recomputation=(again,))


PROFILE = LayerProfile(
    blocks=(Block(("a", "b", "c"), repeat=2),),
    frequency_mhz=np.array([1]),
    measures={Sizes(): {"a": _operator(1), "b": _operator(10), "c": _operator(100)}},
    bytes_per_parameter=BytesPerParameter(),
    links=Links(),
    workspaces_add=True,
)


@pytest.mark.parametrize(
    ("again", "held_bytes", "beside_bytes"),
    [
        ("------", 222, 0),
        ("a-----", 222, 0),  # a run of one keeps its output
        ("ab----", 221, 1),
        ("abc---", 211, 111),  # the next block may begin with a run
        ("-bcab-", 211, 110),  # runs end with their block
    ],
)
def test_runs_of_operators_keep_their_last_output(
    again: str, held_bytes: float, beside_bytes: float
) -> None:
    ways = tuple(None if name == "-" else OPERATOR for name in again)
    work = stage_work(PROFILE, StageLayout(((0, 6),), Sizes(), 1, ways))
    assert work.held_bytes.tolist() == [held_bytes]
    assert work.beside_bytes == beside_bytes
    assert work.time_s == 18 + len(again.replace("-", ""))


@pytest.mark.parametrize(("shared", "tail_s"), [(False, 1000 + 8), (True, 500 + 8)])
def test_all_data_parallel_ranks_handle_all_their_gradients(shared: bool, tail_s: float) -> None:
    profile = replace(PROFILE, optimizer_s=100.0, gradients_s=0.8)
    stage = StageLayout(((0, 6),), Sizes(), 2, (None,) * 6)
    work = replace(stage_work(profile, stage), parameters=10.0)
    configuration = Configuration((stage,), 1, distributed_optimizer=shared)
    assert tails_s(profile, configuration, [work], Job(2, 2, 2)) == pytest.approx([tail_s])


@pytest.mark.parametrize(("shared", "tail_s"), [(False, 0.0), (True, 1.5 + 5.0)])
def test_weights_are_gathered_where_no_gradient_is_reduced(shared: bool, tail_s: float) -> None:
    """Half an all-reduce of their 20 bytes, and as in the other test the optimizer."""
    links = Links(all_reduce={(2, False): Curve(np.array([10.0, 20.0]), np.array([1.0, 3.0]))})
    each = BytesPerParameter(weight=2.0, gradient=0.0)
    profile = replace(PROFILE, bytes_per_parameter=each, links=links, optimizer_s=float(shared))
    stage = StageLayout(((0, 6),), Sizes(), 2, (None,) * 6)
    work = replace(stage_work(profile, stage), parameters=10.0)
    configuration = Configuration((stage,), 1, distributed_optimizer=shared)
    assert tails_s(profile, configuration, [work], Job(2, 2, 2)) == pytest.approx([tail_s])


def test_a_part_of_a_model_that_begins_elsewhere_loads_its_data_too() -> None:
    profile = whole_layers(0)
    loss, number = profile.measures[Sizes()]["loss"], len(profile.pieces)

    def last_of(first: int) -> StageWork:
        return stage_work(
            profile, StageLayout(((first, number),), Sizes(), 1, (None,) * (number - first))
        )

    alone = last_of(number - 1)
    longer = 1 + loss.apart_s / loss.forward_s
    np.testing.assert_allclose(alone.forward_s[0], loss.forward_s * longer)
    np.testing.assert_allclose(alone.forward_j[0], loss.forward_j * longer)
    np.testing.assert_allclose(alone.backward_s[0], loss.backward_s)
    parts = [profile.in_parts.column(Sizes(), name)[:, 0] for name in ("forward_s", "backward_s")]
    assert last_of(0).time_s == pytest.approx(np.sum(parts) - loss.apart_s)
    megatron = MegatronSpace(profile, Job(2, 2, 8), Space())
    for stages, apart_s in ((1, 0.0), (2, loss.apart_s)):
        shape = Shape(Sizes(), stages, 2 // stages, 1, 4)
        whole_s = np.sum(parts) - loss.apart_s + apart_s
        assert megatron.pieces(shape).time_s[-1] == pytest.approx(whole_s)
        by_clock = megatron.pieces(shape).by_clock
        both_s = sum(by_clock[kind][1][-1, 0] for kind in ("forward", "backward"))
        assert both_s == pytest.approx(whole_s)
