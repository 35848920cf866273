"""Frameworks that keep their order of units: what they are told, and what EnvPipe makes of it."""

import json
import re
from collections.abc import Sequence
from unittest.mock import Mock

import instruction_ranks
import numpy as np
import pytest
import torch
from energy_lines import bill_of_ranks, json_lines
from memory_folder import memory_folder
from presets import preset_profile, write_changed_preset
from torch import distributed as dist

from envpipe_megatron.core.kinds import Kind
from envpipe_megatron.core.orders import builders
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.gpu.presets import load_preset
from envpipe_megatron.integrations.instructions import InstrumentedPipeline

pytestmark = pytest.mark.xdist_group("pipeline")

STAGES, MICROBATCHES = 4, 4
QUICK = {"baseline_steps": 3, "profile_steps": 1}
STEPS = 44


def letters(schedule):
    return ["".join(unit.kind.letter for unit in stage) for stage in schedule.stages]


@pytest.fixture(scope="module")
def folder():
    with memory_folder() as made:
        yield made


@pytest.fixture(scope="module")
def preset(folder):
    """An A100 with four clocks."""
    changes = {"min_frequency_mhz": 810, "frequency_step_mhz": 200}
    return write_changed_preset(folder / "few.toml", changes)


def profile(preset, stages=STAGES):
    slowest_s = max(instruction_ranks.FORWARD_S)
    times = {Kind.FORWARD: slowest_s, Kind.BACKWARD: 2 * slowest_s}
    return preset_profile(str(preset), stages, times, (1010, 810))


@pytest.fixture(scope="module")
def trained(pool, folder, preset):
    """Return what the ranks of the example came to."""
    settings = {**QUICK, "type": "envelope", "output": str(folder / "output")}
    arguments = (folder / "example", preset, MICROBATCHES, STEPS, settings)
    return pool.run(instruction_ranks.train_example, *arguments)


def test_the_example_trains_as_without_envpipe(trained):
    """Losses of all steps and all weights, to the last bit, with dropout in between."""
    assert len(trained[-1]["losses"]) == STEPS
    for rank in trained:
        assert rank["losses"] == rank["own_losses"]
        assert rank["weights_equal"]
        assert rank["trained"]


def test_the_example_saves_energy_in_its_own_order(trained):
    own = builders.one_f_one_b(STAGES, MICROBATCHES)
    phases = [phase for phase, _ in trained[0]["iterations"]]
    assert list(dict.fromkeys(phases)) == ["warm-up", "profile", "reconfigure", "steady"]
    assert len(phases) == STEPS - 1, "the first step is recorded alone"
    for stage, rank in enumerate(trained):
        assert rank["executed"] == own.labels()[stage]
    compared = bill_of_ranks([trained[0]["sums"]]).comparison()
    assert compared.saving_percent > 5
    assert compared.slowdown_percent < 1
    bill = [line for line in trained[0]["said"] if "against the job's own baseline" in line]
    assert len(bill) == 1
    assert "no clock was changed" not in bill[0]
    assert re.search(r"envpipe report \S+ shows where", trained[0]["said"][-1])
    assert all(not rank["said"] for rank in trained[1:])


def test_replicas_with_other_numbers_of_microbatches_are_metered(pool, folder, preset):
    both = [letters(builders.one_f_one_b(2, count)) for count in (2, 4)]
    root, known = folder / "other-numbers", folder / "of-two.csv"
    profile(preset, 2).write(known)  # the first step has run: what was given ends nothing
    given = {**QUICK, "type": "optimal", "profile": str(known)}
    order = [*both[0], *both[1]]
    told = pool.run(instruction_ranks.train_letters, root, preset, order, 8, given, 2)
    for rank, job in enumerate(told):
        assert job["phase"] == "steady"
        assert len(job["executed"]) == len(order[rank])
        assert job["reports"][-1]
    (note,) = told[0]["summary"]["notes"]
    assert "replicas with other numbers of microbatches" in note


