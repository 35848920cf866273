"""Timelines against a naive recursion; slack, critical paths and ends against paths made anew."""

import itertools
import random

import numpy as np
import pytest
from core_cases import naive_steps, random_schedule
from hypothesis import given, settings
from hypothesis import strategies as st
from on_request import examples

from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.timeline import LongestPath, Timeline, critical_path
from envpipe_megatron.errors import EnvPipeError

SEEDS = st.integers(0, 2**32)


def random_case(seed, *, zeros=False):
    """A schedule with a duration for each unit and a latency for each boundary."""
    rng = random.Random(seed)
    schedule = random_schedule(rng, max_stages=5, max_microbatches=5)
    lowest = 0.0 if zeros else 0.1
    duration = [
        [0.0 if zeros and rng.random() < 0.2 else rng.uniform(lowest, 3) for _ in order]
        for order in schedule.stages
    ]
    latency = [rng.choice([0.0, rng.uniform(0, 1)]) for _ in range(schedule.num_stages - 1)]
    return rng, schedule, duration, latency


@settings(max_examples=examples(200), deadline=None)
@given(SEEDS)
def test_times_are_those_of_a_naive_recursion(seed):
    _, schedule, duration, latency = random_case(seed, zeros=True)
    timeline = Timeline(schedule, duration, latency)
    chunks, where = schedule.num_chunks, schedule.placement
    naive = naive_steps(schedule.stages, chunks, np.asarray(duration), latency, where)
    for (stage, position), (start, end) in naive.items():
        assert timeline.start_s[stage, position] == pytest.approx(start, abs=1e-9)
        assert timeline.end_s[stage, position] == pytest.approx(end, abs=1e-9)
    assert timeline.iteration_time_s == pytest.approx(max(end for _, end in naive.values()))


@settings(max_examples=examples(40), deadline=None)
@given(SEEDS)
def test_slack_is_exactly_what_a_unit_can_be_delayed_by(seed):
    _, schedule, duration, latency = random_case(seed)
    timeline = Timeline(schedule, duration, latency)
    iteration, slack = timeline.iteration_time_s, timeline.slack_s
    assert slack.min() == pytest.approx(0, abs=1e-9)
    for stage in range(schedule.num_stages):
        for position in range(schedule.units_per_stage):
            longer = [list(row) for row in duration]
            longer[stage][position] += slack[stage, position]
            kept = Timeline(schedule, longer, latency).iteration_time_s
            assert kept == pytest.approx(iteration, rel=1e-12)
            longer[stage][position] += 0.125
            late = Timeline(schedule, longer, latency).iteration_time_s
            assert late == pytest.approx(iteration + 0.125, rel=1e-12)


@settings(max_examples=examples(150), deadline=None)
@given(SEEDS)
def test_the_critical_path_is_contiguous_and_as_long_as_the_iteration(seed):
    _, schedule, duration, latency = random_case(seed, zeros=True)
    timeline = Timeline(schedule, duration, latency)
    path = timeline.critical_path()[::-1]
    width = schedule.units_per_stage
    last = 0 if not schedule.split else timeline.end_s[:, -1].argmax()
    assert path[-1] == (last + 1) * width - 1
    assert path[0] % width == 0
    assert schedule.cross_dependency[path[0]] == -1
    total = timeline.duration_s.ravel()[path[0]]
    for before, node in itertools.pairwise(path):
        same_stage = node == before + 1 and node % width
        assert same_stage or schedule.cross_dependency[node] == before
        gap = timeline.start_s.ravel()[node] - timeline.end_s.ravel()[before]
        hops = {0.0, *latency, max(latency, default=0.0)} if not same_stage else {0.0}
        assert min(abs(gap - hop) for hop in hops) < 1e-7
        total += gap + timeline.duration_s.ravel()[node]
    assert total == pytest.approx(timeline.iteration_time_s)
    assert timeline.slack_s.ravel()[path].max() < 1e-7


