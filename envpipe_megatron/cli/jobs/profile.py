"""`envpipe profile`."""

from __future__ import annotations

import tempfile
from pathlib import Path

import click

from envpipe_megatron.cli.common import OUTPUT_FILE, check_outputs
from envpipe_megatron.core.kinds import Kind
from envpipe_megatron.core.profile import read_profile
from envpipe_megatron.core.sidecar import SIDECAR_FORMAT, sidecar_path
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.launch.signals import Signals
from envpipe_megatron.launch.torchrun.command_line import read
from envpipe_megatron.launch.torchrun.looking import look
from envpipe_megatron.launch.torchrun.run import run_torchrun


@click.command(context_settings={"ignore_unknown_options": True})
@click.option("--output", type=OUTPUT_FILE, required=True, help="Profile CSV.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def profile(output: Path, command: tuple[str, ...]) -> None:
    """Profile a model's stages at each clock, through a patched Megatron-LM.

    COMMAND is what follows `torchrun` when the model is trained: torchrun's options, the training
    script and its arguments, without --save. It trains until every stage was measured, and ends.
    Clocks must be controllable, unless the arguments say --envpipe-gpu-control dry_run.

    On several nodes, run it on each; the profile is left on the node of rank 0.

    Example:

      envpipe profile --output profile.csv -- --nproc-per-node 4 pretrain_gpt.py
      --pipeline-model-parallel-size 4 --train-iters 2000 ...
    """
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