def run_letters(pool, folder, preset, schedule, steps=8, **settings):
    order: Sequence[str] = letters(schedule)
    root = folder / f"letters-{len(list(folder.iterdir()))}"
    given = {**QUICK, **settings}
    return pool.run(instruction_ranks.train_letters, root, preset, order, steps, given)


def test_a_gpipe_is_planned_as_one(pool, folder, preset):
    """By its own order from the first iteration on, and with a plan for it."""
    profile(preset).write(folder / "known.csv")
    gpipe = builders.gpipe(STAGES, MICROBATCHES)
    told = run_letters(
        pool, folder, preset, gpipe, type="uniform", profile=str(folder / "known.csv")
    )
    for stage, job in enumerate(told):
        assert job["phase"] == "steady"
        assert job["schedule"] == "gpipe"
        assert job["executed"] == gpipe.labels()[stage]
        assert len(set(job["frequency_mhz"][stage])) == 1
        assert max(job["frequency_mhz"][stage]) < 1410
        # The warm-up, too: all units of the last stage, and once those of the others.
        units_s = 3 * (MICROBATCHES * 0.05 + 0.03 + 0.03 + 0.03)
        assert job["iterations"][0] == ("warm-up", pytest.approx(units_s, rel=1e-6))


def test_replicas_share_a_job(pool, folder, preset):
    """Two pipelines of two stages: one plan, and a report of all GPUs on every rank."""
    own = builders.one_f_one_b(2, 4)
    told = run_letters(pool, folder, preset, own, type="baseline")
    for rank, job in enumerate(told):
        assert job["phase"] == "steady"
        assert job["executed"] == own.labels()[rank % 2]
        assert job["iterations"] == told[0]["iterations"]
        assert job["reports"] == told[0]["reports"]
    first, *_, last = told[0]["reports"]
    assert first == "", "nothing was metered in the first step"
    assert "envpipe phase: steady" in last


def test_a_job_without_a_pipeline_gets_one_clock(pool, folder, preset):
    """Four GPUs that all run the whole model; and the job is started again."""
    gpu, output = load_preset(str(preset)), folder / "one-clock"
    own = builders.one_f_one_b(1, 2)
    job = {"max_slowdown": 20, "baseline_steps": 5, "facts": {"model": "m"}, "output": str(output)}
    first = run_letters(pool, folder, preset, own, 50, **job)
    units = [(kind.value, time_s) for kind, time_s in ((Kind.FORWARD, 0.05), (Kind.BACKWARD, 0.1))]
    step_s, energy_j = {}, {}
    for clock in gpu.supported_frequencies_mhz:
        times_s = [2 * gpu.unit_time_s(kind, clock, time_s) for kind, time_s in units]
        step_s[clock] = sum(times_s)
        powers_w = [gpu.busy_power_w(kind, clock) for kind, _ in units]
        energy_j[clock] = sum(t * watts for t, watts in zip(times_s, powers_w, strict=True))
    top, best, *_ = gpu.supported_frequencies_mhz
    for rank in first:
        assert rank["phase"] == "steady"
        phases = [phase for phase, _ in rank["iterations"]]
        assert list(dict.fromkeys(phases)) == ["warm-up", "profile", "steady"]
        assert rank["iterations"][-1] == ("steady", pytest.approx(step_s[best], rel=1e-6))
        choice, *clocks = rank["summary"]["notes"]
        assert choice == f"One clock for the whole job: {best} MHz; at most 20 % slower was allowed"
        assert [line.split(":")[0] for line in clocks] == ["1410 MHz", "1210 MHz", "1010 MHz"]
    compared = bill_of_ranks([first[0]["sums"]]).comparison()
    saved = 100 * (1 - energy_j[best] / energy_j[top])
    assert compared.saving_percent == pytest.approx(saved, abs=1.0)
    slower = 100 * (step_s[best] / step_s[top] - 1)
    assert compared.slowdown_percent == pytest.approx(slower, abs=0.1)
    (line,) = (output / "one_clock.jsonl").read_text().splitlines()
    assert json.loads(line)["chosen_mhz"] == best
    assert not (output / "loop.jsonl").exists(), "nothing is predicted"
    units_seen = json_lines(output / "timeline.jsonl")
    steady = [seen for seen in units_seen if seen.get("phase") == "steady"]
    assert {seen["rank"] for seen in steady} == {0, 1, 2, 3}
    assert {clock for seen in steady for clock in seen["frequency_mhz"]} == {best}
    for rank in run_letters(pool, folder, preset, own, 8, **job):
        assert [phase for phase, _ in rank["iterations"]] == ["warm-up"] * 2 + ["steady"] * 5
        assert rank["iterations"][-1] == ("steady", pytest.approx(step_s[best], rel=1e-6))
        assert rank["summary"]["notes"] == [
            f"One clock for the whole job: {best} MHz, as found before"
        ]


