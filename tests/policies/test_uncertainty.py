"""The uncertainty of a plan's saving, against a Monte Carlo simulation."""

import random
from dataclasses import replace

import numpy as np
import pytest
from core_cases import uniform_profile, with_rows

from envpipe_megatron.core.conditions import Conditions
from envpipe_megatron.core.kinds import SPLIT, unit
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.plan import (
    Plan,
    max_frequencies,
    saving_uncertainty_percent,
)
from envpipe_megatron.core.profile_rows import SplitBackward
from envpipe_megatron.core.schedule import Schedule

CURVE = {1400: (0.1, 40.0), 1200: (0.11, 34.0), 1000: (0.13, 31.0)}


@pytest.mark.parametrize("split", [False, True])
def test_the_saving_is_as_unsure_as_when_rows_are_drawn(split):
    rng = random.Random(1)
    profile = with_rows(
        replace(uniform_profile(3, CURVE), interpolates=True),
        lambda row: replace(row, energy_uncertainty_j=rng.uniform(0.005, 0.03) * row.energy_j),
    )
    order = builders.one_f_one_b(3, 6)
    if split:
        ways = dict(zip(SPLIT, "FIW", strict=True))
        stages = tuple(tuple(unit(kind, m) for kind in ways for m in range(6)) for _ in range(3))
        order = Schedule("split", 6, 1, stages)
    clocks = np.array([[rng.choice([1400, 1333, 1200, 1000]) for _ in s] for s in order.stages])
    conditions = Conditions((50.0,) * 3, gpus_per_stage=(1, 2, 4))

    def plan_with(priced):
        priced = priced.with_split_backwards(SplitBackward(0.3, 0.1)) if split else priced
        return Plan("test", order, clocks, priced, conditions)

    def saving(priced):
        plan = plan_with(priced)
        return plan.cost.saving_percent(plan.baseline.cost)

    normal = np.random.default_rng(0).standard_normal

    def drawn(row):
        return replace(row, energy_j=row.energy_j + normal() * row.energy_uncertainty_j)

    savings = [saving(with_rows(profile, drawn)) for _ in range(300)]
    told = saving_uncertainty_percent(plan_with(profile))
    assert told == pytest.approx(np.std(savings), rel=0.1)
    # What both take from the same rows cancels.
    own = builders.one_f_one_b(3, 6)
    same = Plan("test", own, max_frequencies(own, profile), profile, conditions)
    assert saving_uncertainty_percent(same) == 0
    assert saving_uncertainty_percent(replace(same, profile=uniform_profile(3, CURVE))) is None
