"""The proof on GPUs: turns, hangs, what is run again, and what counts as equal. A fake checkout."""

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner
from fake_checkout import no_limits, processes_of
from on_request import on_request

from envpipe_megatron.core.plan import read_plan
from envpipe_megatron.core.profile import read_profile

pytest.importorskip("torch")
from benchmarks.megatron_lm import equality, prove, ratio, stress
from benchmarks.megatron_lm.models import (
    APEX,
    ENVPIPE,
    ONE_F_ONE_B,
    ORDER_ARMS,
    PP4,
    TRANSFORMER_ENGINE,
    UNITS,
    Planned,
)
from benchmarks.megatron_lm.running.jobs import (
    HarmfulError,
    Job,
    Launch,
    State,
    check_harmless,
    make_launch,
)
from benchmarks.megatron_lm.running.pool import Limits, printed_energies, printed_results, run_jobs
from benchmarks.megatron_lm.running.rounds import Keeper, Rounds, order

HAS = frozenset({TRANSFORMER_ENGINE, APEX})


@dataclass(frozen=True)
class LimitsOnceTrue(Limits):
    """Limits that do not depend on how fast this machine is."""

    reached: Callable[[], bool]

    @property
    def left_s(self):
        return 0.0 if self.deadline_s == 0.0 and self.reached() else 300.0

    def __getattribute__(self, name):
        value = super().__getattribute__(name)
        return value if name != "hang_s" or self.reached() else 300.0


def _job(name, iterations, turns=(), hangs=-1):
    arguments = (str(iterations), str(hangs))
    return Job(name, arguments, 2, iterations, patched=False, turns=turns)


def _steps(site, job):
    """Iteration, begin and end of each step of a job, over its ranks."""
    lines = [
        line for file in job.folder(site).glob("steps-*") for line in file.read_text().splitlines()
    ]
    return [(int(n), float(a), float(b)) for n, a, b in (line.split() for line in lines)]


def _wait(reached):
    deadline_s = time.monotonic() + 120.0
    while not reached():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


_OPTIONS = ("--stock", ".", "--patched", ".", "--output", "nowhere", "--ranks-per-gpu", "4")


@on_request("LM")
def test_jobs_take_turns_and_never_compute_together(site, state):
    turns = (2, 3, 3)
    iterations = sum(turns) + 1
    jobs = [_job(f"ratio/start 1/{arm}", iterations, turns) for arm in ORDER_ARMS]
    keeper = Keeper(state, Rounds(1, 2, 3, 2), ORDER_ARMS)
    turns_of = order(jobs)
    run_jobs(site, state, jobs, no_limits(), order=turns_of, on_block=keeper)

    assert [state.runs[job.name]["status"] for job in jobs] == ["ok"] * 3
    assert len(state.rounds) == 1
    assert {len(_steps(site, job)) for job in jobs} == {2 * (iterations - 1)}
    in_turns = [
        (begin_s, end_s, job.name) for job in jobs for _, begin_s, end_s in _steps(site, job)
    ]
    spans = sorted(in_turns)
    for one, other in pairwise(spans):
        assert one[2] == other[2] or one[1] <= other[0]
    seen = [name for _, _, name in spans]
    changes = [name for name, before in zip(seen, [None, *seen], strict=False) if name != before]
    # The last of a round is the first of the next.
    assert changes == [
        n for n, before in zip(turns_of, [None, *turns_of], strict=False) if n != before
    ]
    for block in state.runs[jobs[0].name]["blocks"]:
        assert block["time_s"] >= turns[block["turn"]] * 0.002


@on_request("LM")
def test_a_hang_says_where_and_leaves_no_process(site, state):
    hanging, other = _job("part/hangs/stock", 9, hangs=6), _job("part/goes on/stock", 9)

    def waits_alone():
        return other.name in state.runs and len(_steps(site, hanging)) == 9 + 6

    limits = LimitsOnceTrue(1.0, 300.0, 0.5, 99, 4, 0.0, waits_alone)
    run_jobs(site, state, [hanging, other], limits, slots=2)

    run = state.runs[hanging.name]
    assert run["status"].startswith("hung")
    assert run["stood_at"] == {"0": [8, ""], "1": [6, ""]}
    assert "train_step" in run["stacks"]["stacks-1"]
    assert state.runs[other.name]["status"] == "ok"
    assert not processes_of(hanging.folder(site))


