"""One time axis for GPUs of several nodes, whose clocks begin anywhere."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping

from envpipe_megatron.timeline_file import RankIteration

#: Of an iteration in a job of several runs.
IterationKey = tuple[str, int]


def node_offsets_s(iterations: Iterable[RankIteration]) -> dict[str, float]:
    """What to take off each node's instants, so that they compare with those of all others.

    The stages of a pipeline begin an iteration together, so the median difference between the
    begins of the iterations that two nodes recorded is taken to be 0. That is as exact as an
    iteration's begin is common, and says nothing of single messages between nodes.

    Returns:
        for each node, s; 0 for that of the lowest rank, and for nodes without a common iteration.
    """
    begins: dict[str, dict[IterationKey, float]] = {}
    first_rank: dict[str, int] = {}
    for read in iterations:
        node, rank = read.labels.node, read.labels.rank
        first_rank[node] = min(rank, first_rank.get(node, rank))
        key = read.labels.run, read.iteration
        own = begins.setdefault(node, {})
        own[key] = min(read.begin_s, own.get(key, read.begin_s))
    if not begins:
        return {}
    reference = begins[min(first_rank, key=first_rank.__getitem__)]
    return {node: _median_difference_s(own, reference) for node, own in begins.items()}


def _median_difference_s(
    own: Mapping[IterationKey, float], reference: Mapping[IterationKey, float]
) -> float:
    common = own.keys() & reference.keys()
    return statistics.median(own[key] - reference[key] for key in common) if common else 0.0
