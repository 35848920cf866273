"""Plans made online: from all that was measured of the job."""

import itertools
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from core_cases import for_chunks
from on_request import on_request
from one_rank import CLOCKS, MICROBATCHES, Rank, finish, profile_of
from planning_cases import random_profile

from envpipe_megatron.core.channel_model import find_stall
from envpipe_megatron.core.conditions import Conditions, known_conditions
from envpipe_megatron.core.kinds import SPLIT, WHOLE, Kind, unit
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.orders.builders import split_in_place
from envpipe_megatron.core.plan import Plan, read_plan
from envpipe_megatron.core.profile import make_profile
from envpipe_megatron.core.profile_rows import SplitBackward
from envpipe_megatron.core.schedule import Placement, Schedule
from envpipe_megatron.core.sidecar import Sidecar
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.formats.job_file import StoredJob
from envpipe_megatron.policies.optimal.linear_program import LinearProgramError
from envpipe_megatron.policies.planner import make_plan
from envpipe_megatron.policies.problem import Problem
from envpipe_megatron.policies.request import PlanRequest
from envpipe_megatron.runtime.channel.collectives import DegradedError
from envpipe_megatron.runtime.execution.executor import StageRecord
from envpipe_megatron.runtime.job import phases, planning
from envpipe_megatron.runtime.job.options import JobOptions
from envpipe_megatron.runtime.job.phases import adopt_plan
from envpipe_megatron.runtime.job.planning import (
    plan_online,
    predicted,
    read_files,
)
from envpipe_megatron.runtime.memory.peak import MemoryFullError
from envpipe_megatron.runtime.memory.stage import with_memory
from envpipe_megatron.tuning import sweep


def test_what_a_plan_is_to_save():
    plan = make_plan(profile_of(), PlanRequest(4, "1f1b", "optimal")).plan
    told = predicted(plan)
    assert told is not None
    assert told["saving_percent"] > 1
    assert told["slowdown_percent"] == pytest.approx(0, abs=1e-6)
    assert predicted(plan.baseline) == {"saving_percent": 0, "slowdown_percent": 0}
    assert predicted(None) is None


ASSUMED = SplitBackward(0.5, 0.0)


class Starting(Rank):
    """A rank that plans.

    Args:
        path: of the user's plan, if it is there; the profile lies beside it.
        asked: other options of the job.
        full: how many predictions find too little memory.
        no_slots: orders whose messages do.
        supported: the clocks of this stage's GPUs; `of_next` those of the next.
    """

    def __init__(
        self,
        path: Path,
        *,
        named_profile: bool = False,
        asked: Any = None,
        num_microbatches: int = MICROBATCHES,
        splits: bool = False,
        capacity: int | None = None,
        full: int = 0,
        no_slots: tuple[str, ...] = (),
        supported: tuple[int, ...] = CLOCKS,
        of_next: tuple[int, ...] = CLOCKS,
        **parts: Any,
    ) -> None:
        wanted = {"type": "uniform"} if asked is None else asked
        wanted = {"sweep": True, "reconfigure": "default", **wanted}
        options = JobOptions(
            plan=path if path.exists() else None,
            profile=Path("named.csv") if named_profile else None,
            num_microbatches=num_microbatches,
            why_whole="" if splits else "of a test",
            **wanted,
        )
        super().__init__(options, supported=supported, **parts)
        self.other = lambda own: {*of_next} if isinstance(own, set) else own
        self.path, self.full = path, full
        #: Plans that were written.
        self.kept = list[Plan]()
        self.folder = SimpleNamespace(
            found=StoredJob(),
            write_plan=lambda plan, batch="": self.kept.append(plan),
        )
        self.channel = SimpleNamespace(
            capacity=capacity,
            make_room=lambda s, specs: s.name not in no_slots,
        )
        self.memory.predict, self.predicted = self.predict, self.memory.predicted

    def predict(self, schedule: Any) -> None:
        self.predicted.append(schedule.name)
        if len(self.predicted) <= self.full:
            raise MemoryFullError("Too little of a test")

    def adopt(self, profile: Any = None) -> Plan:
        """Do what `phases.adopt_plan` does after a warm-up of one iteration."""
        if self.options.plan is not None and self.state.given is None:
            known = profile or profile_of()
            self.state.given = known, read_plan(self.options.plan, known)
        empty = np.zeros(self.schedule.units_per_stage)
        records = [StageRecord(empty, empty, 0.0, 0.0)]
        return finish(adopt_plan(self, records, profile or profile_of()))

    def check(self) -> None:
        """As before the first iteration."""
        self.options = replace(self.options, profile=self.path.parent / "profile.csv")
        self.state.given = None
        read_files(self)  # type: ignore[arg-type]


