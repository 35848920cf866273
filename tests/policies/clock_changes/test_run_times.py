"""Time for given runs: the program against that without runs, and moves against the evaluator."""

import random
from dataclasses import replace

import numpy as np
import pytest
from core_cases import B, F, profile_of
from hypothesis import given, settings
from hypothesis import strategies as st
from on_request import examples
from planning_cases import random_job
from program_cases import Case
from scipy.optimize import OptimizeResult

from envpipe_megatron.core.conditions import Conditions
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.plan import Plan, max_frequencies
from envpipe_megatron.policies.clock_changes import run_times
from envpipe_megatron.policies.clock_changes.clock_runs import make_clock_table
from envpipe_megatron.policies.clock_changes.run_times import (
    divide_time,
    faster_path,
    saving_moves,
)


@settings(max_examples=examples(80), deadline=None, derandomize=True)
@given(st.integers(0, 2**32))
def test_runs_of_one_unit_are_as_cheap_as_the_program_without_runs(seed):
    case = Case(seed, job=lambda rng, _: random_job(rng))
    schedule, profile, conditions = case.schedule, case.profile, case.conditions
    table = make_clock_table(schedule, profile, conditions, case.powers_w)
    plan = Plan("mine", schedule, max_frequencies(schedule, profile), profile, conditions)
    # Indices that differ from unit to unit: every unit is a run of its own.
    index = np.broadcast_to(np.arange(schedule.units_per_stage) % 2, schedule.is_backward.shape)
    power_w = case.choices.waiting_power_w
    duration_s, _ = divide_time(plan, table, index, power_w, case.deadline_s)
    assert case.iteration_s(duration_s) <= case.deadline_s * (1 + 1e-6)
    energy_j = case.cost_j(duration_s.ravel())
    scale_j = sum(abs(unit.cost_j).max() for unit in case.choices.units)
    least_j = case.program().solve(case.deadline_s).cost_j
    assert energy_j == pytest.approx(least_j, abs=1e-5 * scale_j, rel=1e-5)


class TestLateClocks:
    """A forward and a backward on stage 0, each a run; another stage between them has one clock."""

    @staticmethod
    def solve(stages, clocks, deadline_s, change_time_s):
        """Durations and prices on stage 0; a forward saves 8 J a second, a backward 10."""
        table = {
            (0, F): {1200: (1.0, 10.0), 900: (1.5, 6.0)},
            (0, B): {1200: (2.0, 30.0), 900: (3.0, 20.0)},
        }
        if stages == 2:
            table |= {(1, F): {1000: (1.0, 9.0)}, (1, B): {1000: (2.0, 19.0)}}
        conditions = Conditions((0.0,) * stages, 0.25, change_time_s=change_time_s)
        schedule = builders.one_f_one_b(stages, 1)
        clock_table = make_clock_table(schedule, profile_of(table), conditions, np.zeros(stages))
        frequency = np.array([clocks, [1000, 1000]][:stages])
        plan = Plan("mine", schedule, frequency, profile_of(table), conditions)
        index = clock_table.index_of(frequency)
        solved = divide_time(plan, clock_table, index, 0.0, deadline_s)
        return solved and tuple(values[0].tolist() for values in solved)

    # A raise from 900 to 1200 MHz makes the backward longer by a third of what its clock is late.
    @pytest.mark.parametrize(
        ("deadline_s", "durations_s", "price_w"),
        [(4.0, [1.0, 2.9], 10.0), (4.3, [1.2, 3.0], 8.0), (9.0, [1.5, 3.0], 0.0)],
    )
    def test_leave_less_time(self, deadline_s, durations_s, price_w):
        durations, prices = self.solve(1, [900, 1200], deadline_s, 0.3)
        assert durations == pytest.approx(durations_s)
        assert prices == pytest.approx([price_w] * 2)

    def test_that_are_lowered_leave_all_of_it(self):
        durations, _ = self.solve(1, [1200, 900], 4.0, 0.3)
        assert durations == pytest.approx([1.0, 3.0])

    def test_count_from_the_end_of_the_unit_before_not_from_the_wait(self):
        # The backward starts 3.5 s after the forward has ended; its clock comes 0.6 s after that.
        durations, prices = self.solve(2, [900, 1200], 7.5, 4.1)
        assert durations == pytest.approx([1.0, 2.8])
        assert prices == pytest.approx([10.0, 10.0])
        durations, _ = self.solve(2, [900, 1200], 7.5, 3.4)
        assert durations == pytest.approx([1.0, 3.0])

    @pytest.mark.parametrize("stages", [1, 2])
    def test_that_miss_the_deadline_miss_it_by_as_little_as_they_can(self, stages):
        durations, _ = self.solve(stages, [900, 1200], 0.1, 6.0)
        assert durations == pytest.approx([1.0, 2.0])

    def test_that_no_solver_finds_are_none(self, monkeypatch):
        gave_up = OptimizeResult(status=4, message="numerical difficulties")
        monkeypatch.setattr(run_times, "linprog", lambda *_, **__: gave_up)
        assert self.solve(1, [900, 1200], 4.0, 0.3) is None


class TestSavingMoves:
    SEEDS = st.integers(0, 2**32)

    @settings(max_examples=examples(80), deadline=None, derandomize=True)
    @given(SEEDS)
    def test_save_what_they_promise_in_time(self, seed):
        case = RandomRuns(seed)
        table = case.table
        moves = saving_moves(case.plan, table, case.change_j, case.deadline_s)
        assert moves == sorted(moves, key=lambda move: -move.rate_w)
        for stage, begin, end, clock in (move[1:] for move in moves):
            now = case.index[stage, begin]
            assert (case.index[stage, begin:end] == now).all()
            assert table.profiled[begin:end, stage, clock].all()
            saved_j, _, in_time = case.tried(stage, begin, end, clock)
            assert saved_j > -1e-9 * case.plan.cost.energy_j
            more_s = table.time_s[begin:end, stage, clock] - table.time_s[begin:end, stage, now]
            assert in_time or (more_s < 0).any()  # units that are faster are later than others


