"""Parts of real recipes train on the CPU as stock does, at any level, and check themselves."""

import itertools
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from checkouts import TAGS
from energy_lines import json_lines
from lm_cases import (
    CASES,
    MICROBATCHES,
    OVERLAPPED,
    PP2,
    PP2CP2,
    PP4,
    Case,
    full,
    run_case,
    run_envpipe,
    write_profile,
)

from envpipe_megatron.core.conditions import Conditions
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.plan import Plan, read_plan
from envpipe_megatron.core.profile import read_profile
from envpipe_megatron.formats.timeline import read_timelines
from unmeasured import another_each_unit

pytestmark = [pytest.mark.xdist_group("megatron_lm"), full]

EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall "
    "--disable-bias-linear --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2"
)
CHUNKS = "--num-layers-per-virtual-pipeline-stage 1"
#: What multi-token prediction and latent attention take.
ROTARY = "--position-embedding-type rope"
LATENT = (
    f"--multi-latent-attention --q-lora-rank 16 --kv-lora-rank 16 --qk-head-dim 8 {ROTARY} "
    "--qk-pos-emb-head-dim 8 --v-head-dim 8 --rope-type rope --normalization RMSNorm --swiglu "
    "--disable-bias-linear"
)
LAYOUT = "--pipeline-model-parallel-layout"
KEPT = {
    "two chunks": Case(PP2, CHUNKS, chunks=2),
    "two chunks, overlapped": Case(PP2, f"{CHUNKS} {OVERLAPPED}", chunks=2),
    "four stages, two chunks": Case(PP4, f"--num-layers 8 {CHUNKS}", chunks=2),
    "context": Case(PP2CP2),
    "multi-token prediction": Case(PP2, f"--mtp-num-layers 1 {ROTARY}"),
    "multi-token prediction, two chunks": Case(
        PP2, f"--mtp-num-layers 1 {ROTARY} {CHUNKS}", chunks=2
    ),
    "latent attention": Case(PP4, LATENT),
    "stages without layers": Case(PP4, f"{LAYOUT} E|t*3|t|L"),
    "uneven chunks, one without layers": Case(PP2, f"{LAYOUT} Et|t|tt|L", chunks=2),
    "one layer first": Case(PP4, "--num-layers 7 --decoder-first-pipeline-num-layers 1"),
    "experts": Case(PP2, EXPERTS),
    "experts on two ranks": Case(PP2, f"{EXPERTS} --expert-model-parallel-size 2"),
    "recompute": Case(PP4, "--recompute-granularity selective --recompute-modules mlp"),
}
#: Warm-up, a profile of all clocks, and a steady phase.
LOOP_STEPS = 200
Find = Callable[[str], Path]
#: On the path of a rank's imports, it makes each of the job's own runs differ from ours.
_DIFFERENT = """
import sys
from importlib.machinery import PathFinder

class Finder:
    def find_spec(self, name, path, target=None):
        if name != "envpipe_megatron.integrations.megatron.self_check":
            return None
        spec = PathFinder.find_spec(name, path)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            differs = iter((None, "gradients of one") * 2)  # split backwards, and whole ones
            module.Outcome.differs_from = lambda own, other: next(differs)

        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder())
"""


def _level(run):
    return next(
        line.split("level ")[1].split(";")[0]
        for output in run.outputs
        for line in output.splitlines()
        if "[envpipe] level" in line
    )


def megatron_order(case, more=()):
    """Megatron's, or with more forwards in the warm-up of each stage."""
    stages = case.num_stages
    if case.chunks > 1:
        return builders.interleaved(stages, MICROBATCHES, case.chunks, extra_warmup=more)
    own = builders.one_f_one_b(stages, MICROBATCHES)
    return builders.envpipe(stages, MICROBATCHES, more) if more else own


def by_plan(case, folder, order, level):
    """Write a plan of an order whose clocks change at every unit, and say so."""
    write_profile(folder / "given.csv", case.num_stages)
    profile = read_profile(folder / "given.csv").for_chunks(case.chunks)
    conditions = Conditions((0.0,) * case.num_stages)
    plan = Plan("custom", order, another_each_unit(order, profile), profile, conditions)
    plan.write(folder / "plan.json")
    return f"--envpipe-level {level} --envpipe-plan {folder / 'plan.json'}"