def write_plan(path: Path, order: Schedule) -> Path:
    profile = profile_of().with_split_backwards(ASSUMED)
    clocks = np.full(order.is_backward.shape, 1200)
    conditions = Conditions((80.0, 80.0))
    plan = Plan("uniform", order, clocks, profile.for_chunks(order.num_chunks), conditions)
    plan.write(path)
    profile.write(path.parent / "profile.csv")
    return path


@pytest.fixture
def by_file(tmp_path) -> Path:
    """The plan of another start, in another order than those that are made here."""
    return write_plan(tmp_path / "plan.json", builders.envpipe(2, 4, [2, 0]))


def test_the_first_iteration_of_a_warm_up_tells_nothing(monkeypatch, tmp_path):
    """Planning goes on from the last one, and reconfiguring looks at all others."""
    looked: list[Any] = []

    def run_commands(job: Any, schedule: Any, clocks_mhz: Any, records: Any, begin: Any) -> Any:
        looked.append(records)
        if len(looked) == 2:
            raise DegradedError("Of a test")
        yield from ()
        return sweep.planned(plan_online(job, profile_of()))

    monkeypatch.setattr(phases, "run_commands", run_commands)
    job: Any = Starting(tmp_path / "none", asked={"type": "envelope", "reconfigure": "balanced"})
    warm_up: Any = ["first", "second", "last"]
    with pytest.raises(DegradedError, match="Of a test"):
        finish(adopt_plan(job, warm_up, profile_of()))
    assert looked == [["last"], ["second", "last"]]


def test_a_plan_by_file_is_run_as_it_stands(by_file):
    job = Starting(by_file)
    plan = job.adopt()
    assert plan.schedule.name == "envpipe"
    assert (job.kept, job.predicted, job.said) == ([plan], ["envpipe"], [])


def test_without_a_file_a_plan_is_made(tmp_path):
    job = Starting(tmp_path / "none")
    plan = job.adopt()
    assert (plan.schedule.name, plan.policy) == ("1f1b", "uniform")
    assert (job.kept, job.predicted, job.said) == ([plan], ["1f1b"], [])


def test_where_memory_is_not_known_no_stage_holds_more_than_in_the_frameworks_order(tmp_path):
    """Though more forwards would save more."""
    asked = {"type": "optimal", "scheduling": "auto"}
    free, limited = (
        Starting(tmp_path / "none", asked={**asked, "max_in_flight": limit}, num_microbatches=8)
        for limit in (None, "memory")
    )
    own = builders.one_f_one_b(2, 8)
    assert sum(free.adopt().schedule.peak_in_flight) > sum(own.peak_in_flight)
    assert limited.adopt().schedule.peak_in_flight == own.peak_in_flight
    assert "Memory is known to hold at most 2, 1 microbatches in flight." in limited.state.notes


REFUSED = [
    ({"num_microbatches": 5}, "is for 4 microbatches, and this job has 5"),
    ({"capacity": 1}, "needs a deeper channel"),
    (
        {"own_order": builders.one_f_one_b(2, 4)},
        "has another order than the framework, which runs its units itself .got 'envpipe'",
    ),
]


@pytest.mark.parametrize(("options", "said"), REFUSED)
def test_a_plan_by_file_that_cannot_run_is_refused_or_made_anew(by_file, options, said):
    with pytest.raises(EnvPipeError, match=said):
        Starting(by_file, **options).check()
    with pytest.raises(DegradedError, match=said):
        Starting(by_file, **options).adopt()  # it became so since
    job = Starting(by_file, **options)
    job.state.several_sizes = True
    assert job.adopt().schedule.name == "1f1b"
    assert len(job.kept) == 1
    (told,) = job.said
    assert told.startswith(f"the plan {by_file} is made again: ")


