"""A session among its parts, each of which notes how it is called: on one rank, without a GPU."""

import inspect
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from plain_stages import SPECS

from envpipe_megatron.core.orders import builders
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.formats.energy import Phase
from envpipe_megatron.integrations.framework_units import SeenUnit, UnitFollower
from envpipe_megatron.runtime.channel.carrier import ChannelError, StageSpecs, TensorSpec
from envpipe_megatron.runtime.channel.collectives import Collectives
from envpipe_megatron.runtime.execution.executor import always
from envpipe_megatron.runtime.execution.stage_run import IterationOrder
from envpipe_megatron.runtime.job import iterations
from envpipe_megatron.runtime.job import session as runtime_session
from envpipe_megatron.runtime.job.options import JobOptions
from envpipe_megatron.runtime.job.restarts import JobFolder
from envpipe_megatron.runtime.job.session import Session
from envpipe_megatron.runtime.memory.peak import MemoryFullError
from envpipe_megatron.tuning.commands import Parking
from host_executor import make_record

SCHEDULE = builders.one_f_one_b(1, 2)
FILES = {"profile": Path("profile.csv"), "plan": Path("plan.json")}
LONGER = StageSpecs.alike(TensorSpec(((9, 3),), (torch.float32,), torch.device("cpu")))
RECORD = make_record([0.0, 1.0, 2.0, 3.0], [0.5, 1.5, 2.5, 3.5], 10.0, 4.0)


class Taken:
    """Equal to that record, whatever number the session gave it."""

    def __eq__(self, other: object) -> bool:
        return getattr(other, "end_s", None) is RECORD.end_s


TAKEN: Any = Taken()


class Noted:
    """A part that notes its calls, and returns what a test has given it."""

    def __init__(self, name: str, calls: list[Any], **gives: Any) -> None:
        self._name, self._calls, self._gives = name, calls, gives

    def __getattr__(self, method: str) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            named.pop("notes", None)
            self._calls.append((f"{self._name}.{method}", *arguments, *named.values()))
            given = self._gives.get(method)
            if isinstance(given, Exception):
                raise given
            return given

        return call


class Work:
    def forward(self, unit: Any, inputs: Any) -> Any:
        return []

    backward = forward

    def sent(self, unit: Any) -> None: ...


class World:
    """The parts of a session, and what it did with them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[Any] = []
        self.made: dict[str, Any] = {}
        self.said: list[str] = []
        self.monkeypatch = monkeypatch
        self.address = SimpleNamespace(backend="emulated", uid="GPU-7")
        self.gpu: Any = SimpleNamespace(
            name="A100",
            address=self.address,
            supported_frequencies_mhz=(1200, 1410, 1005),
            drives_hardware=False,
            read_apart=False,
            read_only=False,
        )
        self.agent: Any = None
        self.replicas: list[Any] = []
        self.orders: list[IterationOrder | Exception] = []
        self.records: list[Any] = []
        self.summary = {"followed": None, "error": None}
        self.energy: Any = Noted("energy", self.calls, lap="lap", gather="all", summary={"j": 1})
        self.energy.baselines = {}
        self.timeline: Any = Noted("timeline", self.calls)
        self.log: Any = Noted("log", self.calls)
        self.meter: Any = Noted("meter", self.calls)
        self.executor: Any = Noted(
            "executor", self.calls, end_unit="event", end_iteration=lambda: RECORD, now_s=77.0
        )
        self.clock: Any = Noted("clock", self.calls, summary=self.summary)
        self.clock.error = None
        self.memory: Any = Noted("memory", self.calls)
        self.memory.watch = lambda: None
        self.pipeline: Any = SimpleNamespace(
            leads=True, gather=lambda own: [own], broadcast=lambda own: own
        )
        for name, part in (
            ("TrainingEnergy", self.energy),
            ("TimelineLog", self.timeline),
            ("EnergyLog", self.log),
            ("EnergyMeter", self.meter),
            ("RankClock", self.clock),
            ("JobMemory", self.memory),
        ):
            self.put(name, part)
        monkeypatch.setattr(runtime_session, "connect_to_agent", self.connect)
        monkeypatch.setattr(iterations, "run_phases", self.phases)

    def put(self, name: str, part: Any) -> None:
        def make(*arguments: Any, **named: Any) -> Any:
            self.made[name] = (arguments, named)
            if isinstance(part, Exception):
                raise part
            return part

        self.monkeypatch.setattr(runtime_session, name, make)

    def connect(self, gpu: Any, labels: Any, collectives: Any, control: Any) -> Any:
        self.made["agent"] = (gpu, dict(labels), collectives)
        return self.agent

    def phases(self, job: Any) -> Any:
        self.job = job
        for order in self.orders:
            if isinstance(order, Exception):
                raise order
            if isinstance(order, IterationOrder):
                self.records.append((yield order))
            else:
                order()

    def session(self, config: JobOptions | None = None, **options: Any) -> Session:
        self.collectives = Collectives(0, self.pipeline, self.replicas, 1 + len(self.replicas))
        self.channel: Any = Noted("channel", self.calls)
        self.channel.ranks, self.channel.lets_go = [4], False

        def make_executor(settle: Any) -> Any:
            assert settle == "settle"
            return self.executor

        self.clock.wait_idle = "settle"
        return Session(
            config or JobOptions(num_microbatches=2, type="baseline", baseline_steps=3),
            self.gpu,
            options.pop("make_executor", make_executor),
            self.channel,
            self.collectives,
            say=self.said.append,
            **options,
        )

    def taken(self) -> list[Any]:
        """Return the calls since the last time, but for the channel and the executor's units."""
        calls, self.calls[:] = [*self.calls], []
        return [
            call
            for call in calls
            if not call[0].startswith(("channel.", "executor.begin", "executor.end"))
        ]


