"""What SLURM says of a process's job: nodes, this node's place among them, GPUs."""

from __future__ import annotations

import re
from collections.abc import Mapping

from envpipe_megatron.errors import EnvPipeError

#: SLURM numbers its batch, interactive and external steps from here.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
#: Below the ports that Linux gives to outgoing connections.
_FIRST_PORT, _NUM_PORTS = 12000, 20000
_PORTS_PER_JOB = 10
_BY_SRUN = "Start it with srun, one task a node: srun --ntasks-per-node=1 envpipe launch ..."


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
