"""Orders that split backwards, or take messages in any sequence, come to megatron-core's bits."""

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
from channel_search import out_of_turn
from jobs import ALIGNED, ALL, OVERLAP, Job, Ours
from on_request import each_of, label, on_request
from random_orders import random_order
from test_bit_equality import (
    CLOCKS_MHZ,
    assert_executed,
    assert_replicas_agree,
    assert_same_bits,
    by_plan,
    labels_that_run,
    ours,
    stock,
    synthetic_profile,
    trained_alike,
)

from envpipe_megatron.core.kinds import Kind
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.orders.builders import half_split, split_in_place, zero_bubble
from envpipe_megatron.core.orders.greedy import shortest
from envpipe_megatron.core.orders.job import OrderJob
from envpipe_megatron.core.profile_rows import SplitBackward
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.policies.objective import Objective

pytestmark = pytest.mark.xdist_group("pipeline")
__all__ = ["ours", "stock"]


def searched(stages, microbatches, chunks=1, most=None, weight=0.8) -> Schedule:
    """One of the list scheduler's, for units that do not take equally long."""
    shape = np.ones((stages, chunks, microbatches))
    uneven = np.linspace(1.0, 1.4, stages)[:, None, None]
    times = {Kind.FORWARD: shape, Kind.INPUT_GRADIENT: 1.2 * uneven * shape}
    times[Kind.WEIGHT_GRADIENT] = weight * shape
    limits = [most or 2 * stages * chunks] * stages
    return shortest(OrderJob(times, 0.05, limits=limits), "searched")


ORDERS = {
    "zb-h1 p2": zero_bubble(2, 8),
    "zb-h2 p2": zero_bubble(2, 8, 3),
    "zb-h1 p4": zero_bubble(4, 8),
    "zb-h2 p4": zero_bubble(4, 8, 7),
    "searched p2": searched(2, 8),
    "searched p4": searched(4, 8),
    "in place p4": split_in_place(builders.one_f_one_b(4, 8), 8),
    "few microbatches p4": zero_bubble(4, 3),
    "the last two of 1F1B p4": split_in_place(builders.one_f_one_b(4, 8), 2),
    "the last four of EnvPipe's p4": split_in_place(builders.envpipe(4, 8, [3, 2, 1, 0]), 4),
}


ALWAYS = [("zb-h1 p4", True), ("the last four of EnvPipe's p4", False)]


@pytest.mark.parametrize(
    ("name", "tied"), each_of(itertools.product(ORDERS, (False, True)), ALWAYS)
)
def test_orders(stock, ours, tmp_path, name, tied):
    schedule = ORDERS[name]
    job = Job(schedule.num_stages, schedule.num_microbatches, tied=tied)
    results = trained_alike(stock, ours, job, by_plan(tmp_path, schedule), schedule)
    layers = max(2, schedule.num_stages) // schedule.num_stages
    for result in results:  # four of each layer, and the output's
        each = 4 * layers + (result.stage == schedule.num_stages - 1)
        whole = schedule.combined[result.stage].sum()
        steady = result.phases.count("steady")
        assert result.put_off.count(each) == steady * (schedule.num_microbatches - whole)
        assert len(result.put_off) == steady * (schedule.num_microbatches - whole)


DDP = [(), ("use_distributed_optimizer",), OVERLAP, ALIGNED, ALL, (*ALL, "align_grad_reduce")]


@pytest.mark.parametrize(
    ("name", "reducer", "tied"),
    each_of(
        itertools.product(["zb-h1 p2", "searched p2"], DDP, (False, True)),
        [("searched p2", DDP[4], True)],
    ),
    ids=label,
)
def test_reducers_of_two_replicas(stock, ours, tmp_path, name, reducer, tied):
    schedule = ORDERS[name]
    job = Job(2, 8, reducer=reducer, tied=tied)
    results = trained_alike(stock, ours, job, by_plan(tmp_path, schedule), schedule)
    assert_replicas_agree(results)


