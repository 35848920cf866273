"""What a job refuses before it begins, and what it survives."""

import json
import subprocess
import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from enum import Enum
from threading import Barrier
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from energy_lines import bill, job, window

from envpipe_megatron.core.orders.builders import framework_order
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.formats.energy import parse_window
from envpipe_megatron.formats.energy_sums import EnergySums
from envpipe_megatron.integrations import job as integrations_job
from envpipe_megatron.integrations.instructions import InstrumentedPipeline
from envpipe_megatron.integrations.job import (
    FrameworkJob,
    WithoutEnvPipeError,
    _check_split_order,
    _fingerprint,
    check_in_flight,
    check_same_everywhere,
    open_job,
)
from envpipe_megatron.integrations.leveled import LeveledJob, end_of_job
from envpipe_megatron.integrations.levels import JobError, Level, decide, why_whole_at
from envpipe_megatron.launch.bill import Tariff, bill_facts, bill_lines
from envpipe_megatron.runtime.job.options import JobOptions

#: Iterations, s and J of one on an average GPU.
PHASES = {"profile": (50, 0.3, 120.0), "steady": (62, 0.25, 100.0), "steady m24": (4, 0.5, 190.0)}
BASELINES = {
    "steady": {"time_s": 0.25, "energy_j": 125.0},
    "steady m24": {"time_s": 0.5, "energy_j": 200.0},
}