@pytest.fixture
def world(monkeypatch) -> World:
    return World(monkeypatch)


def order(phase: Phase, first_mhz: int) -> IterationOrder:
    clocks = np.array([[first_mhz, 1005, 1200, 1005]])
    return IterationOrder(phase, SCHEDULE, clocks)


def run(session: Session, microbatches: int = 2) -> None:
    session.run_iteration(microbatches, SPECS, lambda schedule: Work())


def requests(calls: list[Any]) -> list[int]:
    return [call[1] for call in calls if call[0] == "clock.request"]


UNITS = ["F0", "B0", "F1", "B1"]
UNITS_S = [0.0, 1.0, 2.0, 3.0], [0.5, 1.5, 2.5, 3.5]
RECEIVES = [False] * 4


def billed(calls: list[Any]) -> list[Any]:
    """Calls but for requests; arrays as lists, and what is made when it is asked for as made."""

    def plain(part: Any) -> Any:
        if isinstance(part, tuple):
            return tuple(map(plain, part))
        if isinstance(part, np.ndarray):
            return part.tolist()
        return part() if inspect.isfunction(part) else part

    return [plain(call) for call in calls if call[0] != "clock.request"]


def test_steps_are_numbered_billed_and_told_to_the_phases(world):
    world.orders = [
        order(Phase.WARMUP, 1410),
        order(Phase.WARMUP, 1410),
        order(Phase.PROFILE, 1200),
        order(Phase.PROFILE, 1200),
        order(Phase.STEADY, 1005),
    ]
    session = world.session()
    assert (session.state.iteration, session.executed) == (-1, [])
    world.taken()
    session.begin_step()
    run(session)
    world.calls.append(("optimizer",))
    session.end_step()
    calls = world.taken()
    assert requests(calls) == [1410, 1005, 1200, 1005, 1410]
    assert all(call[2] is None for call in calls if call[0] == "clock.request")
    clocks = [1410, 1005, 1200, 1005]
    assert billed(calls) == [
        ("energy.begin_step",),
        ("energy.add", Phase.WARMUP, 0, TAKEN, RECEIVES, True),
        ("optimizer",),
        ("energy.end_step", 0),
    ]
    assert (session.executed, session.iterations.last_record) == (UNITS, TAKEN)
    run(session)  # a framework that calls nothing else
    assert billed(world.taken()) == [
        ("executor.now_s",),
        ("energy.catch_up",),
        ("timeline.add", Phase.WARMUP, 0, (10.0, 4.0), UNITS_S, UNITS, clocks),
        ("energy.add", Phase.WARMUP, 1, TAKEN, RECEIVES, True),
    ]
    assert session.state.iteration == 1
    session.begin_step(40)
    run(session)
    run(session)
    assert session.state.iteration == 41
    added = [(call[0], *call[1:3]) for call in world.taken() if call[0] not in ("clock.request",)]
    assert [call for call in added if call[0].startswith("energy") and "catch" not in call[0]] == [
        ("energy.begin_step",),
        ("energy.add_between_phases", 40, 77.0),
        ("energy.add", Phase.PROFILE, 40),
        ("energy.settle_baseline", ""),
        ("energy.add", Phase.PROFILE, 41),
    ]
    session.begin_step(7)
    session.end_step()
    run(session)
    assert session.state.iteration == 8
    assert world.records == [TAKEN] * 4
    assert [record.number for record in world.records] == [0, 1, 40, 41]
    assert session.state.phase is Phase.STEADY
    assert list(session.iterations.latest) == [
        (phase, 4.0) for phase in [*[Phase.WARMUP] * 2, *[Phase.PROFILE] * 2, Phase.STEADY]
    ]