UNITS = [unit(kind, m, chunk) for kind in WHOLE for chunk in range(2) for m in range(4)]
THROUGH_A_V = (*UNITS[:8], *UNITS[12:], *UNITS[8:12])  # F of both chunks, B of the later first


@pytest.mark.parametrize(
    ("order", "why", "remedy"),
    [
        (
            split_in_place(builders.one_f_one_b(2, 4), 1),
            "splits backwards, and those of this job are whole: of a test",
            "without rows of input-gradient",
        ),
        (
            Schedule("gpipe-v", 4, 2, (THROUGH_A_V,) * 2, Placement.V),
            "lays chunks out as v, and this job's model is looped",
            "--runnable",
        ),
        (
            builders.interleaved(2, 4, 2, 2),
            r"is for 2 chunk\(s\) a stage, and this job's model has 1",
            "as many chunks as the model",
        ),
    ],
    ids=["split", "v", "chunks"],
)
def test_a_plan_by_file_that_the_job_does_not_run_is_refused(tmp_path, order, why, remedy):
    path = write_plan(tmp_path / "plan.json", order)
    with pytest.raises(EnvPipeError, match=f"{why} .got '{order.name}'.*{remedy}"):
        Starting(path).check()


def test_a_split_plan_by_file_runs_where_the_job_splits(tmp_path):
    """What shows only once training has begun ends none: see `Session.split_no_more`."""
    order = split_in_place(builders.one_f_one_b(2, 4), 1)
    path = write_plan(tmp_path / "plan.json", order)
    job = Starting(path, splits=True)
    job.check()
    profile = profile_of().with_split_backwards(ASSUMED)
    assert job.adopt(profile).schedule.stages == order.stages
    job = Starting(path, splits=True)
    job.state.whole = "its self-check failed"
    job.check()
    with pytest.raises(DegradedError, match="are whole: its self-check failed"):
        job.adopt(profile)


def test_of_a_profile_with_split_backwards_whole_ones_are_planned(tmp_path):
    """Where splitting costs nothing, so that planning by itself would split."""
    parts = profile_of().with_split_backwards(SplitBackward(0.5, 0.0))
    rows = [
        (stage, kind, row)
        for stage, kinds in enumerate(parts.rows)
        for kind, rows in kinds.items()
        if kind is not Kind.NOTHING
        for row in rows
    ]
    profile = make_profile(rows, source="of a test")
    assert make_plan(profile, PlanRequest(4, "auto", "optimal")).plan.schedule.split
    job: Any = Starting(tmp_path / "none", asked={})
    plan = job.adopt(profile)
    assert not plan.schedule.split
    assert plan.profile.kinds == (*WHOLE, Kind.NOTHING)


@pytest.mark.parametrize(("overhead", "splits"), [(0.0, 16), (0.1, 8), (0.6, 0)])
def test_the_more_splitting_costs_the_fewer_backwards_are_split(tmp_path, overhead, splits):
    """As where tensor parallel messages hide under the weight's product of a whole backward."""
    profile = profile_of().with_split_backwards(SplitBackward(0.5, overhead))
    job: Any = Starting(tmp_path / "none", asked={}, num_microbatches=8, splits=True)
    order = sweep.planned(plan_online(job, profile))[0].schedule
    parts = sum(
        own.kind is Kind.INPUT_GRADIENT and not own.combined for of in order.stages for own in of
    )
    assert parts <= splits
    assert (parts > 0) is (splits > 0)


def test_an_order_by_name_that_turned_out_not_to_split_is_the_frameworks(tmp_path):
    job: Any = Starting(tmp_path / "none", asked={"scheduling": "zb-h1"}, splits=True)
    profile = replace(profile_of().with_split_backwards(ASSUMED), assumed=None)
    assert sweep.planned(plan_online(job, profile))[0].schedule.name == "zb-h1"
    job.state.whole = "its self-check failed"
    plan, _ = sweep.planned(plan_online(job, profile))
    assert (plan.schedule.name, plan.policy) == ("1f1b", "optimal")


