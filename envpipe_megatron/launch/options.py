"""Reads torchrun's options, and fills in nodes and processes: from variables, SLURM or a hostfile.

In this order: command line, torchrun's own PET_ variables, EnvPipe's variables, SLURM's. What is
filled in comes first on torchrun's command line, where the last value of an option counts. The
parser is torchrun's own; importing it takes a second, for torch.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.launch.hosts import Host

#: SLURM numbers its batch, interactive and external steps from here.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
#: Below the ports that Linux gives to outgoing connections.
_FIRST_PORT, _NUM_PORTS = 12000, 20000
_PORTS_PER_JOB = 10
#: torchrun's own default of `--shutdown-timeout`.
_SHUTDOWN_S = 30
_SEE_HELP = "See `envpipe launch --help` and `torchrun --help`."
_BY_SRUN = "Start it with srun, one task a node: srun --ntasks-per-node=1 envpipe launch ..."

#: torchrun's options that are filled in, as its parser names them; in capitals EnvPipe's variables.
NAMES = ("nproc_per_node", "nnodes", "node_rank", "master_addr", "master_port")
#: The form of those of which torchrun takes no other without a traceback, and it in words.
_FORMS = {
    "nproc_per_node": (r"0*[1-9]\d*|auto|[cgx]pu", "a number from 1, auto, cpu or gpu"),
    "nnodes": (r"0*[1-9]\d*(:0*[1-9]\d*)?", "a number from 1, or least:most"),
}
#: Names and addresses by which each node reaches itself.
_ITSELF = re.compile(r"localhost(\.localdomain)?|127(\.\d+){3}|::1", re.IGNORECASE)

#: A value, and its origin: `hostfile`, `default`, or the name of a variable.
_Found = tuple[str, str]


class CommandLine(NamedTuple):
    """`[options] SCRIPT ARGS`: the options with their values, and the rest, as they were given."""

    options: tuple[str, ...]
    script: tuple[str, ...]


class HelpAskedError(EnvPipeError):
    """Options ask for help, which torchrun's parser would give for itself only."""


class _Parser(argparse.ArgumentParser):
    """torchrun's own."""

    def __init__(self) -> None:
        try:
            from torch.distributed.run import get_args_parser

            super().__init__(parents=[get_args_parser()], add_help=False)
        except (ImportError, ValueError) as error:
            raise EnvPipeError(
                "torchrun cannot read its options",
                value=str(error),
                remedy="It comes with torch: pip install 'torch>=2.11'. PET_ variables of flags, "
                "such as PET_STANDALONE, must be 0 or 1.",
            ) from error

    def error(self, message: str) -> NoReturn:
        raise EnvPipeError(f"torchrun refuses its options: {message}", remedy=_SEE_HELP)

    def print_help(self, file: Any = None) -> None:
        raise HelpAskedError("There is no help among torchrun's options", remedy=_SEE_HELP)


def read(arguments: Sequence[str]) -> argparse.Namespace:
    """Return all options as torchrun reads them, its PET_ variables and defaults too.

    Raises EnvPipeError if torchrun's parser refuses them, or there is no torch.
    """
    return _Parser().parse_args(arguments)


def split(words: Sequence[str], own: Mapping[str, bool] | None = None) -> CommandLine:
    """Split `[options] [--] SCRIPT ARGS` before the script, which torchrun's parser finds.

    It gets one more word each time: among the script's arguments it would find abbreviations of
    its own options. `own` has other options that may be there, and whether each takes a value.
    Raises EnvPipeError if there is no script, or options lack values or are not known.
    """
    parser = _Parser()
    for name, takes_value in (own or {}).items():
        parser.add_argument(name, action="store" if takes_value else "store_true")
    for end in range(1, len(words)):
        try:
            _, unknown = parser.parse_known_args(words[:end])
            break
        except HelpAskedError:
            raise
        except EnvPipeError:
            pass
    else:
        end = len(words)
        _, unknown = parser.parse_known_args(words)
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    options = tuple(words[: end - 1])
    return CommandLine(
        options[:-1] if options[-1:] == ("--",) else options, tuple(words[end - 1 :])
    )


