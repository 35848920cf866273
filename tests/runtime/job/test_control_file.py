"""A job that is turned off and on again while it runs."""

from __future__ import annotations

import os
import re
from itertools import groupby
from types import SimpleNamespace

import controlled_ranks
import pytest
import step_ranks
from energy_lines import bill_of_ranks
from fake_gpu import look_until
from presets import preset_profile

from envpipe_megatron.files import replace_files
from envpipe_megatron.formats.bill import Bill
from envpipe_megatron.formats.energy import read_energy_logs
from envpipe_megatron.formats.wishes import NO_WISHES, Wishes
from envpipe_megatron.policies.objective import Goal
from envpipe_megatron.runtime.job import parts
from envpipe_megatron.runtime.job.iterations import Switch
from envpipe_megatron.runtime.job.options import JobOptions, Level
from envpipe_megatron.runtime.job.parts import ControlFile, SessionState

pytestmark = pytest.mark.xdist_group("pipeline")

OFF, ON = '{"off": true}', '{"off": false}'
OWN = [
    ["F0", "F1", "F2", "B0", "B1", "B2"],
    ["F0", "F1", "B0", "F2", "B1", "B2"],
    ["F0", "B0", "F1", "B1", "F2", "B2"],
]


def check(ranks, off, *, locked=True):
    """All ranks were off in the same steps, in the framework's order and without a lock."""
    for rank, own in zip(ranks, OWN, strict=True):
        assert [at for at, (phase, *_) in enumerate(rank["ran"]) if phase == "off"] == off
        for phase, lock_mhz, units in rank["ran"]:
            assert (lock_mhz is None) == (phase == "off" or not locked)
            assert units == own or phase not in ("warm-up", "off")
        assert rank["after"] is None
        assert rank["notes"] == ranks[0]["notes"]
        assert rank["wishes"] == ranks[0]["wishes"]


def test_a_loop_waits_while_the_job_is_off_and_goes_on_where_it_was(three_ranks, tmp_path):
    loop = {"type": "optimal", "scheduling": "auto"}
    plain = three_ranks.run(controlled_ranks.train_asked, tmp_path / "plain", 22, loop, {})
    asks = {12: OFF, 15: ON}
    asked = three_ranks.run(controlled_ranks.train_asked, tmp_path / "asked", 25, loop, asks)
    check(asked, [12, 13, 14])
    for rank, without in zip(asked, plain, strict=True):
        assert rank["ran"][:12] + rank["ran"][15:] == without["ran"]
    phases = asked[0]["sums"]
    assert phases["off"].steps == 3
    assert phases["off"].average_power_w > phases["steady"].average_power_w
    saved = [bill_of_ranks([ranks[0]["sums"]]).comparison() for ranks in (asked, plain)]
    assert saved[0].saving_percent == pytest.approx(saved[1].saving_percent, abs=0.2)
    (note,) = asked[0]["notes"]
    assert re.fullmatch(r"Off from iteration 12 \(20.*\) to 14 \(20.*\)", note)
    lines = read_energy_logs([tmp_path / "asked" / "output" / "energy.jsonl"]).lines
    assert Bill(lines).total_by("phase")["off",].steps == 9


def test_a_job_without_a_loop_waits_in_every_phase_and_its_gpus_stay_held(three_ranks, tmp_path):
    """A broken file changes nothing; without a file the job is on."""
    given = preset_profile("a100-sxm", 3, step_ranks.TIMES_S, (1200, 1095))
    given.write(tmp_path / "profile.csv")
    options = {"profile": tmp_path / "profile.csv", "reconfigure": "greedy", "guarded": True}
    asks = {1: OFF, 3: "[", 4: ON, 7: OFF, 9: ON, 14: OFF, 16: None}
    ranks = three_ranks.run(
        controlled_ranks.train_asked, tmp_path, 18, options, asks, (0, 2, 12, 15)
    )
    check(ranks, [1, 2, 3, 7, 8, 14, 15])
    assert [phase for phase, _ in groupby(phase for phase, *_ in ranks[0]["ran"])] == [
        "warm-up", "off", "warm-up", "reconfigure", "off", "reconfigure", "steady", "off", "steady",
    ]  # fmt: skip
    assert ranks[1]["ran"][-1][2] != OWN[1], "the plan runs again"
    for rank in ranks:
        assert rank["paused"] == [(1410, 3), (None, 3), (1410, 3), (None, 3)]
    assert len(ranks[0]["notes"]) == 3


def test_a_power_budget_is_kept_on_all_ranks_until_it_is_lifted(three_ranks, tmp_path):
    loop = {"type": "optimal", "scheduling": "auto"}
    asks = {14: '{"power_budget": "70%"}', 34: None}
    ranks = three_ranks.run(controlled_ranks.train_asked, tmp_path, 44, loop, asks)
    power = ranks[0]["summary"]["power"]
    assert [rank["summary"]["power"] for rank in ranks] == [power] * 3
    assert power["budget_w"] is None, "lifted"
    assert power["exceeded_s"] < 0.2 * power["time_s"], "a window or two"
    assert power["swing_w"] > 0.1 * power["peak_w"]
    said = "\n".join(ranks[0]["said"])
    (allowed_w, own_w) = re.search(
        r"power budget: (\S+) W of a GPU, which took (\S+) W", said
    ).groups()
    assert float(allowed_w) == pytest.approx(0.7 * float(own_w), rel=1e-3)
    assert "the power budget is lifted" in said


