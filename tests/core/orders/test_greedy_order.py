"""Orders of the list scheduler: against all orders there are, against limits, against 1F1B."""

import itertools

import numpy as np
import pytest
from every_order import peak
from hypothesis import given, settings
from hypothesis import strategies as st
from on_request import examples

from envpipe_megatron.core.kinds import SPLIT, WHOLE, Kind, ScheduleError
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.orders.greedy import shortest
from envpipe_megatron.core.orders.job import OrderJob
from envpipe_megatron.core.schedule import Placement
from envpipe_megatron.core.timeline import Timeline


def random_job(rng, stages, chunks, microbatches, *, kinds=SPLIT, **others):
    shape = (stages, chunks, microbatches)
    return OrderJob({kind: rng.uniform(0.3, 1.5, shape) for kind in kinds}, **others)


def time_s(schedule, job):
    """The iteration by the timeline, whose longest path is not the scheduler's."""
    duration_s = [
        [job.duration_s[u.kind][stage, u.chunk, u.microbatch] for u in order]
        for stage, order in enumerate(schedule.stages)
    ]
    return Timeline(schedule, duration_s, job.latency_s, job.tail_s).iteration_time_s


def peaks(schedule, weight_share):
    """The most that each stage holds."""
    shares = np.broadcast_to(weight_share, schedule.num_stages)
    return [
        peak([(u.kind, u.microbatch) for u in order], share)
        for order, share in zip(schedule.stages, shares, strict=True)
    ]


@settings(max_examples=examples(40), deadline=None)
@given(
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 6),
    st.sampled_from([SPLIT, WHOLE]),
    st.sampled_from([Placement.LOOPED, Placement.V]),
    st.sampled_from([0.0, 0.3, 1.0, 16.0, None]),
    st.sampled_from([0.0, 0.02, 1.0]),
    st.integers(0, 2**32 - 1),
)
def test_any_job_gets_an_order_within_its_limits(
    stages, chunks, microbatches, kinds, placement, weight_share, latency_s, seed
):
    rng = np.random.default_rng(seed)
    if weight_share is None:  # other ones on other stages
        weight_share = rng.choice([0.0, 0.5, 1.0, 2.0, 16.0], stages).tolist()
    limits = chunks * rng.uniform(1.0, 3.0, stages)
    if kinds is SPLIT:  # room for the first gradient's rest, and up to twice as much
        rest = np.maximum(0.0, np.broadcast_to(weight_share, stages) - 1)
        limits += rest * rng.choice([1.0, 1.3, 2.0], stages)
    job = random_job(
        rng,
        stages,
        chunks,
        microbatches,
        kinds=kinds,
        placement=placement,
        latency_s=latency_s,
        limits=limits.tolist(),
        weight_share=weight_share,
        tail_s=rng.uniform(0.0, 1.0, stages).tolist(),
    )
    schedule = shortest(job, looks=30)  # the schedule itself checks units, inputs and circles
    assert schedule.split == (kinds is SPLIT)
    assert np.all(np.array(peaks(schedule, weight_share)) <= limits + 1e-5)
    assert time_s(schedule, job) >= job.floor_s * (1 - 1e-9)
    for order in schedule.stages:
        for kind, chunk in itertools.product(kinds, range(chunks)):
            own = [u.microbatch for u in order if (u.kind, u.chunk) == (kind, chunk)]
            assert own == sorted(own)


@pytest.mark.parametrize("seed", range(5))
def test_stretched_units_take_no_longer_than_in_1f1b_with_its_memory(seed):
    stages, microbatches = 4, 12
    limits = [stages - stage for stage in range(stages)]
    job = random_job(
        np.random.default_rng(seed), stages, 1, microbatches, kinds=WHOLE, limits=limits
    )
    assert time_s(shortest(job), job) <= time_s(builders.one_f_one_b(stages, microbatches), job)


def test_looped_chunks_are_as_short_as_megatrons_with_its_memory():
    interleaved = builders.interleaved(4, 12, 2)
    unit_s = np.ones((4, 2, 12))
    duration_s = {Kind.FORWARD: unit_s, Kind.BACKWARD: 2 * unit_s}
    job = OrderJob(duration_s, limits=interleaved.peak_in_flight)
    assert time_s(shortest(job), job) <= time_s(interleaved, job)


@pytest.mark.parametrize("limits", [None, [4] * 4])
def test_equal_units_have_no_wait_but_the_way_in_with_the_memory_of_1f1b(limits):
    job = OrderJob(dict.fromkeys(SPLIT, np.ones((4, 1, 16))), limits=limits)
    assert time_s(shortest(job), job) == job.floor_s  # ZB-H1


def test_two_looks_are_enough_for_an_order():
    job = random_job(np.random.default_rng(0), 4, 2, 8, placement=Placement.V, limits=[8.0] * 4)
    quick_s, thorough_s = (time_s(shortest(job, looks=n), job) for n in (2, None))
    assert thorough_s <= quick_s <= 1.3 * thorough_s


def test_a_job_without_an_order_says_why():
    unit_s = np.ones((2, 2, 3))
    with pytest.raises(ScheduleError, match="less than one microbatch"):
        OrderJob(dict.fromkeys(SPLIT, unit_s), limits=[2.0, 1.5])
