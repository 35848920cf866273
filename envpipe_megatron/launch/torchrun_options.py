"""Fills in what torchrun has to know of nodes and processes: from variables, SLURM or a hostfile.

In this order: command line, torchrun's own PET_ variables, EnvPipe's variables, SLURM's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.launch.hostfile import Host
from envpipe_megatron.launch.slurm import Slurm
from envpipe_megatron.launch.torchrun_parser import TorchrunParser

COMMAND_LINE = "command line"
DEFAULT = "default"
HOSTFILE = "hostfile"
#: torchrun's own default.
MASTER_PORT = "29500"
#: EnvPipe's names of torchrun's options, in the order in which they are shown.
VARIABLES = {
    "--nnodes": "NNODES",
    "--nproc-per-node": "NPROC_PER_NODE",
    "--node-rank": "NODE_RANK",
    "--master-addr": "MASTER_ADDR",
    "--master-port": "MASTER_PORT",
}

#: A value, and what it comes from.
_Found = tuple[str, str]


@dataclass(frozen=True)
class Setting:
    """An option of torchrun.

    Attributes:
        option: its name, such as `--node-rank`.
        value: as text.
        origin: `command line`, `hostfile`, `default`, or the name of a variable.
    """

    option: str
    value: str
    origin: str


@dataclass(frozen=True)
class TorchrunOptions:
    """What torchrun is started with on one node.

    Attributes:
        options: torchrun's options, those that were given and those that were filled in.
        script: the script and its arguments, untouched.
        settings: the options that concern nodes and processes, where they are known.
    """

    options: tuple[str, ...]
    script: tuple[str, ...]
    settings: tuple[Setting, ...]

    @property
    def arguments(self) -> tuple[str, ...]:
        """All words after `torchrun`.

        The dashes keep torchrun from looking for its own abbreviated options in the script's.
        """
        return (*self.options, "--", *self.script)


def options_here(
    options: Sequence[str],
    script: Sequence[str],
    environ: Mapping[str, str],
    parser: TorchrunParser,
    num_cuda_gpus: Callable[[], int] | None = None,
) -> TorchrunOptions:
    """Return what torchrun is started with on this node.

    Where the rendezvous is given (`--standalone`, or a `--rdzv-backend` other than static), node
    rank and master are left alone; with `--rdzv-endpoint` the master is. Without any number of
    processes: as many as there are GPUs, or one.

    Args:
        options: torchrun's, as given.
        script: the script and its arguments.
        environ: the environment. Empty variables count as unset.
        parser: torchrun's.
        num_cuda_gpus: counts the GPUs; torch's own count where it is left out.

    Raises:
        EnvPipeError: an option or variable has a bad value; several nodes, and nothing says which
            this is or where the first one is; or SLURM started this in a wrong way.
    """
    known = _Known(options, environ, parser)
    slurm = Slurm(environ)
    known.fill("--nproc-per-node", slurm.num_gpus if slurm.in_job else None)
    if "--nproc-per-node" not in known.settings:
        count = _cuda_gpus if num_cuda_gpus is None else num_cuda_gpus
        known.add("--nproc-per-node", "gpu" if count() else "1", DEFAULT)
    if not known.standalone:
        known.fill("--nnodes", slurm.num_nodes if slurm.in_job else None)
    several = known.most_nodes > 1
    if known.static:
        known.fill("--node-rank", slurm.node_rank if slurm.in_job and several else None)
        if not known.has_endpoint:
            known.fill("--master-addr", slurm.first_host if slurm.in_job and several else None)
            wants_port = slurm.in_job and (several or not parser.picks_free_port)
            known.fill("--master-port", slurm.master_port if wants_port else None)
        if several:
            known.demand("--node-rank", "which of the nodes this is")
            if not known.has_endpoint:
                known.demand("--master-addr", "where the node of rank 0 is")
    return known.complete(options, script)


def options_of_hosts(
    options: Sequence[str],
    script: Sequence[str],
    environ: Mapping[str, str],
    parser: TorchrunParser,
    hosts: Sequence[Host],
) -> tuple[TorchrunOptions, ...]:
    """Return what torchrun is started with on each host of a hostfile.

    A host's node rank is its place in the file; its slots are the number of processes, unless
    `--nproc-per-node` is given. The first host is the master, unless there is another.

    Raises:
        EnvPipeError: `--node-rank`, `--standalone` or another number of nodes is given, or a host
            has no slots and there is no number of processes.
    """
    return tuple(
        _options_of_host(options, script, environ, parser, hosts, rank)
        for rank in range(len(hosts))
    )


def _options_of_host(
    options: Sequence[str],
    script: Sequence[str],
    environ: Mapping[str, str],
    parser: TorchrunParser,
    hosts: Sequence[Host],
    rank: int,
) -> TorchrunOptions:
    known = _Known(options, environ, parser)
    host = hosts[rank]
    if known.given("--node-rank") is not None:
        raise EnvPipeError(
            "--node-rank does not go with --hostfile, whose hosts are numbered in their order",
            remedy="Leave it out.",
        )
    if known.standalone:
        raise EnvPipeError(
            "--standalone (or PET_STANDALONE) is for one node, and does not go with --hostfile",
            remedy="Leave one of them out.",
        )
    num_nodes = known.given("--nnodes")
    if num_nodes not in (None, str(len(hosts))):
        raise EnvPipeError(
            f"--nnodes is another number than that of the hostfile's hosts, {len(hosts)}",
            value=num_nodes,
            remedy="Leave it out, or name the hosts you want in the file.",
        )
    known.add("--nnodes", str(len(hosts)), HOSTFILE)
    if host.slots is None:
        known.fill("--nproc-per-node")
        if "--nproc-per-node" not in known.settings:
            raise EnvPipeError(
                f"{host.where}: the host has no slots",
                value=host.target,
                remedy="Write host slots=N, or give --nproc-per-node.",
            )
    else:
        known.add("--nproc-per-node", str(host.slots), HOSTFILE)
    if known.static:
        known.add("--node-rank", str(rank), HOSTFILE)
        if not known.has_endpoint:
            known.fill("--master-addr", lambda: (hosts[0].name, HOSTFILE))
            known.fill("--master-port", lambda: (MASTER_PORT, DEFAULT))
    return known.complete(options, script)


class _Known:
    """What is known of torchrun's options so far."""

    def __init__(
        self, options: Sequence[str], environ: Mapping[str, str], parser: TorchrunParser
    ) -> None:
        self._given: dict[str, Any] = parser.given(options)
        self._environ = environ
        self.settings: dict[str, Setting] = {}
        backend = self._told("--rdzv-backend")
        standalone = self._told("--standalone")
        self.standalone = standalone is not None and standalone[0] != "0"
        #: Whether ranks and master are told to each node, rather than agreed on.
        self.static = not self.standalone and (backend is None or backend[0] == "static")
        self.has_endpoint = self._told("--rdzv-endpoint") is not None

    def given(self, option: str) -> str | None:
        """The value on the command line."""
        value = self._given.get(_name(option))
        return None if value is None else str(value)

    def fill(self, option: str, further: Callable[[], _Found | None] | None = None) -> None:
        """Settle an option by the first that tells it, or leave it open."""
        own = VARIABLES[option]
        found = self._told(option)
        if found is None and self._environ.get(own):
            found = self._environ[own], own
        if found is None and further is not None:
            found = further()
        if found is not None:
            self._settle(option, *found)

    def add(self, option: str, value: str, origin: str) -> None:
        """Settle an option, unless the command line does."""
        given = self.given(option)
        self._settle(option, *((value, origin) if given is None else (given, COMMAND_LINE)))

    def demand(self, option: str, meaning: str) -> None:
        """Refuse that an option is still open."""
        if option not in self.settings:
            nodes = self.settings["--nnodes"]
            raise EnvPipeError(
                f"There are several nodes ({nodes.origin}: {nodes.value}), and nothing says "
                f"{meaning}",
                remedy=f"Give {option} or {VARIABLES[option]} on each node, "
                "or start all nodes by --hostfile.",
            )

    @property
    def most_nodes(self) -> int:
        """The number of nodes, the larger where there are two."""
        if "--nnodes" not in self.settings:
            return 1
        return int(self.settings["--nnodes"].value.rpartition(":")[2])

    def complete(self, options: Sequence[str], script: Sequence[str]) -> TorchrunOptions:
        """Add what was found to what was given."""
        settings = tuple(self.settings[name] for name in VARIABLES if name in self.settings)
        added = [
            f"{setting.option}={setting.value}"
            for setting in settings
            if setting.origin != COMMAND_LINE and not setting.origin.startswith("PET_")
        ]
        return TorchrunOptions((*options, *added), tuple(script), settings)

    def _told(self, option: str) -> _Found | None:
        """What torchrun itself would find."""
        given = self.given(option)
        if given is not None:
            return given, COMMAND_LINE
        variable = f"PET_{_name(option).upper()}"
        return (self._environ[variable], variable) if self._environ.get(variable) else None

    def _settle(self, option: str, value: str, origin: str) -> None:
        setting = Setting(option, value, origin)
        _check(setting, self.most_nodes)
        self.settings[option] = setting