def check_script(options: argparse.Namespace) -> None:
    """Refuse (EnvPipeError) a file to run that is not there.

    Each rank would say so; and where it lacks on one node, others would wait for it for minutes.
    """
    script: str = options.training_script
    is_file = options.run_path or not (options.module or options.no_python)
    if is_file and script != "-" and not Path(script).exists():
        raise EnvPipeError(
            "There is no such script to run",
            value=script,
            remedy=f"Give its path as seen from {Path.cwd()}; a module needs -m before it.",
        )


def ranks_of_node(options: argparse.Namespace) -> int:
    """Return how many ranks torchrun starts here: `--nproc-per-node`, or one for each GPU."""
    if options.nproc_per_node.isdecimal():
        return int(options.nproc_per_node)
    import torch

    return max(torch.cuda.device_count(), 1)


def handled_signals(options: argparse.Namespace) -> set[signal.Signals]:
    """Return the signals of `--signals-to-handle`, which torchrun passes to its ranks, and ends."""
    names = {name.strip() for name in options.signals_to_handle.split(",")}
    never = {signal.SIGKILL, signal.SIGSTOP}
    return {number for number in signal.Signals if number.name in names} - never


def shutdown_s(options: argparse.Namespace) -> int:
    """Return how long torchrun gives its ranks from a signal to their end, s."""
    # torch 2.11 has neither option nor variable; and any torchrun refuses one that is no number.
    given: int | None = getattr(options, "shutdown_timeout", _SHUTDOWN_S)
    variable = os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "")
    return given if given is not None else int(variable) if variable.isdecimal() else _SHUTDOWN_S


class TorchrunOptions(NamedTuple):
    """Options that torchrun is started with on one node.

    Attributes:
        arguments: all words after `torchrun`.
        settings: value and origin of what was filled in, by options such as `--node-rank`.
        read: the arguments as torchrun reads them.
    """

    arguments: tuple[str, ...]
    settings: dict[str, _Found]
    read: argparse.Namespace


def options_here(line: CommandLine) -> TorchrunOptions:
    """Return what torchrun is started with on this node.

    Without any number of processes: as many as there are GPUs, or one. Empty variables count as
    unset. Raises EnvPipeError if torchrun's parser refuses the options, SLURM started this in a
    wrong way, or nothing says which of several nodes this is or where the first one is.
    """

    def find(name: str, nodes: str | None) -> _Found | None:
        by_slurm = name in NAMES[:2] or _several(nodes)
        # A port by default: torch 2.11, which takes no free one on a single node.
        if name == "master_port" and read(["--", *line.script]).master_port is not None:
            by_slurm = True
        found = _variable(name, nodes) or (_slurm(name) if by_slurm else None)
        if found is None and name == "nproc_per_node":
            import torch

            found = ("gpu" if torch.cuda.device_count() else "1"), "default"
        return found

    return _completed(line, find)