def test_a_plan_that_adds_gradients_up_in_another_sequence_is_refused(tmp_path):
    forwards, inputs, weights = ([unit(kind, m) for m in range(4)] for kind in SPLIT)
    order = Schedule("late", 4, 1, ((*forwards, *inputs, *weights[::-1]),) * 2)
    with pytest.raises(EnvPipeError, match=r"another sequence than the framework: .* W3 before W0"):
        Starting(write_plan(tmp_path / "plan.json", order), splits=True).check()


def test_a_plan_that_memory_does_not_hold_is_made_anew(by_file):
    job = Starting(by_file, full=1)
    job.state.several_sizes = True
    assert job.adopt().schedule.name == "1f1b"
    assert len(job.kept) == 1
    assert job.predicted == ["envpipe", "1f1b"]
    assert job.said == [f"the plan {by_file} is made again: Too little of a test"]
    with pytest.raises(DegradedError, match="Too little of a test"):
        Starting(by_file, full=1).adopt()
    with pytest.raises(MemoryFullError, match=r"messages between stages in the order 'envpipe'"):
        Starting(by_file, no_slots=("envpipe",)).adopt()


def test_clocks_that_gpus_lack_end_no_training(tmp_path, by_file):
    few = r"the GPUs of stage {} do not have .got 1\d\d\d"
    for named in (False, True):
        with pytest.raises(DegradedError, match=few.format(1)):
            Starting(tmp_path / "none", named_profile=named, of_next=(1410,)).adopt()
    job = Starting(by_file, supported=(1410,))
    with pytest.raises(EnvPipeError, match=few.format(0)):
        job.check()
    job.gpu.read_only = True  # nobody asks for them
    job.check()


def test_a_profile_that_a_job_cannot_use_is_refused_before_its_first_iteration(by_file):
    job = Starting(by_file)
    job.check()
    job.options = replace(job.options, type="optimal", sweep=False, plan=None)
    job.check()
    job.gpu.supported_frequencies_mhz = (1980, 1410, 1200)
    job.clocks_mhz = [{1980, 1410, 1200}] * 2
    with pytest.raises(EnvPipeError, match=r"lacks the highest clock .*got 1980"):
        job.check()
    (by_file.parent / "profile.csv").unlink()
    with pytest.raises(EnvPipeError, match=r"profile\.csv"):
        job.check()


@pytest.mark.parametrize(
    "part",
    [
        (sweep, "planned"),
        (planning, "known_conditions"),
        (planning, "make_problem"),
        (phases, "check_plan"),
    ],
)
@pytest.mark.parametrize(
    "error", [ZeroDivisionError, MemoryError, RecursionError, LinearProgramError, EnvPipeError]
)
def test_planning_may_fail_anywhere(monkeypatch, tmp_path, part, error):
    monkeypatch.setattr(*part, Mock(side_effect=error("of a test")))
    said = "of a test" if issubclass(error, EnvPipeError) else f"{error.__name__}: of a test"
    with pytest.raises(DegradedError, match=f"^{said}"):
        Starting(tmp_path / "none", named_profile=True).adopt()


@pytest.mark.parametrize("limit", [None, 3])
@pytest.mark.parametrize("schedule", ["auto", "envpipe"])
def test_chunks_keep_the_frameworks_order_over_one_hardware_queue(tmp_path, schedule, limit):
    asked = {"scheduling": schedule, "num_chunks": 2, "max_in_flight": limit}
    job = Starting(tmp_path / "none", asked=asked, num_microbatches=6, capacity=1)
    plan = job.adopt()
    assert plan.schedule.stages == builders.interleaved(2, 6, 2).stages
    assert plan.cost.energy_j < plan.baseline.cost.energy_j
    assert job.predicted == ["interleaved"]


@pytest.mark.parametrize("schedule", ["auto", "envpipe", "interleaved"])
def test_chunks_get_no_plan_where_one_hardware_queue_cannot_run_the_frameworks_order(
    tmp_path, schedule
):
    """Groups larger than the pipeline are too far ahead for it."""
    assert find_stall(builders.interleaved(2, 4, 2, 4), 1)
    asked = {"scheduling": schedule, "num_chunks": 2, "group_size": 4}
    said = r"'interleaved' needs a deeper channel.*CONNECTIONS=8\.\nposition .*\nstage 0 .*\["
    with pytest.raises(DegradedError, match=said):
        Starting(tmp_path / "none", asked=asked, capacity=1).adopt()
    Starting(tmp_path / "none", asked=asked).adopt()