@on_request("LM")
def test_what_is_done_is_not_run_again_and_what_ran_out_of_time_is(site, state, tmp_path):
    quick, slow = _job("part/quick/stock", 4), _job("part/slow/stock", 9, hangs=5)

    def hangs_alone():
        return quick.name in state.runs and len(_steps(site, slow)) == 9 + 5

    limits = LimitsOnceTrue(0.0, 300.0, 300.0, 99, 4, 0.0, hangs_alone)
    run_jobs(site, state, [quick, slow], limits, slots=2)
    assert state.runs[quick.name]["status"] == "ok"
    assert state.runs[slow.name]["status"] == "out of time"

    again = State(state.path)
    stamp = (quick.folder(site) / "job.json").stat().st_mtime_ns
    mended = replace(slow, arguments=("9", "-1"))
    run_jobs(site, again, [quick, mended], no_limits())
    assert (quick.folder(site) / "job.json").stat().st_mtime_ns == stamp
    assert again.runs[slow.name]["status"] == "ok"
    assert again.done(quick)
    assert not again.done(replace(quick, arguments=("5", "-1")))
    run = again.runs[quick.name]
    assert [line["lm loss"] for line in run["printed"]] == ["1.50", "1.51", "1.52", "1.53"]
    assert [rank["losses"][0] for rank in run["ranks"]] == [{"lm loss": (1.5).hex()}] * 2
    assert [rank["skipped"] for rank in run["ranks"]] == [1, 1]
    assert not any(rank["imported_envpipe"] for rank in run["ranks"])


@on_request("LM")
def test_a_job_waits_for_the_one_before_it_and_is_left_out_if_that_failed(site, state):
    first = _job("part/halves/stock/first", 4)
    bad = replace(first, name="part/bad/stock/first", arguments=("no number", "0"))
    jobs = [
        replace(first, name="part/halves/stock/second", after=first.name),
        first,
        replace(first, name="part/bad/stock/second", after=bad.name),
        bad,
    ]
    run_jobs(site, state, jobs, no_limits())
    assert state.runs["part/halves/stock/second"]["status"] == "ok"
    assert "part/bad/stock/second" not in state.runs
    failed = state.runs[bad.name]
    assert failed["status"] == "exit 1"
    assert "ValueError" in failed["log"]

    many = [replace(bad, name=f"part/bad {number}/stock") for number in range(4)]
    run_jobs(site, state, many, replace(no_limits(), most_failures=2, concurrency=1))
    assert [job.name in state.runs for job in many] == [True, True, False, False]


@pytest.mark.parametrize(
    ("flags", "forbidden"),
    [
        ("", None),
        ("--envpipe", "1"),
        ("--envpipe --envpipe-gpu-control nvml", "1"),
        ("--envpipe --envpipe-gpu-control dry_run", None),
        ("--envpipe --envpipe-gpu-control dry_run --envpipe-gpu-control=nvml", "1"),
        ("--envpipe-type uniform", "1"),
    ],
)
def test_nothing_is_started_that_might_change_a_clock(flags, forbidden):
    environment = {} if forbidden is None else {"ENVPIPE_FORBID_CLOCK_CONTROL": forbidden}
    with pytest.raises(HarmfulError):
        check_harmless(Launch(("python", *flags.split()), environment))


