"""How many extra forwards memory, the batch, the channel and the user leave to each stage."""

import itertools
from contextlib import suppress
from dataclasses import replace

import pytest
from core_cases import uniform_profile
from hypothesis import given, settings
from hypothesis import strategies as st
from on_request import examples

from envpipe_megatron.core.channel_model import completes
from envpipe_megatron.core.kinds import ScheduleError
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.sidecar import Sidecar
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.policies.problem import (
    OrderLimits,
    in_flight_by_memory,
    order_limits,
)
from envpipe_megatron.policies.request import BY_MEMORY, PlanRequest, make_problem

FIXED = settings(max_examples=examples(150), deadline=None, derandomize=True)
CURVE = {f: (1 + (1200 - f) / 480, 10 + (f - 1080) / 20) for f in (1200, 1170, 1140, 1110, 1080)}


def within(counts, limits):
    """The definition of `OrderLimits`, word for word."""
    falls = [a - b for a, b in itertools.pairwise(counts)]
    return (
        all(0 <= count <= most for count, most in zip(counts, limits.most, strict=True))
        and (limits.max_fall is None or all(fall <= limits.max_fall for fall in falls))
        and all(-fall <= 1 for fall in falls)
    )


@FIXED
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=4),
    st.sampled_from([None, 0, 1, 2, 3]),
    st.lists(st.integers(0, 5), min_size=4, max_size=4),
)
def test_fitted_counts_are_the_largest_within_the_limits(most, max_fall, wanted):
    limits = OrderLimits(tuple(most), max_fall)
    wanted = wanted[: len(most)]
    every = itertools.product(*(range(limit + 1) for limit in most))
    allowed = [counts for counts in every if within(counts, limits)]
    below = [
        counts
        for counts in allowed
        if all(count <= want for count, want in zip(counts, wanted, strict=True))
    ]
    # One of them is at least as large as every other, on every stage at once.
    assert limits.fit(wanted) == tuple(map(max, zip(*below, strict=True)))
    assert limits.fit(wanted) in below
    assert all(limits.allow(counts) for counts in allowed)


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 3), (2, 1), (2, 4), (3, 2), (3, 5)])
def test_without_wishes_the_limits_are_what_can_run_at_all(stages, microbatches):
    limits = order_limits(builders.one_f_one_b(stages, microbatches))
    allowed = set()
    for counts in itertools.product(range(microbatches + 1), repeat=stages):
        runs = False
        with suppress(ScheduleError):  # more forwards than the stage before has sent
            runs = builders.envpipe(stages, microbatches, counts).extra_forwards == counts
        assert limits.allow(counts) == runs, counts
        allowed |= {counts} if runs else set()
    assert (0,) * stages in allowed
    assert limits.fit([microbatches] * stages) in allowed


@pytest.mark.parametrize("capacity", [1, 2])
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 6), (3, 5), (4, 6)])
def test_on_a_bounded_channel_the_limits_are_what_completes(stages, microbatches, capacity):
    own = builders.one_f_one_b(stages, microbatches)
    free, bounded = order_limits(own), order_limits(own, channel_capacity=capacity)
    for counts in itertools.product(range(microbatches), repeat=stages):
        if free.allow(counts):
            schedule = builders.envpipe(stages, microbatches, counts)
            assert bounded.allow(counts) == completes(schedule, capacity), counts


def test_a_channel_that_holds_nothing_is_refused_where_1f1b_needs_one():
    with pytest.raises(EnvPipeError, match="Not even 1F1B"):
        order_limits(builders.one_f_one_b(2, 2), channel_capacity=0)
    # One microbatch never meets another, and one stage has no channel.
    assert order_limits(builders.one_f_one_b(2, 1), channel_capacity=0).fit([3, 3]) == (0, 0)
    assert order_limits(builders.one_f_one_b(1, 4), channel_capacity=0).fit([2]) == (2,)


