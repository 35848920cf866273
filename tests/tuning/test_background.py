"""Work beside training, in a process of its own, and plans that are made there."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from presets import preset_profile

from envpipe_megatron.core.conditions import known_conditions
from envpipe_megatron.core.kinds import Kind
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.formats.energy import Phase
from envpipe_megatron.gpu.guard.messages import wait_readable
from envpipe_megatron.gpu.presets import load_preset
from envpipe_megatron.policies.objective import LEAST_ENERGY
from envpipe_megatron.policies.request import PlanRequest, check_request, make_problem
from envpipe_megatron.runtime.job.options import JobOptions
from envpipe_megatron.tuning.background import Background
from envpipe_megatron.tuning.planner import Planner
from envpipe_megatron.tuning.sweep import planned, planned_beside
from job_runs import Ran, run_job

FOR_EVER = partial(sum, count())
CLOCKS = (1200, 1005, 855)
TIMES = {Kind.FORWARD: 0.03, Kind.BACKWARD: 0.06}


def taken(background):
    background._child[0].wait(60.0)
    return background.take()


def pid_of(background):
    return background._child[0].pid


def is_gone(pid):
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    return True


def test_work_of_a_python_that_was_built_for_an_old_c_library(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    background = Background()
    background.start(partial(sum, [1, 2]))
    assert taken(background) == 3


def test_work_whose_working_folder_is_gone(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    background = Background[int]()
    background.start(partial(sum, [1, 2]))
    assert taken(background) == 3


def test_what_never_ends_ends_itself(monkeypatch):
    monkeypatch.setattr("envpipe_megatron.tuning.background._LIMIT_S", 1)
    before = signal.signal(signal.SIGALRM, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    background = Background()
    background.start(FOR_EVER)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    signal.signal(signal.SIGALRM, before)
    pid = pid_of(background)
    with pytest.raises(EnvPipeError, match="No end in 1 s"):
        taken(background)
    assert is_gone(pid)
    assert not background.busy
    assert background.take() is None


def test_work_that_nobody_waits_for_makes_room():
    background = Background()
    background.start(FOR_EVER)
    pid = pid_of(background)
    background.start(partial(abs, -1))
    assert is_gone(pid), "nobody waits for it any more"
    assert taken(background) == 1
    background.start(FOR_EVER)
    pid = pid_of(background)
    background.close()
    assert is_gone(pid)


def test_what_is_killed_has_failed_and_may_be_tried_again():
    background = Background()
    background.start(FOR_EVER)
    os.kill(pid_of(background), signal.SIGKILL)  # as by a host without memory
    with pytest.raises(EnvPipeError, match="SIGKILL"):
        taken(background)
    background.start(partial(abs, -1))
    assert taken(background) == 1


@pytest.mark.usefixtures("sigchld_ignored")
def test_what_is_killed_has_failed_though_no_status_is_known():
    background = Background()
    background.start(FOR_EVER)
    os.kill(pid_of(background), signal.SIGKILL)
    with pytest.raises(EnvPipeError, match=r"has died .*host's memory"):
        taken(background)


def test_errors_come_as_they_were_or_in_words():
    background = Background()
    background.start(partial(int, "none"))
    with pytest.raises(RuntimeError, match=r"ValueError: .*none"):
        taken(background)
    background.start(partial(check_request, PlanRequest(4, "no-such")))
    with pytest.raises(EnvPipeError, match="no-such"):
        taken(background)
    with pytest.raises(AttributeError, match="pickle"):
        background.start(lambda: 1)
    assert not background.busy


def test_it_ends_with_its_parent():
    """Which may be killed, and waits for nobody."""
    program = (
        "import time; from functools import partial; from itertools import count\n"
        "from envpipe_megatron.tuning.background import Background\n"
        "background = Background(); background.start(partial(sum, count()))\n"
        "print(background._child[0].pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
    assert wait_readable([child], 30)  # once that process has ended
    os.close(child)


ORDER = """
from envpipe_megatron.core.orders import builders
def gpipe_of_a_user(profile, request):
    return builders.gpipe(profile.num_stages, request.num_microbatches)
"""


@pytest.mark.parametrize(("schedule", "alike"), [("auto", "auto"), ("of-a-user", "gpipe")])
def test_a_plan_is_the_same_to_the_last_bit(schedule, alike, tmp_path: Path, monkeypatch):
    """As in this process; an order of the user's own is found by its entry point there too."""
    (tmp_path / "user_orders.py").write_text(ORDER)
    metadata = tmp_path / "user_orders-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: user-orders\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[envpipe_megatron.schedules]\nof-a-user = user_orders:gpipe_of_a_user\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    profile = preset_profile("a100-sxm", 3, TIMES, CLOCKS)
    request = PlanRequest(8, alike, "optimal", conditions=known_conditions(profile))
    problem = replace(make_problem(profile, request), notes=("A note.",))
    background: Background = Background()
    background.start(partial(planned, replace(problem, schedule=schedule)))
    plan, notes = taken(background)
    here, own_notes = planned(problem)
    assert plan.schedule.stages == here.schedule.stages
    assert np.array_equal(plan.frequency_mhz, here.frequency_mhz)
    assert plan.cost == here.cost
    assert plan.energy_lower_bound_j == here.energy_lower_bound_j
    assert notes == own_notes
    assert "A note." in notes


# Plans beside training -------------------------------------------------------------------------


LOOKS = 7


def run(reconfigure: str, late: int) -> Ran:
    config = JobOptions(
        num_microbatches=6,
        type="envelope",
        reconfigure=reconfigure,
        baseline_steps=3,
        profile_steps=1,
        window_s=0.0,
    )
    preset = load_preset("a100-sxm")
    return run_job(config, preset, [0.03, 0.03, 0.036], iterations=130, replicas=2, late=(late,))


@pytest.mark.parametrize("reconfigure", ["default", "balanced"])
def test_training_goes_on_while_the_plan_is_made(reconfigure):
    at_once, slow = run(reconfigure, 0), run(reconfigure, LOOKS)
    phases, before = ([one.phase for one in ran.job] for ran in (slow, at_once))
    first, planned = at_once.profiled, at_once.profiled + LOOKS
    assert phases == [*before[:first], *[Phase.PROFILE] * LOOKS, *before[first:-LOOKS]]
    # The framework's order at the highest clocks, once these have come.
    assert slow.slower(first + 1, planned) < 1e-9
    assert abs(slow.saved(first + 1, planned)) < 1e-9
    assert slow.saved(129, 130) == pytest.approx(at_once.saved(129, 130)) != 0
    assert slow.notes == at_once.notes == ()


def test_what_splitting_wins_is_said_of_the_plan_and_not_of_those_that_follow_it():
    made = {0: "the plan", 3: "one that follows it"}, "Split backwards: 5 %"
    background: Any = SimpleNamespace(busy=True, take=lambda: made)
    nothing: Any = None
    given = nothing, nothing, lambda plan: None, background
    planner = Planner(*given, LEAST_ENERGY, 0.0, 0.0)
    assert planner.take() == made[0]
    assert planner.won == "Split backwards: 5 %"


def test_planning_that_nobody_waits_for_is_ended():
    background: Background[Any] = Background()
    run = planned_beside(background, None)  # type: ignore[arg-type]
    next(run)
    assert background.busy
    run.close()
    assert not background.busy
