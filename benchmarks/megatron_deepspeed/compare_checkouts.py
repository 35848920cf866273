"""Unmodified Megatron-DeepSpeed beside the patched one, on the GPUs of this machine or its CPU.

    python -m benchmarks.megatron_deepspeed.compare_checkouts --stock DIR --patched DIR --output OUT

Trains the same GPT, a stage for each rank, in each arm: the unmodified checkout, EnvPipe in 1F1B,
and EnvPipe's order by file. Losses and gradient norms are compared as they are printed, all weights
at the end by a digest; times are medians of what is printed of an iteration, arms taking turns; of
ranks that share a GPU they say nothing. No clock is ever changed: all runs get a back end that sets
nothing.
"""

from __future__ import annotations

import json
import math
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks.megatron_lm.models import (
    ENVPIPE,
    GPT_1_3B,
    ONE_F_ONE_B,
    ROOT,
    STOCK,
    TINY_ON_CPU,
    Mapping,
    Planned,
)
from benchmarks.megatron_lm.running.jobs import apart, emulated_gpus, launch_ranks, sharing
from benchmarks.outputs import markdown_line
from envpipe_megatron.gpu.base import FORBID_VARIABLE

RUNNER = ROOT / "tests" / "megatron_deepspeed" / "mds_cpu_run.py"
MAKE_DATA = RUNNER.with_name("mds_data.py")
ARMS = STOCK, ONE_F_ONE_B, ENVPIPE
#: Of Megatron-DeepSpeed's order before the plan's, and those whose times are not counted.
_WARMUP, _UNCOUNTED = 3, 8
_ITERATION = re.compile(
    r"^ iteration +(\d+)/.*elapsed time per iteration \(ms\): ([\d.]+).* lm loss: (\S+) .*$", re.M
)
_NORM = re.compile(r"grad norm: (\S+)")
_WEIGHTS = re.compile(r"^cpu_run: weights (\w+)$", re.M)


@dataclass(frozen=True)
class Run:
    """What one run printed: of each iteration its loss and norm, digests of weights, and times."""

    exit_code: int
    printed: list[tuple[str, ...]]
    weights: list[str]
    time_ms: float


@click.command(help=(__doc__ or "").replace("\n\n    python", "\n\n\b\n    python"))
@click.option("--stock", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--patched", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--output", type=click.Path(path_type=Path), required=True)
@click.option("--gpus", default=2, show_default=True, help="A stage for each rank.")
@click.option("--ranks-per-gpu", default=1, show_default=True, help="See shared_gpu.py.")
@click.option("--cpu", is_flag=True, help="gloo, emulated GPUs, and the smallest size.")
@click.option("--iterations", default=30, show_default=True)
@click.option("--rounds", default=2, show_default=True, help="Every second one backwards.")
@click.option("--timeout-s", default=240.0, show_default=True, help="Of a run.")
def main(
    stock: Path,
    patched: Path,
    output: Path,
    gpus: int,
    ranks_per_gpu: int,
    cpu: bool,
    iterations: int,
    rounds: int,
    timeout_s: float,
) -> None:
    """Run all arms in turns; print a table, and write compared.json and the logs."""
    output = output.resolve()
    data = output / "data"
    if not data.exists():
        data.mkdir(parents=True)
        path = os.pathsep.join(filter(None, [str(stock.resolve()), os.environ.get("PYTHONPATH")]))
        making = {**os.environ, "PYTHONPATH": path, FORBID_VARIABLE: "1"}
        subprocess.run([sys.executable, MAKE_DATA, data], env=making, check=True)
    found: dict[str, list[Run]] = {arm: [] for arm in ARMS}
    for number in range(rounds):
        for arm in ARMS[:: (-1) ** number]:
            folder = output / f"{arm}-{number}"
            checkout = (stock if arm == STOCK else patched).resolve()
            stages = gpus * ranks_per_gpu
            shared = sharing(ranks_per_gpu)
            run = _run(checkout, arm, folder, data, stages, shared, cpu, iterations, timeout_s)
            found[arm].append(run)
            click.echo(f"{folder.name}: exit {run.exit_code}, {run.time_ms:.1f} ms")
            saved = {name: [asdict(run) for run in runs] for name, runs in found.items()}
            (output / "compared.json").write_text(json.dumps(saved, indent=1) + "\n")
    reference = found[STOCK][0]
    click.echo(markdown_line(["arm", "iterations", "losses and norms", "weights", "time"]))
    for arm, runs in found.items():
        ratios = [run.time_ms / own.time_ms for run, own in zip(runs, found[STOCK], strict=True)]
        click.echo(
            markdown_line(
                [
                    arm,
                    str(len(runs[0].printed)),
                    compared([run.printed for run in runs], reference.printed),
                    compared([run.weights for run in runs], reference.weights),
                    ", ".join(f"{ratio:.4f}" for ratio in ratios),
                ]
            )
        )


