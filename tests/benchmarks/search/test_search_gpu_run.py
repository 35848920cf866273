"""Which configurations names stand for, where predictions are held against training."""

import numpy as np

from benchmarks.search.gpu_run import layout_of
from envpipe_megatron.search.configuration import Job
from envpipe_megatron.search.layer_profile import (
    Block,
    BytesPerParameter,
    LayerProfile,
    Links,
    Sizes,
)


def test_names_cut_a_model_into_equal_parts():
    blocks = (Block(("embedding",)), Block(("layer",), 8), Block(("loss",)))
    profile = LayerProfile(blocks, np.array([1]), {}, BytesPerParameter(), Links())
    made = layout_of("pp2vp2mb2full", profile, Job(4, 4, 16))
    first, last = made.stages
    assert (first.chunks, last.chunks) == (((0, 3), (5, 7)), ((3, 5), (7, 10)))
    assert first.recomputed == (None, "full", "full", "full", "full")
    assert last.recomputed == ("full", "full", "full", "full", None)
    assert (first.sizes, first.data_parallel) == (Sizes(1, 2), 2)
    assert (made.num_microbatches, made.distributed_optimizer) == (4, True)
    (alone,) = layout_of("tp4", profile, Job(4, 4, 16)).stages
    assert (alone.chunks, alone.sizes, alone.data_parallel) == (((0, 10),), Sizes(4, 1), 1)
