"""The phases of one rank, by hand: what runs in them, and what is watched, said and written."""

from dataclasses import replace
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from one_rank import MICROBATCHES, OWN, STAGES, Rank, finish, profile_of
from plain_stages import SPECS

from envpipe_megatron.core.orders import builders
from envpipe_megatron.formats.energy import Phase
from envpipe_megatron.gpu.presets import load_preset, sweep_range
from envpipe_megatron.runtime.channel.collectives import DegradedError
from envpipe_megatron.runtime.execution.stage_run import IterationOrder, constant_order
from envpipe_megatron.runtime.job import phases
from envpipe_megatron.runtime.job.measuring import known_profile
from envpipe_megatron.runtime.job.options import JobOptions, Level
from envpipe_megatron.runtime.job.phases import run_phases
from envpipe_megatron.runtime.memory.peak import MemoryFullError

ENVELOPE = JobOptions(
    num_microbatches=MICROBATCHES, type="envelope", reconfigure="default", baseline_steps=3
)
BASELINE = JobOptions(num_microbatches=MICROBATCHES, type="baseline", baseline_steps=1)


class Record(str):
    """Stands in for the record of an iteration."""

    whole = True


def run(rank: Any, count: int) -> list[IterationOrder]:
    """So many iterations."""
    going, record, ran = run_phases(rank), None, []
    for number in range(count):
        order = going.send(record)  # type: ignore[arg-type]  # a generator begins with None
        ran.append(order)
        record = Record(f"record {number}")  # type: ignore[assignment]
    return ran


def clocks_of(order: IterationOrder) -> set[int]:
    return set(order.frequency_mhz.ravel().tolist())


@pytest.mark.parametrize("own", [False, True])
def test_messages_have_memory_on_all_ranks_before_a_unit_runs(own):
    """Else an integration lets its framework run the step, and goes on at a lower level."""
    asked = []
    channel = SimpleNamespace(make_room=lambda *what: asked.append(what) or own)
    rank = Rank(BASELINE, channel=channel, other=lambda own: own not in (True, False) and own)
    for _ in range(2):  # the next step would ask again
        with pytest.raises(MemoryFullError, match=r"no memory for messages .* '1f1b'"):
            run(rank, 1)
    assert [(order.name, specs) for order, specs in asked] == [("1f1b", SPECS)] * 2


def test_a_baseline_keeps_the_frameworks_order_at_the_highest_clock():
    rank = Rank(replace(BASELINE, baseline_steps=2))
    ran = run(rank, 7)
    assert [(order.phase, order.watched) for order in ran] == [
        (Phase.WARMUP, False),
        (Phase.WARMUP, True),
        *[(Phase.STEADY, False)] * 2,
        (Phase.STEADY, True),
        *[(Phase.STEADY, False)] * 2,
    ]
    for order in ran:
        assert order.schedule.stages == OWN.stages
        assert clocks_of(order) == {1410}
    assert rank.memory.calls == [("learn", "1f1b"), ("compare",)]
    assert rank.memory.predicted == ["1f1b"]
    assert rank.said == ["warm-up: 2 iterations of 1f1b at 1410 MHz", "steady: 1f1b"]


def test_a_peak_of_some_units_is_not_compared():
    """Those that follow one that came otherwise are not looked at."""
    rank = Rank(BASELINE)
    going, record, watched = run_phases(rank), None, []
    for number in range(8):
        order = going.send(record)  # type: ignore[arg-type]
        watched.append(order.watched)
        assert (("compare",) in rank.memory.calls) is (number == 7)
        record = Record(f"record {number}")  # type: ignore[assignment]
        record.whole = number != 3  # type: ignore[attr-defined]
    assert [at for at, looked in enumerate(watched) if looked] == [0, 3, 6]


def test_units_of_a_plan_that_stays_are_timed_where_they_are_recorded():
    ran = run(Rank(replace(BASELINE, baseline_steps=2)), 2 + 250)
    timed = [number for number, order in enumerate(ran[2:]) if order.times_units]
    assert timed == [*range(10), 100, 200]
    assert all(order.times_units for order in ran[:2])
    assert len({id(order.frequency_mhz) for order in ran[2:]}) == 1


