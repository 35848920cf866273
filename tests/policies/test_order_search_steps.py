"""The search for an order step by step: what it starts from, where it goes, and what it plans."""

from types import SimpleNamespace as Namespace

import pytest
from core_cases import uniform_profile
from test_order_search import CURVE

from envpipe_megatron.core import builders
from envpipe_megatron.core.conditions import Conditions
from envpipe_megatron.policies import order_search
from envpipe_megatron.policies.limits import order_limits
from envpipe_megatron.policies.optimal.linear_program import LinearProgramError
from envpipe_megatron.policies.optimal.optimizer import all_maximum_s
from envpipe_megatron.policies.order_search import Candidate, OrderSearch


def test_what_the_search_starts_from(monkeypatch):
    """1F1B, EnvPipe's counts 7, 4, 2, 0 and multiples, even ramps; and none above one in front."""
    for name in ("_UNIT_BUDGET", "_FEWEST_ORDERS", "_LOOK_BUDGET"):
        monkeypatch.setattr(order_search, name, 0)
    profile = uniform_profile(4, CURVE, slowness=[1, 1.1, 1.3, 1.0], backward=3.0)
    conditions = Conditions((10.0,) * 4)
    deadline_s = all_maximum_s(builders.one_f_one_b(4, 32), profile, conditions)

    def tried(limits, *starts):
        search = OrderSearch(profile, 32, conditions, deadline_s)
        search.search(limits, starts)
        return set(search._solved)

    scaled = {(7, 4, 2, 0), (11, 6, 3, 0), (14, 8, 4, 0)}
    ramps = {(1, 1, 0, 0), (3, 2, 1, 0), (6, 4, 2, 0), (9, 6, 3, 0)}
    assert tried(order_limits(4, 32)) == {(0,) * 4} | scaled | ramps
    held = {(0, 0, 0, 0), (1, 1, 0, 0), (1, 2, 1, 0), (1, 1, 1, 0), (1, 2, 2, 0)}
    limits = order_limits(4, 32, max_in_flight=(5, 5, 5, 5))
    assert tried(limits, (1, 2, 3, 0)) == {*held, (1, 2, 3, 0)}


def test_where_the_search_goes():
    more = [(0, 1, 0), (1, 0, 0), (0, 0, 1), (1, 1, 0), (0, 1, 1), (1, 1, 1), (0, 0, 1)]
    less = [tuple(-step for step in stages) for stages in more]
    assert list(order_search._directions(3)) == [*more, *less]


class TestPlanningCandidates:
    """Candidates in the order of their relaxed energies, and what their plans come to."""

    candidates = (
        Candidate((1, 0), 99.0),
        Candidate((2, 0), 99.1),
        Candidate((3, 0), 99.2),
        Candidate((0, 0), 99.3),
        Candidate((4, 0), 99.4),
    )

    def plan(self, monkeypatch, energies_j, refused="too late"):
        """The extra forwards of the best plan, and of all that were planned."""
        asked = []

        def optimizer(self, extra, *_):
            def plan(deadline_s, min_dwell_s):
                asked.append((extra, deadline_s, min_dwell_s))
                if extra not in energies_j:
                    raise LinearProgramError(refused, value=extra)
                return Namespace(cost=Namespace(energy_j=energies_j[extra]), extra=extra)

            return Namespace(plan=plan)

        monkeypatch.setattr(OrderSearch, "optimizer", optimizer)
        profile = uniform_profile(2, CURVE)
        search = OrderSearch(profile, 4, Conditions((10.0,) * 2), 50.0, min_dwell_s=3.0)
        best = search.plan(self.candidates)
        assert {(deadline_s, dwell_s) for _, deadline_s, dwell_s in asked} == {(50.0, 3.0)}
        return best.extra, [extra for extra, *_ in asked]

    def test_the_first_two_and_1f1b_are_planned_and_the_cheapest_is_given(self, monkeypatch):
        costs = {(1, 0): 100.0, (2, 0): 99.8, (0, 0): 99.9}
        assert self.plan(monkeypatch, costs) == ((2, 0), [(1, 0), (2, 0), (0, 0)])
        costs[0, 0] = 99.7
        assert self.plan(monkeypatch, costs) == ((0, 0), [(1, 0), (2, 0), (0, 0)])

    def test_who_cannot_be_better_is_not_planned(self, monkeypatch):
        assert self.plan(monkeypatch, {(1, 0): 99.05}) == ((1, 0), [(1, 0)])
        costs = {(1, 0): 99.2, (2, 0): 99.15}
        assert self.plan(monkeypatch, costs) == ((2, 0), [(1, 0), (2, 0)])

    def test_who_gets_no_plan_is_left_out(self, monkeypatch):
        assert self.plan(monkeypatch, {(2, 0): 101.0, (0, 0): 102.0})[0] == (2, 0)
        with pytest.raises(LinearProgramError, match=r"too late.*0, 0"):
            self.plan(monkeypatch, {})


def test_how_far_a_search_may_go():
    """In all: nine thousand units solved for, or five orders, and 200,000 looked at."""
    for (stages, microbatches), budget, looks in (((2, 8), 281, 6250), ((8, 96), 5, 130)):
        profile = uniform_profile(stages, CURVE)
        search = OrderSearch(profile, microbatches, Conditions((0.0,) * stages), 1.0)
        assert (search._budget, search._most_looks) == (budget, looks)


class Known(OrderSearch):
    """A search whose orders have known energies: the least at (3, 1), and too late in front."""

    def _solve(self, extra):
        front, rear = extra
        energy_j = 1000.0 + (front - 3) ** 2 + 10 * (rear - 1) ** 2 + 3 * (front - 3) * (rear - 1)
        self._solved[extra] = order_search._Solved(None, None, energy_j) if front else None
        return self._solved[extra]

    def _trimmed(self, extra, limits):
        return extra


@pytest.mark.parametrize(
    ("budget", "visited"),
    [
        (0, []),
        (1, [(5, 1), (5, 2)]),
        (2, [(5, 1), (5, 2)]),
        (3, [(5, 1), (5, 2), (4, 1), (3, 1), (2, 1)]),
        (99, [(5, 1), (5, 2), (4, 1), (3, 1), (2, 1), (3, 0), (2, 0), (3, 2), (4, 2)]),
    ],
)
def test_the_search_walks_down_as_far_as_a_direction_saves(monkeypatch, budget, visited):
    """Until no direction saves or enough was solved for; from three orders, the best at (5, 0)."""
    monkeypatch.setattr(order_search, "_START_MULTIPLES", ())
    monkeypatch.setattr(order_search, "_START_RAMPS", (1.0,))
    monkeypatch.setattr(order_search, "_FEWEST_ORDERS", budget)
    monkeypatch.setattr(order_search, "_UNIT_BUDGET", 0)
    search = Known(uniform_profile(2, CURVE), 32, Conditions((0.0,) * 2), 1.0)
    found = search.search(order_limits(2, 32, max_extra_forwards=5), [(5, 0)])
    assert set(list(search._solved)[:3]) == {(0, 0), (1, 0), (5, 0)}
    assert list(search._solved)[3:] == visited
    best_first = [(3, 1), (2, 1), (4, 1), (5, 1), (5, 0), (3, 0), (3, 2), (2, 0), (4, 2), (1, 0)]
    assert [candidate.extra_forwards for candidate in found] == [
        extra for extra in (*best_first, (5, 2)) if extra in search._solved
    ]
