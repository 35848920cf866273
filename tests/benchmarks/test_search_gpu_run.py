"""What is read of Megatron's log where predictions are held against training."""

import numpy as np

from benchmarks.search.gpu_run import layout_of, read_log
from envpipe_megatron.search.configuration import Job
from envpipe_megatron.search.layer_profile import (
    Block,
    BytesPerParameter,
    LayerProfile,
    Links,
    Sizes,
)

LINE = " [2026-01-01] iteration {0:8d}/ 30 | elapsed time per iteration (ms): {1} | lm loss: 1 |\n"
MEMORY = "[Rank {}] (after {} iterations) memory (MB) | allocated: 5.00 | max allocated: {} | x\n"


def test_the_warm_up_is_left_out_and_the_last_peak_counts():
    lines = [LINE.format(n, 9000.0 if n <= 10 else 1000.0 + n) for n in range(1, 31)]
    memory = [MEMORY.format(rank, n, n + rank / 2) for n in (1, 30) for rank in (0, 1)]
    found = read_log("".join([*lines, *memory]))
    assert found["iteration_s"] == [1 + n / 1000 for n in range(11, 31)]
    assert found["peak_bytes"] == {"0": 30 * 2**20, "1": 30.5 * 2**20}


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
