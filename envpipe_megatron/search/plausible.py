"""Which rows of a layer profile contradict one another.

A larger microbatch takes longer than a smaller one, and not much longer for each of its samples.
Other sizes are not compared: where the host is what bounds, more GPUs may well take longer.
"""

from __future__ import annotations

from itertools import groupby, pairwise

from envpipe_megatron.search.layer_profile import LayerProfile, Measure, Sizes

#: Beyond what the samples account for; a GPU's times vary by less.
_MOST, _LEAST = 1.2, 0.9


def implausible_rows(profile: LayerProfile) -> list[str]:
    """A line for each row whose time cannot be right beside that of the next microbatch size.

    Forward and backward together, at the highest clock: which of them waits for a host that is
    slow differs from row to row. Nothing of profiles without a GPU's name: the times of a CPU, and
    of another project's single operators, vary more.
    """
    if profile.gpu is None:
        return []
    found = []
    ordered = sorted(profile.measures, key=lambda sizes: (_shared(sizes), sizes.microbatch_size))
    for _, alike in groupby(ordered, _shared):
        for small, large in pairwise(alike):
            samples = large.microbatch_size / small.microbatch_size
            for piece, measure in profile.at(large).items():
                times = _both_s(measure) / _both_s(profile.at(small)[piece])
                if times > _MOST * samples:
                    found.append(_sentence(piece, large, small, times))
                elif times < _LEAST:
                    found.append(_sentence(piece, small, large, 1 / times))
    return found


def _shared(sizes: Sizes) -> tuple[int, int, int]:
    return sizes.tensor_parallel, sizes.context_parallel, sizes.expert_parallel


def _both_s(measure: Measure) -> float:
    return float(measure.both_s[0])


def _sentence(piece: str, sizes: Sizes, other: Sizes, times: float) -> str:
    parts = zip(("tensor", "context", "expert"), _shared(sizes), strict=True)
    at = "".join(f"{name} parallel {size}, " for name, size in parts if size > 1)
    return (
        f"{piece} at {at}microbatch {sizes.microbatch_size} takes {times:.1f} times as long as at "
        f"microbatch {other.microbatch_size}"
    )
