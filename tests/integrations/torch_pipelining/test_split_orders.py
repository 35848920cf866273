"""Orders that split backwards, by torch's own runtime: the same bits, or whole backwards."""

import random
import re
from collections import Counter
from dataclasses import replace

import attached_ranks
import pytest
from attached_ranks import Case
from on_request import asked_for, on_request
from planning.core_cases import random_orders
from presets import preset_profile

from envpipe_megatron.core.kinds import Kind
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.orders.builders import half_split, split_in_place
from envpipe_megatron.core.schedule import Placement, Schedule

pytestmark = pytest.mark.xdist_group("torch")

#: Of the test of turns: no clock is set.
SETTINGS = {"baseline_steps": 2, "gpu_control": "none"}
#: Of the random orders; the others run on request.
IN_CI = {("Schedule1F1B", 2), ("ScheduleZBVZeroBubble", 2), ("ScheduleInterleaved1F1B", 4)}


def random_split(rng, ranks, case, placement):
    """Any order with each kind in the microbatches' order, some backwards of which are whole."""
    found = random_orders(
        rng, ranks, case.microbatches, case.chunks, split=True, placement=placement
    )
    return Schedule(
        "random", case.microbatches, case.chunks, tuple(in_turn(rng, o) for o in found), placement
    )


def in_turn(rng, order):
    """The units numbered as they come: what they need still comes before them."""
    counted: Counter[object] = Counter()
    units = []
    for unit in order:
        units.append(replace(unit, microbatch=counted[unit.kind, unit.chunk]))
        counted[unit.kind, unit.chunk] += 1
    return tuple(
        replace(unit, combined=unit.kind is Kind.INPUT_GRADIENT and rng.random() < 0.5)
        if after == replace(unit, kind=Kind.WEIGHT_GRADIENT)
        else unit
        for unit, after in zip(units, [*units[1:], None], strict=True)
    )


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        pytest.param(name, ranks, marks=() if (name, ranks) in IN_CI else on_request("PIPELINE"))
        for name in ("Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleZBVZeroBubble")
        for ranks in (2, 4)
    ],
)
def test_random_orders_have_the_bits_of_torchs_own(request, name, ranks):
    pool = request.getfixturevalue("pool" if ranks == 4 else "two_ranks")
    case = Case(name, 8, chunks=1 if name == "Schedule1F1B" else 2)
    placement = Placement.V if name in attached_ranks.V_SHAPED else Placement.LOOPED
    rng = random.Random(ranks)
    count = 300 if asked_for("PIPELINE") else 5
    orders = [random_split(rng, ranks, case, placement) for _ in range(count)]
    for bits in pool.run(attached_ranks.run_orders, case, orders):
        assert all(each == bits[0] for each in bits[1:])


def test_a_schedule_that_runs_without_autograd_does_so_in_any_order(two_ranks):
    case = Case("ScheduleInterleaved1F1B", 4, chunks=2)
    order = random_split(random.Random(1), 2, case, Placement.LOOPED)
    for bits in two_ranks.run(attached_ranks.run_orders_without_autograd, case, [order]):
        assert bits[1] == bits[0]


def test_stages_in_a_v_run_on_where_torch_refuses_an_order(two_ranks):
    case = Case("ScheduleZBVZeroBubble", 8, chunks=2)
    order = random_split(random.Random(1), 2, case, Placement.V)
    for bits in two_ranks.run(attached_ranks.run_orders, case, [order], True):
        assert bits[1] == bits[0]


def test_weight_gradients_in_another_order_are_noticed(two_ranks):
    order = split_in_place(builders.one_f_one_b(2, 8), 8)
    stages = []
    for units in order.stages:
        *others, last = [
            [unit for unit in units if (unit.kind is Kind.WEIGHT_GRADIENT) is late]
            for late in (False, True)
        ]
        stages.append((*others[0], *reversed(last)))
    turned = replace(order, stages=tuple(stages))
    for own, bits in two_ranks.run(attached_ranks.run_orders, Case("Schedule1F1B", 8), [turned]):
        assert own != bits