@pytest.mark.parametrize(
    ("asked", "alone"),
    [
        ({}, True),
        ({"scheduling": "interleaved", "num_chunks": 2}, True),
        ({"scheduling": "interleaved"}, True),  # of a framework that keeps it
        ({"scheduling": "envpipe"}, False),
        ({"type": "envelope"}, False),
        ({"type": "uniform"}, False),
    ],
)
def test_what_changes_neither_clocks_nor_order_only_measures(asked, alone):
    config = JobOptions(num_microbatches=2, **{"type": "baseline", **asked})
    assert config.only_measures() is alone
    assert not replace(config, **FILES).only_measures()
    assert config.without_control().only_measures()


def test_room_for_longer_messages_is_made_on_all_ranks_or_none(world):
    world.orders = [order(Phase.WARMUP, 1410)] * 2
    session = world.session()
    session.make_room(SPECS)  # of the first shapes it is made before the first iteration
    assert not [call for call in world.calls if call[0] == "channel.make_room"]
    run(session)
    with pytest.raises(MemoryFullError, match="no memory for messages"):
        session.make_room(LONGER)
    assert ("channel.make_room", SCHEDULE, LONGER) in world.calls
    run(session)  # what it had is as before


def test_one_rank_alone_talks(world):
    world.pipeline.leads = False
    world.pipeline.broadcast = lambda own: True if own is None or own is False else own
    world.session().parts.say("a word")
    assert world.said == []


@pytest.mark.parametrize("waits", [False, True])
def test_units_are_timed_where_somebody_looks_or_waits(world, waits):
    """Else those of an iteration of the same order and clocks stand for them."""
    world.clock.waits = waits
    world.executor._gives["end_unit"] = always
    whole = make_record([0.0], [7.0], 40.0, 8.0)
    first = order(Phase.STEADY, 1410)
    seldom = replace(first, times_units=False)
    others = replace(order(Phase.STEADY, 1200), times_units=False)
    parks = replace(seldom, parking=Parking(np.zeros((1, 4)), np.zeros((1, 4))))
    world.orders = [seldom, first, seldom, seldom, others, parks, seldom]
    session, timed = world.session(), []
    for _ in world.orders:
        run = session.open_iteration(SCHEDULE, SPECS)
        world.executor._gives["end_iteration"] = lambda run=run: (
            RECORD if run.times_units else whole
        )
        while run.next_unit is not None:
            run.begin_unit()
            run.end_unit()
        session.close_iteration()
        timed.append(run.times_units)
        assert len(session.iterations.last_record.unit_time_s) == 4
        if not run.times_units:
            assert session.iterations.last_record.end_s.tolist() == [1.0, 3.0, 5.0, 7.0]
    assert timed == [True, True, waits, waits, True, True, waits]


def test_units_that_did_not_all_run_stand_for_no_others(world):
    world.clock.waits = False
    world.executor._gives["end_unit"] = always
    first = order(Phase.STEADY, 1410)
    world.orders = [first, first, *[replace(first, times_units=False)] * 2]
    session, timed = world.session(), []
    for whole in (True, False, True, True):
        run = session.open_iteration(SCHEDULE, SPECS)
        followed = UnitFollower(run, session.highest_clock)
        for unit in run.units[: None if whole else 1]:
            followed.begin(SeenUnit(unit.kind, unit.microbatch))
            followed.end()
        followed.complete()
        assert run.whole == whole
        session.close_iteration()
        timed.append((run.times_units, session.iterations.last_record))
    assert [units for units, _ in timed] == [True, True, False, False]
    assert session.iterations._timed[1] is timed[0][1]