@pytest.mark.parametrize("num_gpus", [pytest.param(2, marks=on_request("CORE")), 8])
def test_every_run_there_is_changes_no_clock(num_gpus, site, state, monkeypatch):
    monkeypatch.setenv("ENVPIPE_FORBID_CLOCK_CONTROL", "0")
    monkeypatch.setenv("ENVPIPE_TYPE", "optimal")
    machine = replace(site, num_gpus=num_gpus, corpus=site.scratch, has=HAS)
    rounds = Rounds(5, 5, 10, 12)
    jobs = [
        *equality.jobs(machine, 50),
        *stress.jobs(machine, 1000, 0.002),
        *ratio.jobs(machine, state, ratio.setting(machine), rounds),
        *ratio.jobs(machine, state, ratio.setting(machine, like="te-fp8-pp2vp2"), rounds),
        *prove.energy_jobs(machine, 60),
    ]
    assert len({job.name for job in jobs}) == len(jobs)
    for job in jobs:
        assert job.num_ranks <= num_gpus
        job.folder(machine).mkdir(parents=True, exist_ok=True)
        launch = make_launch(job, machine, Path("socket"))
        check_harmless(launch)
        assert launch.environment["ENVPIPE_FORBID_CLOCK_CONTROL"] == "1"
        assert "ENVPIPE_TYPE" not in launch.environment
        assert ("--envpipe" in launch.command) == (
            "/stock" not in job.name and "/off" not in job.name
        )
        layers, stages = (
            int(launch.command[launch.command.index(name) + 1])
            for name in ("--num-layers", "--pipeline-model-parallel-size")
        )
        assert layers % stages == 0, job.name


LINE = (
    " [2026-11-21 14:00:00.000000] iteration       12/      50 | consumed samples:          192 |"
    " elapsed time per iteration (ms): 101.5 | energy per GPU (J/iter/GPU): 55.2 |"
    " power per GPU (W/GPU): 544.1 | learning rate: 1.000000E-03 | lm loss: 6.123456E+00 |"
    " loss scale: 1.0 | grad norm: 1.234 | number of skipped iterations:   0 |"
    " envpipe phase: steady | envpipe energy per GPU (J/iter/GPU): 55.0 |"
)


def test_only_results_are_compared():
    evaluation = (
        " validation loss at iteration 20 | lm loss value: 6.1E+00 | lm loss PPL: 4.4E+02 | "
    )
    assert printed_results(f"noise\n{LINE}\n{evaluation}\n") == [
        {
            "iteration": "12",
            "consumed samples": "192",
            "learning rate": "1.000000E-03",
            "lm loss": "6.123456E+00",
            "loss scale": "1.0",
            "grad norm": "1.234",
            "number of skipped iterations": "0",
        },
        {"evaluated": "iteration 20", "lm loss value": "6.1E+00", "lm loss PPL": "4.4E+02"},
    ]
    assert printed_energies(LINE) == [
        {"iteration": 12, "megatron_j": 55.2, "envpipe_j": 55.0, "iteration_ms": 101.5}
    ]


def _equality_run(planned=None, *, loss="1.0", exact="0x1p+0", imported=False, phase="steady"):
    labels = planned.schedule.labels() if planned else [[]] * 4
    rank = {"losses": [{"lm loss": exact}], "grad_norms": [exact], "skipped": 0}
    return {
        "status": "ok",
        "printed": [{"iteration": "1", "lm loss": loss}],
        "ranks": [
            rank
            | {"rank": number, "executed": labels[number]}
            | {"imported_envpipe": imported, "phase": phase}
            for number in range(4)
        ],
    }