def test_stages_that_are_wrapped_behind_attach_keep_backwards_whole(two_ranks, tmp_path):
    case = Case("Schedule1F1B")
    for notes in two_ranks.run(attached_ranks.wrap_behind_attach, case, tmp_path):
        assert "with DistributedDataParallel" in " ".join(notes)


def test_a_trial_finds_what_the_allocator_had_cached(two_ranks, tmp_path):
    """As behind a checkpoint that was loaded: the driver is asked what is free."""
    first, last = two_ranks.run(attached_ranks.look_at_memory, Case("Schedule1F1B"), tmp_path)
    assert (first, last) == (["emptied"], ["emptied", "looked"])


@pytest.mark.parametrize("full", [None, 3])
def test_ranks_of_a_stage_try_parts_together_or_not_at_all(trained, full):
    """One that lacks memory would leave the other waiting for its gradients."""
    settings = {"baseline_steps": 2, "gpu_control": "none"}
    case = Case("Schedule1F1B", replicated="slices", full=full, steps=4, settings=settings)
    _, ours = trained(case)
    notes = " ".join(ours[0]["notes"])
    assert ("Backwards stay whole" in notes) == (full is not None)
    assert ("OutOfMemoryError" in notes) == (full is not None)


def test_a_shared_weight_keeps_backwards_whole(trained, two_ranks, tmp_path):
    """Though the profile says what parts take, and that splitting costs nothing."""
    times_s = {Kind.FORWARD: 0.03, Kind.BACKWARD: 0.06}
    times_s |= dict.fromkeys((Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT), 0.03)
    preset_profile("a100-sxm", 2, times_s, (810, 1005, 1200)).write(tmp_path / "profile.csv")
    settings = {"baseline_steps": 3, "profile": tmp_path / "profile.csv"}
    case = Case("Schedule1F1B", weights="twice", steps=12, settings=settings)
    _, ours = trained(case, ranks=two_ranks)
    assert "Backwards stay whole: a weight is used more than once" in ours[0]["said"]
    assert not ours[0]["plan"].split
    assert {rank["level"] for rank in ours} == {"order"}


@pytest.mark.parametrize(
    "name",
    [
        "Schedule1F1B",
        pytest.param("ScheduleInterleaved1F1B", marks=on_request("PIPELINE")),
        pytest.param("ScheduleZBVZeroBubble", marks=on_request("PIPELINE")),
        pytest.param("ScheduleDualPipeV", marks=on_request("PIPELINE")),
    ],
)
def test_turning_from_order_to_order_keeps_the_bits(trained, two_ranks, name):
    """The own order, half of it split, others, and again, at any step; evaluations between."""
    in_v = name in attached_ranks.V_SHAPED
    case = Case(name, 8, chunks=1 if name == "Schedule1F1B" else 2, settings=SETTINGS)
    rng = random.Random(name)
    orders = [
        random_split(rng, 2, case, Placement.V if in_v else Placement.LOOPED) for _ in range(2)
    ]
    if not in_v:
        own = builders.interleaved(2, 8, 2, 2) if case.chunks > 1 else builders.one_f_one_b(2, 8)
        orders += [own, half_split(own), own]
    long = asked_for("PIPELINE")
    turns = [(rng.choice(orders), rng.choice((1, 1, 2, 3))) for _ in range(40 if long else 8)]
    evaluated = () if in_v else (5, 9)
    steps = 4 + sum(count for _, count in turns)
    case = replace(case, turns=turns, steps=steps, evaluated=evaluated)
    _, ours = trained(case, ranks=two_ranks)
    assert {rank["level"] for rank in ours} == {"order"}
    turned = re.findall(r"turns to (\S+)", " ".join(ours[0]["said"]))
    # A window with a step behind an evaluation, which runs as by torch, is run again.
    assert turned == [order.name for order, _ in 2 * turns][: len(turned)]
    assert len(turned) > len(turns) * 2 / 3
