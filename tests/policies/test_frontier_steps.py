"""Frontiers step by step: which deadlines and limits are asked for, and what is kept of them."""

from types import SimpleNamespace as Namespace

import pytest

from envpipe_megatron.policies.frontier import pareto, plan_frontier
from envpipe_megatron.policies.limits import OrderLimits
from envpipe_megatron.policies.memory_frontier import memory_frontier
from envpipe_megatron.policies.optimal.linear_program import LinearProgramError
from envpipe_megatron.policies.order_search import Candidate


def plan_of(time_s, energy_j, **more):
    return Namespace(cost=Namespace(iteration_time_s=time_s, energy_j=energy_j), **more)


class Order:
    """Stands for an optimizer: energy is linear in time, and plans end where they should."""

    def __init__(self, fastest_s, cheapest_s, energy_j, refuses=()):
        self.fastest_s, self._cheapest_s, self._energy_j = fastest_s, cheapest_s, energy_j
        self._refuses = refuses
        self.relaxed_at, self.planned_at = [], []

    def cheapest_s(self):
        return self._cheapest_s

    def relaxed_energy_j(self, deadline_s):
        self.relaxed_at.append(deadline_s)
        return self._energy_j(deadline_s)

    def plan(self, deadline_s, min_dwell_s):
        assert min_dwell_s == 0.5
        if deadline_s in self._refuses:
            raise LinearProgramError("too late", value=deadline_s)
        self.planned_at.append(deadline_s)
        return plan_of(deadline_s, self._energy_j(deadline_s))


def test_each_deadline_gets_the_order_that_is_cheapest_there():
    # The second order is too slow at 10 s, and cheaper from 16 s on.
    quick = Order(10.0, 20.0, lambda s: 100 - s)
    slow = Order(12.0, 30.0, lambda s: 130 - 3 * s)
    plans = plan_frontier([quick, slow], 11, 0.5)
    assert quick.relaxed_at == [10, 14, 18, 22, 26, 30]
    assert slow.relaxed_at == [12, 14, 18, 22, 26, 30]
    assert quick.planned_at == [10, 12, 14]
    assert slow.planned_at == [16, 18, 20, 22, 24, 26, 28, 30]
    assert [plan.cost.iteration_time_s for plan in plans] == [*range(10, 31, 2)]


def test_a_single_order_is_not_compared():
    order = Order(10.0, 9.0, lambda s: 100 - s)
    assert len(plan_frontier([order], 3, 0.5)) == 1
    assert order.relaxed_at == []
    assert order.planned_at == [10, 10, 10]


def test_deadlines_without_a_plan_are_left_out_unless_all_are():
    order = Order(10.0, 12.0, lambda s: 100 - s, refuses=(10.0, 12.0))
    assert [plan.cost.iteration_time_s for plan in plan_frontier([order], 3, 0.5)] == [11]
    with pytest.raises(LinearProgramError, match=r"too late.*12"):
        plan_frontier([Order(10.0, 12.0, None, refuses=(10.0, 11.0, 12.0))], 3, 0.5)


def test_what_another_plan_beats_or_equals_is_no_part_of_a_frontier():
    costs = [(3, 7), (1, 9), (2, 9), (2, 8), (4, 7), (5, 6), (5, 5)]
    kept = pareto(plan_of(*cost) for cost in costs)
    found = [(plan.cost.iteration_time_s, plan.cost.energy_j) for plan in kept]
    assert found == [(1, 9), (2, 8), (3, 7), (5, 5)]


class Search:
    """Stands for an order search that finds uses for so many extra forwards on stage 0."""

    def __init__(self, uses):
        self._uses = uses
        self.asked = []

    def search(self, limits, starts):
        self.asked.append((limits.most, list(starts)))
        return [Candidate((min(limits.most[0], self._uses), 0), 0.0), Candidate((0, 0), 0.0)]

    def plan(self, candidates):
        extra = candidates[0].extra_forwards
        return plan_of(1.0, 100.0 - extra[0], schedule=Namespace(peak_in_flight=(2 + extra[0], 1)))


@pytest.mark.parametrize(
    ("cap", "uses", "tried", "kept"),
    [
        (0, 9, [0], [0]),
        (3, 9, [0, 1, 2, 3], [0, 1, 2, 3]),
        (50, 50, [0, 1, 2, 3, 4, 6, 8, 12, 16, 32, 48, 50], None),
        (16, 16, [0, 1, 2, 3, 4, 6, 8, 12, 16], None),
        (50, 5, [0, 1, 2, 3, 4, 6], None),
        (50, 6, [0, 1, 2, 3, 4, 6, 8], [0, 1, 2, 3, 4, 6]),
    ],
)
def test_limits_rise_as_long_as_more_memory_is_used(cap, uses, tried, kept):
    search = Search(uses)
    points = memory_frontier(search, OrderLimits((cap, min(cap, 2)), None, 1))
    assert [most for most, _ in search.asked] == [(most, min(most, cap, 2)) for most in tried]
    # Each search starts from what the one before has found.
    found = [(min(most, uses), 0) for most in tried]
    assert [starts for _, starts in search.asked] == [[], *([extra] for extra in found[:-1])]
    assert [point.max_extra_forwards for point in points] == (kept or tried)
    assert [point.peak_in_flight for point in points] == [
        2 + min(point.max_extra_forwards, uses) for point in points
    ]
