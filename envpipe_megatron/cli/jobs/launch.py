"""`envpipe launch`."""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from envpipe_megatron.cli.common import (
    EXISTING_FILE,
    INTENSITY_OPTION,
    OUTPUT_FOLDER,
    PRICE_OPTION,
)
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.launch.hosts import (
    STOP_GRACE_S,
    carried_environment,
    read_hostfile,
    run_nodes,
    ssh_command,
)
from envpipe_megatron.launch.node import TORCHRUN, NodeSettings, run_node
from envpipe_megatron.launch.options import (
    CommandLine,
    HelpAskedError,
    TorchrunOptions,
    check_script,
    options_here,
    options_of_hosts,
    shutdown_s,
    split,
)

#: Options that are not passed on: a node over ssh gets its own.
_OF_ONE_NODE = ("node_name", "until_stdin_ends")

#: click leaves the lines of a paragraph after \b as they are; it would break options at dashes.
_HELP = """
Run torchrun on one or many nodes, and bill the energy of the job.

\b
All of torchrun's options are accepted before SCRIPT, among them
  --nnodes N   --nproc-per-node N|gpu   --standalone   --max-restarts N
  --node-rank I   --master-addr HOST   --master-port PORT
  --rdzv-backend NAME   --rdzv-endpoint HOST:PORT
  -m (SCRIPT is a module)   --no-python (SCRIPT is a program)
What follows SCRIPT is the script's own.

\b
What is not given is taken from torchrun's variables (PET_NNODES, ...), then
from NNODES, NPROC_PER_NODE, NODE_RANK, MASTER_ADDR and MASTER_PORT, then
from SLURM, where srun starts one task a node. --dry-run shows what is found.

With --hostfile, nodes are started over ssh in this folder, which they must have too. They get
PYTHONPATH, LD_LIBRARY_PATH, what --export names, and all variables that begin with ENVPIPE_, NCCL_,
GLOO_, CUDA_ (but CUDA_VISIBLE_DEVICES), TORCH_, OMP_, MKL_ or PET_. Their values are in command
lines, which other users of the machines can read: export no secrets. When a node fails, the others
are stopped, and its exit status is this command's.

\b
Example:
  envpipe launch --nproc-per-node 8 pretrain_gpt.py ... --envpipe
  envpipe launch --hostfile hosts --price 0.25 pretrain_gpt.py ... --envpipe
"""


class _SplitFirst(click.Command):
    """Reads EnvPipe's options wherever they are before SCRIPT, and nothing of what follows it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Leave the words before SCRIPT to click, and keep what follows in the context."""
        if ctx.resilient_parsing:  # a shell asks for completions of half a line
            return super().parse_args(ctx, [])
        _drop_empty_torchrun_variables()
        own = {
            name: not option.is_flag
            for option in self.params
            if isinstance(option, click.Option)
            for name in option.opts
        }
        options: Sequence[str] = ("--help",)
        with contextlib.suppress(HelpAskedError):
            if args[:1] != ["--help"]:  # which needs no torch
                options, ctx.obj = split(args, own)
        return super().parse_args(ctx, list(options))


def _drop_empty_torchrun_variables() -> None:
    """Make empty PET_ variables, which Kubernetes operators set, count as unset to torchrun too."""
    for name in [name for name in os.environ if name.startswith("PET_") and not os.environ[name]]:
        del os.environ[name]


