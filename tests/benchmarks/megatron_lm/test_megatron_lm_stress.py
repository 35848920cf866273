"""Random orders, and units that wait for the device."""

import random
from itertools import pairwise, product
from unittest import mock

import pytest
from channel_search import out_of_turn

from envpipe_megatron.core.channel_model import completes
from envpipe_megatron.core.kinds import WHOLE
from envpipe_megatron.core.orders import builders
from envpipe_megatron.policies.problem import order_limits

pytest.importorskip("torch")
from benchmarks.megatron_lm import stress
from benchmarks.megatron_lm.stress import random_extra_forwards, random_interleaved
from envpipe_megatron.runtime.job import iterations, session
from envpipe_megatron.runtime.job.phases import run_phases


@pytest.mark.parametrize("capacity", [None, 1])
def test_random_orders_finish_and_go_from_none_to_all_that_is_allowed(capacity):
    source = random.Random(5)
    drawn = {random_extra_forwards(source, 4, 8, capacity) for _ in range(150)}
    assert all(completes(builders.envpipe(4, 8, extra), capacity) for extra in drawn)
    assert (0, 0, 0, 0) in drawn
    assert any(any(b > a for a, b in pairwise(extra)) for extra in drawn)
    most = order_limits(builders.one_f_one_b(4, 8)).most
    assert (most in drawn) == completes(builders.envpipe(4, 8, most), capacity)
    assert len(drawn) > 30


def test_stirred_orders_take_messages_out_of_order_and_keep_sums():
    source, kept = random.Random(3), 0
    for _ in range(20):
        own, _ = random_interleaved(source, 2, 8, 2)
        order = stress.stirred(source, own)
        kept += out_of_turn(order)
        for before, after in zip(own.stages, order.stages, strict=True):
            for way in product(WHOLE, range(2)):
                assert [u for u in before if (u.kind, u.chunk) == way] == [
                    u for u in after if (u.kind, u.chunk) == way
                ]
    assert kept > 10


class _Work:
    """Notes the begin and end of each unit's work."""

    def __init__(self, history):
        self._history = history

    def forward(self, unit, data):
        self._history.append("work")
        return data

    backward = forward


def test_a_job_that_is_stressed_gets_random_orders_and_delayed_units(monkeypatch):
    history = []
    monkeypatch.setattr(stress.stage_run, "execute", lambda work, run: history.append(work))
    try:
        stress.install({"seed": 1, "delay_s": 0.0, "splits": False}, 0, print, lambda: 1, print)
        # Where the batches of a job look both up.
        assert iterations.run_phases is not run_phases
        session.execute(_Work(history), None)
    finally:
        mock.patch.stopall()
    assert iterations.run_phases is run_phases
    assert [type(work) for work in history] == [stress.DelayedWork]


@pytest.mark.parametrize("job", [(2, 8, 2), (4, 8, 2), (2, 6, 4)])
def test_random_orders_of_chunks_can_run_and_are_many(job):
    source = random.Random(4)
    orders = [random_interleaved(source, *job)[0] for _ in range(40)]
    assert len({order.stages for order in orders}) > 5
    split = [stress.randomly_split(source, order) for order in orders]
    assert all(order.split and order.out_of_turn is None for order in split)
    assert {order.combined.any() for order in split} == {True}
    for order in (*orders, *split):
        assert (order.num_stages, order.num_microbatches, order.num_chunks) == job
        assert completes(order, None)
