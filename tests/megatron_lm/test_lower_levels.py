"""Jobs in Megatron-LM's own order, or with one clock, train on the CPU as stock does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from checkouts import TAGS
from lm_cases import CASES, OVERLAPPED, PP2, PP4, Case, full, run_case, run_envpipe

pytestmark = [pytest.mark.xdist_group("megatron_lm"), full]

EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall "
    "--disable-bias-linear --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2"
)
KEPT = {
    "two chunks": Case(PP2, "--num-layers-per-virtual-pipeline-stage 1"),
    "two chunks, overlapped": Case(PP2, f"--num-layers-per-virtual-pipeline-stage 1 {OVERLAPPED}"),
    "four stages, two chunks": Case(
        PP4, "--num-layers 8 --num-layers-per-virtual-pipeline-stage 1"
    ),
    "experts": Case(PP2, EXPERTS),
    "experts on two ranks": Case(PP2, f"{EXPERTS} --expert-model-parallel-size 2"),
    "recompute": Case(PP4, "--recompute-granularity selective --recompute-modules mlp"),
}
Find = Callable[[str], Path]


def _level(run) -> str:
    return next(
        line.split("level ")[1].split(";")[0]
        for output in run.outputs
        for line in output.splitlines()
        if "[envpipe] level" in line
    )


@pytest.mark.parametrize("tag", TAGS)
@pytest.mark.parametrize("name", KEPT)
def test_units_have_clocks_in_megatrons_own_order(name, tag, checkout, patched, tmp_path):
    case = KEPT[name]
    stock = run_case(checkout(tag), case, "", tmp_path / "stock")
    run = run_envpipe(patched(tag), case, tmp_path / "ours", "--envpipe-level units")
    assert _level(run) == "units"
    assert run.digits == stock.digits
    assert run.weights == stock.weights
    phases = [iteration.phase for iteration in run.iterations]
    assert phases[:2] == ["framework", "warm-up"]
    assert phases[-1] in ("reconfigure", "steady")


@pytest.mark.parametrize("level", ["observe", "uniform"])
@pytest.mark.parametrize(
    "case", [Case("--pipeline-model-parallel-size 1"), CASES["pp4"]], ids=["no pipeline", "pp4"]
)
def test_below_units_too(case, level, checkout, patched, tmp_path):
    stock = run_case(checkout(TAGS[-1]), case, "", tmp_path / "stock")
    args = f"--envpipe --envpipe-level {level} --envpipe-baseline-steps 3"
    run = run_case(patched(TAGS[-1]), case, args, tmp_path / "ours")
    assert _level(run) == level
    assert run.digits == stock.digits
    assert run.weights == stock.weights
    assert run.iterations[-1].phase == {"observe": "steady", "uniform": "profile"}[level]
