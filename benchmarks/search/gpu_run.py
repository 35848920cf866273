"""Layer profiles on GPUs, and training runs that predictions from them are held against.

    RUN="python -m benchmarks.search.gpu_run --checkout Megatron-LM --output out --gpus 2"
    $RUN profile
    $RUN ranked
    $RUN train pp2 pp2mb2 tp2 dp2full best/configuration.json

`profile` leaves MODEL.layers.json in the output, `train` a line of MODEL.runs.jsonl for each
configuration: iteration times and each stage's peak of allocated memory, predicted and measured.
`ranked` trains the best three and the worst two of all shapes, each in its best cut.
A configuration is a name as in `layout_of`, or a file of `envpipe search`. Clocks are left alone.
With --cpu, tiny models run on gloo, to rehearse; a CPU counts no memory.

Models: GPT-1.3B (24 layers of 2,048, sequences of 2,048), and layers of Llama-3-8B's shape, 8 of
its 32: two GPUs hold that many with their optimizer. Output weights are the embedding's in neither.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
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
from envpipe_megatron.cli.plans.search_training import ITERATIONS, LOG_INTERVAL, read_log
from envpipe_megatron.gpu.base import FORBID_VARIABLE
from envpipe_megatron.search.candidates import Candidate
from envpipe_megatron.search.configuration import (
    Configuration,
    Job,
    StageLayout,
    configuration_text,
    megatron_flags,
)
from envpipe_megatron.search.layer_file import read_layers
from envpipe_megatron.search.layer_profile import LayerProfile, Sizes
from envpipe_megatron.search.space import MegatronSpace, Space

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
@click.argument("configurations", nargs=-1, required=True)
@click.pass_obj
def train(place: Place, limit_s: int, configurations: Sequence[str]) -> None:
    """Train CONFIGURATIONS, names or files of `envpipe search`, one after another."""
    for name in configurations:
        predicted = _predicted(place, name)
        log = place.output / f"{place.model}.{predicted['name']}.log"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(place.gpus), *place.script, *place.arguments]
        command += [] if place.cpu else ["--log-memory-interval", "10"]
        code, wall_s = _run(
            place, [*command, *shlex.split(" ".join(predicted["flags"]))], log, limit_s
        )
        row = {**predicted, "exit": code, "wall_s": wall_s, **asdict(read_log(log.read_text()))}
        with (place.output / f"{place.model}.runs.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        click.echo(_words(row))
        if code:
            click.echo(_end(log, 15))


@main.command()
@click.option("--limit-s", default=90, show_default=True, help="For each run.")
@click.option("--memory-gib", default=75.0, show_default=True, help="Of a GPU, for all but CUDA's.")
@click.pass_context
def ranked(context: click.Context, limit_s: int, memory_gib: float) -> None:
    """Search, and train the best three and the worst two, as unmodified Megatron-LM can."""
    place: Place = context.obj
    profile = read_layers(place.profile)
    job = replace(place.job, memory_bytes=memory_gib * 2**30)
    megatron = MegatronSpace(profile, job, Space(max_chunks=2, same_recomputation=True))
    cuts = filter(None, map(megatron.best_cut, megatron.shapes))
    candidates = [Candidate(cut.configuration, profile, job) for cut in cuts]
    candidates.sort(key=lambda each: each.iteration_time_s)
    chosen = dict.fromkeys([*range(min(3, len(candidates))), *range(len(candidates))[-2:]])
    files = []
    for number in chosen:
        candidate = candidates[number]
        predicted = {
            "own_order_iteration_time_s": candidate.iteration_time_s,
            "peak_bytes": candidate.peak_bytes.tolist(),
        }
        flags = megatron_flags(profile, candidate.configuration, job)
        files.append(place.output / f"{place.model}.{number + 1}-of-{len(candidates)}.json")
        files[-1].write_text(
            configuration_text(
                profile, candidate.configuration, job, flags=flags, predicted=predicted
            )
        )
        click.echo(f"{files[-1].stem}: {' '.join(flags)}")
    context.invoke(train, limit_s=limit_s, configurations=list(map(str, files)))


def _predicted(place: Place, name: str) -> dict[str, Any]:
    """A configuration's flags, and what is predicted for it in Megatron's own order."""
    if Path(name).is_file():
        data = json.loads(Path(name).read_text())
        of_file = data["predicted"]
        return {
            "name": Path(name).stem,
            "flags": data["megatron_flags"],
            "predicted_s": of_file["own_order_iteration_time_s"],
            "predicted_bytes": of_file["peak_bytes"],
        }
    profile = read_layers(place.profile)
    configuration = layout_of(name, profile, place.job)
    candidate = Candidate(configuration, profile, place.job)
    return {
        "name": name,
        "flags": megatron_flags(profile, configuration, place.job),
        "predicted_s": candidate.iteration_time_s,
        "predicted_bytes": candidate.peak_bytes.tolist(),
    }


def layout_of(name: str, profile: LayerProfile, job: Job) -> Configuration:
    """Equal parts of a model, as in `pp2vp3tp2mb4full`; the rest of the GPUs is data parallel.

    Pipeline and virtual stages, tensor parallel and microbatch size are 1 if they are not named;
    `full` or `selective` recomputes every layer.
    """
    size = {key: int(number) for key, number in re.findall(r"(pp|vp|tp|mb)(\d+)", name)}
    stages, chunks = size.get("pp", 1), size.get("vp", 1)
    sizes = Sizes(size.get("tp", 1), size.get("mb", 1))
    way = next((way for way in ("full", "selective") if name.endswith(way)), None)
    last = len(profile.pieces) - 1
    layers = (last - 1) // (stages * chunks)
    edges = [0, *(1 + layers * part for part in range(1, stages * chunks)), last + 1]
    data = job.num_gpus // (stages * sizes.gpus)
    layouts = []
    for stage in range(stages):
        parts = tuple(
            (edges[part], edges[part + 1]) for part in range(stage, len(edges) - 1, stages)
        )
        pieces = [piece for first, end in parts for piece in range(first, end)]
        ways = tuple(None if piece in (0, last) else way for piece in pieces)
        layouts.append(StageLayout(parts, sizes, data, ways))
    microbatches = job.global_batch // (data * sizes.microbatch_size)
    return Configuration(tuple(layouts), microbatches, distributed_optimizer=data > 1)


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


def _words(row: Mapping[str, Any]) -> str:
    text = f"{row['name']}: exit {row['exit']} after {row['wall_s']:.0f} s"
    if not row["iteration_s"]:
        return text
    predicted_s, measured_s = row["predicted_s"], statistics.median(row["iteration_s"])
    text += f"; {predicted_s:.4f} s predicted, {measured_s:.4f} measured"
    text += f" ({100 * (predicted_s / measured_s - 1):+.1f} %)"
    predicted, measured = (
        " ".join(f"{peak / 2**30:.2f}" for peak in peaks)
        for peaks in (
            row["predicted_bytes"],
            [peak for _, peak in sorted(row["peak_bytes"].items())],
        )
    )
    return f"{text}; {predicted} GiB predicted by stage, {measured} measured by rank"


def _end(log: Path, lines: int) -> str:
    return "\n".join(line[:300] for line in log.read_text().splitlines()[-lines:])


if __name__ == "__main__":
    main()
