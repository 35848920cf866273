"""What SLURM tells a process of its job: nodes, this node's place among them, GPUs."""

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
    """A SLURM job as its environment shows it. Values come as text, with their variable's name.

    Args:
        environ: the environment. Empty variables count as unset.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = {name: value for name, value in environ.items() if value}

    @property
    def in_job(self) -> bool:
        """Whether SLURM started this at all."""
        return "SLURM_JOB_ID" in self._environ

    def num_nodes(self) -> tuple[str, str] | None:
        """Return the nodes of this step, or of the job where it is no step of srun.

        Raises:
            EnvPipeError: the variable is no number, this is the batch script of several nodes, or
                one of several tasks of a node.
        """
        names = ["SLURM_NNODES", "SLURM_JOB_NUM_NODES"]
        if self._started_by_srun:
            names.insert(0, "SLURM_STEP_NUM_NODES")
        found = self._first(*names)
        if found is None:
            return None
        num_nodes = self._number(*found, lowest=1)
        if num_nodes > 1 and not self._started_by_srun:
            raise EnvPipeError(
                f"This is the batch script or shell of a SLURM job of {num_nodes} nodes, and would "
                "train on one",
                remedy=f"{_BY_SRUN} For this node alone: --nnodes 1.",
            )
        self._check_one_task_per_node()
        return found

    def node_rank(self) -> tuple[str, str] | None:
        """Return this node's number, from 0, among the step's.

        Raises:
            EnvPipeError: as `num_nodes` does.
        """
        self.num_nodes()
        found = self._first("SLURM_NODEID")
        if found is not None:
            self._number(*found, lowest=0)
        return found

    def first_host(self) -> tuple[str, str] | None:
        """Return the name of the node with rank 0.

        SLURM's short form of host names is read here, because containers have no `scontrol`.

        Raises:
            EnvPipeError: the list of hosts is not in that form.
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

    def num_gpus(self) -> tuple[str, str] | None:
        """Return the GPUs that the step, or else the job, has on this node; None for no GPU.

        Raises:
            EnvPipeError: the variable is no number.
        """
        found = self._first("SLURM_GPUS_ON_NODE")
        return found if found and self._number(*found, lowest=0) else None

    def master_port(self) -> tuple[str, str]:
        """Return a port that differs from those of other jobs and steps of about the same time.

        Raises:
            EnvPipeError: the job's number is none.
        """
        name = "SLURM_JOB_ID"
        job = self._number(self._environ[name], name, lowest=0)
        step = int(self._environ["SLURM_STEP_ID"]) if self._started_by_srun else 0
        return str(_FIRST_PORT + (job * _PORTS_PER_JOB + step) % _NUM_PORTS), name

    @property
    def _started_by_srun(self) -> bool:
        step = self._environ.get("SLURM_STEP_ID", "")
        return step.isdecimal() and int(step) < _FIRST_SPECIAL_STEP

    def _check_one_task_per_node(self) -> None:
        if not self._started_by_srun:
            return
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
        for name in names:
            if name in self._environ:
                return self._environ[name], name
        return None

    @staticmethod
    def _number(value: str, name: str, *, lowest: int) -> int:
        if not (value.isdecimal() and int(value) >= lowest):
            raise EnvPipeError(
                f"{name} is not a whole number of at least {lowest}",
                value=value,
                remedy="SLURM sets it; unset it, or give torchrun's option.",
            )
        return int(value)
