"""Ends that are kept up to date, and ends of many iterations at once, against paths made anew."""

import random

import numpy as np
import pytest
from core_cases import random_schedule

from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.timeline import LongestPath

SCHEDULES = [
    builders.one_f_one_b(5, 12),
    builders.interleaved(4, 8, 2),
    builders.envpipe(4, 12, [6, 4, 2, 0]),
    random_schedule(random.Random(3), 5, 6),
]


def found(schedule, duration_s, latency_s, last_end_s):
    path = LongestPath(schedule, list(duration_s), latency_s)
    path.find_ends()
    path.find_latest_ends(last_end_s)
    return path


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
def test_hundreds_of_changes_equal_a_path_made_anew_to_the_last_bit(schedule):
    rng = random.Random(11)
    duration_s = [rng.uniform(0.1, 2) for _ in range(schedule.num_units)]
    latency_s = [rng.uniform(0, 0.3) for _ in range(schedule.num_stages - 1)]
    last_end_s = [rng.uniform(90, 100) for _ in range(schedule.num_stages)]
    path, before = (found(schedule, duration_s, latency_s, last_end_s) for _ in range(2))
    for _ in range(300):
        node = rng.randrange(schedule.num_units)
        duration_s[node] = rng.choice([0.0, duration_s[node], rng.uniform(0.01, 4)])
        moved = path.change(node, duration_s[node])
        anew = found(schedule, duration_s, latency_s, last_end_s)
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


def test_a_change_that_moves_a_start_but_not_its_end():
    path = found(builders.one_f_one_b(2, 1), [2, 1, 2, 1], 0.0, [6.0, 6.0])
    assert path.end_s == [2, 6, 4, 5]
    assert path.change(2, 1.0) == {0, 1, 2, 3}  # F0 on stage 1
    assert path.change(0, 3.0) == {0, 1, 2, 3}
    assert path.end_s == [3, 6, 4, 5]
    assert [path.start_s(node) for node in range(4)] == [0, 5, 3, 4]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
def test_many_iterations_at_once_end_as_each_of_them_alone(schedule):
    duration_s = np.random.default_rng(5).uniform(0.1, 2, (schedule.num_units, 3))
    many = LongestPath(schedule, list(duration_s), 0.25)
    many.find_ends(np.maximum)
    for at, durations in enumerate(duration_s.T):
        alone = LongestPath(schedule, durations.tolist(), 0.25)
        alone.find_ends()
        assert [ends[at] for ends in many.end_s] == alone.end_s