def test_less_in_flight_than_1f1b_holds_is_refused():
    with pytest.raises(
        ScheduleError, match=r"\(1f1b\) holds, 4, 3, 2, 1 \(got .*2.* Give at least 4"
    ):
        order_limits(builders.one_f_one_b(4, 8), (4, 2, 2, 1))


def with_memory(activation_bytes, free_bytes, stages=3, num_chunks=1, pending_bytes=None):
    sidecar = Sidecar(
        activation_bytes=activation_bytes,
        free_bytes=free_bytes,
        pending_bytes=pending_bytes,
        num_chunks=num_chunks,
    )
    return uniform_profile(stages, CURVE, sidecar=sidecar)


def test_bytes_become_microbatches_beside_the_one_that_is_there():
    profile = with_memory((100.0, 100.0, 100.0), (250.0, 99.0, 0.0))
    assert in_flight_by_memory(profile, 16) == (3, 1, 1)
    assert in_flight_by_memory(profile, 2) == (2, 1, 1)  # no more than there are


def test_weight_gradients_that_wait_may_take_more_than_all_microbatches():
    """In microbatches in flight; of two chunks each holds half of it."""
    pending = {"pending_bytes": (1600.0, 1600.0, 50.0)}
    profile = with_memory((100.0, 100.0, 100.0), (2000.0, 9000.0, 2000.0), **pending)
    assert profile.weight_shares.ravel().tolist() == [16.0, 16.0, 0.5]
    assert in_flight_by_memory(profile, 4) == (21, 64, 4)  # 64: all four wait
    halves = profile.for_chunks(2)
    assert halves.weight_shares.ravel().tolist() == [16.0, 16.0, 0.5]
    assert in_flight_by_memory(halves, 4) == (42, 128, 8)
    unknown = with_memory((100.0, 0.0, 100.0), (2000.0, 9000.0, 2000.0), **pending)
    assert unknown.weight_shares.ravel().tolist() == [1.0, 1.0, 1.0]


def test_bytes_that_fit_exactly_fit_whatever_their_rounding():
    profile = with_memory((0.1, 0.1, 1e9 / 3), (0.3, 0.7, 1e9))  # 0.3 / 0.1 < 3 in floating point
    assert in_flight_by_memory(profile, 16) == (4, 8, 4)


def test_a_stage_that_keeps_no_activations_has_no_limit():
    assert in_flight_by_memory(with_memory((0.0, 5.0, 5.0), (0.0, 0.0, 5.0)), 7) == (7, 1, 2)
    tiny = with_memory((1e-320, 5e-324, 5.0), (1e10, 0.0, 5.0))
    assert in_flight_by_memory(tiny, 7) == (7, 1, 2)


def test_memory_limits_microbatches_of_each_chunk():
    """Measured in two chunks or without, the same memory holds as much."""
    whole = with_memory((100.0, 100.0, 100.0), (250.0, 149.0, 150.0))
    halves = with_memory((50.0, 50.0, 50.0), (300.0, 199.0, 200.0), num_chunks=2)
    assert whole.for_chunks(2).sidecar == halves.sidecar
    request = PlanRequest(16, "auto", "optimal", num_chunks=2, max_in_flight=BY_MEMORY)

    def in_flight(profile, **limit):
        return make_problem(profile, replace(request, **limit)).max_in_flight

    assert in_flight(whole) == in_flight(halves) == (7, 4, 5)
    assert in_flight_by_memory(halves, 2) == (4, 4, 4)  # no more than there are
    assert in_flight(halves, max_in_flight=3.5) == (7, 7, 7)
    assert in_flight(halves, max_in_flight=(3, 2, 1.5)) == (6, 4, 3)


@pytest.mark.parametrize("missing", [(None, (1.0,) * 3), ((1.0,) * 3, None), (None, None)])
def test_memory_that_was_not_measured_is_refused(missing):
    with pytest.raises(EnvPipeError, match=r"activation_bytes and free_bytes.*number of microb"):
        in_flight_by_memory(with_memory(*missing), 8)