LATE = ["energy.catch_up", "read", "timeline.add"]


def test_times_are_read_behind_the_next_iterations_units(world):
    """Only then is the device waited for; what is no training, a report or the end come before."""
    world.orders = [order(Phase.STEADY, 1410)] * 9
    world.executor._gives["end_unit"] = always
    session = world.session()
    world.executor._gives["end_iteration"] = lambda: world.calls.append(("read",)) or RECORD

    def step(number: int) -> list[str]:
        world.calls.clear()
        session.begin_step(number)
        run(session)
        world.calls.append(("optimizer",))
        session.end_step()
        names = [call[0] for call in world.calls]
        return [name for name in names if name in (*LATE, "optimizer")]

    assert step(0) == ["optimizer"]
    assert step(1) == [*LATE, "optimizer"]
    for number, asks in enumerate((session.pause, session.iterations.catch_up), 2):
        world.calls.clear()
        asks()
        assert [call[0] for call in world.calls if call[0] in LATE] == LATE
        assert step(number) == ["optimizer"]
    assert [record.number for record in world.records] == [0, 1, 2]
    assert [record.followed for record in world.records] == [True, False, True]


@pytest.mark.parametrize("ended", [True, False])
def test_a_session_that_is_closed_waits_for_no_iteration(world, ended):
    """Peers may be gone; what the device has ended is billed, also behind the next one's begin."""
    world.orders = [order(Phase.STEADY, 1410)] * 2
    world.executor._gives["end_unit"] = lambda: ended
    session = world.session()
    session.begin_step()
    run(session)
    session.begin_step()
    session.open_iteration(SCHEDULE, SPECS)
    world.calls.clear()
    session.close()
    assert (("energy.catch_up",) in world.calls) == ended


def test_a_step_of_the_frameworks_own_comes_after_what_was_held_back(world):
    world.orders = [order(Phase.STEADY, 1410)]
    session = world.session()
    session.begin_step()
    run(session)
    session.end_step()
    world.taken()
    session.begin_step()
    session.end_step()
    billed_calls = [call[0] for call in world.taken()]
    assert billed_calls.index("energy.catch_up") < billed_calls.index("energy.end_step")


def test_an_order_is_rehearsed_without_a_trace(world):
    """Its units run, over the channel; no clock changes, and no phase, bill or timeline has it."""
    world.orders = [order(Phase.WARMUP, 1410)]
    session, ran = world.session(), []
    session.begin_step()
    world.calls.clear()
    work: Any = SimpleNamespace(
        forward=lambda unit, inputs: ran.append(str(unit)) or [],
        backward=lambda unit, inputs: ran.append(str(unit)) or [],
        sent=lambda unit: None,
    )
    rehearsed = builders.gpipe(1, 2)
    session.rehearse(rehearsed, SPECS, lambda schedule: work)
    assert ran == ["F0", "F1", "B0", "B1"]
    assert ("channel.begin_step", rehearsed, SPECS) in world.calls
    assert [call[0] for call in world.calls[-2:]] == ["channel.end_step", "executor.end_iteration"]
    assert world.taken() == []
    assert (session.executed, session.iterations.last_record, world.records) == ([], None, [])
    run(session)
    session.end_step()
    assert (session.state.iteration, session.executed) == (0, UNITS)
    assert [call[0] for call in world.taken()].count("energy.add") == 1


def test_clocks_of_a_stage_are_those_of_all_its_gpus(world):
    world.pipeline.gather = lambda own: [own, own - {1005} if isinstance(own, set) else own]
    other: Any = SimpleNamespace(leads=True, broadcast=lambda own: own)
    other.gather = lambda own: [own, own - {1200} if isinstance(own, set) else own]
    world.replicas = [other]
    assert world.session().parts.clocks_mhz == [{1005, 1410}, {1410}]


def fails() -> Any:
    raise ChannelError("of a test")


def test_a_loss_that_is_found_behind_the_units_ends_the_session(world):
    world.orders = [order(Phase.STEADY, 1410)] * 2
    session = world.session()
    session.begin_step()
    world.executor._gives["end_iteration"] = fails
    run(session)
    session.end_step()
    with pytest.raises(ChannelError, match="of a test"):
        run(session)
    with pytest.raises(EnvPipeError, match="An earlier iteration failed"):
        run(session)