@pytest.mark.parametrize("level", ["units", "order"])
@pytest.mark.parametrize("tag", TAGS)
@pytest.mark.parametrize("name", KEPT)
def test_recipes_train_as_stock_does(name, tag, level, checkout, patched, tmp_path):
    """With a clock for each unit, in Megatron's own order or with more forwards in the warm-up."""
    # Without Transformer Engine, stock 0.16.1 ends in its experts' router, and none computes again.
    if level == "order" and (name == "recompute" or ("experts" in name and tag == TAGS[0])):
        pytest.skip("stock cannot run it without Transformer Engine")
    case = KEPT[name]
    more = [1] * (case.num_stages - 1) + [0] if level == "order" else ()
    order = megatron_order(case, more)
    stock = run_case(checkout(tag), case, "", tmp_path / "stock")
    run = run_envpipe(patched(tag), case, tmp_path / "ours", by_plan(case, tmp_path, order, level))
    assert _level(run) == level
    assert run.result == stock.result
    assert run.phases[-1] == "steady"
    output = run.folder / "output"
    if level == "units":
        assert run.phases[0] == "warm-up"
        units = 2 * MICROBATCHES * case.chunks * sum("steady" in phase for phase in run.phases)
        assert all(line["changes"] >= units for line in json_lines(output / "clocks.jsonl"))
        return
    said = "\n".join(run.outputs)
    assert "losses and gradients are equal to the last bit" in said
    assert ", 3 times, at last with split backwards" in said
    ran = read_timelines([output / "timeline.jsonl"]).iterations
    steady = [iteration for iteration in ran if iteration.phase == "steady"]
    assert {iteration.labels.stage for iteration in steady} == set(range(case.num_stages))
    for iteration in steady:
        assert iteration.order.split() == order.labels()[iteration.labels.stage]


def test_a_job_that_fails_its_check_trains_on_at_level_units(checkout, patched, tmp_path):
    case, tag = KEPT["experts on two ranks"], "core_v0.19.0"
    stock = run_case(checkout(tag), case, "", tmp_path / "stock")
    (tmp_path / "sitecustomize.py").write_text(_DIFFERENT)
    with mock.patch.dict(os.environ, {"PYTHONPATH": str(tmp_path)}):
        run = run_envpipe(patched(tag), case, tmp_path / "ours", "--envpipe-type optimal")
    assert run.result == stock.result
    said = "\n".join(run.outputs)
    assert "level order; if a self-check holds, for mixture of experts" in said
    assert "Backwards stay whole: gradients of one of stage 0 differ from Megatron's" in said
    assert (
        "level units; against order: mixture of experts, expert parallelism (its self-check: "
        "gradients of one of stage 0 differ from Megatron's, which repeats itself)"
    ) in said
    phases = run.phases
    # The check ends one job, and the next begins with Megatron's own iteration.
    assert phases[0] == "framework"
    assert "warm-up" in phases


def test_clocks_are_adjusted_from_iteration_to_iteration(checkout, patched, tmp_path):
    case = KEPT["two chunks"]
    stock = run_case(checkout(TAGS[-1]), case, "", tmp_path / "stock")
    run = run_envpipe(patched(TAGS[-1]), case, tmp_path / "ours", "--envpipe-level units")
    assert run.result == stock.result
    assert "reconfigure" in run.phases


SAMPLES = "--train-samples {} --lr-decay-samples 1000"
RAMP_UP = f"{SAMPLES} --rampup-batch-size {{}} {{}} {{}} --global-batch-size {{}}"
#: Its thresholds are in tokens.
STEPS = f'{SAMPLES} --step-batch-size-schedule "0:{{}} {{}}:{{}} {{}}:{{}}"'
#: Batches of 2, 4 and 6 microbatches, on one replica or two.
GROWING = {
    "ramp-up": Case(PP4, length=RAMP_UP.format(84, 2, 2, 48, 6)),
    "ramp-up, two chunks": Case(PP2, CHUNKS, length=RAMP_UP.format(168, 4, 4, 96, 12)),
}
#: Since 0.18, which ignores a ramp-up. A batch to evaluate has one microbatch by default.
SCHEDULED = {
    "steps": Case(PP4, length=STEPS.format(72, 2, 12 * 32, 4, 36 * 32, 6)),
    "steps, two chunks": Case(
        PP2,
        f"{CHUNKS} --eval-global-batch-size 4",
        length=STEPS.format(144, 4, 24 * 32, 8, 72 * 32, 12),
    ),
}


