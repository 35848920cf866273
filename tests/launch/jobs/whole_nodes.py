"""Whole nodes for tests: each a launcher with GPUs, guard, leases and output of its own.

Every process of a job has the job's folder in its environment, whoever started it: none is
overlooked, and none of another job is taken for one.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import plain_job
import pytest
from commands import run_well
from free_port import free_port
from on_request import on_request

from envpipe_megatron.gpu.emulated.emulated_gpu import EmulatedGpu
from envpipe_megatron.gpu.emulated.store import list_emulated
from envpipe_megatron.gpu.guard.messages import wait_readable

TRAINED_RANK = Path(__file__).with_name("trained_rank.py")
_RUNNER = Path(__file__).with_name("node_runner.py")
_GATHERED = 256
#: Starting takes 3 s of CPU time a process, and other tests may have the cores.
START_S = 120.0
#: A rank that lost its neighbour, torchrun's shutdown, and the bill's wait; or a whole quickstart,
#: which takes 150 s where other tests have the cores.
END_S = 600.0

full = on_request("LAUNCH")

Event = dict[str, Any]


class Node:
    """A node of a job; others reach it at `address`, and `inside` is a command that runs others
    where it is, as `ip netns exec`.
    """

    def __init__(
        self,
        job: Job,
        folder: Path,
        name: str,
        address: str = "127.0.0.1",
        interface: str = "lo",
        inside: Sequence[str] = (),
    ) -> None:
        self.name = name
        self.address = address
        self.folder = folder
        self.output = folder / "output"
        self.process: subprocess.Popen[bytes] | None = None
        self._job = job
        self._inside = inside
        self._environment: dict[str, str] = {
            "ENVPIPE_EMULATED_ROOT": str(folder / "gpus"),
            "XDG_RUNTIME_DIR": str(folder / "run"),
            "ENVPIPE_LEASE_DIR": str(folder / "leases"),
            "GLOO_SOCKET_IFNAME": interface,
        }
        (folder / "run").mkdir(mode=0o700, parents=True)
        self._before_j: dict[int, float] = {}

    def add_gpus(self, *indices: int) -> None:
        """Make GPUs that have worked before, so that their counters do not begin at 0."""
        for index in indices:
            gpu = EmulatedGpu.create(plain_job.PRESET, index, self.folder / "gpus")
            gpu.run_unit("forward", 1.0 + index / 4, 0.0)
            self._before_j[index] = gpu.read_energy().energy_j

    def share_machine(self, other: Node) -> None:
        """Use the folders of guards and leases that another job's node uses."""
        for name in ("XDG_RUNTIME_DIR", "ENVPIPE_LEASE_DIR"):
            self._environment[name] = other._environment[name]

    @property
    def gpus(self) -> list[EmulatedGpu]:
        """All GPUs that there are on this node by now."""
        root = self.folder / "gpus"
        return [EmulatedGpu.open(root, index) for index in list_emulated(root)]

    def counted_j(self) -> float:
        """Return what the counters of all GPUs have counted since `add_gpus`."""
        return math.fsum(
            gpu.read_energy().energy_j - self._before_j.get(gpu.index, 0.0) for gpu in self.gpus
        )

    def locked_mhz(self) -> list[int | None]:
        """The clock that is locked on each GPU."""
        return [gpu.requested_frequency_mhz for gpu in self.gpus]

    @property
    def log(self) -> Path:
        """The node's energy log."""
        return self.output / f"energy-{self.name}.jsonl"

    @property
    def bill(self) -> dict[str, Any]:
        """Return what it wrote as the node of rank 0."""
        return json.loads((self.output / "bill.json").read_text())

    def start(
        self,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        others_end_s: float | None = None,
        terminal: int | None = None,
        **settings: Any,
    ) -> None:
        """Start the launcher with torchrun's arguments and fields of `NodeSettings`.

        It prints to a file, or has a `terminal` of its own; `others_end_s` is for `node_runner`.
        """
        given: dict[str, Any] = {
            "arguments": list(arguments),
            "settings": {"output_dir": str(self.output), "node_name": self.name, **settings},
        }
        if others_end_s is not None:
            given["others_end_s"] = others_end_s
        with (self.folder / "log.txt").open("ab") as log:
            self.process = subprocess.Popen(
                [*self._inside, sys.executable, str(_RUNNER), json.dumps(given)],
                env={**self._job.environment, **self._environment, **(environment or {})},
                stdin=subprocess.DEVNULL if terminal is None else terminal,
                stdout=log if terminal is None else terminal,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=None
                if terminal is None
                else partial(fcntl.ioctl, terminal, termios.TIOCSCTTY, 0),
            )

    @property
    def launcher_pid(self) -> int:
        """The process that the user started, in which the agent lives."""
        assert self.process is not None
        return self.process.pid

    def processes(self, having: str = "") -> list[int]:
        """Its processes that live, whose commands have something in them."""
        own = f"ENVPIPE_EMULATED_ROOT={self.folder}/gpus\0".encode()
        found = self._job.processes().items()
        return [pid for pid, command in found if having in command and own in _environ(pid)]

    def torchrun_pid(self) -> int:
        """The process of torchrun, which the launcher has started."""
        (pid,) = (
            pid
            for pid in self.processes("torch.distributed.run")
            if int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            == self.launcher_pid
        )
        return pid

    def wait(self, timeout_s: float = END_S) -> int:
        """Wait for its end; return the exit status."""
        assert self.process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(timeout_s)
        raise AssertionError(f"node {self.name} does not end:\n{self._job.said()}")

    @property
    def said(self) -> str:
        """Return what it printed."""
        return (self.folder / "log.txt").read_text(errors="replace")

    def left(self) -> list[str]:
        """Leases, locked clocks and sockets that are left."""
        found = [str(path) for path in (self.folder / "leases").glob("*.json")]
        found += [str(path) for path in (self.folder / "run").rglob("*") if path.is_socket()]
        return found + [
            f"{gpu.address.uid} is locked at {gpu.requested_frequency_mhz} MHz"
            for gpu in self.gpus
            if gpu.requested_frequency_mhz is not None
        ]


