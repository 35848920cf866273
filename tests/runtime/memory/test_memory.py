"""Memory is measured in the framework's own order; peaks of other orders are as predicted."""

import logging
import random
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from fake_memory import SPECS, FakeJob, Sizes, run_units

from envpipe_megatron.core.kinds import KIND_BY_LETTER, SPLIT, WHOLE, Kind, Unit, parse_unit
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.orders.builders import framework_order, half_split
from envpipe_megatron.core.orders.greedy import shortest
from envpipe_megatron.core.orders.job import OrderJob
from envpipe_megatron.core.profile import make_profile
from envpipe_megatron.core.profile_rows import ProfileRow
from envpipe_megatron.core.sidecar import Sidecar
from envpipe_megatron.policies.problem import order_limits
from envpipe_megatron.policies.request import BY_MEMORY
from envpipe_megatron.runtime.channel.carrier import StageSpecs, TensorSpec
from envpipe_megatron.runtime.memory.peak import MemoryFullError
from envpipe_megatron.runtime.memory.stage import (
    PREDICTION_ERROR,
    SAFETY_MARGIN,
    CudaMemory,
    Reading,
    StageMemory,
    bytes_by_chunk,
    device_memory,
    in_flight_limit,
    knows_memory,
    peaks_bytes,
    with_memory,
)


def profile(stages, sidecar=None):
    """Long backwards: EnvPipe's rule wants more extra forwards than there are microbatches."""
    rows = [
        (stage, kind, ProfileRow(f, (8.0 if kind is Kind.BACKWARD else 1.0) * 1000 / f, f / 10))
        for stage in range(stages)
        for kind in WHOLE
        for f in (1000, 900)
    ]
    return make_profile(rows, source="a test's", sidecar=sidecar)


REGIMES = {
    "plain": Sizes(),
    "recomputed": Sizes(activations=400, backward=6_000, message=50),
    "gradients made anew": Sizes(keeps_gradients=False),
    "activations are nearly all": Sizes(
        weights=2_000, gradients=1_000, optimizer=1_000, activations=9_000, jitter=0.03, message=90
    ),
    "holes": Sizes(holes=4_000),
}


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("seed", range(3))
def test_peaks_of_other_orders_are_as_predicted(regime, seed):
    rng = random.Random(seed)
    stages, microbatches = rng.randint(2, 6), rng.randint(1, 14)
    sizes = REGIMES[regime]
    scales = [rng.uniform(0.7, 1.4) for _ in range(stages)]
    job = FakeJob(
        stages,
        microbatches,
        lambda rank: replace(sizes, activations=int(scales[rank] * sizes.activations)),
        seed=seed,
    )
    learned = job.learn()
    limits = order_limits(job.own)
    extra = limits.fit([rng.randint(0, microbatches) for _ in range(stages)])
    schedule = builders.envpipe(stages, microbatches, extra)
    actual = np.max([job.iterate(schedule) for _ in range(3)], axis=0)
    predicted = peaks_bytes(learned, schedule, job.own)
    assert predicted == pytest.approx(actual.tolist(), rel=PREDICTION_ERROR)
    assert [memory.baseline_in_flight for memory in learned] == list(job.own.peak_in_flight)


@pytest.mark.parametrize("seed", range(6))
def test_no_plan_goes_beyond_the_memory_that_is_there(seed):
    """The fake device raises when it is out of memory; holes and waiting outputs count."""
    rng = random.Random(seed)
    stages, microbatches = rng.randint(2, 5), rng.randint(4, 16)
    sizes = replace(rng.choice(list(REGIMES.values())), holes=rng.choice([0, 500]))
    job = FakeJob(stages, microbatches, lambda rank: sizes, seed=seed)
    job.learn()
    needed = max(device.most for device in job.devices) + sizes.holes
    capacity = int(needed * rng.uniform(1.02, 1.6))
    for device in job.devices:
        device.capacity = capacity
    learned = job.learn()
    asked = BY_MEMORY, framework_order(stages, microbatches)
    most = in_flight_limit(*asked, with_memory(profile(stages), learned), learned)
    assert most == in_flight_limit(*asked, profile(stages), learned)  # whose file says nothing
    for memory, count in zip(learned, most, strict=True):
        room = memory.room_bytes / memory.activation_bytes
        assert count == min(microbatches, memory.baseline_in_flight + int(room + 1e-9))
        allowed = memory.baseline_peak_bytes + memory.room_bytes
        assert allowed <= max((1 - SAFETY_MARGIN) * capacity, memory.baseline_peak_bytes)
    limits = order_limits(job.own, list(map(int, most)))
    extra = limits.fit([microbatches] * stages)
    job.iterate(builders.envpipe(stages, microbatches, extra), 3)