def test_a_session_ends_with_what_its_phases_raise(world):
    world.orders = [order(Phase.WARMUP, 1410), ValueError("of a test")]
    session = world.session()
    run(session)
    with pytest.raises(ValueError, match="of a test"):
        run(session)
    with pytest.raises(EnvPipeError, match="An earlier iteration failed"):
        run(session)


def test_the_baseline_is_kept_and_notes_go_to_the_bill(world):
    world.agent = Noted("agent", world.calls)
    world.agent.node = "node of the agent"
    kept = []
    world.monkeypatch.setattr(JobFolder, "keep_baselines", lambda self, found: kept.append(found))

    def note() -> None:
        session.state.notes = ("A note.",)

    world.orders = [order(Phase.WARMUP, 1410), note, order(Phase.STEADY, 1410)]  # type: ignore[list-item]
    world.orders += [order(Phase.STEADY, 1410)]
    session = world.session()
    world.energy.baselines = {"": "baseline"}
    for _ in range(3):
        run(session)
    assert kept == [{"": "baseline"}]  # as soon as the warm-up is over
    assert [call for call in world.calls if call[0] == "agent.post"] == [
        ("agent.post", "job", {"notes": ["A note."]})
    ]
    session._collectives.is_planner = False
    session.describe_job({"model": "m"})
    assert world.calls[-1][0] != "agent.post"
    session._collectives.is_planner = True
    session.describe_job({"model": "m"})
    assert world.calls[-1] == ("agent.post", "job", {"model": "m"})


def test_how_a_power_budget_was_kept_in_the_end_goes_to_the_bill(world):
    world.agent = Noted("agent", world.calls)
    world.agent.node = "node of the agent"
    with closing(world.session()) as session:
        session.state.power = {"budget_w": 200.0}
    told = [call for call in world.calls if call[0].startswith("agent.")]
    assert told[-2:] == [("agent.post", "job", {"power": {"budget_w": 200.0}}), ("agent.close",)]


def test_the_bill_hears_at_once_of_another_power_budget(world):
    world.agent = Noted("agent", world.calls)
    world.agent.node = "node of the agent"
    world.orders = [order(Phase.STEADY, 1410)] * 6
    session = world.session()
    run(session)
    for budget_w in (300.0, 300.0, 250.0, 250.0, None):
        session.state.power = {"budget_w": budget_w}
        run(session)
    said = [{"power": {"budget_w": budget_w}} for budget_w in (300.0, 250.0, None)]
    assert [call[2] for call in world.calls if call[:2] == ("agent.post", "job")] == said


def test_what_is_no_training_runs_at_the_highest_clock(world):
    session = world.session()
    world.taken()
    session.pause()
    asked = [("clock.request", 1410, None), ("clock.confirm",)]
    assert world.taken() == [("energy.pause",), *asked]


def test_clocks_that_are_given_back_or_not_controlled_any_more_are_not_told(world):
    world.orders = [order(phase, 1410) for phase in (Phase.OFF, Phase.WARMUP, Phase.WARMUP)]
    session = world.session()
    run(session)
    run(session)
    world.clock.error = "lost"
    run(session)
    session.iterations.catch_up()
    told = [call[-1] for call in world.taken() if call[0] == "timeline.add"]
    assert told == [None, [1410, 1005, 1200, 1005], None]


LABELS = {
    "node": "own",
    "gpu": "A100",
    "gpu_uid": "GPU-7",
    "clock_backend": "emulated",
    "rank": 4,
    "num_ranks": 1,
    "stage": 0,
}


@pytest.mark.parametrize(
    ("with_agent", "socket", "log"),
    [(False, "", "energy"), (False, "gone", "unbilled-energy"), (True, "there", None)],
)
def test_every_line_says_whose_it_is(world, tmp_path, with_agent, socket, log):
    """Of what an agent that is not reached may bill, too, no lines are where they are summed."""
    world.monkeypatch.setenv("ENVPIPE_AGENT_SOCKET", socket)
    world.monkeypatch.setattr("socket.gethostname", lambda: "own")
    if with_agent:
        world.agent = Noted("agent", world.calls)
        world.agent.node = "agent's"
    config = JobOptions(
        num_microbatches=2,
        type="baseline",
        baseline_steps=3,
        output=tmp_path,
        run="first",
    )
    world.session(config)
    labels = {"run": "first", **LABELS}
    assert world.made["agent"][:2] == (world.gpu, labels)
    if with_agent:
        labels["node"] = "agent's"
    (append, told), _ = world.made["TimelineLog"]
    assert (append.args, append.keywords) == (("timeline",), {"most": 256})
    assert told == labels
    (meter, append, told), _ = world.made["EnergyLog"]
    assert (meter, told) == (world.meter, labels)
    if not with_agent:
        assert append.args == (log,)
        return
    append({"energy_j": 1.0})
    assert world.calls[-1] == ("agent.post", "window", {"energy_j": 1.0})