def compared(found: Sequence[Sequence[Any]], reference: Sequence[Any]) -> str:
    """Whether all that runs printed is what the reference printed."""
    if not reference:
        return "nothing to compare with"
    return "equal" if all(own == reference for own in found) else "DIFFER"


def _run(
    checkout: Path,
    arm: str,
    folder: Path,
    data: Path,
    stages: int,
    shared: Sequence[str],
    cpu: bool,
    iterations: int,
    timeout_s: float,
) -> Run:
    folder.mkdir()
    # One sample each: of more, its attention without flash attention cannot make its views.
    mapping, size = Mapping(stages), TINY_ON_CPU if cpu else GPT_1_3B
    batch = size.microbatch * size.microbatches
    configuration = {
        "train_batch_size": batch,
        "train_micro_batch_size_per_gpu": size.microbatch,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 0},
        "bf16": {"enabled": not cpu},
    }
    (folder / "deepspeed.json").write_text(json.dumps(configuration))
    envpipe = ""
    if arm != STOCK:
        plan = Planned(mapping, size.microbatches, arm)
        plan.write(folder)
        control = "emulated" if cpu else "dry_run"
        envpipe = plan.arguments(_WARMUP).format(folder=folder, control=control)
    on_device = (
        "--distributed-backend gloo --no-bias-gelu-fusion --no-bias-dropout-fusion "
        if cpu
        else "--bf16 "
    )
    arguments = (
        f"--deepspeed --deepspeed_config deepspeed.json --zero-stage 0 {on_device}"
        f"{size.arguments(Mapping(1))} --pipeline-model-parallel-size {stages} "
        f"--train-iters {iterations} --lr 1e-4 --min-lr 1e-5 --lr-decay-iters 100 --clip-grad 1.0 "
        "--log-interval 1 --eval-interval 1000 --eval-iters 0 --num-workers 0 "
        "--no-masked-softmax-fusion --no-gradient-accumulation-fusion "
        f"--tokenizer-type NullTokenizer --vocab-size {size.vocabulary - 1} "
        f"--data-path {data / 'text_document'} --data-impl mmap --split 100,0,0 {envpipe}"
    )
    environment = {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    if cpu:
        environment |= {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": str(stages)}
        environment |= emulated_gpus(folder, 0.004)
    script = (*shared, str(RUNNER), str(checkout / "pretrain_gpt.py"), *arguments.split())
    launch = launch_ranks(stages, ("--standalone", *apart("logs")), script, environment)
    process = launch.start(folder, folder / "torchrun.txt")
    try:
        exit_code = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun ends its workers then; a kill would leave them the GPUs
        exit_code = process.wait()
    files = sorted(folder.glob("logs/*/attempt_0/*/std*.log"))
    output = "\n".join(file.read_text(errors="replace") for file in files)
    lines = list(_ITERATION.finditer(output))
    times_ms = [float(line[2]) for line in lines[_UNCOUNTED:]]
    return Run(
        exit_code,
        [(line[1], line[3], *_NORM.findall(line[0])) for line in lines],
        _WEIGHTS.findall(output),
        statistics.median(times_ms) if times_ms else math.nan,
    )


if __name__ == "__main__":
    main()