@pytest.mark.parametrize(
    ("options", "locked"),
    [
        ({"type": "uniform", "level": Level.UNIFORM}, True),
        ({"type": "optimal", "reads_only": True, "why_whole": ""}, False),
    ],
    ids=["one clock", "order only"],
)
def test_other_jobs_that_change_something(three_ranks, tmp_path, options, locked):
    asks = {7: OFF, 9: ON}
    ranks = three_ranks.run(controlled_ranks.train_asked, tmp_path, 11, options, asks)
    check(ranks, [7, 8], locked=locked)


def test_a_job_that_only_measures_has_its_clocks_given_back_and_keeps_no_budget(
    three_ranks, tmp_path
):
    asks = {2: '{"power_budget": 200}', 4: OFF}
    ranks = three_ranks.run(controlled_ranks.train_asked, tmp_path, 6, {"type": "baseline"}, asks)
    check(ranks, [4, 5])
    budget, off = ranks[0]["notes"]
    assert "power budget is not kept" in budget
    assert re.fullmatch(r"Off from iteration 4 \(20.*\)", off)


def test_a_clock_that_is_lost_while_the_job_is_off_is_said_when_it_is_on_again(
    three_ranks, tmp_path
):
    loop, asks = {"type": "optimal", "scheduling": "auto"}, {12: OFF, 15: ON}
    ranks = three_ranks.run(controlled_ranks.train_asked, tmp_path, 19, loop, asks, (), (1, 13))
    for rank in ranks:
        assert [phase for phase, *_ in rank["ran"][12:16]] == ["off"] * 3 + ["steady"]
        assert rank["notes"] == ranks[0]["notes"]
    assert any("the driver of a test" in text for text in ranks[0]["notes"])


@pytest.fixture
def job():
    """A rank of its own, that chooses no clocks, and an operator."""
    alone = SimpleNamespace(is_planner=True, from_planner=lambda told: told)
    job = SimpleNamespace(state=SessionState(), control=SimpleNamespace(wishes=NO_WISHES), said=[])
    job.options, job.folder = SimpleNamespace(keeps_power=False), SimpleNamespace(path=".")
    job.executor, job.collectives = SimpleNamespace(now_s=lambda: job.state.iteration), alone
    job.named, job.say = str, job.said.append
    return job


def test_notes_of_a_job_that_is_off_again_and_again_do_not_grow(job):
    switch = Switch(job)
    for number in range(1, 1001):
        job.state.iteration = 2 * number
        job.control.wishes = Wishes(off=number % 2 == 1)
        assert switch.hear() == job.control.wishes.off
    notes = job.state.notes
    said = [re.sub(r" \(.*?\)", "", note) for note in notes]
    assert said == [f"Off from iteration {at} to {at + 1}" for at in range(1802, 2000, 4)]
    assert len(job.said) == 1000


@pytest.mark.parametrize("has_folder", [True, False])
@pytest.mark.parametrize("budget", [None, 200.0])
def test_a_budget_of_the_options_that_is_not_kept_is_said_once(job, has_folder, budget):
    job.state.wishes = Wishes(budget)
    job.options = JobOptions(num_microbatches=8, objective=Goal.TIME, power_budget=job.state.wishes)
    job.control = SimpleNamespace(wishes=job.state.wishes)
    job.folder.path = "." if has_folder else None
    switch = Switch(job)
    for job.state.iteration in range(1, 4):
        switch.hear()
    said = () if budget is None else ("The power budget is not kept: this job chooses no clocks",)
    assert (tuple(job.said), job.state.notes) == (said, said)


# --- the file -------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "_LOOK_S", 0.002)
    made = ControlFile(tmp_path, Wishes(power_budget_w=300))
    yield made
    made.close()


def test_the_last_wish_that_could_be_read_stays(file, caplog):
    assert file.wishes == Wishes(power_budget_w=300)
    replace_files({file.path: ['{"power_budget": "80%", "off": true}']})
    look_until(lambda: file.wishes == Wishes(None, 0.8, off=True))
    replace_files({file.path: ['{"power_budget": "800%"}']})
    look_until(lambda: "at full clock" in caplog.text)
    assert file.wishes == Wishes(None, 0.8, off=True)
    file.path.unlink()
    look_until(lambda: file.wishes == Wishes(power_budget_w=300))
    file.path.mkdir()
    look_until(lambda: "directory" in caplog.text)
    assert file.wishes == Wishes(power_budget_w=300)
    said = [record.getMessage()[:9] for record in caplog.records]
    assert said == ["Asked for", "What was ", "Asked for", "What was "], "each is said once"
    assert f"{file.path}: {{'power_budget': '80%', 'off': True}}" in caplog.text
    file.path.rmdir()
    replace_files({file.path: ["{}"]})
    look_until(lambda: file.wishes == NO_WISHES)


def test_a_disk_that_hangs_holds_up_nobody(tmp_path):
    path = tmp_path / "control.json"
    os.mkfifo(path)  # to open it waits for a writer
    file = ControlFile(tmp_path, NO_WISHES)
    assert file.wishes == NO_WISHES
    file.close()
    with path.open("w") as there:  # it answers in the end
        there.write(OFF)
    look_until(lambda: file.wishes.off)
