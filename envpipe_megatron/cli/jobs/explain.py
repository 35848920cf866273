"""`envpipe explain`."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import click

from envpipe_megatron.cli.common import EXISTING_FILE
from envpipe_megatron.console import say
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.integrations.megatron.arguments import (
    RECOMPUTE_FLAG,
    by_stage,
    read_flags,
    read_recipe,
)
from envpipe_megatron.integrations.megatron.explain import PlannedJob
from envpipe_megatron.integrations.megatron.explain import explain as explain_job
from envpipe_megatron.integrations.options import divided, flag_of, read_options

#: A flag that the patch adds beside EnvPipe's options.
_SWITCH = "--envpipe"


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option(
    "--recipe",
    type=EXISTING_FILE,
    help="YAML or JSON file of flags, such as a model_config.yaml of Megatron-LM's functional "
    "tests. Flags of the command line go before its.",
)
@click.option("--nodes", type=click.IntRange(1), help="Default: what the launcher's options say.")
@click.option("--gpus-per-node", type=click.IntRange(1), help="Default: likewise, or 8.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def explain(
    recipe: Path | None,
    nodes: int | None,
    gpus_per_node: int | None,
    as_json: bool,
    command: tuple[str, ...],
) -> None:
    """Print what a job of Megatron-LM gets from EnvPipe, and why, without starting it.

    COMMAND is what starts the job, or the script's flags only: put `envpipe explain --` before
    torchrun in a script of yours. It prints the job's level and why it is no higher, what is proven
    and what is checked at start, what carries messages, what was measured or emulated of such jobs
    on which GPU, and what was never tried. It decides by the flags, as the job itself does; no GPU,
    torch or Megatron is needed.

    \b
    Example:
      envpipe explain -- torchrun --nnodes 2 --nproc-per-node 8 pretrain_gpt.py \\
          --pipeline-model-parallel-size 4 --num-experts 8 --envpipe
    """
    launcher, flags = _split(command)
    if recipe is not None:
        of_recipe, variables = read_recipe(recipe)
        flags = [*of_recipe, *flags]
        os.environ.update(variables)  # where the job's own functions look
    elif not command:
        raise click.UsageError("Give the command that starts the job, or a --recipe.")
    settings, rest = divided(flags, RECOMPUTE_FLAG)
    args = read_flags([word for word in rest if word != _SWITCH])
    by_stage(args)
    options = read_options(
        settings,
        num_stages=args.pipeline_model_parallel_size,
        save_folder=getattr(args, "save", None),
        on_gpu=True,
        named=flag_of,
    )
    job = PlannedJob(
        args,
        options,
        nodes=nodes or _of_launcher(launcher, "nnodes"),
        ranks_per_node=gpus_per_node or _of_launcher(launcher, "nproc-per-node"),
    )
    explained = explain_job(job)
    if as_json:
        click.echo(json.dumps(explained, indent=1))
        return
    for title, lines in explained.items():
        say("\n".join([title, *(f"  - {line}" for line in lines)]))


def _split(command: Sequence[str]) -> tuple[Sequence[str], list[str]]:
    """Split a command after its script; without one, all of it are the script's flags."""
    script = next((n for n, word in enumerate(command) if word.endswith(".py")), None)
    if script is not None:
        return command[:script], list(command[script + 1 :])
    if command and not command[0].startswith("--"):
        raise EnvPipeError(
            "There is no training script in this command",
            value=command[0],
            remedy="Give the script's name, or its flags only, which begin with --.",
        )
    return (), list(command)


def _of_launcher(words: Sequence[str], option: str) -> int | None:
    """Return a number among torchrun's options; None if it is not there, or no number."""
    joined = [part for word in words for part in word.split("=", 1)]
    for name, value in pairwise(joined):
        if name.lstrip("-").replace("_", "-") == option and value.isdecimal():
            return int(value)
    return None
