"""`envpipe profile`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from envpipe_megatron.cli.common import OUTPUT_FILE, check_outputs, counts
from envpipe_megatron.cli.jobs.profile_layers import LayerSizes, profile_layers
from envpipe_megatron.core.kinds import Kind
from envpipe_megatron.core.profile import read_profile
from envpipe_megatron.core.sidecar import SIDECAR_FORMAT, sidecar_path
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.launch.signals import Signals
from envpipe_megatron.launch.torchrun import look, read, run_torchrun

_Command = TypeVar("_Command", bound=Callable[..., Any])


def _of_layers(name: str, help: str, metavar: str = "N[,N...]") -> Callable[[_Command], _Command]:
    """An option of --layers: several numbers."""
    return click.option(name, type=counts(), metavar=metavar, help=help)


@click.command(context_settings={"ignore_unknown_options": True})
@click.option("--output", type=OUTPUT_FILE, required=True, help="Profile CSV; layers: JSON.")
@click.option("--layers", is_flag=True, help="Measure layers alone, for `envpipe search`.")
@_of_layers("--tensor-parallel", help="Tensor parallel sizes. Default: 1, 2, 4, 8 up to the GPUs.")
@_of_layers("--context-parallel", help="Context parallel sizes. Default: 1.")
@_of_layers("--expert-parallel", help="Expert parallel sizes. Default: 1.")
@_of_layers("--microbatch-size", help="Samples of a microbatch. Default: 1,2,4.")
@_of_layers("--clocks", metavar="MHZ[,MHZ...]", help="Clocks to SET. Default: none is.")
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
    runs each kind of layer alone; arguments about stages, sizes and recomputation are set aside.
    What the output has already is not measured again.

    On several nodes, run it on each; the profile is left on the node of rank 0. Layers are measured
    on one.

    Example:

      envpipe profile --output profile.csv -- --nproc-per-node 4 pretrain_gpt.py
      --pipeline-model-parallel-size 4 --train-iters 2000 ...

      envpipe profile --layers --output layers.json -- --nproc-per-node 4 pretrain_gpt.py ...
    """
    if layers:
        of_layers = LayerSizes(
            sizes["tensor_parallel"],
            sizes["context_parallel"] or (1,),
            sizes["expert_parallel"] or (1,),
            sizes["microbatch_size"] or (1, 2, 4),
        )
        clocks_mhz = tuple(sorted(set(sizes["clocks"] or ()), reverse=True))
        profile_layers(output.resolve(), command, of_layers, clocks_mhz)
        return
    if any(sizes.values()):
        raise click.UsageError("Sizes and clocks are chosen for --layers alone.")
    _profile_stages(output, command)


def _profile_stages(output: Path, command: tuple[str, ...]) -> None:
    check_outputs([output], [], {sidecar_path(output): SIDECAR_FORMAT})
    look(read(command))
    output = output.resolve()
    with tempfile.TemporaryDirectory(prefix=f".{output.name}-", dir=output.parent) as folder:
        flags = ["--envpipe", "--envpipe-profile-only", "--envpipe-output", folder]
        with Signals() as signals:
            code = run_torchrun([*command, *flags], {"PYTHONUNBUFFERED": "1"}, signals)
        if code:
            raise EnvPipeError(
                "The training that was to be profiled failed",
                value=code,
                remedy="Its own message is above.",
            )
        measured = Path(folder) / "profile.csv"
        if not measured.is_file():
            if not _of_several_nodes(command):
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


def _of_several_nodes(command: tuple[str, ...]) -> bool:
    """Whether torchrun was told of more nodes than this one."""
    names = {word.split("=")[0].replace("_", "-") for word in command}
    return bool(names & {"--nnodes", "--node-rank", "--rdzv-endpoint"})