def online_job(seed: int) -> tuple[Starting, Any]:
    """A job in chunks that the framework can run, and its profile."""
    rng = random.Random(seed)
    stages, chunks = rng.choice([2, 3, 4]), rng.choice([2, 2, 3, 4])
    fitting = [
        (microbatches, group)
        for microbatches in range(max(4, stages), 17)
        for group in range(stages, 2 * stages + 1)
        if not 0 < microbatches % group < stages
    ]
    microbatches, group = rng.choice(fitting)
    profile = for_chunks(rng, random_profile(rng, stages, 3), chunks)
    latency_s = rng.choice([0.0, 0.2]) * profile.rows[0][Kind.FORWARD][0].time_s
    measured = replace(
        profile.sidecar,
        num_chunks=profile.listed_chunks,
        wait_power_w=({2000: 60.0},) * stages,
        p2p_latency_s=(latency_s,) * (stages - 1),
    )
    own = builders.interleaved(stages, microbatches, chunks, group)
    limit = rng.choice([None, max(own.microbatches_in_flight), 1.5 * microbatches])
    asked = {"num_chunks": chunks, "group_size": group, "max_in_flight": limit}
    job = Starting(Path("none"), asked=asked, num_microbatches=microbatches)
    return job, replace(profile, sidecar=measured)


def planned_online(seed: int) -> Plan:
    job, profile = online_job(seed)
    clocks = [
        {row.frequency_mhz for part in profile.parts(stage) for kind in WHOLE for row in part[kind]}
        for stage in range(profile.num_stages)
    ]
    job.clocks_mhz = clocks
    return job.adopt(profile)


@pytest.mark.parametrize(
    "seed", [*range(6), *(pytest.param(n, marks=on_request("CORE")) for n in range(6, 24))]
)
def test_any_job_in_chunks_gets_a_plan_that_it_runs(seed):
    plan = planned_online(seed)
    order = plan.schedule
    assert order.placement is Placement.LOOPED
    assert not order.split
    assert not find_stall(order, None)
    for units in order.stages:
        for kind, chunk in itertools.product(WHOLE, range(order.num_chunks)):
            own = [u.microbatch for u in units if (u.kind, u.chunk) == (kind, chunk)]
            assert own == list(range(order.num_microbatches))
    assert plan.cost.slowdown_percent(plan.baseline.cost) <= 1e-6
    if seed % 4 == 0:
        again = planned_online(seed)
        assert again.schedule == order
        assert np.array_equal(again.frequency_mhz, plan.frequency_mhz)


@on_request("CORE")
def test_many_jobs_in_chunks_get_another_order_than_megatrons():
    plans = [planned_online(seed) for seed in range(12)]
    assert sum(plan.schedule.stages != plan.baseline.schedule.stages for plan in plans) >= 4


@pytest.mark.parametrize("limit", [None, (2, 1)])
def test_a_plan_is_made_of_all_that_is_known_of_the_job(monkeypatch, tmp_path, limit):
    known: Any = (SimpleNamespace(activation_bytes=1.0, free_bytes=9.0, pending_bytes=None),) * 2

    def limited(asked, own, profile, memory):
        assert (asked, own, memory) == (3, builders.one_f_one_b(2, 7), known)
        return limit

    monkeypatch.setattr(planning, "in_flight_limit", limited)
    asked = {"type": "envelope", "reconfigure": "balanced", "max_in_flight": 3}
    job: Any = Starting(tmp_path / "none", asked=asked, num_microbatches=7, capacity=1)
    job.memory.stages = known
    profile = replace(profile_of(), sidecar=Sidecar(wait_power_w=({1410: 80.0},) * 2))
    problem = plan_online(job, profile)
    notes = ("Memory is known to hold at most 2, 1 microbatches in flight.",) if limit else ()
    assert problem == Problem(
        7,
        "envpipe",
        "envelope",
        profile=with_memory(profile, known),
        conditions=known_conditions(profile),
        max_in_flight=limit or (3, 3),
        channel_capacity=1,
        runnable=True,
        notes=notes,
    )
    plan, told = sweep.planned(problem)
    assert plan.policy == "envelope"
    assert set(notes) <= set(told)