def split_order(rng, stages, microbatches, chunks):
    """An order of random units, some of whose backwards are whole and run where their W was."""
    times = np.random.default_rng(rng.randrange(2**32))
    shape = stages, chunks, microbatches
    job = OrderJob(
        {kind: times.uniform(0.3, 1.5, shape) for kind in SPLIT},
        limits=(chunks * times.uniform(1, 4, stages)).tolist(),
    )
    order, orders = shortest(job, looks=4), []
    for units in order.stages:
        whole = {unit for unit in units if unit.kind is Kind.WEIGHT_GRADIENT}
        whole = set(rng.sample(sorted(whole, key=str), len(whole) // 3))
        first = {replace(unit, kind=Kind.INPUT_GRADIENT): unit for unit in whole}
        own = []
        for unit in units:
            both = [replace(unit, combined=True), first[unit]] if unit in first else [unit]
            own += [] if unit in whole else both
        orders.append(tuple(own))
    return replace(order, stages=tuple(orders))


RECOMPUTED = Sizes(activations=400, pending=6_400, backward=2_000, layers=4, message=0)
SPLIT_REGIMES = {
    "as much": Sizes(message=0, activations=2_800),
    "less": Sizes(message=0, pending=700),
    "layer after layer": Sizes(message=0, layers=5),
    "recomputed": RECOMPUTED,
    "recomputed in chunks": replace(RECOMPUTED, chunk_factors=(1.0, 1.5)),
    "chunks, gradients made anew": Sizes(
        message=0, keeps_gradients=False, chunk_factors=(1.0, 2.0, 0.5)
    ),
    "outputs wait": Sizes(),
    "gradients come": Sizes(message=0, gradient=250),
}


@pytest.mark.parametrize("regime", SPLIT_REGIMES)
@pytest.mark.parametrize("seed", range(3))
def test_peaks_of_split_orders_are_what_was_predicted(regime, seed):
    """To the byte in one chunk, but for outputs that wait; never less.

    Of several, a weight gradient may run where most is held, and needs less than a whole backward.
    """
    rng = random.Random(seed)
    sizes = SPLIT_REGIMES[regime]
    chunks = len(sizes.chunk_factors)
    stages = rng.randint(2, 4)
    microbatches = 4 * stages
    job = FakeJob(stages, microbatches, lambda rank: sizes, seed=seed, chunks=chunks)
    learned = job.learn_parts(half_split(job.own))
    for stage in learned:
        assert stage.pending_bytes == pytest.approx(
            [sizes.pending * factor for factor in sizes.chunk_factors], abs=2 * sizes.message
        )
    orders = [split_order(rng, stages, microbatches, chunks) for _ in range(4)]
    for order in (job.own, *orders):
        actual = np.max([job.iterate(order) for _ in range(2)], axis=0).tolist()
        for predicted, peak in zip(peaks_bytes(learned, order, job.own), actual, strict=True):
            assert predicted >= peak - 10 * sizes.message - chunks * sizes.input
            beside = 0 if chunks == 1 else sizes.backward
            assert predicted <= peak + beside + 10 * sizes.message


def test_until_it_is_measured_the_most_is_taken_to_wait():
    job = FakeJob(2, 4, lambda rank: Sizes(activations=400, message=0))
    assert [stage.pending_bytes for stage in job.learn()] == [None, None]
    for *_, memory in job.ranks:
        memory.waiting_bytes = (1040.0,)
    learned = job.learn()
    assert [stage.pending_bytes for stage in learned] == [(1040.0,), (1040.0,)]
    in_place = half_split(job.own)
    more = peaks_bytes(learned, in_place, in_place)[0] - peaks_bytes(learned, job.own, in_place)[0]
    assert more == 1040 - 400  # it waits beside another in flight
    assert job.learn_parts(in_place)[0].pending_bytes == (2_800.0,)


def test_an_optimizer_that_comes_into_being_late_counts():
    """Its first step is skipped, as with loss scaling; the last iteration of a warm-up counts."""
    sizes = Sizes()
    early, late = FakeJob(2, 4, lambda rank: sizes), FakeJob(2, 4, lambda rank: sizes)
    for _, work, _ in late.ranks:
        work.skipped_steps = 1
    assert late.learn()[0].baseline_peak_bytes == early.learn()[0].baseline_peak_bytes


def test_of_replicas_the_one_with_the_least_room_counts():
    def sizes(rank):
        return Sizes(activations=5_000 if rank == 2 else 3_000)  # the second replica of stage 0

    job = FakeJob(2, 6, sizes, replicas=2, capacity=200_000)
    job.devices[0].capacity = 150_000
    first, second = job.learn()
    alone = FakeJob(2, 6, lambda rank: Sizes(), capacity=150_000).learn()
    assert first.activation_bytes == pytest.approx(5_000, abs=60)
    assert first.baseline_peak_bytes > alone[0].baseline_peak_bytes + 3_000
    assert first.room_bytes == pytest.approx(alone[0].room_bytes, abs=200)
    assert second.room_bytes > alone[1].room_bytes + 40_000


@pytest.mark.parametrize("lacks", ["source", "units", "readings that mean something"])
def test_a_rank_that_knows_no_memory_leaves_it_unknown_on_all(lacks, caplog):
    job = FakeJob(3, 4, lambda rank: Sizes())
    if lacks == "source":
        job.ranks[1][2]._source = None
    schedule = job.own

    def run(stage, work, memory):
        run_units(work, schedule.stages[stage], memory, watched=lacks != "units")
        if lacks.startswith("readings") and stage == 1:
            del memory._readings[0]
        memory.learn(schedule, SPECS)
        memory.predict(schedule)
        memory.compare()
        return memory.stages

    assert job.everywhere(run) == [None] * 3
    assert caplog.text.count("This rank's memory is not known") == lacks.startswith("readings")


def test_what_was_known_stays_where_parts_tell_nothing(caplog):
    job = FakeJob(2, 4, lambda rank: Sizes())
    learned, in_place = job.learn(), half_split(job.own)
    job.iterate(in_place)
    del job.ranks[1][2]._readings[0]
    job.everywhere(lambda stage, work, memory: memory.learn(job.own, SPECS, in_place))
    assert [memory.stages for *_, memory in job.ranks] == [learned] * 2
    assert caplog.text.count("This rank's memory is not known") == 1


def test_the_peak_of_units_stays_theirs_when_the_step_has_followed():
    job = FakeJob(2, 6, lambda rank: Sizes(step=90_000))
    job.learn()

    def run(stage, work, memory):
        memory._source.most = memory._source.allocated
        run_units(work, job.own.stages[stage], memory)
        peak = memory._source.most
        work.end_iteration()
        work.step()
        assert memory._source.most > peak
        assert memory.peak_bytes == peak
        return True

    assert job.everywhere(run) == [True, True]


def test_the_measured_peak_is_held_against_the_prediction(caplog):
    job = FakeJob(2, 6, lambda rank: Sizes(message=0))
    job.learn()
    schedule = builders.envpipe(2, 6, (3, 0))

    def run(leak):
        def each(stage, work, memory):
            memory.predict(schedule)
            if stage == 1:
                work.memory.take(leak)
            run_units(work, schedule.stages[stage], memory)
            memory.compare()
            work.end_iteration()
            return memory.stages

        return job.everywhere(each)[0]

    with caplog.at_level(logging.WARNING):
        stages = run(0)
    assert [stage.in_flight for stage in stages] == [5, 1]
    for stage in stages:
        assert stage.measured_peak_bytes == stage.predicted_peak_bytes
    assert not caplog.records
    assert "+0.0%" in job.said[-1]
    with caplog.at_level(logging.WARNING):
        run(20_000)
    (record,) = caplog.records  # the planner alone says so
    assert "% from the prediction" in record.getMessage()


def test_what_does_not_fit_is_refused_before_it_runs_and_what_ran_goes_on():
    """The margin counts, and no later order may hold as many."""
    gib = 2**30
    sizes = Sizes(2 * gib, gib, message=0, forward=0, backward=0, gradients=gib, optimizer=2 * gib)
    job = FakeJob(2, 6, lambda rank: sizes, capacity=11 * gib)
    learned = job.learn()

    def predict(extra):
        order = builders.envpipe(2, 6, (extra, 0))

        def each(stage, work, memory):
            try:
                memory.predict(order)
            except MemoryFullError as error:
                return str(error).partition(", or")[0]

        first, second = job.everywhere(each)
        assert first == second
        return first, [stage.room_bytes / gib for stage in job.ranks[0][2].stages]

    full = (
        "Stages 0 have no memory for the microbatches in flight of this order, [{}, 6.00] GiB at "
        "its peak, where [{}] GiB may be used (got {}, 1). Let fewer be in flight"
    )
    second = learned[1].room_bytes / gib
    assert predict(4) == (full.format("11.00", "10.45, 10.45", 6), [3.0, second])
    assert predict(3) == (None, [3.0, second])
    assert predict(4)[0] == full.format("11.00", "10.00, 10.45", 6)
    assert job.said[:3] == [
        "memory (GiB): peak [7.00, 6.00], a microbatch in flight [1.00, 1.00], room for more "
        "[3.45, 4.45] beside 5% kept free",
        "memory: in flight 6, 1, predicted peak [11.00, 6.00] GiB",
        "memory: in flight 5, 1, predicted peak [10.00, 6.00] GiB",
    ]


def test_memory_is_ready_before_an_order_begins():
    job = FakeJob(2, 6, lambda rank: Sizes(message=0, holes=2_000))
    job.learn()
    schedule = builders.envpipe(2, 6, (3, 0))
    job.everywhere(lambda stage, work, memory: memory.predict(schedule))
    ready = [device.reserved for device in job.devices]
    holes = [memory._unusable_bytes for _, _, memory in job.ranks]
    assert max(holes) > 0
    peaks = job.iterate(schedule)
    assert [r - h for r, h in zip(ready, holes, strict=True)] == pytest.approx(peaks, rel=0.01)


def test_an_order_that_runs_on_without_its_memory_is_compared_with_nothing():
    """Another process took it: the framework's own order has run, and goes on."""
    job = FakeJob(2, 4, lambda rank: Sizes())
    job.learn()
    for device in job.devices:
        device.capacity = device.allocated

    def run(stage, work, memory):
        with pytest.raises(MemoryFullError):
            memory.predict(job.own)
        memory.compare()
        return {own.measured_peak_bytes for own in memory.stages}

    assert job.everywhere(run) == [{None}] * 2


def test_nothing_is_looked_at_once_the_plan_runs():
    job = FakeJob(2, 6, lambda rank: Sizes())
    job.learn()
    counts = [(device.readings, device.resets) for device in job.devices]
    job.iterate(job.own, 5, watched=False)
    assert counts == [(device.readings, device.resets) for device in job.devices]


def units_of(text):
    """Such as F0, or a backward of the second chunk: B1, or I1+W1."""
    found = re.findall(r"(.)(.)(\+?)", text)
    return [Unit(KIND_BY_LETTER[k], 0, int(chunk), bool(plus)) for k, chunk, plus in found]


@pytest.mark.parametrize(
    ("units", "allocated", "expected"),
    [
        ("F0F0B0F0B0B0", [0, 10, 20, 10, 20, 10, 0], (10,)),
        ("F0B0F0B0F0B0", [7, 17, 7, 17, 7, 17, 7], (10,)),  # the last stage
        ("F0B0F0B0F0B0", [0, 15, 30, 40, 30, 40, 30], (10,)),  # a workspace, and gradients
        ("F0B0", [0, 10, 25], (10,)),  # gradients outweigh the only microbatch
        ("F0F0F0B0B0B0", [0, 12, 24, 36, 28, 20, 12], (12,)),  # outputs wait for their transfer
        ("F0F0F1F1B1B1B0B0", [0, 20, 40, 44, 48, 44, 40, 20, 0], (20, 4)),
    ],
)
def test_activations_of_one_microbatch(units, allocated, expected):
    assert bytes_by_chunk(units_of(units), allocated, (0, 0)) == (expected, None)


@pytest.mark.parametrize(
    ("units", "allocated", "expected"),
    [
        ("F0I0+W0F0I0W0", [0, 10, 10, 0, 10, 7, 0], ((10,), (7,))),
        ("F0I0W0F0I0+W0", [0, 1, 16, 0, 1, 1, 0], ((1,), (16,))),  # recomputed
        ("F0I0+W0F0I0W0", [0, 10, 10, 5, 15, 12, 9], ((10,), (7,))),  # gradients are new in each
        ("F0I0+W0F0I0W0", [0, 10, 10, 0, 10, 9, 2], ((10,), (9,))),  # an output waits behind I
        ("F0F1I1W1I0W0", [0, 10, 14, 13, 10, 18, 0], ((10, 4), (18, 3))),  # no whole backward
        ("F0F1I1+W1I0W0", [0, 10, 14, 14, 10, 6, 0], ((10, 4), None)),  # none of the second chunk
        ("F0F1I1W1I0+W0", [0, 10, 14, 9, 10, 10, 0], ((10, 4), None)),
    ],
)
def test_what_waits_between_the_parts_of_a_backward(units, allocated, expected):
    assert bytes_by_chunk(units_of(units), allocated, (0, 0)) == expected


def test_the_input_that_a_model_keeps_until_its_next_forward_is_a_microbatchs():
    """On the last stage, where each forward's backward comes before the next forward."""
    one, other = (
        [Unit(KIND_BY_LETTER[letter], number) for number in range(4) for letter in letters]
        for letters in ("FB", "FIW")
    )
    held = [0, 100, 10, 110, 10, 110, 10, 110, 10]  # a forward frees the input before, of 10
    assert bytes_by_chunk(one, held, (10,)) == ((110,), None)
    held = [0, *[100, 80, 10, 110, 80, 10, 110, 80, 10, 110, 80, 10]]
    assert bytes_by_chunk(other, held, (10,)) == ((110,), (80,))


def test_an_input_that_the_first_part_lets_go_is_kept_of_the_last_forward_only():
    """As in FP8, whose weight gradients need no input of 16 bits."""
    held = [0, 100, 200, 180, 100, 90, 10]
    units = [*map(parse_unit, ("F0", "F1", "I0", "W0", "I1", "W1"))]
    assert bytes_by_chunk(units, held, (10,)) == ((100,), (80,))


def test_a_microbatch_holds_at_least_its_message():
    """Return what comes in; of the first stage, what goes out."""
    short, long = (
        TensorSpec(((length,),), (torch.float16,), torch.device("cpu")) for length in (5, 8)
    )
    ends, middle = {}, {Kind.FORWARD: short}
    sizes = Sizes(activations=0, message=0)
    for receives, num_bytes in ((middle, 10), (ends, 16)):
        specs = StageSpecs(receives, {Kind.FORWARD: long})
        assert FakeJob(2, 4, lambda rank: sizes).learn(specs=specs)[0].activation_bytes == num_bytes


MEMORY = (
    StageMemory(2, 1000, 250.0, (100.0,)),
    StageMemory(1, 1000, 50.0, (100.0,)),
)


def test_free_beside_one_microbatch_is_the_room_and_the_others():
    assert [stage.free_bytes for stage in MEMORY] == [350.0, 50.0]
    sidecar = with_memory(profile(2, Sidecar(gpu="a test's")), MEMORY).sidecar
    assert sidecar == Sidecar(
        gpu="a test's", activation_bytes=(100.0, 100.0), free_bytes=(350.0, 50.0)
    )
    assert knows_memory(sidecar)
    assert not knows_memory(replace(sidecar, free_bytes=None))


def test_what_an_earlier_start_measured_between_parts_is_not_given_up_for_a_bound():
    bound = tuple(replace(stage, pending_bytes=(700.0,)) for stage in MEMORY)
    measured = tuple(
        replace(stage, pending_bytes=(90.0,), unit_bytes=((0.0,),) * len(Kind)) for stage in MEMORY
    )
    known = with_memory(profile(2), bound)
    assert known.sidecar.pending_bytes == (700.0, 700.0)
    known = with_memory(known, measured)
    assert known.sidecar.pending_bytes == (90.0, 90.0)
    assert with_memory(known, bound).sidecar.pending_bytes == (90.0, 90.0)
    assert with_memory(known, MEMORY).sidecar.pending_bytes == (90.0, 90.0)


@pytest.mark.parametrize(
    ("asked", "known", "file", "expected"),
    [
        (BY_MEMORY, MEMORY, None, (4, 1)),
        (None, MEMORY, None, (4, 1)),  # never beyond what is there
        (BY_MEMORY, MEMORY, ((100.0, 100.0), (200.0, 900.0)), (3, 1)),
        (BY_MEMORY, None, ((100.0, 100.0), (200.0, 900.0)), (3, 8)),
        (BY_MEMORY, None, ((100.0, 100.0), (0.0, 0.0)), (2, 1)),  # it runs already
        (BY_MEMORY, None, None, (2, 1)),
        (None, None, ((100.0, 100.0), (0.0, 0.0)), None),  # nobody asked
        (5, MEMORY, None, None),  # the user's word
    ],
)
def test_bytes_limit_what_may_be_planned(asked, known, file, expected):
    sidecar = Sidecar(activation_bytes=file[0], free_bytes=file[1]) if file else None
    given = profile(2, sidecar) if file else with_memory(profile(2), known)
    assert in_flight_limit(asked, framework_order(2, 8), given, known) == expected


def test_what_was_measured_in_chunks_limits_microbatches():
    """A unit of two chunks holds 50; 5 fit on stage 0: a job plans 2.5 microbatches in flight."""
    learned = tuple(StageMemory(3, 1000, room, (50.0, 50.0)) for room in (125.0, 0.0))
    assert in_flight_limit(None, framework_order(2, 8, 2), profile(2), learned) == (2.5, 1.5)


def test_without_a_cuda_device_there_is_no_memory_to_measure():
    if torch.cuda.is_initialized():
        pytest.skip("a CUDA device is in use")
    assert device_memory() is None


def test_cuda_memory_reads_the_allocators_counters(monkeypatch):
    """By their names in torch's nested statistics; a block that a stream still uses is not free."""

    stats = {
        "allocated_bytes": {"all": {"current": 700, "peak": 800}},
        "active_bytes": {"all": {"current": 730, "peak": 850}},
        "inactive_split_bytes": {"all": {"current": 50, "peak": 60}},
    }
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda.memory, "memory_stats_as_nested_dict", {3: stats}.__getitem__)
    monkeypatch.setattr(torch.cuda, "memory_reserved", {3: 900}.__getitem__)
    monkeypatch.setattr(torch.cuda, "mem_get_info", {3: (4_000, 8_000)}.__getitem__)
    reset = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset.append)
    memory = device_memory()
    assert memory.read() == Reading(allocated_bytes=700, peak_bytes=800, unusable_bytes=80)
    assert memory.capacity_bytes() == 4_900  # others on the device hold the rest
    memory.reset_peak()
    assert reset == [3]


def test_an_allocator_that_counts_nothing_leaves_memory_unknown(monkeypatch, caplog):
    def refuse(device):
        raise RuntimeError("it does not support getDeviceStats")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda.memory, "memory_stats_as_nested_dict", refuse)
    assert device_memory() is None
    assert "getDeviceStats" in caplog.text


def test_cuda_memory_that_is_cached_already_is_not_taken_again(monkeypatch):
    """The allocator gives a piece that it holds before it asks the driver."""
    pieces, asked, driver = [40, 300], [], 500
    reserved = 1_000

    def empty(count, *, dtype, device):
        nonlocal reserved, driver
        assert (dtype, device) == (torch.uint8, 0)
        asked.append(count)
        for piece in pieces:
            if piece >= count:
                pieces.remove(piece)
                return [0]
        if count > driver:
            raise torch.OutOfMemoryError
        reserved, driver = reserved + count, driver - count
        return [0]

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved)
    monkeypatch.setattr(torch, "empty", empty)
    memory = CudaMemory()
    assert memory.reserve(900)
    assert not asked
    assert memory.reserve(1_200)
    assert (asked, reserved, driver) == ([200, 200], 1_200, 300)
    assert not memory.reserve(1_501)
    assert memory.reserve(1_500)
