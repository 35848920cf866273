"""Schedules of torch's in jobs that may set no clock, and what other jobs go for."""

from dataclasses import replace

import attached_ranks
import pytest
from attached_ranks import Case
from on_request import on_request

pytestmark = pytest.mark.xdist_group("torch")

LOOP = Case("Schedule1F1B", 8, steps=44, settings={"baseline_steps": 4, "gpu_control": "none"})
#: With zero-bubble orders the job has nothing to gain, nor with whole backwards on equal stages.
KEPT = "ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble", "ScheduleDualPipeV"


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("Schedule1F1B", "auto"),
        ("Schedule1F1B", "off"),
        ("ScheduleGPipe", "auto"),
        ("ScheduleInterleaved1F1B", "auto"),
        *((name, "auto") for name in KEPT),
    ],
)
@on_request("PIPELINE")
def test_the_shortest_order_runs_where_no_clock_may_be_set(trained, two_ranks, name, split):
    case = replace(
        LOOP,
        schedule=name,
        chunks=1 if name in ("Schedule1F1B", "ScheduleGPipe") else 2,
        evaluated=() if name in attached_ranks.V_SHAPED else (3, LOOP.steps - 5),
        settings={**LOOP.settings, "split": split},
    )
    _, ours = trained(case, ranks=two_ranks)
    for stage, rank in enumerate(ours):
        assert rank["level"] == "order"
        first, *_, last = rank["notes"]
        assert "only: the shortest order" in first
        plan = rank["plan"]
        if name in KEPT or split == "off":
            assert last == "The framework's own order: no other is predicted to take less time"
            assert plan is None
            assert all(units == rank["ran"][1] for units in rank["ran"][1:])
        else:
            assert "% less time (predicted" in last
            assert plan.split
            assert len(rank["clocks"]) == 1
            own = LOOP.steps - 5  # torch infers shapes behind the evaluation
            after = [units for step, units in enumerate(rank["ran"]) if step > 32 and step != own]
            assert all(units == plan.labels()[stage] for units in after)


@pytest.mark.parametrize("late_from", [pytest.param(0, marks=on_request("PIPELINE")), 36])
def test_a_rank_that_is_late_in_other_orders_has_its_own_again(trained, two_ranks, late_from):
    """Within twenty iterations, and it says so."""
    case = replace(LOOP, steps=late_from + 30, late_from=late_from, evaluated=())
    _, ours = trained(case, ranks=two_ranks)
    for rank in ours:
        own = rank["ran"][1]  # the first step is torch's alone, and tells of no unit
        others = [step for step, units in enumerate(rank["ran"]) if step and units != own]
        assert late_from <= max(others) < (late_from or min(others)) + 20
        assert set(range(32, late_from)) <= set(others), "the shortest order runs until then"
        assert any(note.startswith("The framework's own order: the") for note in rank["notes"])


# What a job goes for ---------------------------------------------------------------------------


ALONE = "only measuring, in the framework's order and at the "
SHORTEST = "order auto, the shortest that is found, at the "
READ = "A GPU is opened for reading only: the "
KEEPS = "Objective time needs another order, and this job keeps its own"


@pytest.mark.parametrize(
    ("asked", "does", "notes"),
    [
        ({"objective": "time"}, f"{SHORTEST}highest clock, where it is faster", []),
        ({"objective": "time", "level": "units"}, f"{ALONE}highest clock; clocks", [KEEPS]),
        ({"objective": "edp", "level": "uniform"}, "one clock of least energy for the whole", []),
        (
            {"objective": "edp", "gpu_control": "none"},
            f"{SHORTEST}clocks as they are, where it is faster",
            [f"{READ}shortest order in place of least edp, and clocks stay as they are"],
        ),
        (
            {"level": "units", "gpu_control": "none"},
            f"{ALONE}clocks as they are, not order 1f1b, plans of least energy",
            [f"{READ}framework's order at baseline clocks"],
        ),
    ],
)
def test_what_a_job_goes_for(trained, two_ranks, asked, does, notes):
    case = Case("Schedule1F1B", 4, steps=4, settings={"baseline_steps": 2, **asked})
    _, ours = trained(case, ranks=two_ranks)
    assert f"is active: {does}" in ours[0]["said"][0]
    assert ours[0]["summary"]["notes"][: len(notes) or None] == notes
    assert ours[0]["said"][0].endswith("; ".join(["", *notes])) or not notes