@pytest.mark.parametrize(
    ("size", "what", "reducer"),
    each_of(
        itertools.product(
            [(2, 8, 2), (4, 8, 2), (2, 6, 3)],
            ["in place", "the last", "searched", "more in flight"],
            [None, DDP[1], DDP[2], DDP[5]],
        ),
        [((2, 8, 2), "searched", DDP[5])],
    ),
    ids=label,
)
def test_chunks(stock, ours, tmp_path, size, what, reducer):
    stages, microbatches, chunks = size
    job = Job(stages, microbatches, chunks=chunks, reducer=reducer)
    schedule = {
        "in place": lambda: split_in_place(job.own_order, microbatches * chunks),
        "the last": lambda: split_in_place(job.own_order, stages * chunks),
        "searched": lambda: searched(stages, microbatches, chunks),
        "more in flight": lambda: searched(stages, microbatches, chunks, 4 * stages * chunks, 1.1),
    }[what]()
    trained_alike(stock, ours, job, by_plan(tmp_path, schedule), schedule)


@pytest.mark.parametrize(
    ("stages", "microbatches", "chunks", "split", "seed"),
    each_of(
        (
            (*size, split, seed)
            for size in ((2, 8, 2), (2, 6, 3), (4, 8, 2), (4, 8, 1))
            for split in (False, True)
            for seed in range(2 * split, 4)
        ),
        [(2, 8, 2, False, 0), (2, 8, 2, True, 2)],
    ),
)
def test_orders_that_take_messages_otherwise_than_they_are_sent(
    stock, ours, tmp_path, stages, microbatches, chunks, split, seed
):
    rng = random.Random(seed)
    schedule = random_order(rng, stages, microbatches, chunks, split=split, in_turn=True)
    assert out_of_turn(schedule) or chunks == 1
    job = Job(stages, microbatches, chunks=chunks)
    trained_alike(stock, ours, job, by_plan(tmp_path, schedule), schedule)


def test_a_searched_order_of_messages_out_of_order(stock, ours, tmp_path):
    schedule = searched(4, 12, 2)
    assert out_of_turn(schedule)
    job = Job(4, 12, chunks=2)
    trained_alike(stock, ours, job, by_plan(tmp_path, schedule), schedule)


PLANNED = {"p4": Job(4, 12, tied=True), "V2": Job(2, 8, chunks=2, reducer=ALIGNED)}


@pytest.mark.parametrize("name", each_of(PLANNED, ["V2"]))
def test_an_order_of_the_planner(stock, ours, tmp_path, name):
    job = PLANNED[name]
    profile = synthetic_profile(job.stages).with_split_backwards(SplitBackward(0.5, 0.0))
    replace(profile, assumed=None).write(tmp_path / "profile_in.csv")  # as if it were measured
    how = Ours("auto", "optimal", profile_file=tmp_path / "profile_in.csv", splits=True)
    results = ours(job, how)
    order = results[0].plan.schedule
    assert order.split
    assert_executed(job, results, order)
    assert_same_bits(results, stock(job))


def test_parts_are_measured_in_steps_that_are_shorter_than_a_clock_may_be_late(ours):
    how = Ours("auto", "optimal", splits=True, closed_loop=True, unit_s=0.001, warmup_iterations=3)
    results = ours(Job(2, 4, steps=14), how)
    assert results[0].phases[-1] == "profile"
    assert results[0].notes == ()


@on_request("PIPELINE")
@pytest.mark.parametrize(("goal", "steps"), [("energy", 160), ("edp", 160), ("time", 60)])
def test_closed_loop(stock, ours, goal, steps):
    """It measures, plans beside training, and corrects: orders change while training goes on."""
    job = Job(2, 8, steps=steps)
    how = Ours(
        "auto",
        "optimal",
        warmup_iterations=3,
        unit_s=0.02,
        clocks_mhz=CLOCKS_MHZ[::2],
        splits=True,
        closed_loop=True,
        objective=Objective(goal),
    )
    results = ours(job, how)
    if goal == "time":
        assert {clock for result in results for clock in result.locked_mhz} <= {max(CLOCKS_MHZ)}
    run = {tuple(units) for units in results[0].executed}
    assert results[0].plan.schedule.split
    for order in (results[0].plan.schedule, half_split(builders.one_f_one_b(2, 8))):
        assert tuple(labels_that_run(order, 0)) in run
    assert_same_bits(results, stock(replace(job, steps=len(results[0].losses))))
