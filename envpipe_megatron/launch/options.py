"""Fills in torchrun's options for nodes and processes: from variables, SLURM or a hostfile.

In this order: command line, torchrun's own PET_ variables, EnvPipe's variables, SLURM's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.launch.hosts import Host
from envpipe_megatron.launch.torchrun import MASTER_PORT, CommandLine, TorchrunParser

#: SLURM numbers its batch, interactive and external steps from here.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
#: Below the ports that Linux gives to outgoing connections.
_FIRST_PORT, _NUM_PORTS = 12000, 20000
_PORTS_PER_JOB = 10
_BY_SRUN = "Start it with srun, one task a node: srun --ntasks-per-node=1 envpipe launch ..."

_COMMAND_LINE = "command line"
_DEFAULT = "default"
_HOSTFILE = "hostfile"
#: EnvPipe's names of torchrun's options, in the order in which they are shown.
VARIABLES = {
    "--nnodes": "NNODES",
    "--nproc-per-node": "NPROC_PER_NODE",
    "--node-rank": "NODE_RANK",
    "--master-addr": "MASTER_ADDR",
    "--master-port": "MASTER_PORT",
}
#: The form of each, in words too: torchrun answers other values with a traceback.
_FORMS = {
    "--nnodes": (r"0*[1-9]\d*(:\d+)?", "a number of nodes, N or MIN:MAX"),
    "--nproc-per-node": (
        r"0*[1-9]\d*|auto|cpu|gpu",
        "a number of processes from 1, or auto, cpu or gpu",
    ),
    "--node-rank": (r"\d+", "the number of a node, from 0 to {last_node}"),
    "--master-addr": (r"\S+", "the name or address of a host"),
    "--master-port": (r"\d+", "a port, from 1 to 65535"),
}

#: A value and its origin.
_Found = tuple[str, str]
#: Finds an option's value.
_Source = Callable[[str], _Found | None]


class Slurm:
    """A SLURM job as its environment shows it. Empty variables count as unset."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = {name: value for name, value in environ.items() if value}
        step = self._environ.get("SLURM_STEP_ID", "")
        by_srun = step.isdecimal() and int(step) < _FIRST_SPECIAL_STEP
        #: Number of the step of srun; None outside one, as in the batch script.
        self._step = int(step) if by_srun else None

    def find(self, option: str) -> tuple[str, str] | None:
        """Return the value of one of torchrun's options as text, and the name of its variable.

        Raises EnvPipeError in the batch script of several nodes, in one of several tasks of a node,
        and if the list of hosts is not in SLURM's form.
        """
        if "SLURM_JOB_ID" not in self._environ:
            return None
        match option:
            case "--nnodes":
                return self._num_nodes()
            case "--node-rank":  # a number among nodes that are not counted would mean nothing
                return self._first("SLURM_NODEID") if self._num_nodes() else None
            case "--nproc-per-node":
                found = self._first("SLURM_GPUS_ON_NODE")
                return None if found and found[0] == "0" else found
            case "--master-addr":
                return self._first_host()
            case "--master-port":
                return self._port()
        return None

    def _num_nodes(self) -> tuple[str, str] | None:
        """The nodes of this step, or of the job if it is no step of srun."""
        names = ["SLURM_NNODES", "SLURM_JOB_NUM_NODES"]
        if self._step is not None:
            self._check_one_task_per_node()
            names.insert(0, "SLURM_STEP_NUM_NODES")
        found = self._first(*names)
        if found is not None and found[0] != "1" and self._step is None:
            raise EnvPipeError(
                f"This is the batch script or shell of a SLURM job of {found[0]} nodes, and would "
                "train on one",
                remedy=f"{_BY_SRUN} For this node alone: --nnodes 1.",
            )
        return found

    def _first_host(self) -> tuple[str, str] | None:
        """The name of the node with rank 0.

        SLURM's short form of host names is read here, because containers have no `scontrol`.
        """
        found = self._first("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
        if found is None:
            return None
        hosts, name = found
        # rack[1-2]node[03,07-09],other: the first is rack1node03.
        first = re.match(r"(?:[^][,]|\[\d[-\d,]*\])+(?=,|$)", hosts)
        if first is None:
            raise EnvPipeError(
                f"{name} is not a list of hosts as SLURM writes them",
                value=hosts,
                remedy="Give --master-addr or MASTER_ADDR.",
            )
        return re.sub(r"\[(\d+)[^]]*\]", r"\1", first[0]), name

    def _port(self) -> tuple[str, str] | None:
        """A port that differs from those of other jobs and steps of about the same time."""
        job = self._environ["SLURM_JOB_ID"]
        if not job.isdecimal():
            return None
        place = int(job) * _PORTS_PER_JOB + (self._step or 0)
        return str(_FIRST_PORT + place % _NUM_PORTS), "SLURM_JOB_ID"

    def _check_one_task_per_node(self) -> None:
        tasks = self._environ.get("SLURM_STEP_TASKS_PER_NODE", "1")
        # 2(x3),1: two tasks on each of three nodes, one on the next.
        most = max(map(int, re.findall(r"(?:^|,)(\d+)", tasks)), default=1)
        name, value = "SLURM_STEP_TASKS_PER_NODE", tasks
        if most <= 1:
            name, value = "SLURM_LOCALID", self._environ.get("SLURM_LOCALID", "0")
        if most > 1 or value != "0":
            raise EnvPipeError(
                f"SLURM started more than one task on a node ({name})",
                value=value,
                remedy=f"torchrun starts the processes of a node itself. {_BY_SRUN}",
            )

    def _first(self, *names: str) -> tuple[str, str] | None:
        found = [(self._environ[name], name) for name in names if name in self._environ]
        return found[0] if found else None


class Setting(NamedTuple):
    """An option of torchrun, such as `--node-rank`, its value as text, and its origin.

    The origin is `command line`, `hostfile`, `default`, or the name of a variable.
    """

    option: str
    value: str
    origin: str


class TorchrunOptions(NamedTuple):
    """All words after `torchrun` on one node; the settings of nodes and processes among them."""

    arguments: tuple[str, ...]
    settings: tuple[Setting, ...]


def options_here(line: CommandLine, environ: Mapping[str, str]) -> TorchrunOptions:
    """Return what torchrun is started with on this node.

    Where the rendezvous is given (`--standalone`, or a `--rdzv-backend` other than static), node
    rank and master are left alone; with `--rdzv-endpoint` the master is. Without any number of
    processes: as many as there are GPUs, or one. Empty variables count as unset.

    Raises EnvPipeError if a value is bad, SLURM started this in a wrong way, or nothing says
    which of several nodes this is or where the first one is.
    """
    parser = TorchrunParser()
    known = _Known(line, environ, parser)
    slurm = Slurm(environ)
    known.settle(
        "--nproc-per-node",
        known.variable,
        slurm.find,
        lambda _: ("gpu" if _cuda_gpus() else "1", _DEFAULT),
    )
    if not known.standalone:
        known.settle("--nnodes", known.variable, slurm.find)
    several = known.most_nodes > 1
    from_slurm = [slurm.find] if several else []
    if known.static:
        known.settle("--node-rank", known.variable, *from_slurm)
        if not known.has_endpoint:
            known.settle("--master-addr", known.variable, *from_slurm)
            if not parser.picks_free_port:
                from_slurm = [slurm.find]
            known.settle("--master-port", known.variable, *from_slurm)
        if several:
            known.demand("--node-rank", "which of the nodes this is")
            if not known.has_endpoint:
                known.demand("--master-addr", "where the node of rank 0 is")
    return known.complete()


def options_of_hosts(
    line: CommandLine, environ: Mapping[str, str], hosts: Sequence[Host]
) -> tuple[TorchrunOptions, ...]:
    """Return what torchrun is started with on each host of a hostfile.

    A host's node rank is its place in the file; its slots are the number of processes, unless
    `--nproc-per-node` is given. The first host is the master, unless there is another. Raises
    EnvPipeError if other options contradict the hosts, or one has no number of processes.
    """
    parser = TorchrunParser()
    return tuple(
        _options_of_host(_Known(line, environ, parser), hosts, rank) for rank in range(len(hosts))
    )


def _options_of_host(known: _Known, hosts: Sequence[Host], rank: int) -> TorchrunOptions:
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
            f"--nnodes is {num_nodes}, and the hostfile names {len(hosts)} hosts",
            remedy="Leave it out, or name the hosts you want in the file.",
        )
    known.settle("--nnodes", lambda _: (str(len(hosts)), _HOSTFILE))
    slots = None if host.slots is None else (str(host.slots), _HOSTFILE)
    known.settle("--nproc-per-node", known.variable if slots is None else lambda _: slots)
    if "--nproc-per-node" not in known.settings:
        raise EnvPipeError(
            f"{host.where}: the host has no slots",
            value=host.target,
            remedy="Write host slots=N, or give --nproc-per-node.",
        )
    if known.static:
        known.settle("--node-rank", lambda _: (str(rank), _HOSTFILE))
        if not known.has_endpoint:
            known.settle("--master-addr", known.variable, lambda _: (hosts[0].name, _HOSTFILE))
            known.settle("--master-port", known.variable, lambda _: (MASTER_PORT, _DEFAULT))
    return known.complete()


