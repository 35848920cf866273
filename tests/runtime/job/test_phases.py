"""The phases of one rank, by hand: what runs in them, and what is watched, said and written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from plain_stages import SPECS
from presets import preset_profile

from envpipe_megatron.core.conditions import Conditions
from envpipe_megatron.core.kinds import Kind
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.plan import Plan
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.core.sidecar import Sidecar
from envpipe_megatron.formats.energy import Phase
from envpipe_megatron.gpu.presets import load_preset, sweep_range
from envpipe_megatron.policies.reconfigure import RECONFIGURE_POLICIES, Ended
from envpipe_megatron.runtime.channel.collectives import Collectives
from envpipe_megatron.runtime.execution.orders import IterationOrder
from envpipe_megatron.runtime.going_on import GoesOnError
from envpipe_megatron.runtime.job import phases
from envpipe_megatron.runtime.job.measuring import known_profile
from envpipe_megatron.runtime.job.options import JobOptions, Level
from envpipe_megatron.runtime.job.parts import PhaseParts, SessionState
from envpipe_megatron.runtime.job.phases import run_phases
from envpipe_megatron.runtime.job.restarts import JobFolder
from envpipe_megatron.runtime.memory.peak import MemoryFullError, Watch

CLOCKS = (1005, 1200, 1410)
STAGES, MICROBATCHES = 2, 4
ENVELOPE = JobOptions(
    num_microbatches=MICROBATCHES, type="envelope", reconfigure="default", baseline_steps=3
)
BASELINE = JobOptions(num_microbatches=MICROBATCHES, type="baseline", baseline_steps=1)


def profile_of(stages: int = STAGES) -> Any:
    times_s = {Kind.FORWARD: 0.1, Kind.BACKWARD: 0.2}
    return preset_profile("a100-sxm", stages, times_s, CLOCKS[:2])


class Memory:
    """Notes what is done with it."""

    def __init__(self) -> None:
        self.watch: Any = None
        self.stages: Any = None
        self.calls: list[Any] = []
        self.peaks: list[int | None] = [5, 9, 7]
        self.predicted: list[str] = []
        self.predicting: Exception | None = None

    def learn(self, schedule: Schedule, specs: Any) -> None:
        assert specs is SPECS
        self.calls.append(("learn", schedule.name))
        self.stages = "learned"

    def predict(self, schedule: Schedule) -> None:
        self.predicted.append(schedule.name)
        if self.predicting is not None:
            raise self.predicting

    def peak_bytes(self) -> int | None:
        return self.peaks.pop(0)

    def compare(self, peak: int | None) -> None:
        self.calls.append(("compare", peak))
        self.stages = "compared"


CHANNEL = SimpleNamespace(make_room=lambda order, specs: True, capacity=None)


class Record(str):
    """Stands in for the record of an iteration."""

    whole = True


@dataclass
class Rank:
    """Stage 0 of a job, on one of its two replicas; others say what it says, but for `other`."""

    options: JobOptions
    own_order: Schedule | None = None
    other: Callable[[Any], Any] = lambda own: own
    replica: Callable[[Any], Any] = lambda own: own
    changes_clock: bool = True
    is_planner: bool = True
    supported: tuple[int, ...] = CLOCKS
    memory: Memory = field(default_factory=Memory)
    said: list[str] = field(default_factory=list)
    state: SessionState = field(default_factory=SessionState)
    specs: Any = SPECS
    batch: str = ""
    stage: int = 0
    num_stages: int = STAGES
    num_microbatches: int = MICROBATCHES
    channel: Any = field(default_factory=lambda: CHANNEL)
    executor: Any = "executor"
    energy: Any = field(default_factory=lambda: SimpleNamespace(baselines={}))
    meter: Any = "meter"
    named = PhaseParts.named

    def __post_init__(self) -> None:
        pipeline: Any = SimpleNamespace(
            leads=True, gather=lambda own: [own, self.other(own)], broadcast=lambda own: own
        )
        replicas: Any = SimpleNamespace(leads=True, broadcast=lambda own: own)
        replicas.gather = lambda own: [own, self.replica(own)]
        self.collectives = Collectives(0, pipeline, [replicas], 2)
        self.collectives.is_planner = True  # where files go is what that rank says
        self.gpu = SimpleNamespace(
            name="NVIDIA of a test",
            changes_clock=self.changes_clock,
            supported_frequencies_mhz=self.supported,
        )
        self.folder = JobFolder(self.options.output, self.collectives)
        self.collectives.is_planner = self.is_planner
        self.clock = SimpleNamespace(error=None)
        self.say = self.said.append
        self.background = lambda: "background"

    def run(self, count: int) -> list[tuple[IterationOrder, Any]]:
        """So many iterations, and what was watched in each."""
        job: Any = self
        going, record, ran = run_phases(job), None, []
        for number in range(count):
            order = going.send(record)  # type: ignore[arg-type]  # a generator begins with None
            ran.append((order, self.memory.watch))
            record = Record(f"record {number}")  # type: ignore[assignment]
        return ran


def clocks_of(order: IterationOrder) -> set[int]:
    return set(order.frequency_mhz.ravel().tolist())


@pytest.mark.parametrize("own", [False, True])
def test_messages_have_memory_on_all_ranks_before_a_unit_runs(own):
    """Else an integration lets its framework run the step, and goes on at a lower level."""
    asked = []
    channel = SimpleNamespace(make_room=lambda *what: asked.append(what) or own)
    rank = Rank(
        BASELINE,
        channel=channel,
        other=lambda own: False,
    )
    for _ in range(2):  # the next step would ask again
        with pytest.raises(MemoryFullError, match=r"no memory for messages .* '1f1b'"):
            rank.run(1)
    assert [(order.name, specs) for order, specs in asked] == [("1f1b", SPECS)] * 2
    kept = builders.one_f_one_b(STAGES, MICROBATCHES)
    Rank(
        BASELINE,
        kept,
        channel=channel,
    ).run(1)
    assert len(asked) == 2  # its framework sends the messages itself


def test_a_baseline_keeps_the_frameworks_order_at_the_highest_clock():
    rank = Rank(replace(BASELINE, baseline_steps=2))
    ran = rank.run(7)
    assert [(order.phase, watched) for order, watched in ran] == [
        (Phase.WARMUP, Watch.PEAK),
        (Phase.WARMUP, Watch.UNITS),
        *[(Phase.STEADY, Watch.PEAK)] * 3,
        *[(Phase.STEADY, Watch.NOTHING)] * 2,
    ]
    for order, _ in ran:
        assert order.schedule.stages == builders.one_f_one_b(STAGES, MICROBATCHES).stages
        assert clocks_of(order) == {1410}
    assert rank.memory.calls == [("learn", "1f1b"), ("compare", 9)]
    assert rank.memory.predicted == ["1f1b"]
    assert rank.said == ["warm-up: 2 iterations of 1f1b at 1410 MHz", "steady: 1f1b"]


def test_units_of_a_plan_that_stays_are_timed_where_they_are_recorded():
    ran = Rank(replace(BASELINE, baseline_steps=2)).run(2 + 250)
    timed = [number for number, (order, _) in enumerate(ran[2:]) if order.times_units]
    assert timed == [*range(10), 100, 200]
    assert all(order.times_units for order, _ in ran[:2])
    assert len({id(order.frequency_mhz) for order, _ in ran[2:]}) == 1


@pytest.mark.parametrize("peaks", [[None, 4, 3], [None] * 3])
def test_peaks_that_nobody_knows_are_not_compared(peaks):
    rank = Rank(BASELINE)
    rank.memory.peaks, rank.memory.stages = [*peaks], "known"
    rank.run(5)
    assert rank.memory.calls == [("compare", 4 if peaks[1] else None)]


@pytest.mark.parametrize("error", [MemoryFullError, GoesOnError])
def test_too_little_memory_for_the_own_order_is_said_alone(error):
    rank = Rank(BASELINE)
    rank.memory.predicting = error("Of a test")
    assert rank.run(3)[-1][0].phase is Phase.STEADY
    assert "memory: Of a test" in rank.said


def test_chunks_and_orders_that_are_kept_warm_up_as_they_will_run():
    chunks = replace(BASELINE, scheduling="interleaved", num_chunks=2)
    warmup, _ = Rank(chunks).run(1)[0]
    assert warmup.schedule.stages == builders.interleaved(STAGES, MICROBATCHES, 2).stages
    kept = builders.gpipe(STAGES, MICROBATCHES)
    warmup, _ = Rank(chunks, own_order=kept).run(1)[0]
    assert warmup.schedule is kept


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
    asked = []

    def save(job: Any, schedule: Schedule, records: Any) -> Any:
        asked.append(records)
        raise GoesOnError("Of a test")
        yield

    monkeypatch.setattr(phases, "_save_energy", save)
    monkeypatch.setattr(phases, "check_files", lambda job: None)
    chunks = 2 if request_[0] == "interleaved" else 1
    scheduling, policy = request_
    given = {"type": policy, "scheduling": scheduling, "num_chunks": chunks, **options}
    rank = Rank(replace(BASELINE, baseline_steps=3, **given), own_order=kept)
    rank.state.plan = "plan"  # type: ignore[assignment]
    order, _ = rank.run(4)[-1]
    assert (order.phase, clocks_of(order)) == (Phase.STEADY, {1410})
    assert asked == ([["record 0", "record 1", "record 2"]] if saves else [])
    notes = "The framework's own order, at the highest clock: Of a test"
    assert rank.state.notes == ((notes,) if saves else ())
    assert (notes in rank.said) is saves
    assert rank.state.plan == (None if saves else "plan")
    assert len(rank.memory.predicted) == 1


def plan_of(clock: int = 1200) -> Plan:
    order = builders.envpipe(STAGES, MICROBATCHES, [2, 0])
    frequency = np.full(order.is_backward.shape, clock)
    return Plan("envelope", order, frequency, profile_of(), Conditions((80.0,) * STAGES))


@pytest.fixture
def saving(monkeypatch) -> Any:
    """What is known, planned and reconfigured, by hand; a known plan is where one is put."""
    parts = SimpleNamespace(known=None, calls=[])

    def profile(job: Any, schedule: Schedule, records: Any) -> Any:
        assert schedule.name == "1f1b"
        assert "record 0" not in records
        return profile_of(), schedule

    def known(job: Any, profile: Any, clocks_mhz: Any) -> Any:
        parts.calls.append((profile, clocks_mhz))
        return parts.known

    def run(job: Any, schedule: Schedule, clocks_mhz: Any, records: Any, begin: Any) -> Any:
        assert clocks_mhz == CLOCKS
        what, *given = begin("warm-up")
        parts.calls.append((schedule.name, records, given))
        order = yield "tuning"
        planned = (plan_of(), ("A note.",)), (plan_of(1410), 7, Ended.ENVELOPE)
        return planned[what == "reconfigured"], order

    for name in ("planned_beside", "reconfigured"):
        monkeypatch.setattr(phases, name, lambda *given, name=name: (name, *given))

    monkeypatch.setattr(phases, "check_files", lambda job: None)
    monkeypatch.setattr(phases, "known_and_measured", profile)
    monkeypatch.setattr(phases, "given_plan", known)
    monkeypatch.setattr(phases, "plan_online", lambda job, profile: (profile, "asked"))
    monkeypatch.setattr(phases, "by_planner", lambda collectives, make: make())
    monkeypatch.setattr(phases, "check_plan", lambda job, plan, clocks_mhz: None)
    monkeypatch.setattr(phases, "make_room", lambda job, plan: parts.calls.append(plan))
    monkeypatch.setattr(phases, "run_commands", run)
    return parts


@pytest.mark.parametrize("is_known", [False, True])
def test_a_plan_is_reconfigured_where_it_is_new(saving, tmp_path, is_known):
    request = replace(ENVELOPE, reconfigure="balanced")
    saving.known = plan_of() if is_known else None
    both = {set: lambda own: own - {1200}}
    rank = Rank(
        replace(request, baseline_steps=2, output=tmp_path),
        replica=lambda own: both.get(type(own), lambda same: same)(own),
        other=lambda own: own - {1005} if isinstance(own, set) else own,
    )
    *_, (order, _) = rank.run(3 if is_known else 5)
    clocks = [{1005, 1410}, {1410}]
    (profile, clocks_mhz), *made = saving.calls
    assert (profile, clocks_mhz) == (profile_of(), clocks)
    plan = plan_of(1200 if is_known else 1410)
    assert (order.phase, order.schedule) == (Phase.STEADY, plan.schedule)
    assert (order.frequency_mhz == plan.frequency_mhz).all()
    assert rank.state.plan.to_json() == plan.to_json()
    assert rank.state.profile == profile_of()
    if is_known:
        assert not made
        assert rank.state.notes == ()
        assert rank.state.reconfigure_ended is None
        return
    (name, records, planner), with_memory, (_, measured, reconfigurer) = made
    assert (name, records, measured) == ("1f1b", ["record 1"], ["record 1"])
    assert planner == ["background", (profile_of(), "asked"), "warm-up"]
    started, *others = reconfigurer
    assert with_memory.to_json() == started.to_json() == plan_of().to_json()
    own = builders.one_f_one_b(STAGES, MICROBATCHES)
    policy = RECONFIGURE_POLICIES["balanced"]
    assert others == [policy, own, clocks, "warm-up"]
    assert rank.state.notes == ("A note.",)
    assert (rank.state.reconfigure_steps, rank.state.reconfigure_ended) == (7, Ended.ENVELOPE)
    assert rank.said[-4:] == [
        "A note.",
        "reconfigure: balanced, extra forwards [2, 0]",
        f"reconfigure: ended after 7 steps, since {Ended.ENVELOPE.value}",
        "steady: envpipe",
    ]


def test_one_iteration_is_warm_up_enough_to_plan_beside(saving):
    rank = Rank(replace(ENVELOPE, baseline_steps=1))
    rank.state.profile = profile_of()
    *_, (order, _) = rank.run(3)
    assert order.phase is Phase.STEADY
    assert [call[1] for call in saving.calls[1:2]] == [["record 0"]]


@pytest.mark.parametrize(
    ("options", "is_planner", "is_known", "left"),
    [
        ({}, True, False, True),
        ({}, False, False, False),
        (FILES, True, True, True),
        ({**FILES, "plan": "own"}, True, True, False),
        ({**FILES, "plan": "own"}, True, False, True),
    ],
)
@pytest.mark.usefixtures("written_at_once")
def test_the_plan_is_left_where_it_is_not_yet(
    saving, tmp_path, options, is_planner, is_known, left
):
    if options.get("plan") == "own":
        options = {**options, "plan": tmp_path / "plan.json"}
    saving.known = plan_of() if is_known else None
    config = replace(ENVELOPE, baseline_steps=2, output=tmp_path, **options)
    Rank(config, is_planner=is_planner).run(3 if is_known else 4)
    assert (tmp_path / "plan.json").exists() is left


@dataclass(frozen=True)
class Known:
    """What a stage's memory was measured to be."""

    activation_bytes: float
    free_bytes: float
    pending_bytes: tuple[float, ...] | None = None
    spare_bytes: tuple[float, ...] | None = None


