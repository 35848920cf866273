"""What stages hold that compute operators again: runs of them keep their last output."""

from dataclasses import replace

import numpy as np
import pytest

from envpipe_megatron.search.configuration import Configuration, Job, StageLayout
from envpipe_megatron.search.layer_profile import (
    OPERATOR,
    Block,
    BytesPerParameter,
    LayerProfile,
    Links,
    Measure,
    Recomputation,
    Sizes,
)
from envpipe_megatron.search.megatron.work import stage_work, tails_s

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
