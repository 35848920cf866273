"""Telling the energies of forward and backward apart from iterations that ran both."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from envpipe_megatron.profile import ProfileRow
from envpipe_megatron.schedule import Kind


@dataclass(frozen=True)
class Measured:
    """One stage at one setting of clocks.

    Args:
        forward_s: mean time of one forward.
        backward_s: mean time of one backward.
        pair_j: energy of one forward plus one backward, without waiting.
        pair_uncertainty_j: its standard uncertainty.
    """

    forward_s: float
    backward_s: float
    pair_j: float
    pair_uncertainty_j: float = 0.0


def mean_without_outliers(values: ArrayLike) -> float:
    """Mean of the values within one standard deviation of the mean of all, as EnvPipe takes it."""
    array = np.asarray(values, dtype=np.float64)
    kept = array[np.abs(array - array.mean()) <= array.std() * (1 + 1e-9)]
    return float(kept.mean())


def error_of_sum(
    energies_j: Sequence[float], durations_s: Sequence[float], block_s: float
) -> float:
    """Standard error of the sum of iterations' energies, J, from how blocks of them scatter.

    Args:
        energies_j: of iterations that followed each other.
        durations_s: how long each took.
        block_s: iterations are taken together until they last so long, as what a meter says of
            less is not independent.

    Returns:
        0 where they make less than two blocks, which tell nothing.
    """
    blocks: list[list[float]] = [[]]
    filled_s = 0.0
    for energy_j, duration_s in zip(energies_j, durations_s, strict=False):
        if filled_s >= block_s * (1 - 1e-9):
            blocks.append([])
            filled_s = 0.0
        blocks[-1].append(energy_j)
        filled_s += duration_s
    if len(blocks) > 1 and filled_s < block_s * (1 - 1e-9):
        short = blocks.pop()
        blocks[-1] += short
    count = len(blocks)
    if count < 2:
        return 0.0
    mean_j = sum(energies_j) / len(energies_j)
    off_j = [sum(block) - len(block) * mean_j for block in blocks]
    return math.hypot(*off_j) * math.sqrt(count / (count - 1))


def split_energies(
    clocks_mhz: Sequence[int], together: Sequence[Measured], apart: Sequence[Measured]
) -> tuple[dict[Kind, list[ProfileRow]], float]:
    """Rows of both kinds of one stage from two sweeps.

    With the pair energy S(f) of a clock, and S'(f) where backwards stay at the maximum, the
    forward's change is F(f) - F(max) = S'(f) - S(max), if units ran wholly at their clocks. In the
    second sweep a change settles late: a share `a` of each forward's work still ran at the maximum,
    and a share `b` of each backward's at f. Then
    S'(f) - S(max) = (1 - a) (F(f) - F(max)) + b (B(f) - B(max)), and F + B = S gives F.

    The rows' uncertainties are those of S(max), S(f) and S'(f), taken as independent, through the
    same equations. The level at the maximum is split by convention, so they hold for F and B as
    split, and the sum of both is as uncertain as S alone.

    Args:
        clocks_mhz: the clocks, the maximum first.
        together: forwards and backwards at each of these clocks.
        apart: forwards at each but the first, backwards at the maximum.

    Returns:
        the rows, and the mean time in s for which a unit ran at the clock of the unit before it.
    """
    top = together[0]
    lower = list(zip(together[1:], apart, strict=True))
    forward_late_s = _late_s(
        [m.forward_s / top.forward_s - 1 for m, _ in lower],
        [m.forward_s - a.forward_s for m, a in lower],
        top.forward_s,
    )
    backward_late_s = _late_s(
        [1 - top.backward_s / m.backward_s for m, _ in lower],
        [a.backward_s - top.backward_s for _, a in lower],
        top.backward_s,
    )
    # Any split of the level will do (see the module); equal power is the natural one.
    forward_share = top.forward_s / (top.forward_s + top.backward_s)
    forward_top_j = top.pair_j * forward_share
    top_u = top.pair_uncertainty_j
    rows = {
        Kind.FORWARD: [
            ProfileRow(clocks_mhz[0], top.forward_s, forward_top_j, top_u * forward_share)
        ],
        Kind.BACKWARD: [
            ProfileRow(
                clocks_mhz[0],
                top.backward_s,
                top.pair_j - forward_top_j,
                top_u * (1 - forward_share),
            )
        ],
    }
    for frequency, (m, a) in zip(clocks_mhz[1:], lower, strict=True):
        late_forward = forward_late_s / top.forward_s
        late_backward = backward_late_s / m.backward_s
        pair_change_j = m.pair_j - top.pair_j
        gain = 1 / (1 - late_forward - late_backward)
        forward_change_j = gain * (a.pair_j - top.pair_j - late_backward * pair_change_j)
        forward_j = min(max(forward_top_j + forward_change_j, 0.0), m.pair_j)
        # What the forward's energy changes by with S(max), S'(f) and S(f); the backward's is S - F.
        by_top, by_apart = forward_share - gain * (1 - late_backward), gain
        by_together = -gain * late_backward
        common = by_top * top_u, by_apart * a.pair_uncertainty_j
        forward_u = math.hypot(*common, by_together * m.pair_uncertainty_j)
        backward_u = math.hypot(*common, (1 - by_together) * m.pair_uncertainty_j)
        rows[Kind.FORWARD].append(ProfileRow(frequency, m.forward_s, forward_j, forward_u))
        rows[Kind.BACKWARD].append(
            ProfileRow(frequency, m.backward_s, m.pair_j - forward_j, backward_u)
        )
    return rows, max(forward_late_s, backward_late_s)


def _late_s(stretch: Sequence[float], shift_s: Sequence[float], most_s: float) -> float:
    """Time that units ran at the wrong clock: least squares of shift = time x stretch.

    Kept under a third of a unit: with more, the two energies could not be told apart.
    """
    x, y = np.array(stretch), np.array(shift_s)
    norm = float(x @ x)
    late_s = float(x @ y) / norm if norm > 0 else 0.0
    return min(max(late_s, 0.0), most_s / 3)