def test_an_order_that_cannot_be_planned_is_refused_on_all_ranks(pool, folder, preset):
    other = builders.envpipe(STAGES, STAGES + 2, [2, 1, 0, 0])
    for error in run_letters(pool, folder, preset, other):
        assert "neither 1F1B nor GPipe" in error
        assert letters(other)[0] in error


@pytest.fixture
def alone(monkeypatch):
    """Makes a pipeline of this process, whose first step has not been."""
    monkeypatch.setenv("RANK", "0")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def make(num_microbatches=1, group=None, **settings):
        return InstrumentedPipeline(group, num_microbatches, gpu="a40", **settings)

    yield make
    dist.destroy_process_group()


#: What calls are written as.
CALLS = {
    "(": lambda of: of.on_step_begin(),
    ")": lambda of: of.on_step_end(),
    "F": lambda of: of.on_instruction_begin("forward"),
    "f": lambda of: of.on_instruction_end("forward"),
    "b": lambda of: of.on_instruction_end("backward"),
    "?": lambda of: of.on_instruction_begin("optimizer"),
    "|": lambda of: of.pause(),
}


@pytest.mark.parametrize(
    ("calls", "said"),
    [
        ("F", "on_instruction_begin was called outside a step"),
        ("((", "on_step_begin was called within a step"),
        ("(|", "pause was called within a step"),
        ("(?", r"No such instruction \(got 'optimizer'\). There are forward, backward"),
        ("(f", "on_instruction_end was called within a step.* within a forward"),
        ("(Fb", "on_instruction_end was called within a forward.* within a backward"),
        ("(F)", "on_step_end was called within a forward"),
        ("(Ff)", "neither 1F1B nor GPipe of 1 microbatches"),
    ],
)
def test_misuse_is_told_where_it_happens(alone, calls, said):
    pipeline = alone()
    for call in calls[:-1]:
        CALLS[call](pipeline)
    with pytest.raises(EnvPipeError, match=said):
        CALLS[calls[-1]](pipeline)


def test_one_that_is_closed_before_its_first_step_ends_no_training(alone, caplog):
    pipeline = alone()
    pipeline.close()
    for _ in range(2):
        with pipeline.step(), pipeline.instruction("forward"):
            pass
    assert len(caplog.messages) == 1
    assert "on_step_begin was called after end_training or close" in caplog.text


@pytest.mark.parametrize("count", [0, -1, 4.0, "4", None])
def test_what_is_no_number_of_microbatches_is_refused_before_the_first_step(alone, count):
    with pytest.raises(EnvPipeError, match="one microbatch or more"):
        alone(count)


@pytest.mark.parametrize("make", [np.int64, torch.tensor])
def test_a_number_of_microbatches_of_numpy_or_torch_is_kept_as_json(
    alone, tmp_path, monkeypatch, make
):
    """For the job's next start."""
    monkeypatch.setenv("ENVPIPE_EMULATED_ROOT", str(tmp_path / "gpus"))
    pipeline = alone(make(1), facts={"model": "m"}, output=tmp_path)
    with pipeline.step():
        for name in ("forward", "backward"):
            with pipeline.instruction(name):
                pass
    pipeline.close()
    assert json.loads((tmp_path / "job.json").read_text())["steps"]["num_microbatches"] == 1


def test_a_rank_that_is_not_in_the_group_that_it_gives_is_refused(alone):
    with pytest.raises(EnvPipeError, match=r"in no pipeline that it gave \(got 0\)"):
        alone(group=dist.GroupMember.NON_GROUP_MEMBER)