def options_of_hosts(line: CommandLine, hosts: Sequence[Host]) -> tuple[TorchrunOptions, ...]:
    """Return what torchrun is started with on each host of a hostfile.

    A host's node rank is its place in the file; its slots are the number of processes, unless
    `--nproc-per-node` is given. The first host is the master, unless there is another. Raises
    EnvPipeError if other options contradict the hosts, one has no number of processes, or others
    cannot find the master by its name.
    """
    given = _given(line)
    for option, contradicts in (
        ("--node-rank", given.node_rank is not None),
        ("--standalone (or PET_STANDALONE)", given.standalone),
        ("--nnodes", given.nnodes not in (None, str(len(hosts)))),
    ):
        if contradicts:
            raise EnvPipeError(
                f"{option} does not go with this --hostfile: the nodes are its {len(hosts)} hosts, "
                "in their order",
                remedy="Leave it out.",
            )

    def completed(found: Mapping[str, _Found | None]) -> TorchrunOptions:
        return _completed(line, lambda name, nodes: found[name])

    made = []
    for rank, host in enumerate(hosts):
        found = {name: _variable(name, str(len(hosts))) for name in NAMES}
        found["nnodes"] = str(len(hosts)), "hostfile"
        found["node_rank"] = str(rank), "hostfile"
        found["master_addr"] = found["master_addr"] or (hosts[0].name, "hostfile")
        if host.slots:
            found["nproc_per_node"] = str(host.slots), "hostfile"
        elif given.nproc_per_node is None and not found["nproc_per_node"]:
            raise EnvPipeError(
                f"{host.where}: the host has no slots",
                value=host.target,
                remedy="Write host slots=N, or give --nproc-per-node.",
            )
        made.append(completed(found))
    option = "--master-addr"
    if given.rdzv_endpoint or given.rdzv_backend == "c10d":
        option = "--rdzv-endpoint"
    by_line = given.rdzv_endpoint or given.master_addr or "", "the command line or a PET_ variable"
    place, origin = made[0].settings.get(option, by_line)
    name = place if option == "--master-addr" else re.sub(r":\d*$", "", place).strip("[]")
    meets_here = _ITSELF.fullmatch(name) and given.rdzv_backend in ("static", "c10d")
    elsewhere = [host for host in hosts if not _ITSELF.fullmatch(host.name)]
    if meets_here and elsewhere and len(hosts) > 1:
        raise EnvPipeError(
            f"Each host would look for the first one on itself, by {option} of {origin}",
            value=place,
            remedy=f"Begin the hostfile with the name by which others know it, or give {option}.",
        )
    return tuple(made)


def _given(line: CommandLine) -> argparse.Namespace:
    """Return all options as torchrun reads them, but those of `NAMES` from the line only."""
    parser = _Parser()
    parser.set_defaults(**dict.fromkeys(NAMES))
    return parser.parse_args([*line.options, "--", *line.script])


def _completed(
    line: CommandLine, find: Callable[[str, str | None], _Found | None]
) -> TorchrunOptions:
    """Add to a command line what it lacks of `NAMES`, and `find` has.

    `find` gets the name, and the number of nodes as far as it is known. Where the rendezvous is
    given (`--standalone`, or a `--rdzv-backend` other than static), node rank and master are not
    filled in, but c10d's several nodes meet at the master; with `--rdzv-endpoint` it is not.
    EnvPipeError: what torchrun's parser refuses, what is not of `_FORMS`, and a node for which
    torchrun would wait for 15 minutes.
    """
    given = vars(_given(line))
    by_rank = given["rdzv_backend"] == "static" and not given["standalone"]
    endpoint = given["rdzv_endpoint"]
    count = 1 if given["standalone"] else 2 if not by_rank else 3 if endpoint else len(NAMES)
    known, settings = {name: given[name] for name in NAMES}, dict[str, _Found]()
    for name in NAMES[:count]:
        if known[name] is None and (found := find(name, known["nnodes"])):
            settings[f"--{name.replace('_', '-')}"], known[name] = found, found[0]
    several = _several(known["nnodes"])
    if given["rdzv_backend"] == "c10d" and count == 2 and several and not endpoint:
        by_line = {name: (str(given[name]), "the command line") for name in NAMES if given[name]}
        master, port = (by_line.get(name) or find(name, known["nnodes"]) for name in NAMES[3:])
        if master:  # else each node would hold the rendezvous for itself
            host = f"[{master[0]}]" if ":" in master[0] else master[0]  # an IPv6 address
            settings["--rdzv-endpoint"] = f"{host}:{port[0]}" if port else host, master[1]
    filled = [f"{option}={value}" for option, (value, _) in settings.items()]
    # The dashes keep torchrun from looking for its own abbreviated options in the script's.
    arguments = (*filled, *line.options, "--", *line.script)
    options = read(arguments)
    for name, (form, words) in _FORMS.items():
        if not re.fullmatch(form, value := getattr(options, name)):
            option = f"--{name.replace('_', '-')}"
            origin = settings[option][1] if option in settings else name.upper()
            raise EnvPipeError(
                f"{option} (or {origin}) is not {words}",
                value=value,
                remedy="Correct it.",
            )
    if by_rank and several:
        lacking = "which of them this is" if known["node_rank"] is None else ""
        if not (endpoint or known["master_addr"]):
            lacking = lacking or "where that of rank 0 is"
        if lacking:
            raise EnvPipeError(
                f"There are {known['nnodes']} nodes, and nothing says {lacking}",
                remedy="Give --node-rank (or NODE_RANK) and --master-addr (MASTER_ADDR) on each "
                "node, or start all nodes by --hostfile.",
            )
    most = int(options.nnodes.rpartition(":")[2])
    if by_rank and not 0 <= options.node_rank < most:
        raise EnvPipeError(
            "--node-rank (or NODE_RANK) is not the number of a node",
            value=options.node_rank,
            remedy=f"Number {most} nodes from 0.",
        )
    return TorchrunOptions(arguments, settings, options)


