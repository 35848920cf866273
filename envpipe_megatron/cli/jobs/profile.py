"""`envpipe profile`: measures the stages of a job, or with --layers a model's layers."""

from __future__ import annotations

import os
import pickle
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import click

from envpipe_megatron.child import Signals
from envpipe_megatron.cli.common import COUNTS, OUTPUT_FILE, check_outputs
from envpipe_megatron.console import say
from envpipe_megatron.core.kinds import Kind
from envpipe_megatron.core.profile import read_profile
from envpipe_megatron.core.sidecar import SIDECAR_FORMAT, sidecar_path
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.files import replace_files
from envpipe_megatron.gpu.registry import VISIBLE_VARIABLE, narrowed
from envpipe_megatron.launch.node import run_torchrun
from envpipe_megatron.launch.options import check_script, ranks_of_node, read, split
from envpipe_megatron.search.layer_file import LAYERS_FORMAT, layers_text, read_layers
from envpipe_megatron.search.layer_jobs import (
    JOB_VARIABLE,
    LayerJob,
    check_known,
    jobs_for,
)
from envpipe_megatron.search.layer_profile import Links

_MODULE = "envpipe_megatron.integrations.layer_profile"
#: Values of torchrun's --nnodes that are one node.
_ONE_NODE = ("1", "1:1")


def _profile_layers(
    output: Path, command: Sequence[str], sizes: Mapping[str, tuple[int, ...] | None]
) -> None:
    """Measure what the output does not have yet, each size with each.

    Jobs add to the output, so that a command that was interrupted goes on when it is given again.
    EnvPipeError if a job fails, and what was measured before is kept; and before any job if the
    output is of another command or at other clocks.
    """
    check_outputs([], [], {output: LAYERS_FORMAT})
    options = read(command)
    check_script(options)
    if options.nnodes not in _ONE_NODE or options.module or options.no_python:
        raise EnvPipeError(
            "Layers are measured on one node, by a Python script of Megatron-LM",
            remedy="Leave out torchrun's --nnodes, -m and --no-python.",
        )
    num_gpus = ranks_of_node(options)
    clocks_mhz = tuple(sorted(set(sizes["clocks"] or ()), reverse=True))
    source = shlex.join(split(command).script)
    known = read_layers(output) if output.is_file() else None
    if known is not None:
        check_known(known, source, clocks_mhz)
    jobs = jobs_for(
        sizes["tensor_parallel"] or tuple(t for t in (1, 2, 4, 8) if t <= num_gpus),
        sizes["context_parallel"] or (1,),
        sizes["expert_parallel"] or (1,),
        sizes["microbatch_size"] or (1, 2, 4),
        clocks_mhz,
        output,
        () if known is None else known.measures,
        source,
    )
    if too_large := [job for job in jobs if job.num_ranks > num_gpus]:
        raise EnvPipeError(
            f"Sizes need more GPUs than the command's {num_gpus}",
            value=_words(too_large[0]),
            remedy="Give torchrun's --nproc-per-node, or smaller sizes.",
        )
    links, speeds = Links() if known is None else known.links, [1.0]
    if num_gpus > 1 and (jobs or links.within_node is None):
        say(f"Measuring the speeds of {num_gpus} GPUs, and links between them")
        measured, speeds = _measure_node(command, num_gpus, output)
        links = measured if links.within_node is None else links
    if not jobs:
        say("All these sizes were measured before: there is nothing to measure")
    try:
        for number, job in enumerate(jobs, start=1):
            say(f"Job {number} of {len(jobs)}: {_words(job)}")
            if code := _run_job(job, command, speeds):
                raise EnvPipeError(
                    f"The job that measured {_words(job)} failed",
                    value=code,
                    remedy="Its own message is above. What was measured before is kept: leave out "
                    "sizes that do not fit into memory, and give the command again.",
                )
    finally:
        if output.is_file():
            replace_files({output: [layers_text(replace(read_layers(output), links=links))]})
    if output.is_file():
        say(f"{'Wrote' if jobs else 'They are in'} {output}")


def _run_job(job: LayerJob, command: Sequence[str], speeds: Sequence[float]) -> int:
    """Run a job that measures layers, on the GPUs for which others wait; its exit status."""
    variables = {JOB_VARIABLE: job.to_text()}
    if visible := narrowed(job.gpus(speeds)):
        variables[VISIBLE_VARIABLE] = visible
    return _run(command, job.num_ranks, [f"{_MODULE}.hooks"], variables)


def _measure_node(command: Sequence[str], num_gpus: int, output: Path) -> tuple[Links, list[float]]:
    """Return the links, and the speed of each GPU."""
    with tempfile.TemporaryDirectory(prefix=f".{output.name}-", dir=output.parent) as name:
        measured = Path(name, "measured")
        code = _run(command, num_gpus, [f"{_MODULE}.node", str(measured)], {}, script=False)
        if code:
            raise EnvPipeError(
                "The job that measured GPUs and messages between them failed",
                value=code,
                remedy="Its own message is above.",
            )
        links, speeds = pickle.loads(measured.read_bytes())
        return links, speeds


