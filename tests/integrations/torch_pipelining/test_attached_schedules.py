"""Schedules of torch.distributed.pipelining with EnvPipe attached: the same bits, less energy."""

import re
from dataclasses import replace
from functools import partial

import attached_ranks
import pytest
import torch
from attached_ranks import Case
from energy_lines import bill_of_ranks
from memory_folder import memory_folder
from on_request import on_request
from presets import preset_profile
from rank_pool import RankFailedError

from envpipe_megatron.core.kinds import Kind, parse_unit
from envpipe_megatron.integrations.device import DeviceError, check_current
from envpipe_megatron.policies.planner import make_plan
from envpipe_megatron.policies.request import PlanRequest

pytestmark = pytest.mark.xdist_group("torch")

ORDER, UNITS = "order", "units"
#: Enough for a plan to run, on GPUs of four clocks.
PLANNED = 20


SPLIT = "ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble", "ScheduleDualPipeV"
KEPT = "ScheduleLoopedBFS", *SPLIT


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=on_request("PIPELINE") if name != "ScheduleDualPipeV" else ())
        for name in KEPT
    ],
)
def test_orders_that_are_kept_train_as_by_torch_alone(trained, name):
    """Backwards in reverse, and at level units splits and Vs: clocks in their own order."""
    count = 12 if name == "ScheduleDualPipeV" else 8
    # Torch's own evaluation hangs where stages lie in a V.
    evaluated = () if name in attached_ranks.V_SHAPED else (3,)
    settings = {"baseline_steps": 4, "level": UNITS if name in SPLIT else "auto"}
    case = Case(name, count, chunks=2, steps=10, settings=settings, evaluated=evaluated)
    _, ours = trained(case)
    for rank in ours:
        assert rank["level"] == UNITS
        assert rank["phases"][-1] in ("profile", "reconfigure")
        assert len(rank["executed"]) == len(set(rank["executed"]))
    if name not in SPLIT:
        why = f"against order: {name} (in it, stage 0 runs B7.0 before B0.0)"
        assert why in ours[0]["said"][0]
    if name == "ScheduleDualPipeV":  # whole backwards among others are two units that run as one
        kinds = {str(parse_unit(unit).kind) for unit in ours[0]["executed"]}
        assert kinds == {"forward", "input-gradient", "weight-gradient"}
        assert any(unit.endswith("+") for unit in ours[0]["executed"])


@pytest.mark.parametrize(
    ("name", "chunks", "forward_s"),
    [
        pytest.param("Schedule1F1B", 1, (0.03,), marks=on_request("PIPELINE")),
        pytest.param("ScheduleGPipe", 1, (0.03,), marks=on_request("PIPELINE")),
        ("ScheduleInterleaved1F1B", 2, (0.02, 0.03, 0.02, 0.03)),
        *(
            pytest.param(name, 2, (0.02, 0.03, 0.02, 0.03), marks=on_request("PIPELINE"))
            for name in SPLIT
        ),
    ],
)
def test_planned_orders_train_as_by_torch_alone(trained, name, chunks, forward_s):
    # The last one between steps of a plan. Torch's own hangs where stages lie in a V.
    evaluated = () if name in attached_ranks.V_SHAPED else (3, PLANNED - 2)
    settings = {"baseline_steps": 4}
    named = ("run", "runs", "error")  # as functions of EnvPipe's have, too
    count = 12 if name == "ScheduleDualPipeV" else 8
    case = Case(name, count, chunks, 0, PLANNED, settings, forward_s, evaluated, named=named)
    _, ours = trained(case)
    plan = ours[0]["plan"]
    assert plan.split
    for stage, rank in enumerate(ours):
        assert rank["level"] == ORDER
        assert set(rank["phases"][-3:]) <= {"reconfigure", "steady"}
        assert rank["executed"] == plan.labels()[stage]
        assert rank["released"], "the schedule is torch's alone again"
    # How many clocks it has is left to a counter's last digits: plans of three and of four differ
    # by a thousandth of their energy. None of one clock is both as fast and as frugal.
    cost, _ = ours[0]["predicted"]
    as_fast_j = [
        each.energy_j
        for each in ours[0]["at_one_clock"]
        if each.iteration_time_s <= cost.iteration_time_s
    ]
    assert cost.energy_j < 0.99 * min(as_fast_j)


