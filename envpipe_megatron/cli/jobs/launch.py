"""`envpipe launch`."""

from __future__ import annotations

import os
import shlex
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from envpipe_megatron.cli.common import EXISTING_FILE, OUTPUT_FOLDER, Finite
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.launch.hosts import (
    STOP_GRACE_S,
    NodeProcess,
    carried_environment,
    read_hostfile,
    run_nodes,
    ssh_command,
)
from envpipe_megatron.launch.options import (
    TorchrunOptions,
    options_here,
    options_of_hosts,
)
from envpipe_megatron.launch.torchrun import (
    TORCHRUN,
    CommandLine,
    look,
    read,
    shutdown_s,
    split,
)

#: Options that are used when the hostfile is read; nodes get all others.
_USED_UP = ("--hostfile", "--ssh", "--python", "--export", "--dry-run")

#: click leaves the lines of a paragraph behind \b as they are; it would break options at dashes.
_HELP = """
Run torchrun on one or many nodes, and bill the energy of the job.

\b
All of torchrun's options are accepted before SCRIPT, among them
  --nnodes N   --nproc-per-node N|gpu   --standalone   --max-restarts N
  --node-rank I   --master-addr HOST   --master-port PORT
  --rdzv-backend NAME   --rdzv-endpoint HOST:PORT
  -m (SCRIPT is a module)   --no-python (SCRIPT is a program)
What follows SCRIPT is the script's alone.

\b
What is not given is taken from torchrun's variables (PET_NNODES, ...), then
from NNODES, NPROC_PER_NODE, NODE_RANK, MASTER_ADDR and MASTER_PORT, then
from SLURM, where srun starts one task a node. --dry-run shows what is found.

With --hostfile, nodes are started over ssh in this folder, which they must have too. They get
PYTHONPATH, LD_LIBRARY_PATH, what --export names, and all variables that begin with ENVPIPE_, NCCL_,
GLOO_, CUDA_ (but CUDA_VISIBLE_DEVICES), TORCH_, OMP_, MKL_ or PET_. Their values stand in command
lines, which other users of the machines can read: export no secrets. When a node fails, the others
are stopped, and its exit status is this command's.

\b
Example:
  envpipe launch --nproc-per-node 8 pretrain_gpt.py ... --envpipe
  envpipe launch --hostfile hosts --price 0.25 pretrain_gpt.py ... --envpipe
"""


class _SplitFirst(click.Command):
    """Reads EnvPipe's options wherever they stand before SCRIPT, and nothing of what follows it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Leave EnvPipe's options to click, and keep torchrun's in the context."""
        if ctx.resilient_parsing:  # a shell asks for completions of half a line
            return super().parse_args(ctx, [])
        _drop_empty_torchrun_variables()
        own = {
            name: not option.is_flag
            for option in self.get_params(ctx)
            if isinstance(option, click.Option)
            for name in option.opts
        }
        ctx.obj = line = split(args, own)
        return super().parse_args(ctx, list(line.own))


def _drop_empty_torchrun_variables() -> None:
    """Make empty PET_ variables, which Kubernetes operators set, count as unset to torchrun too."""
    for name in [name for name in os.environ if name.startswith("PET_") and not os.environ[name]]:
        del os.environ[name]


def _file_name(ctx: click.Context, param: click.Parameter, value: str) -> str:
    if value in ("", ".", "..") or "/" in value:
        raise click.BadParameter(f"{value!r} cannot be a part of file names.")
    return value


@click.command(
    cls=_SplitFirst,
    help=_HELP,
    options_metavar="[OPTIONS] [TORCHRUN'S OPTIONS] SCRIPT [ARGS]...",
)
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
    default=socket.gethostname,
    show_default="the host's name",
    callback=_file_name,
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
@click.option(
    "--price",
    "price_per_kwh",
    type=Finite(0),
    metavar="X",
    help="Price of a kWh, in a currency of your choice.",
)
@click.option(
    "--grid-intensity",
    "grid_g_per_kwh",
    type=Finite(0),
    metavar="G",
    help="Carbon intensity of the grid, in g CO2 per kWh.",
)
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
    hostfile: Path | None,
    ssh: str,
    python: str,
    exported: tuple[str, ...],
    dry_run: bool,
    **settings: Any,
) -> None:
    """Run torchrun here, or a node on each host."""
    line: CommandLine = ctx.obj
    settings["job_name"] = settings["job_name"] or settings["output_dir"].resolve().name
    if not line.script:
        raise EnvPipeError(
            "There is no SCRIPT to run",
            remedy="Give it behind the options: envpipe launch --nproc-per-node 8 train.py ...",
        )
    if hostfile is None:
        plan = options_here(line, os.environ)
        if dry_run:
            _show("this node", (*TORCHRUN, *plan.arguments), plan)
        found = look(read(plan.arguments))
        if dry_run:
            click.echo("".join(f"  {line}\n" for line in found), nl=False)
            return
        from envpipe_megatron.launch.node import NodeSettings, run_node

        ctx.exit(run_node(plan.arguments, NodeSettings(**settings)))
    if any(word.startswith("--node-name=") for word in line.own):
        raise EnvPipeError(
            "--node-name names one node, and --hostfile starts several",
            value=settings["node_name"],
            remedy="Leave it out: nodes are named after their hosts.",
        )
    environ = carried_environment(os.environ, exported)
    hosts = read_hostfile(hostfile)
    plans = options_of_hosts(line, os.environ, hosts)
    nodes = []
    for host, plan in zip(hosts, plans, strict=True):
        arguments = [
            "--until-stdin-ends",
            f"--node-name={host.name}",
            *(word for word in line.own if word.partition("=")[0] not in _USED_UP),
            *plan.arguments,
        ]
        command = ssh_command(
            ssh, host, arguments, python=python, folder=Path.cwd(), environ=environ
        )
        nodes.append(NodeProcess(host.name, command))
    if dry_run:
        for node, plan in zip(nodes, plans, strict=True):
            _show(node.host, node.command, plan)
        return
    ctx.exit(run_nodes(nodes, STOP_GRACE_S + 2 * shutdown_s(plans[0].arguments)))


def _show(where: str, command: Sequence[str], plan: TorchrunOptions) -> None:
    """Print what would be run, and where each value comes from."""
    click.echo(f"{where}:\n  {shlex.join(command)}")
    for setting in plan.settings:
        click.echo(f"  {setting.option} {setting.value}: {setting.origin}")
