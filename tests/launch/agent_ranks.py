"""Ranks that a test plays, towards agents that it makes or that a launcher has made."""

from __future__ import annotations

import math
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from energy_lines import window

from envpipe_megatron.gpu.base import EnergyReading
from envpipe_megatron.gpu.emulated.emulated_gpu import EmulatedGpu
from envpipe_megatron.gpu.guard.messages import receive, send
from envpipe_megatron.launch.agent.agent import NodeAgent

LONG_S = 120.0


class Rank:
    """A rank of the test's, and the GPU that it uses."""

    def __init__(self, agent: NodeAgent, gpu: EmulatedGpu, rank: int = 0) -> None:
        self.gpu = gpu
        self.rank = rank
        self.agent = agent
        self.connection = connect(agent)

    def hello(self, **fields: Any) -> dict[str, Any]:
        return {
            "op": "hello",
            "node": "of the job file",
            "gpu": self.gpu.name,
            "gpu_uid": self.gpu.address.uid,
            "rank": self.rank,
            "stage": self.rank,
            **fields,
        }

    def say_hello(self) -> Rank:
        send(self.connection, self.hello())
        welcome = {"event": "welcome", "node": self.agent.log.node, "endpoint": None}
        assert receive(self.connection) == welcome
        return self

    def collect(self, host: str = "localhost") -> dict[str, Any]:
        """Say hello as rank 0 does, and return where agents are to send."""
        send(self.connection, self.hello(collect={"host": host, "control": None}))
        answer = receive(self.connection)
        assert answer is not None
        assert answer["event"] == "welcome"
        return answer["endpoint"]

    def train(self, iteration: int, work_s: float = 0.5, **fields: Any) -> None:
        """Run a unit, and send the window from the refresh before it to the last one in it."""
        before = self.gpu.read_energy()
        self.gpu.run_unit("forward", work_s, 0.0)
        line = self.line(iteration, before, self.gpu.read_energy())
        send(self.connection, {"op": "window", "line": line | fields})

    def line(self, iteration: int, begin: EnergyReading, end: EnergyReading) -> dict[str, Any]:
        length_s = end.time_s - begin.time_s
        return window(
            self.rank,
            iteration,
            end.energy_j - begin.energy_j,
            gpu_uid=self.gpu.address.uid,
            begin_s=begin.time_s,
            duration_s=length_s,
            compute_s=length_s,
            blocking_s=0.0,
            idle_s=0.0,
            begin_counter=[begin.energy_j, 0.1],
            end_counter=[end.energy_j, 0.1],
        )

    def bye(self) -> None:
        send(self.connection, {"op": "bye"})
        assert self.is_hung_up()

    def is_hung_up(self) -> bool:
        return receive(self.connection) is None

    def close(self) -> None:
        self.connection.close()


def connect(agent: NodeAgent) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(LONG_S)
    connection.connect(f"\0{agent.address}")
    return connection


class Nodes:
    """Makes agents, GPUs and ranks, and ends them."""

    def __init__(self, folder: Path, last: ExitStack) -> None:
        self.folder = folder
        self._last = last
        self._before_j: dict[str, float] = {}

    def agent(self, node: str = "n0") -> NodeAgent:
        agent = NodeAgent(self.folder / "out", node)
        self._last.callback(agent.close)
        return agent

    def gpu(self, index: int = 0) -> EmulatedGpu:
        """A GPU that has worked before, so that its counter does not begin at 0."""
        gpu = EmulatedGpu.create("a100-sxm", index, self.folder / "gpus")
        gpu.run_unit("backward", 1.0 + index, 0.0)
        self._before_j[gpu.address.uid] = gpu.read_energy().energy_j
        return gpu

    def rank(self, agent: NodeAgent, gpu: EmulatedGpu, rank: int = 0) -> Rank:
        made = Rank(agent, gpu, rank)
        self._last.callback(made.close)
        return made

    def counted_j(self, *gpus: EmulatedGpu) -> float:
        return math.fsum(
            gpu.read_energy().energy_j - self._before_j[gpu.address.uid] for gpu in gpus
        )