@pytest.mark.parametrize(
    ("how", "name", "chunks", "why"),
    [
        pytest.param(
            "fsdp", "ScheduleInterleaved1F1B", 2, "with fully_shard", marks=on_request("PIPELINE")
        ),
        pytest.param("ddp", "Schedule1F1B", 1, "with Distributed", marks=on_request("PIPELINE")),
    ],
)
def test_stages_that_replicas_share_train_as_by_torch_alone(trained, how, name, chunks, why):
    """Two stages, and two replicas of each that see other data: sharded weights, or copies."""
    settings = {"baseline_steps": 4}
    case = Case(name, 8, chunks, steps=PLANNED, settings=settings, replicated=how)
    alone, ours = trained(case)
    assert alone[0]["losses"] == alone[1]["losses"] == []
    assert alone[2]["losses"] != alone[3]["losses"]
    plan = ours[0]["plan"]
    assert not plan.split
    assert f"Backwards stay whole: {why}" in " ".join(ours[0]["said"])
    for rank, found in enumerate(ours):
        assert found["level"] == ORDER
        assert found["executed"] == plan.labels()[rank // 2]


#: Steps of a warm-up, of a profile and of a plan that have other microbatches, then as before.
OTHERS = {1: (2, 2), 6: (4, 2), PLANNED: (4, 2), PLANNED + 2: (6, 2), PLANNED + 3: (8, 4),
          PLANNED + 4: (8, 4), PLANNED + 6: (4, 4), PLANNED + 7: (12, 2)}  # fmt: skip


@pytest.mark.parametrize("level", [ORDER, "uniform"])
def test_steps_with_other_microbatches_are_as_by_torch_alone(trained, two_ranks, level):
    """Fewer, more, or of another size: weights and losses, and a bill that does not mix them."""
    settings = {"baseline_steps": 4, "level": level}
    case = Case("Schedule1F1B", 8, steps=PLANNED + 10, settings=settings, others=OTHERS)
    _, ours = trained(case, ranks=two_ranks)
    for rank in ours:
        assert rank["level"] == level
        by_torch = rank["energy"]["framework"].steps
        assert by_torch == 1 + len(OTHERS)


def test_shapes_that_are_inferred_anew_and_functions_that_change(trained, two_ranks):
    sizes = {6: (8, 4), PLANNED: (8, 1), PLANNED + 1: (8, 1)}
    case = Case("ScheduleInterleaved1F1B", 8, chunks=2, steps=PLANNED + 4, others=sizes,
                settings={"baseline_steps": 4}, own_loss_from=PLANNED + 3)  # fmt: skip
    for each in (case, replace(case, schedule="Schedule1F1B", chunks=1)):
        _, ours = trained(each, ranks=two_ranks)
        assert ours[0]["plan"] is not None
        # The first one, these, and that with the function.
        by_torch = ours[0]["energy"]["framework"].steps
        assert by_torch == 1 + len(sizes) + 1


@pytest.mark.parametrize("more", [0, 2])
def test_replicas_with_other_microbatches_train(trained, more):
    """From the start: metered, with the reason. In one step: the others keep their phase."""
    others = {} if more else {1: (2, 2), PLANNED - 3: (4, 2)}
    case = Case("Schedule1F1B", 8, steps=PLANNED, replicated="ddp", others=others, others_of=[1],
                settings={"baseline_steps": 4}, more=more)  # fmt: skip
    _, ours = trained(case)
    assert {rank["level"] for rank in ours} == {"observe" if more else ORDER}
    assert len({tuple(rank["phases"]) for rank in ours}) == 1
    assert (ours[0]["plan"] is None) == bool(more)
    if more:
        assert "replicas with other numbers of microbatches" in ours[0]["said"][0]


def test_a_job_saves_as_its_plan_says(trained):
    """Within a point of saving, and no slower than half a percent."""
    case = Case("Schedule1F1B", 8, steps=50, forward_s=(0.03, 0.03, 0.03, 0.05))
    _, ours = trained(case, "a100-sxm")
    compared = bill_of_ranks(rank["energy"] for rank in ours).comparison_facts()["comparison"]
    cost, baseline = ours[0]["predicted"]
    assert ours[0]["plan"].split
    assert cost.saving_percent(baseline) > 25
    assert abs(compared["saving_percent"] - cost.saving_percent(baseline)) < 1
    assert compared["slowdown_percent"] < 0.5
    assert "against the job's own baseline: a step takes" in " ".join(ours[0]["said"])
    assert all(not rank["said"] for rank in ours[1:])
    assert all("envpipe energy per GPU" in line for line in ours[0]["lines"])


def test_a_level_that_is_named_is_what_changes(trained, two_ranks):
    for name, level, phases in (
        ("ScheduleGPipe", "observe", {"framework", "warm-up", "steady"}),
        ("Schedule1F1B", "uniform", {"framework", "warm-up", "profile", "steady"}),
    ):
        settings = {"level": level, "baseline_steps": 3}
        _, ours = trained(Case(name, steps=8, settings=settings), ranks=two_ranks)
        assert {rank["level"] for rank in ours} == {level}
        assert set(ours[0]["phases"]) <= phases
        assert ours[0]["plan"] is None


def test_where_nothing_but_looking_is_asked_for_a_plan_is_refused(two_ranks, tmp_path):
    profile = preset_profile("a100-sxm", 2, {Kind.FORWARD: 0.03, Kind.BACKWARD: 0.06}, (1200,))
    profile.write(tmp_path / "profile.csv")
    make_plan(profile, PlanRequest(4)).plan.write(tmp_path / "plan.json")
    files = {"profile": tmp_path / "profile.csv", "plan": tmp_path / "plan.json"}
    case = Case("ScheduleGPipe", settings={"level": "observe", **files})
    with pytest.raises(RankFailedError, match=r"this job's level is below that .got 'observe'"):
        two_ranks.run(attached_ranks.train, case, tmp_path, "a100-sxm")


def test_random_numbers_keep_the_order_of_chunks(trained, two_ranks):
    """With dropout, a rank's forwards draw the same numbers in their own order alone."""
    dropout = Case("ScheduleInterleaved1F1B", chunks=2, dropout=0.1, steps=6)
    _, ours = trained(dropout, ranks=two_ranks)
    assert {rank["level"] for rank in ours} == {UNITS}
    assert "another order gives forwards other numbers" in " ".join(ours[0]["said"])
    whole = replace(dropout, schedule="Schedule1F1B", chunks=1)
    _, ours = trained(whole, ranks=two_ranks)
    assert {rank["level"] for rank in ours} == {ORDER}
    _, ours = trained(replace(whole, draws_in_backward=True), ranks=two_ranks)
    assert {rank["level"] for rank in ours} == {UNITS}
    assert "random numbers in backwards" in " ".join(ours[0]["said"])


@pytest.mark.parametrize("level", ["uniform", "units", "order"])
def test_a_step_that_fails_and_is_caught_does_not_end_training(trained, two_ranks, level):
    settings = {"level": level, "baseline_steps": 3}
    case = Case("Schedule1F1B", steps=9, fails=5, settings=settings)
    _, ours = trained(case, ranks=two_ranks)
    assert {rank["level"] for rank in ours} == {level}
    assert ours[0]["energy"]["framework"].steps == 2  # the first one, and that which failed


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"channel": "receives"}, "No such option .*channel"),
        ({"no_such": 1}, "No such option"),
        ({"level": "order", "max_in_flight": 1}, "in flight is below"),
    ],
)
def test_settings_that_are_wrong_are_told_before_training(pool, tmp_path, settings, said):
    with pytest.raises(RankFailedError, match=said):
        pool.run(attached_ranks.train, Case("Schedule1F1B", settings=settings), tmp_path)