CLOSING = [
    "clock.close",
    "clock.summary",
    "executor.idle",
    "executor.wait_no_more",
    "energy.close",
    "meter.close",
    "agent.close",
    "timeline.close",
]


@pytest.mark.parametrize("fails", [None, "executor", "energy", "meter"])
def test_closing_goes_on_whatever_fails(world, tmp_path, fails, caplog):
    world.agent = Noted("agent", world.calls)
    world.agent.node = "agent's"
    world.summary["followed"] = {"warning": "Clocks are late of a test"} if fails else None
    if fails:
        method = "idle" if fails == "executor" else "close"
        getattr(world, fails)._gives[method] = OSError("of a test")
    session = world.session(
        JobOptions(num_microbatches=2, type="baseline", baseline_steps=3, output=tmp_path)
    )
    world.calls.clear()
    if fails:
        with pytest.raises(OSError, match="of a test"):
            session.close()
    else:
        session.close()
    assert [call[0] for call in world.calls] == CLOSING
    assert ("Clocks are late of a test" in caplog.text) is bool(fails)
    line = (tmp_path / "clocks.jsonl").read_text()
    assert '"node": "agent\'s"' in line
    assert '"error": null' in line
    world.calls.clear()
    session.close()
    assert world.calls == [("clock.close",)]


@pytest.mark.parametrize("fails", ["make_executor", "EnergyMeter", "RankClock"])
def test_a_session_that_cannot_be_made_leaves_nothing_open(world, fails):
    world.agent = Noted("agent", world.calls)
    world.agent.node = "agent's"
    options = {}
    if fails == "make_executor":

        def no_executor(settle: Any) -> Any:
            raise OSError("of a test")

        options["make_executor"] = no_executor
    else:
        world.put(fails, OSError("of a test"))
    with pytest.raises(OSError, match="of a test"):
        world.session(**options)
    made = [] if fails == "RankClock" else ["clock.close", "agent.close", "timeline.close"]
    assert [call[0] for call in world.calls] == made


@pytest.mark.parametrize(
    ("asked", "without", "words"),
    [
        # By all that neither plans orders as the job runs nor is given one, the framework's.
        (
            {"type": "baseline", "scheduling": "envpipe", "profile": Path("profile.csv")},
            {"scheduling": "1f1b", "profile": None},
            "the framework's order at baseline clocks",
        ),
        (
            {"type": "optimal", "scheduling": "interleaved", "num_chunks": 3},
            {"type": "baseline"},
            "the framework's order at baseline clocks",
        ),
        (
            {"type": "baseline", "scheduling": "envpipe", **FILES},
            {},
            "the plan's order, and clocks stay as they are",
        ),
        *(
            (
                {"scheduling": schedule, "objective": goal, "why_whole": ""},
                {"objective": "time"},
                f"the shortest order{instead}, and clocks stay as they are",
            )
            for schedule in ("auto", "zb-h1")
            for goal, instead in (("edp", " in place of least edp"), ("time", ""))
        ),
    ],
)
def test_without_control_another_order_may_run_and_clocks_stay(asked, without, words):
    config = JobOptions(num_microbatches=6, **asked)
    assert config.without_control() == replace(config, **without)
    assert config.without_control().order_in_words(config) == words


@pytest.mark.parametrize(
    ("splits", "schedule", "by_file", "may"),
    [
        (True, "auto", False, True),
        (True, "zb-h1", False, True),
        (True, "1f1b", False, False),
        (True, "1f1b", True, True),
        (False, "auto", True, False),
    ],
)
def test_orders_may_come_that_split_backwards(tmp_path, splits, schedule, by_file, may):
    plan = {"plan": tmp_path / "plan.json", "profile": tmp_path / "profile.csv"}
    whole = "" if splits else "of a test"
    options = JobOptions(scheduling=schedule, why_whole=whole, **plan if by_file else {})
    assert options.may_split is may
