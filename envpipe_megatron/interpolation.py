"""Profiles between the clocks that were measured.

EnvPipe profiles every 90 MHz and reconfigures by 30: units run at clocks of which no row says what
they take.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from envpipe_megatron.profile import Profile, ProfileRow
from envpipe_megatron.schedule import Kind


def interpolated(profile: Profile, clocks_mhz: Sequence[Iterable[int]]) -> Profile:
    """The profile with rows at more clocks, as far as they lie between measured ones.

    Time and energy are linear in the clock from one measured row to the next. So a row is a convex
    mixture of two measured ones, and a lower bound over their convex hull holds for it too. It is
    marked, and never written: the profile stays the one of its file.

    Args:
        profile: as measured.
        clocks_mhz: for each stage, those that its units may run at.
    """
    stages = []
    for stage, (kinds, clocks) in enumerate(zip(profile.rows, clocks_mhz, strict=True)):
        wanted = set(clocks)
        stages.append({kind: _denser(profile, stage, kind, wanted) for kind in kinds})
    return replace(profile, rows=tuple(stages))


def _denser(profile: Profile, stage: int, kind: Kind, clocks: set[int]) -> tuple[ProfileRow, ...]:
    measured = profile.rows[stage][kind]
    known, times_s, energies_j = profile.curve(stage, kind)
    rows = [
        ProfileRow(
            clock,
            float(np.interp(clock, known, times_s)),
            float(np.interp(clock, known, energies_j)),
            interpolated=True,
        )
        for clock in clocks.difference(known.tolist())
        if known[0] < clock < known[-1]
    ]
    return tuple(sorted([*measured, *rows], key=lambda row: row.frequency_mhz, reverse=True))
