"""Moves of runs: what they promise is what the evaluator finds, and none that helps is left out."""

import random
from dataclasses import replace
from itertools import groupby

import numpy as np
import pytest
from core_cases import B, F, profile_of
from hypothesis import given, settings
from hypothesis import strategies as st
from on_request import examples
from planning_cases import random_job

from envpipe_megatron.core.conditions import Conditions
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.plan import Plan
from envpipe_megatron.policies.clock_changes.clock_runs import make_clock_table
from envpipe_megatron.policies.clock_changes.run_moves import faster_path, saving_moves


class Case:
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

    def moves(self):
        return saving_moves(self.plan, self.table, self.index, self.change_j, self.deadline_s)

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

    def runs(self):
        for stage, row in enumerate(self.index.tolist()):
            begin = 0
            for clock, units in groupby(row):
                end = begin + len(list(units))
                yield stage, begin, end, clock, (row[begin - 1], row[end % len(row)])
                begin = end


SEEDS = st.integers(0, 2**32)
FIXED = settings(max_examples=examples(80), deadline=None, derandomize=True)


@FIXED
@given(SEEDS)
def test_a_move_saves_what_it_promises(seed):
    case = Case(seed)
    moves = case.moves()
    for move in moves:
        saved_j, extra_s, in_time = case.tried(move.stage, move.begin, move.end, move.clock)
        assert move.saved_j == pytest.approx(saved_j, rel=1e-6, abs=1e-9 * case.plan.cost.energy_j)
        assert move.extra_s == pytest.approx(extra_s, rel=1e-6, abs=1e-9 * case.deadline_s)
        assert move.saved_j > 0
        # Late units of a run can hold each other up by way of another stage.
        assert in_time or (case.plan.schedule.num_stages > 1 and move.end - move.begin > 1)
    # Moves that take no time come first, then those that save most a second.
    free = [move for move in moves if move.extra_s <= 0]
    assert moves[: len(free)] == sorted(free, key=lambda move: -move.saved_j)
    assert moves[len(free) :] == sorted(
        moves[len(free) :], key=lambda move: -move.saved_j / move.extra_s
    )


@FIXED
@given(SEEDS)
def test_no_move_that_helps_is_left_out(seed):
    """Whole runs to a slower or a neighbour's clock; ends of runs, the longest that has time."""
    case = Case(seed)
    one_stage = case.plan.schedule.num_stages == 1
    moves = {(m.stage, m.begin, m.end, m.clock) for m in case.moves()}
    small_j = 1e-9 * case.plan.cost.energy_j
    for stage, begin, end, now, sides in case.runs():
        # Where some units are faster and some slower, the estimate may see no time in between.
        more_s = case.table.time_s[begin:end, stage]
        more_s = more_s - more_s[:, now, None]
        is_exact = (end - begin == 1) | one_stage & ((more_s >= 0).all(0) | (more_s <= 0).all(0))
        for clock in np.flatnonzero(is_exact).tolist():
            saved_j, extra_s, in_time = case.tried(stage, begin, end, clock)
            if abs(saved_j) > small_j:
                wanted = in_time and saved_j > 0 and (clock in sides or extra_s > 0)
                assert ((stage, begin, end, clock) in moves) == wanted
        for clock, front in zip(sides, (True, False), strict=True):
            count = end - begin - 1 if one_stage and is_exact[clock] and clock != now else 0
            while count:
                first = begin if front else end - count
                saved_j, _, in_time = case.tried(stage, first, first + count, clock)
                if in_time and saved_j > small_j:
                    assert (stage, first, first + count, clock) in moves
                    break
                count //= 2


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
        index = table.index_of(plan.frequency_mhz)
        faster = faster_path(plan, table, index, deadline_s)
        return None if faster is None else table.frequencies(faster)[0].tolist()

    @pytest.mark.parametrize(
        ("deadline_s", "clocks"),
        [
            (8.75, [1000, 900, 900, 900]),
            (8.74, [1000, 900, 1000, 900]),
            (8.5, [1000, 900, 1000, 900]),
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
            (13.0, 6.5, [1200, 1200, 900, 1200]),
            (13.0, 6.3, [1200, 1200, 1200, 1200]),
            (13.0, 5.0, [1200, 1200, 1200, 1200]),
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
