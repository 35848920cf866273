"""The bound of all orders: what no solver can spoil, and a deadline that none meets."""

import random

import numpy as np
import pytest
from planning_cases import random_profile
from scipy.optimize import OptimizeResult

from envpipe_megatron.core.conditions import Conditions
from envpipe_megatron.core.orders import builders
from envpipe_megatron.policies.optimal.linear_program import (
    DurationProgram,
    LinearProgramError,
    make_choices,
)
from envpipe_megatron.policies.orders import any_order
from envpipe_megatron.policies.orders.any_order import any_order as bound_all_orders


def small_job(deadline_s=None):
    """Arguments of the bound."""
    profile, floor_w = random_profile(random.Random(0), 2, 4), np.full(2, 50.0)
    choices = make_choices(profile, floor_w, np.ones(2, dtype=np.int64))
    program = DurationProgram(builders.one_f_one_b(2, 4), choices, Conditions((0.0,) * 2))
    deadline_s = deadline_s or 1.1 * program.fastest_iteration_s
    return profile, Conditions((50.0, 50.0)), 4, deadline_s, floor_w


def test_the_bound_of_all_orders_refuses_a_deadline_that_none_meets(monkeypatch):
    """Additions say so; no solver is asked."""
    monkeypatch.setattr(any_order, "linprog", None)
    with pytest.raises(LinearProgramError, match="No order"):
        bound_all_orders(*small_job(1e-6))


def test_the_bound_of_all_orders_trusts_no_solver(monkeypatch):
    """One that fails leaves a lower bound, and so does one that answers anything."""
    job = small_job()

    def bound_j(answer=None):
        if answer is not None:
            monkeypatch.setattr(any_order, "linprog", lambda *_, **__: answer)
        return bound_all_orders(*job).energy_lower_bound_j

    best_j = bound_j()
    failed_j = bound_j(OptimizeResult(status=4, message="numerical difficulties"))
    assert 0 < failed_j < best_j
    numbers = np.random.default_rng(0)
    for scale_w in (1.0, 100.0, 10_000.0):
        for _ in range(20):
            prices = OptimizeResult(marginals=scale_w * numbers.normal(size=4))
            anything = OptimizeResult(status=0, fun=1e9, ineqlin=prices, x=np.zeros(99))
            assert bound_j(anything) <= best_j * (1 + 1e-9)
