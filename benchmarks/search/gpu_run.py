"""Layer profiles on GPUs, and training runs that predictions from them are held against.

    RUN="python -m benchmarks.search.gpu_run --checkout Megatron-LM --output out --gpus 2"
    $RUN profile
    $RUN ranked

`profile` leaves MODEL.layers.json in the output. `ranked` trains the best three and the worst two
of all shapes, each in its best cut, and leaves MODEL/rows.jsonl: the median iteration time and the
highest peak of allocated memory, predicted and measured. Clocks are left alone. With --cpu, tiny
models run on gloo, to rehearse; a CPU counts no memory.

Models: GPT-1.3B (24 layers of 2,048, sequences of 2,048), and layers of Llama-3-8B's shape, 8 of
its 32: two GPUs hold that many with their optimizer. Output weights are the embedding's in neither.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from benchmarks.megatron_lm.models import (
    CPU_RUN,
    NO_EVALUATION,
    TRANSFORMER_ENGINE,
    base_arguments,
    joined,
    training,
)
from benchmarks.outputs import leave, make_console, make_table
from envpipe_megatron.gpu.base import FORBID_VARIABLE
from envpipe_megatron.search.configuration import (
    Job,
    megatron_flags,
)
from envpipe_megatron.search.layer_file import read_layers
from envpipe_megatron.search.space import MegatronSpace, Space

#: Iterations that are trained, and those at first that take longer and are left out.
ITERATIONS, WARM_UP = 30, 10
#: A line of Megatron's log is for so many: each takes it milliseconds, and waits of all ranks.
LOG_INTERVAL = 5
_MIB, _GIB = 2.0**20, 2.0**30

_GPT = "--attention-dropout 0 --hidden-dropout 0 --untie-embeddings-and-output-weights"
_LLAMA = (
    "--swiglu --normalization RMSNorm --group-query-attention --position-embedding-type rope "
    f"--disable-bias-linear {_GPT}"
)
_DATA = "--mock-data --tokenizer-type NullTokenizer --vocab-size"


@dataclass(frozen=True)
class Model:
    """A model and its batch, as Megatron's arguments; `tiny` stands for it on a CPU.

    Microbatches are as large as an H100 wants them: with smaller ones the host is the bottleneck.
    """

    arguments: str
    tiny: str
    global_batch: int
    microbatch_sizes: str


MODELS = {
    "gpt-1.3b": Model(
        "--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 "
        f"--max-position-embeddings 2048 {_DATA} 51199 {_GPT} --bf16",
        "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 "
        f"--max-position-embeddings 32 {_DATA} 64 {_GPT}",
        64,
        "8,16",
    ),
    "llama-8b": Model(
        "--num-layers 8 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 "
        "--num-query-groups 8 --seq-length 4096 --max-position-embeddings 4096 "
        f"{_DATA} 128255 {_LLAMA} --bf16",
        "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --num-query-groups 2 "
        f"--seq-length 32 --max-position-embeddings 32 {_DATA} 64 {_LLAMA}",
        16,
        "1,2",
    ),
}


@dataclass(frozen=True)
class Place:
    """Where jobs run."""

    checkout: Path
    output: Path
    gpus: int
    cpu: bool
    model: str

    @property
    def job(self) -> Job:
        """What is trained."""
        return Job(self.gpus, self.gpus, MODELS[self.model].global_batch)

    @property
    def profile(self) -> Path:
        """Where the layer profile is."""
        return self.output / f"{self.model}.layers.json"

    @property
    def arguments(self) -> tuple[str, ...]:
        """Megatron's that all runs of the model share; a configuration's own come behind."""
        model = MODELS[self.model]
        parts = (
            model.tiny if self.cpu else model.arguments,
            f"--micro-batch-size 1 --global-batch-size {model.global_batch} --sequence-parallel",
            training(ITERATIONS, log_interval=LOG_INTERVAL),
            NO_EVALUATION,
        )
        return (*base_arguments(self.cpu, {TRANSFORMER_ENGINE}), *joined(parts))

    @property
    def script(self) -> tuple[str, ...]:
        """What torchrun runs."""
        script = str(self.checkout.resolve() / "pretrain_gpt.py")
        return (str(CPU_RUN), script) if self.cpu else (script,)

    @property
    def environment(self) -> dict[str, str]:
        """For every process: no clock is changed, and one queue, as tensor parallelism needs."""
        more = {
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            "TORCHDYNAMO_DISABLE": "1" if self.cpu else "0",
            FORBID_VARIABLE: "1",
        }
        return {**os.environ, **more}


@click.group()
@click.option("--checkout", type=click.Path(exists=True, path_type=Path), required=True)
@click.option("--output", type=click.Path(file_okay=False, path_type=Path), required=True)
@click.option("--gpus", type=click.IntRange(1), required=True)
@click.option("--model", type=click.Choice(list(MODELS)), default="gpt-1.3b", show_default=True)
@click.option("--cpu", is_flag=True, help="Rehearse on gloo with a tiny model.")
@click.pass_context
def main(context: click.Context, /, **place: Any) -> None:
    """Profile layers on the GPUs of this machine, and train what is compared with predictions."""
    context.obj = Place(**place)
    context.obj.output.mkdir(parents=True, exist_ok=True)


@main.command()
@click.option("--microbatch-size", help="By default the model's.")
@click.option("--tensor-parallel", help="By default all that the GPUs allow.")
@click.pass_obj
def profile(place: Place, microbatch_size: str | None, tensor_parallel: str | None) -> None:
    """Measure the layers."""
    log = place.output / f"{place.model}.profile.log"
    command = [sys.executable, "-m", "envpipe_megatron.cli", "profile", "--layers"]
    command += ["--output", str(place.profile)]
    command += ["--microbatch-size", microbatch_size or MODELS[place.model].microbatch_sizes]
    command += ["--tensor-parallel", tensor_parallel] if tensor_parallel else []
    command += ["--", "--standalone"]
    command += ["--nproc-per-node", str(place.gpus), *place.script, *place.arguments]
    code, wall_s = _run(place, command, log, limit_s=300)
    click.echo(f"profile of {place.model}: exit {code} after {wall_s:.0f} s")
    click.echo(_end(log, 30))
    sys.exit(code)


@main.command()
@click.option("--limit-s", default=90, show_default=True, help="For each run.")
@click.option("--memory-gib", default=75.0, show_default=True, help="Of a GPU, for all but CUDA's.")
@click.pass_obj
def ranked(place: Place, limit_s: int, memory_gib: float) -> None:
    """Search, and train the best three and the worst two, as unmodified Megatron-LM can."""
    profile = read_layers(place.profile)
    job = replace(place.job, memory_bytes=memory_gib * 2**30)
    megatron = MegatronSpace(profile, job, Space(max_chunks=2, same_recomputation=True))
    candidates = [*filter(None, map(megatron.best_cut, megatron.shapes))]
    candidates.sort(key=lambda each: each.iteration_time_s)
    chosen = dict.fromkeys([*range(min(3, len(candidates))), *range(len(candidates))[-2:]])
    rows = []
    for number in chosen:
        name = f"{number + 1}-of-{len(candidates)}"
        candidate = candidates[number]
        flags = megatron_flags(profile, candidate.configuration, job)
        log = place.output / f"{place.model}.{name}.log"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(place.gpus), *place.script, *place.arguments]
        command += [] if place.cpu else ["--log-memory-interval", str(WARM_UP)]
        code, wall_s = _run(place, [*command, *shlex.split(" ".join(flags))], log, limit_s)
        predicted_s = candidate.iteration_time_s
        measured_s, peak_bytes = read_log(log.read_text())
        row = {
            "model": place.model,
            "place": name,
            "configuration": " ".join(flags),
            "predicted (s)": predicted_s,
            "measured (s)": measured_s,
            "error (%)": 100 * (predicted_s / measured_s - 1),
            "memory, predicted (GiB)": float(candidate.peak_bytes.max()) / _GIB,
            "measured (GiB)": peak_bytes / _GIB,
        }
        rows.append(row)
        click.echo(f"{row}, exit {code} after {wall_s:.0f} s")
        if code:
            click.echo(_end(log, 15))
    make_console().print(make_table("The best three and the worst two", rows))
    basis, gpus = ("CPU", "") if place.cpu else ("GPUs", str(place.gpus))
    leave(place.output / place.model, basis, {"ranked": rows}, gpus=gpus)


def read_log(text: str) -> tuple[float, float]:
    """Return the median time (s) after the warm-up and the highest peak (bytes); NaN if missing."""
    times_ms = re.findall(r"elapsed time per iteration \(ms\): ([\d.]+)", text)
    peaks_mib = re.findall(r"\[Rank \d+\].*\| max allocated: ([\d.]+)", text)
    times_s = [float(time_ms) / 1e3 for time_ms in times_ms[WARM_UP // LOG_INTERVAL :]]
    peak_mib = max(map(float, peaks_mib), default=math.nan)
    return statistics.median(times_s or [math.nan]), peak_mib * _MIB


def _run(place: Place, command: Sequence[str], log: Path, limit_s: float) -> tuple[int, float]:
    """Exit status and seconds; a run that takes too long is killed, with its ranks."""
    begin_s = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=place.environment
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun, and `envpipe`, end their ranks
            code = process.wait() or 1
    return code, time.monotonic() - begin_s


def _end(log: Path, lines: int) -> str:
    return "\n".join(line[:300] for line in log.read_text().splitlines()[-lines:])


if __name__ == "__main__":
    main()
