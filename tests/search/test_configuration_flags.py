"""A configuration as Megatron's flags and as a file."""

from dataclasses import replace

from whole_layers import whole_layers

from envpipe_megatron.search.configuration import (
    Job,
    Recomputed,
    Shape,
    megatron_flags,
)
from envpipe_megatron.search.layer_profile import Sizes
from envpipe_megatron.search.space import MegatronSpace, Space

PROFILE = whole_layers(0, ("layer",) * 7)
JOB = Job(num_gpus=4, gpus_per_node=4, global_batch=8)
MEGATRON = MegatronSpace(PROFILE, JOB, Space())


def _flags(slots: list[int], recomputed: list[Recomputed], chunks: int = 1) -> list[str]:
    shape = Shape(Sizes(2, 1), 2, 1, chunks, 8)
    return megatron_flags(PROFILE, MEGATRON.candidate(shape, slots, recomputed).configuration, JOB)


def test_layers_embedding_and_loss_are_laid_out_by_chunk_and_stage() -> None:
    assert _flags([0, 4, 9], [(None, 0)] * 2) == [
        "--tensor-model-parallel-size 2",
        "--pipeline-model-parallel-size 2",
        "--micro-batch-size 1",
        "--global-batch-size 8",
        "--pipeline-model-parallel-layout 'Et*3|t*4L'",
        "--use-distributed-optimizer",
    ]
    chunks = _flags([0, 1, 4, 8, 9], [(None, 0)] * 2, chunks=2)
    assert "--pipeline-model-parallel-layout 'E|t*3|t*4|L'" in chunks


def test_recomputation_is_megatrons_own_where_stages_are_alike() -> None:
    full = ["--recompute-granularity full --recompute-method block", "--recompute-num-layers 2"]
    assert _flags([0, 4, 9], [("full", 2), ("full", 2)])[-2:] == full  # the embedding is none
    # A stage with fewer layers recomputes all that it has.
    assert _flags([0, 2, 9], [("full", 2), ("full", 2)])[-1] == "--recompute-num-layers 2"
    # So does each virtual stage, the one with the embedding too.
    chunks = _flags([0, 4, 5, 6, 9], [("full", 2), ("full", 2)], chunks=2)
    assert chunks[-2:] == full
    assert _flags([0, 1, 9], [(None, 0), ("full", 3)])[-2:] == [full[0], "--recompute-num-layers 3"]
    assert _flags([0, 4, 9], [("selective", 9)] * 2)[-1] == "--recompute-granularity selective"


def test_recomputation_by_stage_is_envpipes() -> None:
    assert (
        _flags([0, 4, 9], [("full", 2), (None, 0)])[-1]
        == "--envpipe --envpipe-recompute full:2,none"
    )
    mixed = _flags([0, 4, 9], [("full", 2), ("selective", 1)])
    assert mixed[-1] == "--envpipe --envpipe-recompute full:2,selective:1"


def test_full_by_stage_is_not_called_selective_where_no_layer_can_do_that() -> None:
    only_full = {
        sizes: {
            name: replace(each, recomputation=each.recomputation[1:])
            for name, each in by_piece.items()
        }
        for sizes, by_piece in PROFILE.measures.items()
    }
    profile = replace(PROFILE, measures=only_full)
    shape = Shape(Sizes(2, 1), 2, 1, 1, 8)
    candidate = MegatronSpace(profile, JOB, Space()).candidate(
        shape, [0, 4, 9], [("full", 2), (None, 0)]
    )
    flags = megatron_flags(profile, candidate.configuration, JOB)
    assert flags[-1] == "--envpipe --envpipe-recompute full:2,none"


def test_what_is_printed_is_what_was_ranked() -> None:
    recomputing = set()
    for memory_bytes in (270.0, 300.0):
        job = replace(JOB, memory_bytes=memory_bytes)
        megatron = MegatronSpace(PROFILE, job, Space(max_chunks=2))
        for shape in megatron.shapes:
            if cut := megatron.best_cut(shape):
                stages = cut.configuration.stages
                printed = [stage.recomputed for stage in stages]
                edges = {edge for stage in stages for chunk in stage.chunks for edge in chunk}
                again = megatron.candidate(shape, sorted(edges), printed)
                assert again.configuration == cut.configuration
                recomputing |= {(shape.num_chunks, name) for name, _ in printed}
    assert {(1, "selective"), (2, "selective")} <= recomputing