@click.command(
    cls=_SplitFirst,
    help=_HELP,
    options_metavar="[OPTIONS] [TORCHRUN'S OPTIONS] SCRIPT [ARGS]...",
    context_settings={"ignore_unknown_options": True},
)
@click.argument("options", nargs=-1, type=click.UNPROCESSED, metavar="")
@click.option(
    "--output",
    "output_dir",
    type=OUTPUT_FOLDER,
    default=Path("runs/launch"),
    show_default=True,
    help="Folder of each node's energy log, and of the job's bill.",
)
@click.option(
    "--node-name",
    default="",
    show_default="the host's name",
    help="This node's name in the bill and in file names.",
)
@click.option(
    "--bill-interval",
    type=click.IntRange(0),
    default=100,
    show_default=True,
    metavar="N",
    help="Iterations between live lines of the bill; 0 for none.",
)
@PRICE_OPTION
@INTENSITY_OPTION
@click.option(
    "--prometheus-port",
    type=click.IntRange(1, 65535),
    metavar="P",
    help="Serve figures of this node's GPUs, and of the job, for Prometheus at this port.",
)
@click.option(
    "--prometheus-address",
    default="127.0.0.1",
    show_default=True,
    metavar="A",
    help="Address to serve them at.",
)
@click.option(
    "--job-name",
    default=lambda: os.environ.get("SLURM_JOB_ID", ""),
    show_default="SLURM's number of the job, or the folder of --output",
    metavar="NAME",
    help="Label of the metrics, the same on all nodes, that tells this job from others.",
)
@click.option(
    "--hostfile",
    type=EXISTING_FILE,
    metavar="FILE",
    help="Start a node on each host of this file over ssh, also on this machine where it is one "
    "of them. Each line: [user@]host slots=N, or host:N.",
)
@click.option(
    "--ssh", default="ssh", show_default=True, metavar="COMMAND", help="ssh client and its options."
)
@click.option(
    "--python",
    default=sys.executable,
    show_default="the one that runs this",
    metavar="PATH",
    help="Python on the hosts of the hostfile.",
)
@click.option(
    "--export",
    "exported",
    multiple=True,
    metavar="NAME",
    help="Carry this variable to the hosts, too; repeat for more.",
)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Say what would be started where and what was found for it here, and start nothing.",
)
@click.option("--until-stdin-ends", is_flag=True, hidden=True)
@click.pass_context
def launch(
    ctx: click.Context,
    /,
    options: tuple[str, ...],
    hostfile: Path | None,
    ssh: str,
    python: str,
    exported: tuple[str, ...],
    dry_run: bool,
    **settings: Any,
) -> None:
    """Run torchrun here, or a node on each host."""
    line = CommandLine(options, ctx.obj)
    settings["job_name"] = settings["job_name"] or settings["output_dir"].resolve().name
    if hostfile is None:
        settings["node_name"] = settings["node_name"] or socket.gethostname()
        plan = options_here(line)
        if dry_run:
            _show("this node", (*TORCHRUN, *plan.arguments), plan)
        check_script(plan.read)
        if dry_run:
            return
        ctx.exit(run_node(plan.arguments, NodeSettings(**settings)))
    if settings["node_name"]:
        raise EnvPipeError(
            "--node-name names one node, and --hostfile starts several",
            value=settings["node_name"],
            remedy="Leave it out: nodes are named after their hosts.",
        )
    environ = carried_environment(os.environ, exported)
    hosts = read_hostfile(hostfile)
    plans = options_of_hosts(line, hosts)
    own = [
        f"{option.opts[0]}={settings[option.name]}"
        for option in ctx.command.params
        if option.name in settings.keys() - _OF_ONE_NODE and settings[option.name] is not None
    ]
    commands = {}
    for host, plan in zip(hosts, plans, strict=True):
        words = ["--until-stdin-ends", f"--node-name={host.name}", *own, *plan.arguments]
        command = ssh_command(ssh, host, words, python=python, folder=Path.cwd(), environ=environ)
        commands[host.name] = command
        if dry_run:
            _show(host.name, command, plan)
    if not dry_run:
        ctx.exit(run_nodes(commands, STOP_GRACE_S + 2 * shutdown_s(plans[0].read)))


def _show(where: str, command: Sequence[str], plan: TorchrunOptions) -> None:
    """Print what would be run, and where each value comes from."""
    click.echo(f"{where}:\n  {shlex.join(command)}")
    for option, (value, origin) in plan.settings.items():
        click.echo(f"  {option} {value}: {origin}")