class Measured(Memory):
    def learn(self, schedule: Schedule, specs: Any) -> None:
        super().learn(schedule, specs)
        self.stages = (Known(10.0, 100.0), Known(20.0, 200.0))


def finish(going: Any) -> Any:
    """What a phase returns that runs no iteration."""
    with pytest.raises(StopIteration) as ended:
        next(going)
    return ended.value.value


@pytest.fixture
def measuring(monkeypatch) -> Any:
    """What surrounds the units, by hand; and commands that find a profile with what was known."""
    parts = SimpleNamespace()

    def run_commands(*arguments: Any) -> Any:
        *parts.ran, begin = arguments
        facts = parts.known = begin.args[0].facts
        parts.begins = begin.func
        return replace(profile_of(), sidecar=facts), "the last order"
        yield

    def hop(*arguments: Any) -> float:
        parts.hop = arguments
        return 0.25

    monkeypatch.setattr(phases, "run_commands", run_commands)
    monkeypatch.setattr(phases, "measure_p2p_latency_s", hop)
    return parts


@pytest.mark.parametrize("is_planner", [True, False])
@pytest.mark.usefixtures("written_at_once")
def test_an_online_profile_knows_what_surrounds_the_units(measuring, tmp_path, is_planner):
    config = replace(
        ENVELOPE,
        sidecar=Sidecar(tensor_parallel=1, sequence_length=77),
        profile_steps=3,
        window_s=4.0,
        output=tmp_path,
    )
    # The other replica's hop takes thrice as long, that of the next stage nothing.
    rank: Any = Rank(
        config,
        replica=lambda own: 3 * own if isinstance(own, float) else own,
        other=lambda own: 0.0 if isinstance(own, float) else own,
        memory=Measured(),
        is_planner=is_planner,
    )
    schedule = replace(builders.one_f_one_b(STAGES, MICROBATCHES))
    profile = finish(phases._profile(rank, schedule, schedule, ["a record"]))
    assert measuring.known == Sidecar(
        gpu="NVIDIA of a test", tensor_parallel=1, sequence_length=77, p2p_latency_s=(0.5,)
    )
    assert measuring.hop == (0, STAGES, CHANNEL, SPECS, "executor")
    assert measuring.ran == [rank, schedule, (1410, 1200, 1005), ["a record"]]
    assert measuring.begins is phases.measured_profile
    assert profile.sidecar.free_bytes == (100.0, 200.0)
    assert rank.memory.calls == [("learn", "1f1b")]
    assert (tmp_path / "profile.csv").exists() is is_planner


