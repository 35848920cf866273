"""Stock Megatron-LM beside the patched one on the CPU: the same losses, and the same weights.

With ENVPIPE_LM_FULL=1 on all mappings, features and tags; else the least that shows it. A run takes
a quarter of a minute where two cores are free.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from checkouts import TAGS
from lm_runs import GPT, LLAMA, MOCK_DATA, OPTIMIZER, Run, run_pretrain

from envpipe_megatron import builders
from envpipe_megatron.gpu.presets import load_preset
from envpipe_megatron.plan import read_plan
from envpipe_megatron.profile import ProfileRow, make_profile, read_profile
from envpipe_megatron.schedule import Kind

pytestmark = pytest.mark.xdist_group("megatron_lm")

FULL = os.environ.get("ENVPIPE_LM_FULL") == "1"
full = pytest.mark.skipif(not FULL, reason="takes minutes: ENVPIPE_LM_FULL=1 runs it")

MICROBATCHES, ITERATIONS, WARMUP = 8, 12, 3
PRESET, FORWARD_S = "a100-sxm", 0.01
CLOCKS_MHZ = range(1410, 690, -120)

PP4 = "--pipeline-model-parallel-size 4"
PP2 = "--pipeline-model-parallel-size 2"
PP2TP2 = f"{PP2} --tensor-model-parallel-size 2"
OVERLAPPED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
# So high that the first iterations overflow, and are skipped.
FP16 = "--fp16 --initial-loss-scale 2097152 --hysteresis 1 --loss-scale-window 4"


@dataclass(frozen=True)
class Case:
    """A job that both train."""

    mapping: str
    features: str = ""
    model: str = GPT

    @property
    def num_stages(self) -> int:
        return 4 if PP4 in self.mapping else 2

    @property
    def args(self) -> str:
        replicas = 4 // self.num_stages if self.mapping == PP2 else 1
        return (
            f"{MOCK_DATA} {self.model} {OPTIMIZER} {self.mapping} {self.features} "
            f"--global-batch-size {MICROBATCHES * replicas} "
            f"--train-iters {ITERATIONS} --log-interval 1 --eval-interval 5 --eval-iters 2"
        )

    @property
    def env(self) -> dict[str, str]:
        # Megatron-LM insists on it.
        return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if self.mapping == PP2TP2 else {}


CASES = {
    "pp4": Case(PP4),
    "pp2tp2": Case(PP2TP2),
    "pp2dp2": Case(PP2),
    "pp2tp2-sequence": Case(PP2TP2, "--sequence-parallel"),
    "pp2dp2-overlapped": Case(PP2, OVERLAPPED),
    "pp4-untied": Case(PP4, "--untie-embeddings-and-output-weights"),
    "pp4-recompute": Case(PP4, RECOMPUTE),
    "pp4-bf16": Case(PP4, "--bf16"),
    "pp2dp2-overlapped-bf16": Case(PP2, f"{OVERLAPPED} --bf16"),
    "pp4-fp16": Case(PP4, FP16),
    "pp2dp2-overlapped-fp16": Case(PP2, f"{OVERLAPPED} {FP16}"),
    "llama-pp4": Case(PP4, model=LLAMA),
    "llama-pp2tp2-sequence": Case(PP2TP2, "--sequence-parallel", LLAMA),
    "llama-pp2dp2-overlapped-recompute": Case(PP2, f"{OVERLAPPED} {RECOMPUTE}", LLAMA),
    # As long as every stage draws its own random numbers in the same order, which is one for each
    # stage and microbatch under full recomputation too.
    "pp4-dropout-1f1b": Case(PP4, "--attention-dropout 0.1 --hidden-dropout 0.1"),
}
ONE_F_ONE_B = "--envpipe-type uniform --envpipe-scheduling 1f1b"
ENVPIPE = "--envpipe-type envelope --envpipe-scheduling envpipe --envpipe-reconfigure balanced"
AUTO = "--envpipe-type optimal"

Find = Callable[[str], Path]
Stock = Callable[[str, str], Run]


@pytest.fixture(scope="session")
def stock(checkout: Find, tmp_path_factory: pytest.TempPathFactory) -> Stock:
    """What stock Megatron-LM makes of a case, on a tag; each is run once."""
    runs: dict[tuple[str, str], Run] = {}

    def find(name: str, tag: str) -> Run:
        if (name, tag) not in runs:
            folder = tmp_path_factory.mktemp("stock") / name
            runs[name, tag] = _run(checkout(tag), CASES[name], "", folder)
        return runs[name, tag]

    return find


def _run(checkout: Path, case: Case, args: str, folder: Path) -> Run:
    run = run_pretrain(
        checkout,
        f"{case.args} {args}",
        folder,
        env={
            **case.env,
            "ENVPIPE_EMULATED_GPU": PRESET,
            "ENVPIPE_EMULATED_FORWARD_S": str(FORWARD_S),
            "ENVPIPE_EMULATED_ROOT": str(folder / "gpus"),
        },
        timeout_s=600,
    )
    return run.require_success()


def _write_profile(path: Path, num_stages: int) -> None:
    """What profiling the emulated GPUs would find, without the minute that it takes."""
    gpu = load_preset(PRESET)
    rows = []
    for stage, kind, clock in itertools.product(range(num_stages), Kind, CLOCKS_MHZ):
        at_max_s = FORWARD_S * (2 if kind is Kind.BACKWARD else 1)
        time_s = gpu.unit_time_s(kind, clock, at_max_s)
        rows.append(
            (stage, kind, ProfileRow(clock, time_s, time_s * gpu.busy_power_w(kind, clock)))
        )
    make_profile(rows, source=PRESET).write(path)


def _run_envpipe(checkout: Path, case: Case, how: str, folder: Path) -> Run:
    profile = folder.with_suffix(".csv")
    _write_profile(profile, case.num_stages)
    return _run(
        checkout,
        case,
        f"--envpipe {how} --envpipe-profile {profile} --envpipe-baseline-steps {WARMUP} "
        "--envpipe-output output",
        folder,
    )


def _assert_same(run: Run, stock: Run) -> None:
    assert [i.digits for i in run.iterations] == [i.digits for i in stock.iterations]
    assert run.evaluations == stock.evaluations
    assert run.weights == stock.weights
    # There was something to compare.
    assert len(stock.iterations) == ITERATIONS
    assert len(stock.evaluations) >= 4
    assert None not in stock.weights


def _assert_planned(run: Run, case: Case, how: str) -> None:
    """EnvPipe was at work, in the order that was asked for."""
    assert run.imported
    phases = [iteration.phase for iteration in run.iterations]
    assert phases[:WARMUP] == ["warm-up"] * WARMUP
    assert phases[-1] in ("reconfigure", "steady")
    plan = read_plan(
        run.folder / "output" / "plan.json", read_profile(run.folder.with_suffix(".csv"))
    )
    framework_order = builders.one_f_one_b(case.num_stages, MICROBATCHES)
    assert (plan.schedule.stages == framework_order.stages) == (how == ONE_F_ONE_B)


def _check(name: str, tag: str, how: str, stock: Stock, patched: Find, folder: Path) -> None:
    run = _run_envpipe(patched(tag), CASES[name], how, folder)
    _assert_planned(run, CASES[name], how)
    _assert_same(run, stock(name, tag))


@pytest.mark.parametrize("tag", [TAGS[0], pytest.param(TAGS[1], marks=full)])
def test_another_order_trains_the_same(tag, stock, patched, tmp_path):
    _check("pp4", tag, ENVPIPE, stock, patched, tmp_path / "run")


@full
@pytest.mark.parametrize("tag", TAGS)
@pytest.mark.parametrize(
    "name", [name for name in CASES if name not in ("pp4", "pp4-dropout-1f1b")]
)
def test_another_order_trains_the_same_everywhere(name, tag, stock, patched, tmp_path):
    _check(name, tag, ENVPIPE, stock, patched, tmp_path / "run")


@full
@pytest.mark.parametrize("tag", TAGS)
@pytest.mark.parametrize("name", ["pp4", "pp2tp2", "pp2dp2-overlapped", "pp4-dropout-1f1b"])
def test_the_framework_order_trains_the_same(name, tag, stock, patched, tmp_path):
    _check(name, tag, ONE_F_ONE_B, stock, patched, tmp_path / "run")


@full
@pytest.mark.parametrize("tag", TAGS)
@pytest.mark.parametrize("name", ["pp4", "pp2tp2", "pp2dp2-overlapped"])
def test_the_optimal_plan_trains_the_same(name, tag, stock, patched, tmp_path):
    _check(name, tag, AUTO, stock, patched, tmp_path / "run")


@pytest.mark.parametrize("tag", [TAGS[0], pytest.param(TAGS[1], marks=full)])
def test_flag_off_nothing_of_envpipe_is_imported(tag, stock, patched, tmp_path):
    run = _run(patched(tag), CASES["pp4"], "", tmp_path / "run")
    assert not run.imported
    _assert_same(run, stock("pp4", tag))


@full
@pytest.mark.parametrize("tag", TAGS)
def test_stock_is_the_same_twice(tag, checkout, stock, tmp_path):
    _assert_same(_run(checkout(tag), CASES["pp4"], "", tmp_path / "run"), stock("pp4", tag))


@full
@pytest.mark.parametrize("tag", TAGS)
@pytest.mark.parametrize("name", ["pp4-fp16", "pp2dp2-overlapped-fp16"])
def test_fp16_skips_iterations_and_goes_on(name, tag, stock):
    skipped = [iteration.skipped for iteration in stock(name, tag).iterations]
    assert skipped[0]
    assert not all(skipped)


@full
@pytest.mark.parametrize("tag", TAGS)
@pytest.mark.parametrize("name", ["pp4", "pp2tp2-sequence", "pp2dp2-overlapped"])
def test_a_restarted_job_trains_the_same(name, tag, stock, patched, tmp_path):
    """Stopped at a checkpoint in the middle, and started again from it."""
    case = CASES[name]
    middle = ITERATIONS // 2
    checkpoints = f"--save {tmp_path / 'checkpoints'} --save-interval {middle}"
    first = _run_envpipe(
        patched(tag), case, f"{ENVPIPE} {checkpoints} --exit-interval {middle}", tmp_path / "first"
    )
    loading = f"{ENVPIPE} --load {tmp_path / 'checkpoints'}"
    second = _run_envpipe(patched(tag), case, loading, tmp_path / "second")
    digits = [iteration.digits for run in (first, second) for iteration in run.iterations]
    assert digits == [iteration.digits for iteration in stock(name, tag).iterations]
    assert second.weights == stock(name, tag).weights
