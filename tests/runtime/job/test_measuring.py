"""What a job measures beside its profile: with half of its backwards split, and between stages."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from one_rank import CLOCKS, MICROBATCHES, OWN, STAGES, Memory, Rank, finish, profile_of

from envpipe_megatron.core.kinds import parse_unit
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.orders.builders import half_split, zero_bubble
from envpipe_megatron.core.profile_rows import SplitBackward
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.core.timeline import Timeline
from envpipe_megatron.formats.energy import Phase
from envpipe_megatron.runtime.job import measuring
from envpipe_megatron.runtime.job.measuring import (
    known_and_measured,
    measure_hops_s,
    try_parts,
)
from envpipe_megatron.runtime.job.options import JobOptions
from envpipe_megatron.runtime.job.parts import note
from envpipe_megatron.runtime.memory.peak import MemoryFullError

H200 = Path(__file__).parents[3] / "benchmarks" / "h200"
AUTO = JobOptions(num_microbatches=MICROBATCHES, why_whole="")


def measured_by(own: Schedule = OWN, **given: Any) -> str:
    rank: Any = Rank(replace(AUTO, **given), own)
    profile, measured = known_and_measured(rank, [])
    assert profile is None
    assert measured is own or measured.stages == half_split(own).stages
    return "whole" if measured is own else "half"


def test_half_of_the_backwards_are_split_where_plans_may_split_some():
    assert measured_by() == "half"
    assert measured_by(scheduling="zb-h1", type="uniform") == "half"
    assert measured_by(why_whole="of a test") == "whole"
    assert measured_by(builders.one_f_one_b(STAGES, 2)) == "half"
    assert measured_by(builders.one_f_one_b(STAGES, 1)) == "whole"  # both in one iteration?
    assert measured_by(builders.interleaved(2, 4, 2)) == "half"
    assert measured_by(builders.interleaved(2, 4, 2, combined=True)) == "whole"
    assert measured_by(zero_bubble(STAGES, MICROBATCHES)) == "whole"  # the framework splits them


@pytest.mark.parametrize("schedule", ["1f1b", "envpipe"])
@pytest.mark.parametrize("policy", ["uniform", "envelope", "optimal"])
def test_orders_that_are_whole_by_name_measure_no_parts(schedule, policy):
    assert measured_by(scheduling=schedule, type=policy) == "whole"


@pytest.mark.parametrize("by_file", [False, True])
def test_a_profile_without_parts_is_used_only_where_the_user_gave_it(monkeypatch, by_file):
    named = Path("named.csv") if by_file else None
    for known in (profile_of(), profile_of().with_split_backwards(SplitBackward())):
        monkeypatch.setattr(measuring, "known_profile", lambda *of, known=known: known)
        rank: Any = Rank(replace(AUTO, profile=named), OWN)
        profile, measured = known_and_measured(rank, [])
        if known.assumed is not None:
            assert (profile, measured.stages) == (known, half_split(OWN).stages)
            assert not rank.said
        elif by_file:
            assert (profile, measured) == (known, OWN)
            (note,) = rank.state.notes
            assert note.startswith("Backwards stay whole: named.csv has no rows of input-gradient")
        else:
            assert (profile, measured.stages) == (None, half_split(OWN).stages)
            assert "that is known is not used" in rank.said[0]
            assert not rank.state.notes


class OfParts(Memory):
    def learn(self, schedule: Schedule, specs: Any, ran: Schedule) -> None:  # type: ignore
        self.calls.append(("learn", schedule.name, ran.name))


def test_what_parts_hold_is_watched_before_they_are_measured():
    rank: Any = Rank(AUTO, OWN, memory=OfParts())
    trying = try_parts(rank, half_split(OWN))
    order = next(trying)
    assert (order.phase, order.schedule.name) == (Phase.PROFILE, "1f1b-split")
    assert (order.frequency_mhz == max(CLOCKS)).all()
    assert order.watched
    assert finish(trying).name == "1f1b-split"
    assert rank.memory.calls == [("learn", "1f1b", "1f1b-split")]
    assert rank.memory.predicted == ["1f1b-split"]
    assert not rank.state.whole


def test_without_memory_for_parts_backwards_stay_whole():
    rank: Any = Rank(AUTO, OWN)
    rank.memory.predicting = MemoryFullError("Too little of a test")
    assert finish(try_parts(rank, half_split(OWN))) is OWN
    assert rank.state.whole == "Too little of a test"
    assert rank.state.notes == ("Backwards stay whole: Too little of a test",)
    assert known_and_measured(rank, [])[1] is OWN
    note(rank, "The framework's own order: of a test", "Later")
    note(rank)
    note(rank, "The framework's own order: of a test")
    assert rank.state.notes == (
        "Backwards stay whole: Too little of a test",
        "Later",
        "The framework's own order: of a test",
    )


@pytest.mark.parametrize(
    "order",
    [
        builders.one_f_one_b(4, 6),
        builders.gpipe(4, 6),
        builders.interleaved(4, 8, 2),
        builders.interleaved(4, 8, 2, combined=True),
        half_split(builders.one_f_one_b(4, 6)),
        builders.one_f_one_b(1, 4),
    ],
    ids=lambda order: f"{order.name} of {order.num_stages}",
)
@pytest.mark.parametrize("longest", range(4))
def test_hops_are_seen_from_units_though_stages_share_no_clock(order, longest):
    """Whichever stage is the longest; iterations that did not run whole say nothing."""
    hops_s = (0.003, 0.0, 0.001)[: order.num_stages - 1]
    duration_s = np.where(order.is_backward, 0.06, 0.03)
    duration_s[min(longest, order.num_stages - 1)] *= 1.3
    duration_s[order.combined] = 0.0
    timeline = Timeline(order, duration_s, hops_s)
    begins_s = np.random.default_rng(7).uniform(0.0, 0.5, (2, 5, order.num_stages, 1))
    begins_s[..., 1:] = begins_s[..., :1]  # of replicas and iterations; a stage begins late in all
    spoilt = [(0, 1), (1, 0), (1, 4)]
    records = [
        [
            [
                SimpleNamespace(
                    start_s=timeline.start_s[stage] + begin_s,
                    end_s=timeline.end_s[stage] + begin_s,
                    whole=(replica, number) not in spoilt,
                )
                for number, (begin_s,) in enumerate(begins_s[replica, :, stage])
            ]
            for replica in range(2)
        ]
        for stage in range(order.num_stages)
    ]
    assert hops_by(order, records) == pytest.approx(hops_s, abs=1e-9)
    assert hops_by(order, [[[], []]] * order.num_stages) == (0.0,) * (order.num_stages - 1)


@pytest.mark.parametrize("slow", range(3))
def test_where_a_slow_stage_never_waits_messages_take_what_they_take_elsewhere(slow):
    """Not as long as its inputs lie there: plans would leave no slack to the stage behind it."""
    order = builders.interleaved(4, 8, 2)
    duration_s = np.where(order.is_backward, 0.06, 0.03)
    duration_s[slow] *= 2
    timeline = Timeline(order, duration_s, 0.001)
    records = [
        [[SimpleNamespace(start_s=start_s, end_s=end_s, whole=True)]]
        for start_s, end_s in zip(timeline.start_s, timeline.end_s, strict=True)
    ]
    assert hops_by(order, records) == pytest.approx((0.001,) * 3, abs=1e-9)


@pytest.mark.parametrize(
    "path", sorted(H200.rglob("measured.json")), ids=lambda path: path.parent.name
)
def test_on_two_h200s_hops_are_those_that_messages_to_and_fro_took(path):
    """By single iterations, over NCCL and by one-sided copies; units took 22 to 94 ms."""
    (hop_s,) = json.loads(path.with_name("profile.json").read_text())["p2p_latency_s"]
    for run in json.loads(path.read_text())["runs"]:
        lines = [tuple(map(parse_unit, each["units"].split())) for each in run["timeline"]]
        order = Schedule(run["order"], run["num_microbatches"], 1, tuple(lines))
        records = [
            [
                [
                    SimpleNamespace(
                        start_s=np.array(t["start_s"]), end_s=np.array(t["end_s"]), whole=True
                    )
                ]
            ]
            for t in run["timeline"]
        ]
        assert hops_by(order, records) == pytest.approx((hop_s,), abs=1.5e-4)


def hops_by(order: Schedule, records: Any) -> tuple[float, ...]:
    """Return what all ranks' records, of each replica of each stage, say of hops."""
    said: list[list[Any]] = [[] for _ in records]
    for stage, of_stage in enumerate(records):
        for own in of_stage:
            ranks: Any = SimpleNamespace(
                is_planner=False,
                to_planner=lambda value, merge, stage=stage: said[stage].append(value) or [],
                from_planner=lambda value: [[(0.0,)], None],
            )
            parts: Any = SimpleNamespace(num_stages=len(records), collectives=ranks, schedule=order)
            measure_hops_s(parts, own)
    planner: Any = SimpleNamespace(
        is_planner=True,
        to_planner=lambda value, merge: [merge(parts) for parts in said],
        from_planner=lambda value: value,
    )
    parts = SimpleNamespace(num_stages=len(records), collectives=planner, schedule=order)
    return measure_hops_s(parts, records[0][0])