def _name(option: str) -> str:
    return option.removeprefix("--").replace("-", "_")


def _check(setting: Setting, most_nodes: int) -> None:
    """Refuse a value that torchrun would stumble over, by the name of what it comes from."""
    value = setting.value
    numbers = [int(part) if part.isdecimal() else -1 for part in value.split(":")]
    match setting.option:
        case "--nnodes":
            wanted = "a number of nodes, N or MIN:MAX"
            good = len(numbers) <= 2 and 1 <= numbers[0] <= numbers[-1]
        case "--nproc-per-node":
            wanted = "a number of processes from 1, or auto, cpu or gpu"
            good = value.isalpha() or (value.isdecimal() and int(value) >= 1)
        case "--node-rank":
            wanted = f"the number of a node, from 0 to {most_nodes - 1}"
            good = value.isdecimal() and int(value) < most_nodes
        case "--master-port":
            wanted = "a port, from 1 to 65535"
            good = value.isdecimal() and 1 <= int(value) <= 65535
        case _:
            wanted = "the name or address of a host"
            good = value != "" and not any(char.isspace() for char in value)
    if not good:
        name = setting.option if setting.origin == COMMAND_LINE else setting.origin
        raise EnvPipeError(
            f"{name} is not {wanted}", value=value, remedy="Correct it, or leave it out."
        )


def _cuda_gpus() -> int:
    import torch

    return torch.cuda.device_count()