def test_critical_path_of_measured_waits_ignores_waits_up_to_the_threshold():
    schedule = builders.one_f_one_b(2, 2)  # nodes 0-3: F0 F1 B0 B1; 4-7: F0 B0 F1 B1
    measured = [0.0, 0.0, 0.0, 0.010, *[0.0] * 4]
    assert critical_path(schedule, measured, 0.010) == [3, 2, 1, 0]
    assert critical_path(schedule, measured, 0.009) == [3, 7, 6, 5, 4, 0]


def test_tails_decide_where_the_critical_path_ends_and_what_slack_there_is():
    schedule = builders.one_f_one_b(2, 2)  # as by hand above: stages end at 9 and at 7
    timeline = Timeline(schedule, [[1, 1, 2, 2], [1, 2, 1, 2]], tail_s=[0.5, 4])
    assert timeline.iteration_time_s == 7 + 4
    assert timeline.critical_path() == [7, 6, 5, 4, 0]
    assert timeline.wait_s[:, 0].tolist() == [11 - 9, 1 + 11 - 7]
    assert timeline.slack_s.tolist() == [[0, 2, 2.5, 1.5], [0, 0, 0, 0]]


def test_paths_on_the_outer_envelope():
    schedule = builders.one_f_one_b(3, 3)
    balanced = Timeline(schedule, np.ones((3, 6)))
    on_envelope = [0, 5, 6, 11, 12, 13, 14, 15, 16, 17]
    assert np.flatnonzero(schedule.outer_envelope).tolist() == on_envelope
    slow_inside = balanced.duration_s
    slow_inside[0, 3] = 50
    assert not schedule.outer_envelope.flat[Timeline(schedule, slow_inside).critical_path()].all()


@pytest.mark.parametrize("duration", [np.ones((2, 3)), np.ones((3, 4)), np.ones(8), [[1.0] * 4]])
def test_wrong_shapes_are_refused(duration):
    with pytest.raises(EnvPipeError, match="is 2 x 4"):
        Timeline(builders.one_f_one_b(2, 2), duration)


@pytest.mark.parametrize("bad", [-0.1, float("nan"), float("inf")])
def test_the_unit_with_an_impossible_duration_is_named(bad):
    duration = np.ones((2, 4))
    duration[1, 2] = bad
    with pytest.raises(EnvPipeError, match=r"F1 on stage 1 .*got"):
        Timeline(builders.one_f_one_b(2, 2), duration)


@pytest.mark.parametrize("latency", [-1.0, float("nan"), [0.1], [0.1, 0.2, 0.3], [0.1, -0.1]])
def test_impossible_latencies_are_refused(latency):
    with pytest.raises(EnvPipeError, match="latency"):
        Timeline(builders.one_f_one_b(3, 3), np.ones((3, 6)), latency)


SCHEDULES = [
    builders.one_f_one_b(5, 12),
    builders.interleaved(4, 8, 2),
    builders.envpipe(4, 12, [6, 4, 2, 0]),
    random_schedule(random.Random(3), 5, 6),
]


def found(schedule, duration_s, latency_s, tail_s):
    path = LongestPath(schedule, list(duration_s), latency_s, tail_s)
    path.find_ends()
    path.find_latest_ends(100.0)
    return path


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
def test_hundreds_of_changes_equal_a_path_made_anew_to_the_last_bit(schedule):
    rng = random.Random(11)
    duration_s = [rng.uniform(0.1, 2) for _ in range(schedule.num_units)]
    latency_s = [rng.uniform(0, 0.3) for _ in range(schedule.num_stages - 1)]
    tail_s = [rng.uniform(0, 10) for _ in range(schedule.num_stages)]
    path, before = (found(schedule, duration_s, latency_s, tail_s) for _ in range(2))
    for _ in range(300):
        node = rng.randrange(schedule.num_units)
        duration_s[node] = rng.choice([0.0, duration_s[node], rng.uniform(0.01, 4)])
        moved = path.change(node, duration_s[node])
        anew = found(schedule, duration_s, latency_s, tail_s)
        assert path.duration_s == duration_s
        assert path.end_s == anew.end_s
        assert path.latest_end_s == anew.latest_end_s
        assert moved == {
            node
            for node in range(schedule.num_units)
            if before.end_s[node] != anew.end_s[node]
            or before.latest_end_s[node] != anew.latest_end_s[node]
        }
        before = anew