def _run(
    command: Sequence[str],
    num_ranks: int,
    module: Sequence[str],
    environment: dict[str, str],
    *,
    script: bool = True,
) -> int:
    """Run a module under the command's torchrun, with its script after it or without."""
    parts = split(command)
    words = [*parts.options, "--nproc-per-node", str(num_ranks), "-m", *module]
    return _run_torchrun([*words, *(parts.script if script else ())], environment)


def _run_torchrun(words: Sequence[str], environment: dict[str, str]) -> int:
    with Signals() as signals:
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", **environment}
        return run_torchrun(words, environment, signals)


def _words(job: LayerJob) -> str:
    microbatches = ", ".join(str(sizes.microbatch_size) for sizes in job.sizes)
    one = job.sizes[0]
    parallel = {
        "tensor": one.tensor_parallel,
        "context": one.context_parallel,
        "expert": one.expert_parallel,
    }
    sizes = ", ".join(f"{name} {size}" for name, size in parallel.items() if size > 1)
    return f"{sizes or 'one GPU'}, microbatches of {microbatches}"


@click.command(context_settings={"ignore_unknown_options": True})
@click.option("--output", type=OUTPUT_FILE, required=True, help="Profile CSV; layers: JSON.")
@click.option("--layers", is_flag=True, help="Measure layers only, for `envpipe search`.")
@click.option(
    "--tensor-parallel", type=COUNTS,
    help="Tensor parallel sizes. Default: 1, 2, 4, 8 up to the GPUs.",
)  # fmt: skip
@click.option("--context-parallel", type=COUNTS, help="Context parallel sizes. Default: 1.")
@click.option("--expert-parallel", type=COUNTS, help="Expert parallel sizes. Default: 1.")
@click.option("--microbatch-size", type=COUNTS, help="Samples of a microbatch. Default: 1,2,4.")
@click.option("--clocks", type=COUNTS, metavar="MHZ[,MHZ...]", help="Clocks to SET. Default: none.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def profile(
    output: Path, layers: bool, command: tuple[str, ...], **sizes: tuple[int, ...] | None
) -> None:
    """Profile a model's stages at each clock, or its layers at several sizes, in Megatron-LM.

    COMMAND is what follows `torchrun` when the model is trained: torchrun's options, the training
    script and its arguments, without --save. It trains until every stage was measured, and ends;
    the checkout must be patched. Clocks must be controllable, unless the arguments say
    --envpipe-gpu-control dry_run.

    With --layers nothing is trained, and any checkout will do. A job for each of the parallel sizes
    runs one kind of layer after another; arguments about stages, sizes and recomputation are set
    aside. What the output has already is not measured again.

    On several nodes, run it on each; the profile is left on the node of rank 0. Layers are measured
    on one.

    \b
    Example:
      envpipe profile --output profile.csv -- --nproc-per-node 4 pretrain_gpt.py \\
          --pipeline-model-parallel-size 4 --train-iters 2000 ...
      envpipe profile --layers --output layers.json -- \\
          --nproc-per-node 4 pretrain_gpt.py ...
    """
    if layers:
        _profile_layers(output.resolve(), command, sizes)
        return
    if any(sizes.values()):
        raise click.UsageError("Sizes and clocks are chosen for --layers only.")
    _profile_stages(output, command)


def _profile_stages(output: Path, command: tuple[str, ...]) -> None:
    check_outputs([output], [], {sidecar_path(output): SIDECAR_FORMAT})
    check_script(read(command))
    output = output.resolve()
    with tempfile.TemporaryDirectory(prefix=f".{output.name}-", dir=output.parent) as folder:
        flags = ["--envpipe", "--envpipe-profile-only", "--envpipe-output", folder]
        if code := _run_torchrun([*command, *flags], {}):
            raise EnvPipeError(
                "The training that was to be profiled failed",
                value=code,
                remedy="Its own message is above.",
            )
        measured = Path(folder) / "profile.csv"
        if not measured.is_file():
            if read(command).nnodes in _ONE_NODE and not read(command).node_rank:
                raise EnvPipeError(
                    "The training ended and left no profile",
                    remedy="Its own messages are above; it must be the training script of a "
                    "patched checkout.",
                )
            click.echo("No profile on this node: it is on the node of rank 0.")
            return
        result = read_profile(measured)
        result.write(output)
    num_clocks = len(result.rows[0][Kind.FORWARD])
    click.echo(f"{output}: {result.num_stages} stages at {num_clocks} clocks.")