class Job:
    """A job of some nodes, and all of its processes. Made by `new_job`.

    Args:
        folder: of the job, which no other has.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nodes: list[Node] = []
        self.environment = {
            **os.environ,
            "ENVPIPE_TEST_JOB": str(folder),
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
        self._events = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._events.bind(str(folder / "events"))

    def node(self, name: str, **where: Any) -> Node:
        """Add a node; see `Node`."""
        node = Node(self, self.folder / name, name, **where)
        self.nodes.append(node)
        return node

    def start(
        self,
        script: Sequence[str],
        *,
        per_node: int = 1,
        port: int | None = None,
        nodes: Sequence[Node] | None = None,
        elastic: bool = False,
        options: Sequence[str] = (),
        **how: Any,
    ) -> int:
        """Start a script with `per_node` ranks on some nodes, by default all; return the port.

        Elastic ones find each other by the c10d rendezvous, as ranks must that are to start again.
        `options` are torchrun's, `how` is for `Node.start`.
        """
        port = free_port() if port is None else port
        first = self.nodes[0].address
        if elastic:
            # Else a store outlives the ranks, with their addresses in it, and those that start
            # again take these for each other's new ones; the static rendezvous knows no other way.
            how["environment"] = {
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
                **how.get("environment", {}),
            }
        for node in self.nodes if nodes is None else nodes:
            where = ["--nnodes", str(len(self.nodes)), "--nproc-per-node", str(per_node)]
            if elastic:
                where += ["--rdzv-backend", "c10d", "--rdzv-id", self.folder.name]
                where += ["--rdzv-endpoint", f"{first}:{port}", "--local-addr", node.address]
                where += ["--rdzv-conf", f"is_host={int(node is self.nodes[0])}"]
            else:
                where += ["--node-rank", str(self.nodes.index(node))]
                where += ["--master-addr", first, "--master-port", str(port)]
            node.start([*where, *options, *script], **how)
        return port

    def start_plain(self, iterations: int, *, per_node: int = 1, **how: Any) -> int:
        """Start `trained_rank`; see `start`."""
        plain_job.write_plan(self.folder, per_node * len(self.nodes))
        script = [str(TRAINED_RANK), str(self.folder), str(iterations)]
        return self.start(script, per_node=per_node, **how)

    def hear(self, wanted: Callable[[Event], bool], timeout_s: float = START_S) -> Event:
        """Wait for an event of a rank."""
        end_s = time.monotonic() + timeout_s
        while wait_readable([self._events.fileno()], end_s - time.monotonic()):
            event: Event = json.loads(self._events.recv(4096))
            if wanted(event):
                return event
        raise AssertionError("nothing of the kind was heard:\n" + self.said())

    def hear_iteration(self, iteration: int) -> Event:
        """Wait until a rank has trained so far."""
        return self.hear(lambda e: e["event"] == "trained" and e["iteration"] >= iteration)

    def pid_of(self, rank: int) -> int:
        """The process of a rank that trains."""
        return self.trained(rank)[-1]["pid"]

    def trained(self, rank: int) -> list[Event]:
        """Return what a rank has trained, one entry an iteration."""
        lines = (self.folder / f"iterations-{rank}").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def processes(self) -> dict[int, str]:
        """All processes of this job that live, with their commands."""
        mark = f"ENVPIPE_TEST_JOB={self.folder}\0".encode()
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and mark in _environ(int(entry.name)):
                with contextlib.suppress(OSError):
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
                    found[int(entry.name)] = command.decode(errors="replace")
        return found

    def wait_until_none_runs(self, timeout_s: float = END_S) -> None:
        """Wait until no process of this job is left, its guards included."""
        end_s = time.monotonic() + timeout_s
        while running := self.processes():
            with contextlib.ExitStack() as opened:
                ends = []
                for pid in running:
                    with contextlib.suppress(ProcessLookupError):
                        ends.append(os.pidfd_open(pid))
                        opened.callback(os.close, ends[-1])
                left_s = end_s - time.monotonic()
                if ends and (left_s <= 0 or not wait_readable(ends, left_s)):
                    commands = "\n".join(running.values())
                    raise AssertionError(f"these still run:\n{commands}\n{self.said()}")

    def said(self) -> str:
        """Return what all nodes printed."""
        return "\n".join(
            f"----- {node.name}\n{node.said}" for node in self.nodes if node.process is not None
        )

    def close(self) -> None:
        """Kill what still runs."""
        self._events.close()
        for node in self.nodes:
            # The parent first, or it would start the others anew.
            if node.process is not None and node.process.poll() is None:
                node.process.kill()
                node.process.wait()
        for _ in range(_GATHERED):  # a process may have been about to start another
            running = self.processes()
            if not running:
                return
            for pid in running:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def new_job() -> Iterator[Job]:
    """A job in a folder of its own; afterwards none of its processes is left.

    The folder's path is short: sockets are in it, whose paths may have 107 bytes.
    """
    folder = Path(tempfile.mkdtemp(prefix="job-", dir="/tmp"))
    job = Job(folder)
    try:
        yield job
    finally:
        job.close()
        shutil.rmtree(folder, ignore_errors=True)


def summed(*logs: Path) -> dict[str, Any]:
    """Return what `envpipe energy sum` says of energy logs."""
    return json.loads(run_well("energy", "sum", "--json", *logs).stdout)


def assert_equals_counters(energy_j: float, nodes: Sequence[Node]) -> None:
    """A total is what the counters counted.

    Each line is a difference of two readings, or of points between readings, in floating point, and
    each rounds at the 16th digit of its counter: a thousand lines differ from the difference of
    last and first reading at the 13th digit at most. A line too much or too little is far more.
    """
    counted_j = math.fsum(node.counted_j() for node in nodes)
    assert energy_j == pytest.approx(counted_j, rel=1e-9), "\n".join(node.said for node in nodes)


def _environ(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # it has ended, or is another user's
        return b""