@pytest.mark.parametrize("level", ["units", "order"])
@pytest.mark.parametrize(
    ("tag", "name"),
    [
        *itertools.product(("core_v0.16.1", "core_v0.17.1"), GROWING),
        *itertools.product(("core_v0.18.2", "core_v0.19.0"), SCHEDULED),
    ],
)
def test_each_size_of_a_batch_that_grows_has_a_plan(name, tag, level, checkout, patched, tmp_path):
    case = (GROWING | SCHEDULED)[name]
    stock = run_case(checkout(tag), case, "", tmp_path / "stock")
    how = f"--envpipe-level {level} --envpipe-type envelope --envpipe-reconfigure default"
    run = run_envpipe(patched(tag), case, tmp_path / "ours", how)
    assert _level(run) == level
    assert run.result == stock.result
    phases = set(run.phases)
    assert {"warm-up", "steady", "steady m2", "steady m4"} <= phases
    assert "framework" not in phases
    # What ran is what was planned, another plan for each size.
    output = run.folder / "output"
    profile = read_profile(run.folder.with_suffix(".csv"))
    ran = read_timelines([output / "timeline.jsonl"]).iterations
    for batch, count in (("", 6), (" m2", 2), (" m4", 4)):
        plan = read_plan(output / f"plan{batch.replace(' ', '-')}.json", profile)
        assert plan.schedule.num_microbatches == count
        assert len(np.unique(plan.frequency_mhz)) > 1
        steady = [iteration for iteration in ran if iteration.phase == f"steady{batch}"]
        assert {iteration.labels.stage for iteration in steady} == set(range(case.num_stages))
        for iteration in steady:
            clocks = plan.frequency_mhz[iteration.labels.stage].tolist()
            assert iteration.frequency_mhz.tolist() == clocks


@pytest.mark.parametrize("policy", ["envelope", "optimal"])
@pytest.mark.parametrize("name", ["two chunks", "four stages, two chunks"])
def test_the_whole_loop_saves_as_simulated(name, policy, patched, tmp_path):
    """Profile and plan while it trains, on one row of the profile for each chunk."""
    case = KEPT[name]
    how = (
        f"--envpipe --envpipe-level units --envpipe-type {policy} --envpipe-output output "
        f"--train-iters {LOOP_STEPS} --eval-interval {2 * LOOP_STEPS}"
    )
    run = run_case(patched(TAGS[-1]), case, how, tmp_path / "ours", forward_s=0.03)
    output = run.folder / "output"
    plan = read_plan(output / "plan.json", read_profile(output / "profile.csv"))
    assert plan.schedule.num_chunks == case.chunks
    simulated = plan.cost.saving_percent(plan.baseline.cost)
    compared = json.loads((output / "summary.json").read_text())["job"]["comparison"]
    print(f"{name}, {policy}: {simulated=:.2f} %, measured {compared}")
    assert compared["saving_percent"] == pytest.approx(simulated, abs=1)
    assert compared["slowdown_percent"] < 0.5


@pytest.mark.parametrize("level", ["observe", "uniform"])
@pytest.mark.parametrize(
    "case", [Case("--pipeline-model-parallel-size 1"), CASES["pp4"]], ids=["no pipeline", "pp4"]
)
def test_below_units_too(case, level, checkout, patched, tmp_path):
    stock = run_case(checkout(TAGS[-1]), case, "", tmp_path / "stock")
    args = f"--envpipe --envpipe-level {level} --envpipe-baseline-steps 3"
    run = run_case(patched(TAGS[-1]), case, args, tmp_path / "ours")
    assert _level(run) == level
    assert run.result == stock.result
    assert run.phases[-1] == {"observe": "steady", "uniform": "profile"}[level]
    said = "".join(run.outputs)
    assert ("no forward or backward ran on a GPU" in said) == (level == "observe")
    assert level == "uniform" or "against baseline" not in said


@pytest.mark.parametrize("level", ["units", "order"])
@pytest.mark.parametrize("name", ["pp4", "pp2dp2-overlapped"])
def test_a_job_that_may_set_no_clock(name, level, checkout, patched, tmp_path):
    """At level `order` the shortest order runs; below it, nothing is changed."""
    case = CASES[name]
    length = f"--global-batch-size {MICROBATCHES} --train-iters 60 --lr-decay-iters 100"
    case = replace(case, length=length)
    stock = run_case(checkout(TAGS[0]), case, "", tmp_path / "stock")
    args = f"--envpipe --envpipe-level {level} --envpipe-gpu-control none --envpipe-output output"
    run = run_case(patched(TAGS[0]), case, args, tmp_path / "ours")
    assert run.result == stock.result
    said = "".join(run.outputs)
    assert ("only measuring, in the framework's order" in said) == (level == "units")
    job = json.loads((tmp_path / "ours" / "output" / "summary.json").read_text())["job"]
    if level == "units":
        assert job["comparison"] is None
        return
    assert "The planned order takes" in said
    assert job["comparison"]["slowdown_percent"] < -5