class RandomRuns:
    """A plan of random runs, waiting for free: then what a move saves is what the plan saves."""

    def __init__(self, seed):
        rng = random.Random(seed)
        job = random_job(rng, stages=(1, 2, 3))
        stages = job.num_stages
        change_j = rng.choice([0.0, job.profile.rows[0][F][0].energy_j * rng.uniform(0, 0.5)])
        conditions = replace(
            job.conditions, blocking_power_w=(0.0,) * stages, change_energy_j=change_j
        )
        schedule = builders.one_f_one_b(stages, job.num_microbatches)
        self.table = make_clock_table(schedule, job.profile, conditions, np.zeros(stages))
        self.change_j = change_j * conditions.gpus_by_stage
        self.index = np.zeros(schedule.is_backward.shape, dtype=np.int64)
        for stage, position in np.ndindex(self.index.shape):
            now = self.index[stage, position - 1] if position else -1
            known = np.flatnonzero(self.table.profiled[position, stage]).tolist()
            keep = now in known and rng.random() < 0.6
            self.index[stage, position] = now if keep else rng.choice(known)
        frequency = self.table.frequencies(self.index)
        self.plan = Plan("mine", schedule, frequency, job.profile, conditions)
        self.deadline_s = self.plan.cost.iteration_time_s * rng.choice([1.0, 1.1, 1.5])

    def tried(self, stage, begin, end, clock):
        """Energy saved and time taken by another clock, and whether the deadline holds."""
        if not self.table.profiled[begin:end, stage, clock].all():
            return 0.0, 0.0, False
        index = self.index.copy()
        index[stage, begin:end] = clock
        changed = replace(self.plan, frequency_mhz=self.table.frequencies(index))
        extra_s = changed.timeline.duration_s.sum() - self.plan.timeline.duration_s.sum()
        in_time = changed.cost.iteration_time_s <= self.deadline_s * (1 + 1e-12)
        return self.plan.cost.energy_j - changed.cost.energy_j, extra_s, in_time


class TestFasterPath:
    """F0 B0 F1 B1 on a single stage; backwards have no 1000 MHz, forwards no 1100."""

    profile = profile_of(
        {
            (0, F): {1200: (1.0, 20.0), 1000: (1.25, 14.0), 900: (1.5, 12.0)},
            (0, B): {1200: (2.0, 44.0), 1100: (2.25, 38.0), 900: (3.0, 29.0)},
        }
    )

    def faster(self, clocks, deadline_s, profile=None, **conditions):
        schedule, profile = builders.one_f_one_b(1, 2), profile or self.profile
        around = Conditions((0.0,), **conditions)
        table = make_clock_table(schedule, profile, around, np.zeros(1))
        plan = Plan("mine", schedule, np.array([clocks]), profile, around)
        faster = faster_path(plan, table, deadline_s)
        return None if faster is None else table.frequencies(faster)[0].tolist()

    @pytest.mark.parametrize(
        ("deadline_s", "clocks"),
        [
            (8.75, [1000, 900, 900, 900]),
            (8.74, [1000, 900, 1000, 900]),
            (8.25, [1000, 1100, 1000, 900]),
            (1.0, [1000, 1100, 1000, 1100]),
        ],
    )
    def test_takes_the_next_clock_of_the_units_that_pay_least_for_a_second(
        self, deadline_s, clocks
    ):
        # All at 900 MHz take 9 s. A forward gains 0.25 s at 8 J/s, a backward 0.75 s at 12 J/s.
        assert self.faster([900] * 4, deadline_s) == clocks

    def test_knows_when_nothing_can_be_faster(self):
        assert self.faster([1200] * 4, 1.0) is None

    # B0 and B1 start at 900 MHz and have theirs after half a second: they take 2 1/6 s, and F1,
    # which starts at 1200, 1.25 s. A forward at 1200 takes 0.5 s less, and so does its backward
    # a sixth.
    @pytest.mark.parametrize(
        ("forward_j", "deadline_s", "clocks"),
        [
            (13.0, 7.0, [1200, 1200, 900, 1200]),
            (13.0, 6.3, [1200, 1200, 1200, 1200]),
            (16.0, 6.85, [1000, 1200, 900, 1200]),
        ],
    )
    def test_sets_a_late_clock_a_unit_earlier_where_that_is_cheaper(
        self, forward_j, deadline_s, clocks
    ):
        curve = {1200: (1.0, forward_j), 1000: (1.25, 12.9), 900: (1.5, 12.0)}
        backward = {
            row.frequency_mhz: (row.time_s, row.energy_j) for row in self.profile.rows[0][B]
        }
        profile = profile_of({(0, F): curve, (0, B): backward})
        late = {"profile": profile, "change_time_s": 0.5}
        assert self.faster([900, 1200, 900, 1200], deadline_s, **late) == clocks

    def test_sets_no_clock_that_the_unit_before_does_not_have(self):
        dear = {1200: (1.0, 60.0), 1000: (1.25, 50.0), 900: (1.5, 12.0)}
        profile = profile_of({(0, F): dear, (0, B): {1100: (2.25, 38.0), 900: (3.0, 29.0)}})
        late = {"profile": profile, "change_time_s": 0.5}
        assert self.faster([900, 1100, 900, 1100], 1.0, **late) == [1000, 1100, 1000, 1100]