def test_a_level_that_cannot_be_had_is_an_error_on_every_rank(pool, tmp_path):
    case = Case("ScheduleLoopedBFS", chunks=2, settings={"level": "order"})
    with pytest.raises(RankFailedError, match="Level order cannot be had with: ScheduleLoopedBFS"):
        pool.run(attached_ranks.train, case, tmp_path)


def test_one_attach_at_a_time_and_another_after_it(pool, tmp_path):
    told = pool.run(attached_ranks.attach_again, Case("Schedule1F1B"), tmp_path)
    without = "This job trains without EnvPipe: Another job of this process has not ended"
    for rank, (facts, said, levels) in enumerate(told):
        assert "values by name (got GPT, 24)" in facts
        assert [line.startswith(without) for line in said] == [True] * 4 * (rank == 0)
        assert levels == [ORDER, ORDER]


def test_what_is_no_schedule_is_refused():
    from envpipe_megatron.integrations.torch_pipelining import attach

    with pytest.raises(Exception, match=r"no schedule of torch\.distributed"):
        attach(object())


def test_a_stage_on_another_gpu_than_its_process_s_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    check_current(torch.device("cpu"))
    check_current(torch.device("cuda:0"))
    check_current(torch.device("cuda"))
    with pytest.raises(DeviceError, match=r"cuda:0 .got 'cuda:1'.*set_device"):
        check_current(torch.device("cuda:1"))


@pytest.mark.parametrize(("lines", "refused"), [(0, False), (1, False), (2, True)])
def test_where_a_gpu_cannot_be_read_the_schedule_is_torchs(two_ranks, lines, refused):
    """From the start, or where the job is made again, at the level that the first step allows.

    Or at the one below an order that torch refuses.
    """
    train = attached_ranks.train_where_no_gpu_is_read
    train = partial(train, later=lines > 0, refused=refused)
    case = Case("Schedule1F1B", draws_in_backward=lines == 1)
    with memory_folder() as folder:
        told = two_ranks.run(train, case, folder)
    why = "This job trains without EnvPipe: .*no CUDA GPU in this process"
    for rank, (untouched, phase, line, said) in enumerate(told):
        assert untouched
        assert (phase, line) == ("framework", "")
        assert [bool(re.match(why, text)) for text in said[lines:]] == [True] * (rank == 0)