@pytest.mark.parametrize("option", ["scheduling", "channel"])
def test_options_of_an_order_or_of_its_messages_are_refused(alone, option):
    with pytest.raises(EnvPipeError, match=rf"No such option .*{option}"):
        alone(**{option: "receives"})


def test_all_options_that_are_taken_are_listed(alone):
    with pytest.raises(EnvPipeError) as error:
        alone(order="ours")
    *_, names = str(error.value).rstrip(".").partition("There are ")
    assert not [
        name for name in names.split(", ") if f"`{name}`" not in InstrumentedPipeline.__doc__
    ]


def test_what_is_no_step_ends_no_training(pool, folder, preset):
    """It is said once, and the steps after it are as before."""
    own = letters(builders.one_f_one_b(STAGES, MICROBATCHES))
    for told in pool.run(instruction_ranks.train_on, folder / "goes-on", preset, own):
        assert told.pop("iterations") == ["warm-up"] * 2 + ["steady"] * 14
        assert told.pop("at the end") == 2 + 14
        for name, said in {
            "failed first": [],
            "failed": [],
            "failed, evaluation": [],
            "unfinished": [
                "on_step_begin was called within a forward",
                r"This iteration ended before [FB]\d",
            ],
            "short": [],
            "short again": [],
            "evaluation": ["on_instruction_begin was called outside a step"],
            "other order": [],
            "within": [
                "pause was called within a step",
                "on_instruction_end was called within a step",
                r"No such instruction \(got 'recompute'\)",
            ],
            "end": ["on_step_end was called outside a step"],
            "closed": ["on_step_begin was called after end_training or close"],
        }.items():
            found = told.pop(name)
            assert len(found) == len(said), (name, found)
            for text, pattern in zip(found, said, strict=True):
                assert re.search(pattern, text), name
        assert not told


def test_a_step_that_could_not_begin_is_none(caplog):
    pipeline, job = object.__new__(InstrumentedPipeline), Mock()
    job.follow.side_effect = RuntimeError("a peer is gone")
    known = {
        "_job": job,
        "_framework": Mock(),
        "_reporter": None,
        "_logged": set(),
    }
    vars(pipeline).update(known, _closed=False, _paused=False, _running=None)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="a peer is gone"):
            pipeline.on_step_begin()
    pipeline.on_step_end()
    (record,) = caplog.records
    assert "on_step_end was called outside a step" in record.message


def started(pool, folder, preset, fault, **settings):
    orders = letters(builders.one_f_one_b(STAGES, MICROBATCHES))
    with memory_folder() as root:
        return pool.run(
            instruction_ranks.start_with_fault, root, preset, orders, fault, {**QUICK, **settings}
        )


def test_without_a_guard_on_one_rank_all_train_and_change_no_clock(pool, folder, preset):
    ranks = started(pool, folder, preset, "guard", type="envelope")
    for phase, _, _, notes, changes in ranks:
        assert (phase, changes) == ("warm-up", 0)
        assert "not only this user's" in notes[1]
    assert any("left as they are (" in text and "only this user's" in text for text in ranks[0][2])
    for error in started(pool, folder, preset, "guard", require_control=True):
        assert "not only this user's" in error


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("reading", "NVML is not there"),
        ("gloo", "cannot reach others of the job"),
    ],
)
def test_what_cannot_be_read_or_reached_trains_without_envpipe(pool, folder, preset, fault, why):
    ranks = started(pool, folder, preset, fault)
    assert [rank[:2] for rank in ranks] == [("framework", "")] * STAGES
    (said,) = ranks[0][2]
    assert said.startswith("This job trains without EnvPipe: ")
    assert why in said
    assert [rank[2] for rank in ranks[1:]] == [[]] * (STAGES - 1)
    for error in started(pool, folder, preset, fault, require_control=True):
        assert why in error


def test_a_wrong_emulation_stays_an_error(pool, folder, preset):
    for error in started(pool, folder, preset, "emulation"):
        assert "is a time in s above 0" in error
