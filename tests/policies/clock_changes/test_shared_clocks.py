"""The best durations of given runs: against the program without runs, and against the clock."""

import random

import numpy as np
import pytest
from core_cases import B, F, profile_of
from hypothesis import given, settings
from hypothesis import strategies as st
from on_request import examples
from planning_cases import random_job
from scipy.optimize import OptimizeResult

from envpipe_megatron.core.conditions import Conditions
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.timeline import Timeline
from envpipe_megatron.policies.clock_changes import shared_clocks
from envpipe_megatron.policies.clock_changes.clock_runs import make_clock_table
from envpipe_megatron.policies.clock_changes.shared_clocks import solve_shared_clocks
from envpipe_megatron.policies.optimal.choices import make_choices, node_keys
from envpipe_megatron.policies.optimal.linear_program import DurationProgram, LinearProgramError


class Case:
    """A small job with its table, and two clocks a unit to tell runs by."""

    def __init__(self, rng):
        self.job = random_job(rng)
        profile, conditions = self.job.profile, self.job.conditions
        self.schedule = builders.one_f_one_b(self.job.num_stages, self.job.num_microbatches)
        self.power_w = np.array(conditions.blocking_power_w)
        self.total_w = float(np.dot(self.power_w, conditions.gpus_by_stage))
        self.table = make_clock_table(self.schedule, profile, conditions, self.power_w)
        self.choices = make_choices(profile, self.power_w, conditions.gpus_by_stage)
        self.key = node_keys(self.schedule, self.choices).reshape(self.schedule.is_backward.shape)
        fastest_s = np.array([unit.time_s[0] for unit in self.choices.units])[self.key]
        self.fastest_s = self.iteration_s(fastest_s)

    def iteration_s(self, duration_s):
        conditions = self.job.conditions
        ends_s = Timeline(self.schedule, duration_s, conditions.latency_s).end_s[:, -1]
        return float((ends_s + conditions.tail_by_stage_s).max())

    def solve(self, index, deadline_s):
        conditions = self.job.conditions
        return solve_shared_clocks(
            self.schedule, self.table, index, conditions, self.total_w, deadline_s
        )

    def runs_of_one(self):
        """Indices that differ from unit to unit: every unit is a run of its own."""
        shape = self.schedule.is_backward.shape
        return np.broadcast_to(np.arange(shape[1]) % 2, shape)


@settings(max_examples=examples(80), deadline=None, derandomize=True)
@given(st.integers(0, 2**32))
def test_runs_of_one_unit_are_as_cheap_as_the_program_without_runs(seed):
    rng = random.Random(seed)
    case = Case(rng)
    conditions = case.job.conditions
    deadline_s = rng.choice([1.0, 1.05, 1.3, 3.0]) * case.fastest_s
    duration_s, _ = case.solve(case.runs_of_one(), deadline_s)
    iteration_s = case.iteration_s(duration_s)
    assert iteration_s <= deadline_s * (1 + 1e-6)
    energy_j = case.total_w * iteration_s
    for unit, longest_s in zip(
        np.array(case.choices.units, dtype=object)[case.key.ravel()],
        duration_s.ravel(),
        strict=True,
    ):
        hull_s, hull_j = unit.time_s[unit.hull], unit.cost_j[unit.hull]
        energy_j += np.interp(longest_s, hull_s, hull_j)
    program = DurationProgram(
        case.schedule, case.choices, conditions.latency_s, conditions.tail_by_stage_s
    )
    scale_j = sum(abs(unit.cost_j).max() for unit in case.choices.units)
    assert energy_j == pytest.approx(program.solve(deadline_s).cost_j, abs=1e-5 * scale_j, rel=1e-5)


@settings(max_examples=examples(40), deadline=None, derandomize=True)
@given(st.integers(0, 2**32))
def test_one_run_a_stage_has_one_clock_and_misses_a_deadline_by_as_little_as_it_can(seed):
    rng = random.Random(seed)
    case = Case(rng)
    index = np.zeros(case.schedule.is_backward.shape, dtype=np.int64)
    duration_s, price_w = case.solve(index, 0.5 * case.fastest_s)
    assert (price_w >= -1e-6).all()
    for stage in range(case.job.num_stages):
        backward = case.schedule.is_backward[stage]
        for kind in (backward, ~backward):
            assert np.ptp(duration_s[stage, kind]) <= 1e-9 * duration_s.max()
    # No mixture of clocks that both kinds have makes it faster: try all single ones.
    profiled = case.table.profiled.all(axis=0)
    fastest_s = np.array(
        [
            [case.table.time_s[position, stage, profiled[stage]].min() for position in range(width)]
            for stage, width in enumerate([index.shape[1]] * len(index))
        ]
    )
    assert case.iteration_s(duration_s) >= case.iteration_s(fastest_s) * (1 - 1e-9)


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
        index = clock_table.index_of(np.array([clocks, [1000, 1000]][:stages]))
        solved = solve_shared_clocks(schedule, clock_table, index, conditions, 0.0, deadline_s)
        return tuple(values[0].tolist() for values in solved)

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

    def test_that_rounding_hides_from_the_solver_are_found_a_millionth_later(self, monkeypatch):
        latest, solve = [], shared_clocks.linprog

        def sees_none_at_first(**program):
            latest.append(program["bounds"][-1][1])
            gave_up = OptimizeResult(status=4, message="model_status is Unknown")
            return gave_up if len(latest) == 1 else solve(**program)

        monkeypatch.setattr(shared_clocks, "linprog", sees_none_at_first)
        durations, _ = self.solve(2, [900, 1200], 7.5, 4.1)
        assert durations == pytest.approx([1.0, 2.8], rel=1e-5)
        assert latest[1] / latest[0] == pytest.approx(1 + 1e-6, rel=1e-9)

    def test_that_no_solver_finds_are_an_error(self, monkeypatch):
        gave_up = OptimizeResult(status=4, message="numerical difficulties")
        monkeypatch.setattr(shared_clocks, "linprog", lambda *_, **__: gave_up)
        with pytest.raises(LinearProgramError, match="not found: numerical difficulties"):
            self.solve(1, [900, 1200], 4.0, 0.3)
