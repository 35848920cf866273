"""What a job measures beside its profile: with half of its backwards split, and between stages."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from one_rank import CLOCKS, MICROBATCHES, OWN, STAGES, Memory, Rank, finish, profile_of

from envpipe_megatron.core.kinds import WHOLE, Kind
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.orders.zero_bubble import half_split, zero_bubble
from envpipe_megatron.core.profile_rows import SplitBackward
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.formats.energy import Phase
from envpipe_megatron.runtime.job import measuring
from envpipe_megatron.runtime.job.measuring import (
    known_and_measured,
    measure_p2p_latency_s,
    try_parts,
)
from envpipe_megatron.runtime.job.options import JobOptions
from envpipe_megatron.runtime.job.parts import note
from envpipe_megatron.runtime.memory.peak import MemoryFullError, Watch

AUTO = JobOptions(num_microbatches=MICROBATCHES, why_whole="")


def measured_by(own: Schedule = OWN, **given: Any) -> str:
    rank: Any = Rank(replace(AUTO, **given))
    profile, measured = known_and_measured(rank, own, [])
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
        rank: Any = Rank(replace(AUTO, profile=named))
        profile, measured = known_and_measured(rank, OWN, [])
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
        self.calls.append(("learn", schedule.name, ran.name, self.watch))


def test_what_parts_hold_is_watched_before_they_are_measured():
    rank: Any = Rank(AUTO, memory=OfParts())
    rank.memory.watch = Watch.PEAK
    trying = try_parts(rank, OWN, half_split(OWN))
    order = next(trying)
    assert (order.phase, order.schedule.name) == (Phase.PROFILE, "1f1b-split")
    assert (order.frequency_mhz == max(CLOCKS)).all()
    assert rank.memory.watch is Watch.UNITS
    assert finish(trying).name == "1f1b-split"
    assert rank.memory.calls == [("learn", "1f1b", "1f1b-split", Watch.UNITS)]
    assert (rank.memory.predicted, rank.memory.watch) == (["1f1b-split"], Watch.PEAK)
    assert not rank.state.whole


def test_without_memory_for_parts_backwards_stay_whole():
    rank: Any = Rank(AUTO)
    rank.memory.predicting = MemoryFullError("Too little of a test")
    assert finish(try_parts(rank, OWN, half_split(OWN))) is OWN
    assert rank.state.whole == "Too little of a test"
    assert rank.state.notes == ("Backwards stay whole: Too little of a test",)
    assert known_and_measured(rank, OWN, [])[1] is OWN
    note(rank, "The framework's own order: of a test", "Later")
    note(rank)
    note(rank, "The framework's own order: of a test")
    assert rank.state.notes == (
        "Backwards stay whole: Too little of a test",
        "Later",
        "The framework's own order: of a test",
    )


@pytest.mark.parametrize("stages", [2, 3, 4, 5])
def test_no_transfer_waits_for_one_behind_it_on_a_single_communicator(stages):
    """As if a host stood still in each until its neighbour came to the same."""
    left = [transfers_of(stage, stages) for stage in range(stages)]
    while any(left):
        first = {stage: transfers[0] for stage, transfers in enumerate(left) if transfers}
        pairs = [
            (stage, peer)
            for stage, (way, peer, kind) in first.items()
            if way == "send" and first.get(peer) == ("receive", stage, kind)
        ]
        assert pairs, first
        for stage in pairs[0]:
            del left[stage][0]


def transfers_of(stage: int, stages: int) -> list[tuple[str, int, Kind]]:
    """What a stage sends and receives, with which neighbour, in its order."""
    done: list[tuple[str, int, Kind]] = []
    back = {Kind.FORWARD: -1, Kind.BACKWARD: 1}
    channel: Any = SimpleNamespace(
        expect=lambda counts, specs: None,
        send=lambda unit, _: done.append(("send", stage - back[unit.kind], unit.kind)),
        receive=lambda unit: done.append(("receive", stage + back[unit.kind], unit.kind)),
        end_step=lambda: None,
    )
    executor: Any = SimpleNamespace(now_s=lambda: 0.0, wait_for_messages=lambda: None)
    spec = SimpleNamespace(make=lambda zeros: None)
    specs: Any = SimpleNamespace(sends=dict.fromkeys(WHOLE, spec))
    job = {"stage": stage, "num_stages": stages, "channel": channel, "specs": specs}
    measure_p2p_latency_s(SimpleNamespace(**job, executor=executor))  # type: ignore[arg-type]
    return done
