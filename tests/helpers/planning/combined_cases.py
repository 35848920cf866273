"""Combined units by their definition: slow, and sharing no code with the core."""

import itertools
import random
from dataclasses import replace

from core_cases import B, F

from envpipe_megatron.core.kinds import Kind
from envpipe_megatron.core.profile import make_profile
from envpipe_megatron.core.profile_rows import ProfileRow

CLOCKS_MHZ = (1410, 1200, 900)


def combined_profile(seed=0, stages=2, chunks=2, clocks_mhz=CLOCKS_MHZ):
    """Rows of forwards, backwards and pairs of each chunk, none like another."""
    rng = random.Random(seed)
    rows = []
    for stage, chunk in itertools.product(range(stages), range(chunks)):
        for kind, work in ((F, 1.0), (B, 2.0), (Kind.COMBINED, 2.5)):
            part = stage * chunks + chunk
            base = work * rng.uniform(0.7, 1.4)
            for clock in clocks_mhz:
                time_s = base * (0.3 + 0.7 * 1410 / clock)
                energy_j = time_s * (60 + 240 * (clock / 1410) ** 2)
                rows.append((part, kind, ProfileRow(clock, time_s, energy_j)))
    return make_profile(rows, source="made for a test", listed_chunks=chunks)


def paired(orders, at):
    """The orders with the forwards at (stage, position) combined."""
    return tuple(
        tuple(replace(u, combined=(stage, i) in at) for i, u in enumerate(order))
        for stage, order in enumerate(orders)
    )
