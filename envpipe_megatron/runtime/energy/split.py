"""Telling the energies of forward and backward apart from iterations that ran both."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from envpipe_megatron.core.kinds import WHOLE, Kind
from envpipe_megatron.core.profile_rows import ProfileRow


@dataclass(frozen=True)
class Measured:
    """One stage at one setting of clocks: means of one forward and one backward.

    `pair_j` is the energy of both without waiting, with its standard uncertainty. `part_share`,
    [chunks, kinds], is what a chunk's forward, backward and, where a stage has any, combined pair
    take over those means: a forward over the first, the others over the second. Pairs' time is
    added to that of the backwards, and the means are over the forwards that run alone.
    """

    forward_s: float
    backward_s: float
    pair_j: float
    pair_uncertainty_j: float = 0.0
    part_share: Sequence[Sequence[float]] = ((1.0, 1.0),)


def mean_without_outliers(values: ArrayLike) -> float:
    """Mean of the values within one standard deviation of the mean of all, as EnvPipe takes it."""
    array = np.asarray(values, dtype=np.float64)
    kept = array[np.abs(array - array.mean()) <= array.std() * (1 + 1e-9)]
    return float(kept.mean())


def error_of_sum(
    energies_j: Sequence[float], durations_s: Sequence[float], block_s: float
) -> float:
    """Standard error of the sum of iterations' energies, J, from how blocks of them scatter.

    Iterations that followed each other are taken together until they last `block_s`, as what a
    meter says of less is not independent. 0 if they make less than two blocks, which tell
    nothing.
    """
    blocks: list[list[float]] = [[]]
    filled_s = 0.0
    for energy_j, duration_s in zip(energies_j, durations_s, strict=True):
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


@dataclass(frozen=True)
class Split:
    """Both kinds of one stage.

    Args:
        rows: rows of each kind, the highest clock first; with chunks, of their mean.
        late_s: mean time for which a unit ran at the clock of the unit before it.
        told_apart: False if the sweeps do not tell forwards from backwards; the energy of each
            pair is then shared by time.
    """

    rows: dict[Kind, list[ProfileRow]]
    late_s: float
    told_apart: bool


def split_energies(
    clocks_mhz: Sequence[int], together: Sequence[Measured], apart: Sequence[Measured]
) -> Split:
    """Rows of both kinds of one stage from two sweeps.

    With the pair energy S(f) of a clock, and S'(f) where backwards stay at the maximum, the
    forward's change is F(f) - F(max) = S'(f) - S(max), if units ran wholly at their clocks. In the
    second sweep a change settles late: a share `a` of each forward's work still ran at the maximum,
    and a share `b` of each backward's at f. Then S'(f) - S(max) = (1 - a) (F(f) - F(max)) + b (B(f)
    - B(max)), and F + B = S gives F.

    The rows' uncertainties are those of S(max), S(f) and S'(f), taken as independent, through the
    same equations. The level at the maximum is split by convention, so they hold for F and B as
    split, and the sum of both is as uncertain as S alone.

    Where a third of a unit or more ran at the wrong clock, or an energy comes out no larger than
    its uncertainty, the sweeps do not tell the kinds apart.

    Args:
        clocks_mhz: the maximum first.
        together: forwards and backwards at each of these clocks.
        apart: forwards at each but the first, backwards at the maximum.
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
    shared = [_by_time(m) for m in together]
    # Any split of the level will do (see the profiler's module); equal power is the natural one.
    energies, top_u = shared[:1], top.pair_uncertainty_j
    forward_share = top.forward_s / (top.forward_s + top.backward_s)
    for m, a in lower:
        late_forward = forward_late_s / top.forward_s
        late_backward = backward_late_s / m.backward_s
        pair_change_j = m.pair_j - top.pair_j
        gain = 1 / (1 - late_forward - late_backward)
        forward_change_j = gain * (a.pair_j - top.pair_j - late_backward * pair_change_j)
        forward_j = top.pair_j * forward_share + forward_change_j
        # What the forward's energy changes by with S(max), S'(f) and S(f); the backward's is S - F.
        by_top, by_apart = forward_share - gain * (1 - late_backward), gain
        by_together = -gain * late_backward
        common = by_top * top_u, by_apart * a.pair_uncertainty_j
        forward_u = math.hypot(*common, by_together * m.pair_uncertainty_j)
        backward_u = math.hypot(*common, (1 - by_together) * m.pair_uncertainty_j)
        energies.append((forward_j, forward_u, m.pair_j - forward_j, backward_u))
    settled = forward_late_s < top.forward_s / 3 and backward_late_s < top.backward_s / 3
    told_apart = settled and all(
        forward_j > forward_u and backward_j > backward_u
        for forward_j, forward_u, backward_j, backward_u in energies[1:]
    )
    rows: dict[Kind, list[ProfileRow]] = {kind: [] for kind in WHOLE}
    for clock, m, (forward_j, forward_u, backward_j, backward_u) in zip(
        clocks_mhz, together, energies if told_apart else shared, strict=True
    ):
        rows[Kind.FORWARD].append(ProfileRow(clock, m.forward_s, forward_j, forward_u))
        rows[Kind.BACKWARD].append(ProfileRow(clock, m.backward_s, backward_j, backward_u))
    return Split(rows, max(forward_late_s, backward_late_s), told_apart)


def _by_time(measured: Measured) -> tuple[float, float, float, float]:
    """Energy of a forward and its uncertainty, and a backward's, J, at equal power."""
    share = measured.forward_s / (measured.forward_s + measured.backward_s)
    pair_j, pair_u = measured.pair_j, measured.pair_uncertainty_j
    forward_j = pair_j * share
    return forward_j, pair_u * share, pair_j - forward_j, pair_u * (1 - share)


def _late_s(stretch: Sequence[float], shift_s: Sequence[float], most_s: float) -> float:
    """Time that units ran at the wrong clock: least squares of shift = time x stretch.

    Kept under a third of a unit: with more, the two energies could not be told apart.
    """
    x, y = np.array(stretch), np.array(shift_s)
    norm = float(x @ x)
    late_s = float(x @ y) / norm if norm > 0 else 0.0
    return min(max(late_s, 0.0), most_s / 3)