def windows_of(rank, *, compares):
    """A GPU's lines, two of a phase: a fifth more or less than an average one."""
    lines = [window(rank, 0, 5.0, phase="plan")]
    for phase, (count, step_s, step_j) in PHASES.items():
        step = {"duration_s": count / 2 * step_s, "phase": phase, "clock_backend": "none"}
        units_s = 0.75 * step["duration_s"]
        shares = {"compute_s": units_s, "blocking_s": 0.0, "idle_s": units_s / 3}
        known = {"iterations": 9, "time_uncertainty_s": 0.001, "metering_uncertainty_j": 0.5}
        if compares and phase in BASELINES:
            step["baseline"] = {**known, **BASELINES[phase]}
        energy_j = count / 2 * step_j * (0.8 if rank else 1.2)
        for first in (0, count // 2):
            last = first + count // 2 - 1
            lines.append(window(rank, first, energy_j, last_iteration=last, **step, **shares))
    return lines


@pytest.mark.parametrize("only_measures", [False, True])
def test_summary_and_bill_are_of_one_sum(only_measures, tmp_path):
    """Closing lines have every step that was metered, and the figures that a bill has."""
    lines = [windows_of(rank, compares=not only_measures) for rank in (0, 1)]
    ranks = []
    for own in lines:
        sums: defaultdict[str, EnergySums] = defaultdict(EnergySums)
        for line in own:
            sums[line["phase"]].add(parse_window(line))
        told = {"notes": ["a note"], "power": None}
        ranks.append(({**told, "clocks": {"followed": None, "backend": "none"}}, sums))
    session: Any = SimpleNamespace(
        summary=lambda: ranks[0][0],
        energy=SimpleNamespace(sums=lambda: ranks[0][1], baselines={}),
        parts=SimpleNamespace(
            memory=SimpleNamespace(stages=None),
            folder=SimpleNamespace(path=tmp_path, started=""),
            collectives=SimpleNamespace(
                is_planner=True, all_to_planner=lambda own: [[each] for each in ranks]
            ),
        ),
        options=SimpleNamespace(only_measures=lambda: only_measures),
        executed=["F0", "B0"],
    )
    said = end_of_job(session, 50_000)
    known = [line for line in said if line.startswith(("against", "in "))]
    assert [line for line in said if line not in known] == [
        "energy of 2 GPUs in training: 25930 J, 7.203 Wh, 375.8 W each on average; "
        "measured by the GPUs' counters",
        "profile: 50 iterations, 0.3000 s and 120.0 J each on an average GPU (400.0 W)",
        "steady: 62 iterations, 0.2500 s and 100.0 J each on an average GPU (400.0 W)",
        "steady m24: 4 iterations, 0.5000 s and 190.0 J each on an average GPU (380.0 W)",
        "a note",
    ]
    summary = json.loads((tmp_path / "summary.json").read_text())
    made = bill(*lines[0], *lines[1], job(tokens_per_iteration=50_000))
    shown = bill_facts(made, Tariff())
    assert summary["job"]["comparison"] == shown["comparison"]
    assert summary["phases"]["steady"]["energy_j"] == pytest.approx(100.0)
    assert summary["phases"].keys() == PHASES.keys(), "between phases there is no step"
    end_of_job(session, torch.tensor(50_000))  # a user's fact of no type of JSON's
    assert '"tokens_per_iteration": "tensor(50000)"' in (tmp_path / "summary.json").read_text()
    if only_measures:
        assert known == ["in 25.0 % of the steady steps' time no forward or backward ran on a GPU"]
        assert summary["job"] == {"comparison": None, "other_batches": {}}
        return
    assert summary["job"]["comparison"]["saving_percent"] == pytest.approx(20.0)
    assert summary["job"]["other_batches"]["m24"]["saving_percent"] == pytest.approx(5.0)
    first, saved, other, other_saved = known
    assert [first, saved] == bill_lines(made, Tariff())[:2]
    assert saved.startswith("in 62 such steps: 0.861 +- 0.048 Wh less energy, 0.00 +- 0.12 s ")
    assert saved.endswith("250 tokens a joule, 200 before")
    assert other_saved.startswith("in 4 such steps: 0.0222 +- 0.0")
    assert first.endswith("a token 5 us and 4 mJ on 2 GPUs; no clock was changed")
    assert other.startswith("against the job's own baseline, batches of m24: a step takes 500 ms")


def told_to(*facts):
    """Return what ranks get that begin with these facts, each in a thread."""
    met, told = Barrier(len(facts), timeout=20), []

    def of_all_ranks(own):
        told.append(own)
        met.wait()
        return told

    def begin(own):
        try:
            check_same_everywhere(own)
        except JobError as error:
            return str(error)
        return "nothing"

    with (
        patch.object(integrations_job, "of_all_ranks", of_all_ranks),
        ThreadPoolExecutor(len(facts)) as threads,
    ):
        return list(threads.map(begin, facts))


def test_ranks_that_were_started_differently_are_refused_with_what_differs():
    here: dict[str, object] = {
        "policy": "envelope",
        "CUDA_DEVICE_MAX_CONNECTIONS": None,
        "microbatches": 8,
    }
    assert told_to(here, here) == ["nothing", "nothing"]
    there = {**here, "policy": "baseline", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    for text in told_to(here, there, here):
        assert "started differently" in text
        assert "(got policy: (baseline, envelope), CUDA_DEVICE" in text
        assert "microbatches" not in text


@pytest.mark.parametrize(
    ("level", "given", "of_model", "why"),
    [
        (Level.ORDER, {}, "", ""),
        (Level.UNITS, {}, "", "its level is units"),
        (Level.ORDER, {"split": "off"}, "", "--envpipe-split off"),
        (
            Level.ORDER,
            {"self_check": "off"},
            "",
            "--envpipe-self-check off leaves out what shows that splitting them changes no bit",
        ),
        (Level.ORDER, {}, "of a test", "of a test"),
    ],
)
def test_orders_that_split_backwards_by_name_run_where_nothing_stands_against_it(
    level, given, of_model, why
):
    options = JobOptions(scheduling="zb-h1", **given)
    assert why_whole_at(options, level, of_model) == why
    for chunks, said in ((1, f"backwards of this job are whole: {why}"), (2, "of 1 chunk a stage")):
        if why or chunks == 2:
            with pytest.raises(JobError, match=f"The order zb-h1 cannot be had: .*{said}"):
                _check_split_order(replace(options, num_chunks=chunks), why)
        else:
            _check_split_order(options, why)
        _check_split_order(JobOptions(num_chunks=chunks), why)


@pytest.mark.parametrize(
    ("own", "kept", "below", "holds"),
    [
        ((4, 8), (4, 9, (4, 3, 2, 1), (5, 3, 3, 1)), (3, (4, 3, 1, 1), (3, 3, 2, 1)),
         r"\(1f1b\) holds, 4, 3, 2, 1 .*at least 4"),
        ((4, 2), (2,), (), ""),  # few microbatches need no more
        ((4, 8, 2, None), (7, (6, 5, 4, 3)), (5, (6, 5, 4, 2)),
         r"\(interleaved\) holds, 5.5, 4.5, 3.5, 2.5 .*at least 6"),
        ((4, 8, 2, 8), (8, (8, 7, 6, 5)), (7, (8, 7, 6, 4)),
         r"\(interleaved\) holds, 7.5, 6.5, 5.5, 4.5 .*at least 8"),
    ],
)  # fmt: skip
def test_a_limit_is_no_lower_than_what_the_own_order_holds(own, kept, below, holds):
    order = framework_order(*own)
    for limit in (*kept, None, "memory"):
        check_in_flight(limit, order)
    for limit in below:
        with pytest.raises(JobError, match=rf"own order {holds}"):
            check_in_flight(limit, order)


def test_what_units_rest_on_is_json_and_the_same_each_time(monkeypatch):
    kinds = Enum("kinds", "flash auto")
    job = {"attention_backend": kinds.flash, "params_dtype": torch.bfloat16, "num_layers": 4}
    options = SimpleNamespace(gpu=None)
    first, again = (_fingerprint(job, options, "H200") for _ in range(2))  # type: ignore[arg-type]
    assert json.loads(json.dumps(first)) == again
    other = {**job, "attention_backend": kinds.auto}
    assert _fingerprint(other, options, "H200") != first  # type: ignore[arg-type]
    monkeypatch.setattr(integrations_job, "version_of", lambda package: "9")
    assert _fingerprint(job, options, "H200") != first  # type: ignore[arg-type]


def test_a_closed_job_gives_back_the_clock_and_then_the_channels_memory():
    called: list[str] = []
    channel = SimpleNamespace(close=lambda: called.append("channel"))
    parts = SimpleNamespace(channel=channel)
    job = object.__new__(LeveledJob)
    job.job = SimpleNamespace(close=lambda: called.append("session"), parts=parts)  # type: ignore[assignment]
    job.close()
    assert called == ["session", "channel"]


def test_facts_that_are_no_mapping_are_refused_before_a_step():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(EnvPipeError, match=r"values by name \(got GPT, 24\)"):
            InstrumentedPipeline(dist.group.WORLD, 2, gpu="a40", facts=["GPT", 24])
    finally:
        dist.destroy_process_group()


#: What is wrong with standard output when a line is said there.
LOGS = {
    "a full disk": "os.dup2(os.open('/dev/full', os.O_WRONLY), 1)",
    "a reader that has gone": "r, w = os.pipe(); os.close(r); os.dup2(w, 1)",
    "closed": "sys.stdout.close()",
    "none": "sys.stdout = None",
    "without such letters": "sys.stdout.reconfigure(encoding='ascii')",
    "a stand-in of the script's": (
        "out = sys.stdout; sys.stdout = type('Lines', (), {'write': lambda self, text: 1})()"
    ),
}


@pytest.mark.parametrize("wrong", LOGS)
def test_a_log_that_takes_no_line_ends_no_training(wrong):
    script = (
        "import os, sys; from envpipe_megatron.integrations.job import say_line\n"
        f"{LOGS[wrong]}\nsay_line('output: L\\xe4ufe'); os.dup2(2, 1)\n"
        "sys.stdout = globals().get('out', sys.stdout)\n"
        "if sys.stdout and not sys.stdout.closed: print('trained')"
    )
    command = [sys.executable, "-c", script]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr  # 120: Python could not write what was left
    assert run.stderr == ("trained\n" if "closed" != wrong != "none" else "")
    if wrong == "without such letters":
        assert run.stdout == "[envpipe] output: L\\xe4ufe\n"


def test_ranks_that_cannot_be_connected_end_no_training(monkeypatch):
    hours = timedelta(hours=2)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=hours)
    said: list[str] = []

    def no_sockets(pipelines, timeout):
        assert timeout == hours  # a silent rank has the time that the user gave the process group
        raise RuntimeError("Too many open files")

    monkeypatch.setattr(integrations_job, "make_collectives", no_sockets)
    framework = FrameworkJob(dist.group.WORLD, 1, runs_units=True)
    try:
        with pytest.raises(WithoutEnvPipeError, match="Too many open files"):
            open_job(JobOptions(), framework, said.append, decide([]), (), busy=False)
    finally:
        dist.destroy_process_group()
    assert said == ["This job trains without EnvPipe: Too many open files"]
