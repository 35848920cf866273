"""One time axis for GPUs of several nodes, whose clocks begin anywhere."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping

from envpipe_megatron.formats.timeline import RankIteration

#: A start of a job, by the label of its run, and a node.
StartAndNode = tuple[str, str]


def node_offsets_s(iterations: Iterable[RankIteration]) -> dict[StartAndNode, float]:
    """What to take off each node's instants, so that they compare with those of all others.

    The stages of a pipeline begin an iteration together, so the median difference between the
    begins of the iterations that two nodes recorded is taken to be 0. Each start of a job has its
    own, since a node that was booted between them has a clock that starts again. It is 0 for the
    node of the lowest rank, and for nodes without a common iteration.
    """
    begins: dict[str, dict[str, dict[int, float]]] = {}
    first_rank: dict[str, int] = {}
    for read in iterations:
        node, rank = read.labels.node, read.labels.rank
        first_rank[node] = min(rank, first_rank.get(node, rank))
        own = begins.setdefault(read.labels.run, {}).setdefault(node, {})
        own[read.iteration] = min(read.begin_s, own.get(read.iteration, read.begin_s))
    return {
        (run, node): _median_difference_s(own, nodes[min(nodes, key=first_rank.__getitem__)])
        for run, nodes in begins.items()
        for node, own in nodes.items()
    }


def _median_difference_s(own: Mapping[int, float], reference: Mapping[int, float]) -> float:
    common = own.keys() & reference.keys()
    return statistics.median(own[key] - reference[key] for key in common) if common else 0.0