class _Known:
    """torchrun's options as far as they are known."""

    def __init__(
        self, line: CommandLine, environ: Mapping[str, str], parser: TorchrunParser
    ) -> None:
        self._line = line
        self._given = parser.given(line.options)
        self._environ = environ
        self.settings: dict[str, Setting] = {}
        backend = self._as_torchrun("--rdzv-backend")
        self.standalone = self._as_torchrun("--standalone") not in (None, "0")
        #: Whether ranks and master are given to each node, rather than agreed on.
        self.static = not self.standalone and backend in (None, "static")
        self.has_endpoint = self._as_torchrun("--rdzv-endpoint") is not None

    def given(self, option: str) -> str | None:
        """The value on the command line."""
        value = self._given[_name(option)]
        return None if value is None else str(value)

    def variable(self, option: str) -> _Found | None:
        """The value of torchrun's own variable, or else of EnvPipe's."""
        for name in (_pet(option), VARIABLES[option]):
            if value := self._environ.get(name):
                return value, name
        return None

    def settle(self, option: str, *sources: _Source) -> None:
        """Settle an option by the command line or the first source that has it; check it."""
        given = self.given(option)
        found = None if given is None else (given, _COMMAND_LINE)
        for source in sources:
            found = found or source(option)
        if found is not None:
            self.settings[option] = Setting(option, *found)
            _check(self.settings[option], self.most_nodes)

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
        """The number of nodes, the larger if there are two."""
        nodes = self.settings["--nnodes"].value if "--nnodes" in self.settings else "1"
        most = nodes.rpartition(":")[2]
        return int(most) if most.isdecimal() else 0

    def complete(self) -> TorchrunOptions:
        """Add what was found to what was given."""
        settings = tuple(self.settings[name] for name in VARIABLES if name in self.settings)
        added = [
            f"{setting.option}={setting.value}"
            for setting in settings
            if setting.origin not in (_COMMAND_LINE, _pet(setting.option))
        ]
        # The dashes keep torchrun from looking for its own abbreviated options in the script's.
        return TorchrunOptions((*self._line.options, *added, "--", *self._line.script), settings)

    def _as_torchrun(self, option: str) -> str | None:
        given = self.given(option)
        return self._environ.get(_pet(option)) or None if given is None else given


def _name(option: str) -> str:
    return option.removeprefix("--").replace("-", "_")


def _pet(option: str) -> str:
    return f"PET_{_name(option).upper()}"


def _check(setting: Setting, most_nodes: int) -> None:
    """Refuse a value that torchrun would stumble over, by the name of its origin."""
    option, value, origin = setting
    form, meaning = _FORMS[option]
    good = re.fullmatch(form, value) is not None
    if good and option == "--nnodes":
        least, _, most = value.partition(":")
        good = not most or int(least) <= int(most)
    elif good and option == "--node-rank":
        good = int(value) < most_nodes
    elif good and option == "--master-port":
        good = 1 <= int(value) <= 65535
    if not good:
        raise EnvPipeError(
            f"{option if origin == _COMMAND_LINE else origin} is not "
            f"{meaning.format(last_node=most_nodes - 1)}",
            value=value,
            remedy="Correct it, or leave it out.",
        )


def _cuda_gpus() -> int:
    import torch

    return torch.cuda.device_count()