def test_equal_is_what_has_the_same_digits_and_ran_the_planned_order(state):
    planned = Planned(PP4, equality.TINY.microbatches, ENVPIPE)
    other = Planned(PP4, equality.TINY.microbatches, ONE_F_ONE_B)
    units = Planned(replace(PP4, chunks=2), equality.TINY.microbatches, UNITS)
    runs = {
        "gpt-pp4/stock": _equality_run(),
        "gpt-pp4/off": _equality_run(),
        "gpt-pp4/envpipe": _equality_run(planned, imported=True),
        "gpt-pp4-distopt/stock": _equality_run(),
        "gpt-pp4-distopt/off": _equality_run(imported=True),
        "gpt-pp4-distopt/envpipe": _equality_run(other, imported=True),
        "llama-pp4/stock": _equality_run(),
        "llama-pp4/envpipe": _equality_run(planned, loss="1.1", exact="0x2p+0", imported=True),
        "llama-pp4/1f1b": _equality_run(other, exact="0x2p+0", imported=True),
        "gpt-pp4/units": _equality_run(other, imported=True, phase="warm-up"),
        "gpt-pp4vp2/stock": _equality_run(),
        "gpt-pp4vp2/units": _equality_run(units, imported=True),
    }
    state.runs.update({f"equality/{name}": run for name, run in runs.items()})
    found = {f"{row['setting']}/{row['arm']}": row for row in equality.rows(state, False)}
    assert {name: row["good"] for name, row in found.items()} == {
        "gpt-pp4/off": True,
        "gpt-pp4/envpipe": True,
        "gpt-pp4-distopt/off": False,  # EnvPipe was imported
        "gpt-pp4-distopt/envpipe": False,  # the order is another
        "llama-pp4/envpipe": False,
        "llama-pp4/1f1b": True,  # to all printed digits
        "gpt-pp4/units": False,  # nothing was planned yet
        "gpt-pp4vp2/units": True,
    }
    assert not found["llama-pp4/1f1b"]["exact"]
    assert "lm loss 1.0 -> 1.1" in found["llama-pp4/envpipe"]["differs_at"]


def test_ranks_that_share_a_gpu_are_started_by_what_lets_nccl_take_them(site):
    one = replace(site, num_gpus=1, ranks_per_gpu=4)
    jobs = {job.name: job for job in equality.jobs(one, 5)}
    assert jobs.keys() == {job.name for job in equality.jobs(replace(site, num_gpus=4), 5)}
    job = jobs["equality/gpt-pp4/stock"]
    job.folder(site).mkdir(parents=True, exist_ok=True)
    command = make_launch(job, one, Path("socket")).command
    started = [Path(part).name for part in command].index("shared_gpu.py")
    assert [Path(part).name for part in command[started + 1 : started + 3]] == ["4", "entry.py"]
    for part in ("ratio", "energy"):
        ran = CliRunner().invoke(prove.main, [*_OPTIONS, part])
        assert ran.exit_code == 2
        assert part in ran.output


def test_a_pair_of_overlapped_experts_is_planned_as_one(site):
    four = {job.name: job for job in equality.jobs(replace(site, num_gpus=4, has=HAS), 5)}
    job = four["equality/te-overlapped-experts-pp2vp2ep2/units"]
    assert "--overlap-moe-expert-parallel-comm" in job.arguments
    job.plan.write(site.scratch)
    plan = read_plan(site.scratch / "plan.json", read_profile(site.scratch / "profile.csv"))
    assert plan.schedule.combined.any()


DRIVER = """
import sys, time
from pathlib import Path
from benchmarks.megatron_lm.running.jobs import Job, Site
from benchmarks.megatron_lm.running.pool import Limits, run_jobs
from benchmarks.megatron_lm.running.jobs import State

checkout, scratch = Path(sys.argv[1]), Path(sys.argv[2])
job = Job("part/hangs/stock", ("9", "5"), 2, 9, patched=False)
site = Site(checkout, checkout, scratch, cpu=False, num_gpus=2)
limits = Limits(time.monotonic() + 300.0, 300.0, 300.0, 99, concurrency=1, least_s=0.0)
run_jobs(site, State(scratch / "proof.json"), [job], limits)
"""


@on_request("LM")
def test_jobs_die_with_the_script_that_started_them(site):
    arguments = [sys.executable, "-c", DRIVER, str(site.stock), str(site.scratch)]
    with subprocess.Popen(arguments) as driver:
        job = _job("part/hangs/stock", 9, hangs=5)
        _wait(lambda: len(_steps(site, job)) == 9 + 5)
        assert processes_of(job.folder(site))
        driver.kill()
    _wait(lambda: not processes_of(job.folder(site)))
