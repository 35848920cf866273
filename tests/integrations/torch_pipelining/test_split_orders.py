"""Orders that split backwards, by torch's own runtime: the same bits, or whole backwards."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import attached_ranks
import pytest
from attached_ranks import Case
from planning.core_cases import random_orders
from presets import preset_profile

from envpipe_megatron.core.kinds import Kind, Unit
from envpipe_megatron.core.schedule import Placement, Schedule

pytestmark = pytest.mark.xdist_group("pipeline")


def random_split(rng: random.Random, ranks: int, case: Case, placement: Placement) -> Schedule:
    """Any order with each kind in the microbatches' order, some backwards of which are whole."""
    found = random_orders(
        rng, ranks, case.microbatches, case.chunks, split=True, placement=placement
    )
    return Schedule(
        "random", case.microbatches, case.chunks, tuple(in_turn(rng, o) for o in found), placement
    )


def in_turn(rng: random.Random, order: tuple[Unit, ...]) -> tuple[Unit, ...]:
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
    "name", ["Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleZBVZeroBubble"]
)
@pytest.mark.parametrize("ranks", [2, 4])
def test_random_orders_have_the_bits_of_torchs_own(request, name, ranks):
    pool = request.getfixturevalue("pool" if ranks == 4 else "two_ranks")
    case = Case(name, 8, chunks=1 if name == "Schedule1F1B" else 2)
    placement = Placement.V if name in attached_ranks.V_SHAPED else Placement.LOOPED
    rng = random.Random(ranks)
    orders = [random_split(rng, ranks, case, placement) for _ in range(6)]
    for bits in pool.run(attached_ranks.run_orders, case, orders):
        assert all(each == bits[0] for each in bits[1:])


def profile_of_parts(path: Path, ranks: int) -> Path:
    """A profile as if it were measured, where splitting costs nothing."""
    times_s = {Kind.FORWARD: 0.03, Kind.BACKWARD: 0.06}
    times_s |= dict.fromkeys((Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT), 0.03)
    preset_profile("a100-sxm", ranks, times_s, (810, 1005, 1200)).write(path)
    return path


def settings(path: Path, ranks: int) -> dict[str, object]:
    return {"baseline_steps": 4, "profile": profile_of_parts(path, ranks)}


@pytest.mark.parametrize(("name", "chunks"), [("Schedule1F1B", 1), ("ScheduleInterleaved1F1B", 2)])
def test_planned_orders_split_backwards(trained, tmp_path, name, chunks):
    case = Case(name, 8, chunks, steps=14, settings=settings(tmp_path / "profile.csv", 4))
    _, ours = trained(case)
    plan = ours[0]["plan"]
    print(plan.name, plan.labels())
    assert plan.split
    for stage, rank in enumerate(ours):
        assert rank["level"] == "order"
        assert rank["executed"] == plan.labels()[stage]


@pytest.mark.parametrize(
    ("case", "why"),
    [
        (Case("Schedule1F1B", weights="twice"), "a weight is used more than once"),
        (Case("Schedule1F1B", weights="own"), "weights are used by OwnLinearBackward"),
        (Case("Schedule1F1B", weights="again"), "torch would compute Linear again"),
        (Case("Schedule1F1B", replicated="fsdp"), "FSDP"),
        (Case("Schedule1F1B", replicated="ddp"), "DistributedDataParallel"),
    ],
)
def test_backwards_stay_whole(trained, pool, two_ranks, tmp_path, case, why):
    ranks = pool if case.replicated else two_ranks
    given = settings(tmp_path / "profile.csv", 2)
    _, ours = trained(replace(case, steps=10, settings=given), ranks=ranks)
    assert why in " ".join(ours[0]["said"])
    assert not ours[0]["plan"].split
    assert {rank["level"] for rank in ours} == {"order"}