@pytest.mark.parametrize("error", [MemoryFullError, DegradedError])
def test_too_little_memory_for_the_own_order_is_said_alone(error):
    rank = Rank(BASELINE)
    rank.memory.predicting = error("Of a test")
    assert run(rank, 3)[-1].phase is Phase.STEADY
    assert "memory: Of a test" in rank.said


GPIPE = builders.gpipe(STAGES, MICROBATCHES)
FILES = {"plan": Path("plan.json"), "profile": Path("profile.csv")}


@pytest.mark.parametrize(
    ("request_", "options", "kept", "saves"),
    [
        (("1f1b", "baseline"), {}, None, False),
        (("1f1b", "baseline"), FILES, None, True),
        (("1f1b", "uniform"), {}, None, True),
        (("gpipe", "baseline"), {}, None, True),
        (("gpipe", "baseline"), {}, GPIPE, False),
        (("1f1b", "baseline"), {}, GPIPE, False),
        (("interleaved", "baseline"), {}, None, False),
        (("envpipe", "baseline"), {}, None, True),
    ],
)
def test_where_nothing_is_saved_nothing_is_measured(monkeypatch, request_, options, kept, saves):
    save = Mock(side_effect=DegradedError("Of a test"))
    monkeypatch.setattr(phases, "_save_energy", save)
    monkeypatch.setattr(phases, "read_files", lambda job: None)
    chunks = 2 if request_[0] == "interleaved" else 1
    scheduling, policy = request_
    given = {"type": policy, "scheduling": scheduling, "num_chunks": chunks, **options}
    rank = Rank(replace(BASELINE, baseline_steps=3, **given), own_order=kept)
    rank.state.plan = "plan"  # type: ignore[assignment]
    order = run(rank, 4)[-1]
    assert (order.phase, clocks_of(order)) == (Phase.STEADY, {1410})
    assert [records for (_, records), _ in save.call_args_list] == (
        [["record 0", "record 1", "record 2"]] if saves else []
    )
    notes = "The framework's own order, at the highest clock: Of a test"
    assert rank.state.notes == ((notes,) if saves else ())
    assert (notes in rank.said) is saves
    assert rank.state.plan == (None if saves else "plan")
    assert len(rank.memory.predicted) == 1


def test_one_profile_serves_all_batches_that_have_no_other_units():
    rank: Any = Rank(ENVELOPE)
    few, more = (builders.interleaved(STAGES, count, 2, combined=True) for count in (2, 8))
    assert not few.combined[0].any()
    rank.own_order = few
    assert known_profile(rank, []) is None
    made = rank.state.profile = profile_of()
    rank.state.profiled = few
    assert known_profile(rank, []) is made
    rank.own_order = builders.interleaved(STAGES, 8, 2)
    assert known_profile(rank, []) is made
    rank.own_order = more
    assert known_profile(rank, []) is None  # of the first stage's pairs


def test_a_batch_that_cannot_be_planned_leaves_the_others_as_they_are(monkeypatch):
    fails = Mock(side_effect=DegradedError("Of a test"))
    monkeypatch.setattr(phases, "_save_energy", fails)
    rank = Rank(replace(ENVELOPE, baseline_steps=2), batch="m4")
    rank.folder.forget_profile = lambda: pytest.fail("others use it")  # type: ignore[method-assign]
    rank.state.several_sizes = True
    rank.state.notes = ("Of another.",)
    order = run(rank, 3)[-1]
    assert (order.phase, clocks_of(order)) == (Phase.STEADY, {1410})
    note = "The framework's own order, at the highest clock: Of a test"
    assert rank.state.notes == ("Of another.", f"m4: {note}")
    assert note in rank.said