def test_a_warm_up_of_one_iteration_is_followed_by_one_that_counts(measuring):
    rank: Any = Rank(replace(ENVELOPE, baseline_steps=1), memory=Measured())
    own = builders.one_f_one_b(STAGES, MICROBATCHES)
    going = phases._profile(rank, own, own, [])
    order = next(going)
    assert (order.phase, clocks_of(order)) == (Phase.PROFILE, {1410})
    with pytest.raises(StopIteration):
        going.send(Record("of it"))  # type: ignore[arg-type]
    assert measuring.ran[-1] == ["of it"]


def test_one_profile_serves_all_batches_that_have_no_other_units(measuring):
    rank: Any = Rank(ENVELOPE, memory=Measured())
    few, more = (builders.interleaved(STAGES, count, 2, combined=True) for count in (2, 8))
    assert not few.combined[0].any()
    assert known_profile(rank, few, []) is None
    made = rank.state.profile = finish(phases._profile(rank, few, few, ["a record"]))
    assert measuring.ran[1] is few
    assert known_profile(rank, few, []) is made
    assert known_profile(rank, builders.interleaved(STAGES, 8, 2), []) is made
    assert known_profile(rank, more, []) is None  # of the first stage's pairs


def test_a_batch_that_cannot_be_planned_leaves_the_others_as_they_are(saving, monkeypatch):
    def fails(*arguments: Any) -> Any:
        raise GoesOnError("Of a test")

    monkeypatch.setattr(phases, "given_plan", fails)
    rank = Rank(replace(ENVELOPE, baseline_steps=2), batch="m4")
    rank.folder.forget_profile = lambda: pytest.fail("others use it")  # type: ignore[method-assign]
    rank.state.several_sizes = True
    rank.state.notes = ("Of another.",)
    order, _ = rank.run(3)[-1]
    assert (order.phase, clocks_of(order)) == (Phase.STEADY, {1410})
    note = "The framework's own order, at the highest clock: Of a test"
    assert rank.state.notes == ("Of another.", f"m4: {note}")
    assert note in rank.said