def _several(nodes: str | None) -> bool:
    return nodes not in (None, "1", "1:1")


def _slurm(name: str) -> _Found | None:
    """Return the value of one of `NAMES` in a SLURM job, and the name of its variable.

    Raises EnvPipeError in the batch script of several nodes, in one of several tasks of a node,
    and if the list of hosts is not in SLURM's form.
    """
    job, step = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_STEP_ID", "")
    if not job:
        return None
    by_srun = step.isdecimal() and int(step) < _FIRST_SPECIAL_STEP
    match name:
        case "nnodes":
            return _slurm_nodes(by_srun)
        case "node_rank":  # a number among nodes that are not counted would mean nothing
            return _first("SLURM_NODEID") if _slurm_nodes(by_srun) else None
        case "nproc_per_node":
            found = _first("SLURM_GPUS_ON_NODE")
            return None if found and found[0] == "0" else found
        case "master_addr":
            return _slurm_master()
    if not job.isdecimal():
        return None
    # It differs from those of other jobs and steps of about the same time.
    place = int(job) * _PORTS_PER_JOB + (int(step) if by_srun else 0)
    return str(_FIRST_PORT + place % _NUM_PORTS), "SLURM_JOB_ID"


def _slurm_nodes(by_srun: bool) -> _Found | None:
    """Return the number of nodes of a step of srun, or of the job."""
    tasks = _first("SLURM_STEP_TASKS_PER_NODE") if by_srun else None
    # 2(x3),1: two tasks on each of three nodes, one on the next.
    if tasks and not re.fullmatch(r"(1(\(x\d+\))?,?)+", tasks[0]):
        raise EnvPipeError(
            "SLURM started more than one task on a node (SLURM_STEP_TASKS_PER_NODE)",
            value=tasks[0],
            remedy=f"torchrun starts the processes of a node itself. {_BY_SRUN}",
        )
    of_job = _first("SLURM_NNODES", "SLURM_JOB_NUM_NODES")
    if by_srun:
        return _first("SLURM_STEP_NUM_NODES") or of_job
    if of_job and of_job[0] != "1":
        raise EnvPipeError(
            f"This is the batch script or shell of a SLURM job of {of_job[0]} nodes, and would "
            "train on one",
            remedy=f"{_BY_SRUN} For this node only: --nnodes 1.",
        )
    return of_job


def _slurm_master() -> _Found | None:
    """Return the name of the node with rank 0.

    SLURM's short form of host names is read here, because containers have no `scontrol`.
    """
    found = _first("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
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


def _variable(name: str, nodes: str | None) -> _Found | None:
    """Return the value of torchrun's own variable, or else of EnvPipe's.

    A place among several nodes may be another job's, or the whole cluster's: one node has none.
    """
    has_place = _several(nodes) or name not in ("node_rank", "master_addr")
    return _first(f"PET_{name.upper()}", *([name.upper()] if has_place else []))


def _first(*variables: str) -> _Found | None:
    """Return the first variable that is set and not empty."""
    found = [(os.environ[name], name) for name in variables if os.environ.get(name)]
    return found[0] if found else None