def test_a_loop_that_is_begun_anew_learns_memory_of_its_own_order_again(monkeypatch):
    """Another order, or a batch of another size, may have been watched meanwhile."""
    loops = Mock(side_effect=DegradedError("Of a test"))
    monkeypatch.setattr(phases, "_loop", loops)
    monkeypatch.setattr(phases, "_TRIED_AFTER", 2)
    rank = Rank(replace(BASELINE, type="optimal", baseline_steps=3))
    ran = run(rank, 3 + 2 + phases.WINDOW + 1)
    assert [at for at, order in enumerate(ran) if order.watched] == [2, 4 + phases.WINDOW]
    assert len(loops.call_args_list) == 2


@pytest.mark.parametrize(("plan", "pauses"), [(None, [2, 4, 8]), ("a plan", [2, 2, 2])])
def test_a_loop_that_fails_before_it_has_a_plan_is_begun_anew_ever_later(monkeypatch, plan, pauses):
    """However long it looked: steps of milliseconds are looked at hundreds of times."""
    monkeypatch.setattr(phases, "_TRIED_AFTER", 2)
    monkeypatch.setattr(phases, "WINDOW", 2)
    rank: Any = Rank(replace(BASELINE, type="optimal", baseline_steps=2))

    def looks(job: Any, records: Any) -> Any:
        for _ in range(20):
            rank.state.iteration += 1
            yield constant_order(Phase.PROFILE, job.schedule, 1410)
        rank.state.plan = plan
        raise DegradedError("Of a test")

    monkeypatch.setattr(phases, "_loop", looks)
    ran = run(rank, 100)
    own = [
        len([*them])
        for phase, them in groupby(ran, lambda order: order.phase)
        if phase is Phase.STEADY
    ]
    assert own[:3] == [pause + 2 for pause in pauses]


def test_clocks_that_cannot_be_found_end_profiling_alone():
    rank: Any = Rank(ENVELOPE)
    del rank.gpu.supported_frequencies_mhz
    with pytest.raises(DegradedError, match=r"Stage 0: AttributeError: .*supported"):
        phases._swept_clocks(rank)


def test_clocks_of_another_kind_of_gpu_are_swept_as_it_needs():
    supported = tuple(range(300, 2100, 15))
    rank: Any = Rank(ENVELOPE, supported=supported)
    swept = {None: phases._swept_clocks(rank)}
    assert swept[None] == sweep_range(supported, None)
    rank.gpu.name = "NVIDIA GeForce RTX 3090"
    for name, preset in ((None, "rtx3090"), ("v100", "v100")):
        rank.options = replace(ENVELOPE, gpu=name)
        swept[preset] = phases._swept_clocks(rank)
        assert swept[preset] == sweep_range(supported, load_preset(preset).control)
    assert len(set(swept.values())) == 3
    rank.other = lambda own: not own if isinstance(own, bool) else own
    with pytest.raises(DegradedError, match="different clocks"):
        phases._swept_clocks(rank)
    few: Any = Rank(ENVELOPE, supported=(1410, 1005))
    assert phases._swept_clocks(few) == (1410, 1005)
    few.gpu.supported_frequencies_mhz = (1410,)
    with pytest.raises(DegradedError, match=r"a single clock \(MHz\) \(got 1410\)"):
        phases._swept_clocks(few)


@pytest.mark.parametrize("changes_clock", [False, True])
def test_one_clock_is_looked_for_where_clocks_change(monkeypatch, changes_clock):
    """In a dry run `OneClock` keeps the highest."""
    made: list[Any] = []

    def no_iteration(*arguments: Any) -> Any:
        made.append(arguments[-1])
        yield from ()

    for name in ("_compared", "run_commands"):
        monkeypatch.setattr(phases, name, no_iteration)
    config = replace(BASELINE, type="uniform", level=Level.UNIFORM, max_slowdown=5.0)
    rank: Any = Rank(config, changes_clock=changes_clock)
    finish(phases._one_clock(rank))
    tuner = made[-1].__self__
    assert (tuner.clocks_mhz[0], tuner.follows) == (1410, changes_clock)