@pytest.mark.usefixtures("measuring")
def test_a_dry_run_says_that_it_changes_no_clock():
    rank: Any = Rank(ENVELOPE, changes_clock=False, memory=Measured())
    own = builders.one_f_one_b(STAGES, MICROBATCHES)
    finish(phases._profile(rank, own, own, ["a record"]))
    assert any("a dry run changes no clock" in text for text in rank.said)


def test_clocks_that_cannot_be_found_end_profiling_alone(monkeypatch):
    def fails(*arguments: Any) -> Any:
        raise KeyError("of a test")

    monkeypatch.setattr(phases, "sweep_range", fails)
    with pytest.raises(GoesOnError, match="Stage 0: KeyError: 'of a test'"):
        phases._swept_clocks(Rank(ENVELOPE))  # type: ignore[arg-type]


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
    with pytest.raises(GoesOnError, match="different clocks"):
        phases._swept_clocks(rank)
    few: Any = Rank(ENVELOPE, supported=(1410, 1005))
    assert phases._swept_clocks(few) == (1410, 1005)
    few.gpu.supported_frequencies_mhz = (1410,)
    with pytest.raises(GoesOnError, match=r"a single clock \(MHz\) \(got 1410\)"):
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
    finish(phases._one_clock(rank, builders.one_f_one_b(STAGES, MICROBATCHES)))
    tuner = made[-1].__self__
    assert (tuner.clocks_mhz[0], tuner.follows) == (1410, changes_clock)
