"""Small random profiles, and the least cost of any division, found by trying all of them.

Written from the description of the space alone: nothing of the search is used.
"""

from collections.abc import Iterator
from itertools import combinations, product

import numpy as np

from envpipe_megatron.search.configuration import Job
from envpipe_megatron.search.layer_profile import (
    Block,
    BytesPerParameter,
    Curve,
    LayerProfile,
    Links,
    Measure,
    Recomputation,
    Sizes,
)

_SIZES = (Sizes(1, 1), Sizes(2, 1), Sizes(1, 2), Sizes(2, 2))
_KEPT = ("head", "tail")


def random_profile(random: np.random.Generator) -> LayerProfile:
    """Nine pieces in five blocks, at tensor parallel and microbatch sizes of 1 and 2."""
    blocks = (Block(("head",)), Block(("a", "b", "c"), 1), Block(("x", "y"), 2), Block(("tail",)))
    base = {piece: random.integers(1, 100, 6) for block in blocks for piece in block.pieces}
    within, across = (Curve(np.array([1.0, 20]), np.array([0.1, end])) for end in (1.0, 4.0))
    return LayerProfile(
        blocks=blocks,
        frequency_mhz=np.array([1000]),
        measures={
            sizes: {name: _measure(name, values, sizes, random) for name, values in base.items()}
            for sizes in _SIZES
        },
        bytes_per_parameter=BytesPerParameter(2, 2, 12, least_workspace=2),
        links=Links(within, across),
        workspaces_add=True,
    )


def _measure(name: str, values: np.ndarray, sizes: Sizes, random: np.random.Generator) -> Measure:
    share = sizes.microbatch_size / sizes.tensor_parallel
    slower = random.uniform(1.0, 2.0) if sizes.tensor_parallel > 1 else 1.0
    forward_s = np.array([values[0] * share * slower * random.uniform(0.8, 1.2) / 10])
    activation_bytes = float(values[1] * share)
    again = Recomputation("operator", forward_s, None, 0.0, activation_bytes)
    return Measure(
        forward_s,
        2 * forward_s,
        parameters=values[2] / 40 / sizes.tensor_parallel,
        input_bytes=values[3] / 30,
        output_bytes=values[3] / 30,
        activation_bytes=activation_bytes,
        forward_workspace_bytes=values[4] / 4,
        backward_workspace_bytes=values[5] / 4,
        recomputation=() if name in _KEPT else (again,),
    )


def least_cost_s(profile: LayerProfile, job: Job, batches: tuple[int, ...]) -> float:
    """The least (m - 1) max t + sum t of any division that fits; infinite if none does."""
    costs_s = [np.inf]
    for batch in batches:
        options = [
            (sizes, batch // sizes.microbatch_size)
            for sizes in profile.measures
            if batch % sizes.microbatch_size == 0
        ]
        tables: dict[tuple[object, ...], float] = {}
        for edges in _cuts(len(profile.pieces), job.num_gpus):
            for sizes in product(options, repeat=len(edges) - 1):
                gpus = [each.gpus * data_parallel for each, data_parallel in sizes]
                if sum(gpus) != job.num_gpus:
                    continue
                stage_s = []
                for number, (each, _) in enumerate(sizes):
                    stage = (each, *edges[number : number + 2], len(sizes) - number)
                    if stage not in tables:
                        memory_bytes = job.memory_bytes or np.inf
                        tables[stage] = _stage_s(profile, memory_bytes, *stage)
                    stage_s.append(tables[stage])
                costs_s.append((job.global_batch // batch - 1) * max(stage_s) + sum(stage_s))
    return min(costs_s)


def _cuts(num_pieces: int, most_stages: int) -> Iterator[tuple[int, ...]]:
    for inner in range(min(most_stages, num_pieces)):
        for cuts in combinations(range(1, num_pieces), inner):
            yield (0, *cuts, num_pieces)


def _stage_s(
    profile: LayerProfile, memory_bytes: float, sizes: Sizes, first: int, end: int, in_flight: int
) -> float:
    """Time of a stage with the cheapest recomputation that fits, of all subsets of its pieces."""
    measures = [profile.at(sizes)[piece] for piece in profile.pieces[first:end]]
    parameters = sum(measure.parameters for measure in measures)
    inner = measures[:-1]
    workspace = max((measure.forward_workspace_bytes for measure in inner), default=0.0)
    workspace += max((measure.backward_workspace_bytes for measure in inner), default=0.0)
    held = 16 * parameters + max(workspace, 2 * parameters)
    kept = measures[0].input_bytes + sum(measure.activation_bytes for measure in measures)
    again_s = np.inf
    for flags in product((False, True), repeat=end - first):
        if any(flag and not m.recomputation for flag, m in zip(flags, measures, strict=True)):
            continue
        saved, most = 0.0, 0.0
        for begin, stop in _runs(flags, first, profile.block_edges):
            run = sum(measure.activation_bytes for measure in measures[begin : stop - 1])
            whole = first + stop in profile.block_edges and stop - begin > 1
            saved += run
            most = max(most, run + (measures[stop - 1].activation_bytes if whole else 0.0))
        if held + in_flight * (kept - saved) + most <= memory_bytes:
            chosen = [m.forward_s[0] for flag, m in zip(flags, measures, strict=True) if flag]
            again_s = min(again_s, sum(chosen))
    run_s = sum(float(m.forward_s[0] + m.backward_s[0]) for m in measures)
    messages_s = profile.links.message_s(measures[0].input_bytes, crosses=False)
    is_last = end == len(profile.pieces)  # Aceso has it send as well, out of the node
    messages_s = messages_s + profile.links.message_s(measures[-1].output_bytes, crosses=is_last)
    return run_s + float(messages_s) + again_s


def _runs(flags: tuple[bool, ...], first: int, edges: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Runs of flagged pieces inside blocks, counted from the stage's first piece."""
    begin = None
    for piece, flag in enumerate((*flags, False)):
        if begin is not None and (not flag or first + piece in edges):
            yield begin, piece
            begin = None
        if flag and begin is None:
            begin = piece
