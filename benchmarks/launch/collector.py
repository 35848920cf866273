"""How many nodes one collector adds up: emulated agents against a real collector on loopback.

Each agent has an energy log and an uplink as a node's agent has, and bills all its GPUs once in
each interval. The collector, in another process, also writes the bill as it grows. Says how long a
line takes from the file to the sums and back, and whether the total is that of what was sent.

    python benchmarks/launch/collector.py                        # 256 agents of 8 GPUs, 60 s
    python benchmarks/launch/collector.py --sweep --seconds 20   # 64 to 1024 agents
    python benchmarks/launch/collector.py --agents 128 --json
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import multiprocessing
import os
import random
import resource
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import click
import numpy as np

from envpipe_megatron.formats.account import Tariff
from envpipe_megatron.formats.energy import ENERGY_FORMAT, JOB, Phase
from envpipe_megatron.launch.agent.collector import Collector, Uplink
from envpipe_megatron.launch.agent.ledger import NodeLog
from envpipe_megatron.launch.bill.report import BillReport

SWEPT_AGENTS = (64, 128, 256, 512, 1024)
#: Part of the time after which the collector has seen all GPUs and phases, and should not grow.
WARM_UP = 0.25
#: Iterations in a window, and between live lines.
ITERATIONS, LIVE_ITERATIONS = 5, 100
#: As many as a process sends for without being busy itself.
AGENTS_OF_A_SENDER = 256
START_S, LAST_S = 120.0, 60.0
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Load:
    """What the agents of one measurement do."""

    agents: int
    gpus: int
    interval_s: float
    seconds: float

    @property
    def rounds(self) -> int:
        """Lines of each GPU."""
        return max(1, round(self.seconds / self.interval_s))


@dataclass(frozen=True)
class Sample:
    """The collector at one instant: its clock and CPU time, memory, and what it has added up."""

    time_s: float
    cpu_s: float
    rss_bytes: int
    lines: int
    total_j: float


@dataclass(frozen=True)
class Sent:
    """What one process sent."""

    total_j: float
    latencies_s: list[float]
    cuts: int
    unknown_bytes: int


def serve(pipe: Connection, folder: Path) -> None:
    """Collect until the pipe says so; answer each word with a sample."""
    _allow_many_files()
    asyncio.run(_serve(pipe, folder))


async def _serve(pipe: Connection, folder: Path) -> None:
    report, collector = BillReport(folder, Tariff(), LIVE_ITERATIONS), Collector()
    bill = collector.bill

    async def show() -> None:
        while True:
            await asyncio.sleep(1.0)
            report.look(bill)

    showing = asyncio.create_task(show())
    pipe.send(await collector.start("127.0.0.1"))
    loop = asyncio.get_running_loop()
    asked = asyncio.Event()
    loop.add_reader(pipe.fileno(), asked.set)
    word = ""
    while word != "end":
        await asked.wait()
        asked.clear()
        if not pipe.poll():
            continue
        word = pipe.recv()
        total = bill.total()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        pipe.send(
            Sample(
                time.monotonic(),
                time.process_time(),
                pages * _PAGE_BYTES,
                total.windows,
                total.energy_j,
            )
        )
    loop.remove_reader(pipe.fileno())
    showing.cancel()
    await collector.close()


def send(pipe: Connection, endpoint: Any, folder: Path, load: Load, names: Sequence[int]) -> None:
    """Be some agents, from the word of the pipe on; answer with what was sent."""
    _allow_many_files()
    logging.getLogger(Uplink.__module__).addHandler(_Counter())
    pipe.send(asyncio.run(_send(pipe, endpoint, folder, load, names)))


async def _send(
    pipe: Connection, endpoint: Any, folder: Path, load: Load, names: Sequence[int]
) -> Sent:
    agents = [_Agent(folder, name, load) for name in names]
    pipe.send("ready")
    begin_s = float(await asyncio.to_thread(pipe.recv))
    await asyncio.gather(*(agent.run(endpoint, begin_s) for agent in agents))
    total_j = math.fsum(agent.total_j for agent in agents)
    latencies_s = [latency_s for agent in agents for latency_s in agent.latencies_s]
    return Sent(
        total_j,
        latencies_s,
        _Counter.count,
        sum(agent.unknown_bytes for agent in agents),
    )


class _Counter(logging.Handler):
    """Counts the uplinks' warnings in place of printing them: each is a connection that ended."""

    count = 0

    def emit(self, record: logging.LogRecord) -> None:
        _Counter.count += 1


class _Watched(Uplink):
    """One that says when it knows more."""

    def __init__(self, log: NodeLog) -> None:
        self._more = asyncio.Event()
        super().__init__(log)

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name == "known_bytes":
            self._more.set()

    async def all_known(self, timeout_s: float) -> None:
        """Wait until the collector has the whole log, for a time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not self.knows_all():
                    self._more.clear()
                    await self._more.wait()


class _Agent:
    def __init__(self, folder: Path, index: int, load: Load) -> None:
        self._load = load
        self._index = index
        self._random = random.Random(index)
        self._log = NodeLog(folder, f"node{index}")
        self._uplink = _Watched(self._log)
        self._log.grown = self._uplink.grown
        self.total_j = 0.0
        self.latencies_s: list[float] = []
        self.unknown_bytes = 0

    async def run(self, endpoint: Any, begin_s: float) -> None:
        """Bill all GPUs again and again, at a phase of the interval that is this agent's own."""
        load = self._load
        phase_s = load.interval_s * self._random.random()
        self._uplink.send_to(endpoint)
        if self._index == 0:
            self._log.note(JOB, facts={"num_gpus": load.agents * load.gpus})
        for number in range(load.rounds):
            await asyncio.sleep(begin_s + phase_s + number * load.interval_s - time.monotonic())
            appended_s = time.monotonic()
            for gpu in range(load.gpus):
                self._append(gpu, number)
            await self._uplink.all_known(LAST_S)
            self.latencies_s.append(time.monotonic() - appended_s)
        self._log.end(0)
        await self._uplink.all_known(LAST_S)
        self.unknown_bytes = self._log.size - self._uplink.known_bytes
        await self._uplink.close()
        self._log.close()

    def _append(self, gpu: int, number: int) -> None:
        interval_s = self._load.interval_s
        energy_j = self._random.uniform(50.0, 700.0) * interval_s
        self.total_j += energy_j
        rank = self._index * self._load.gpus + gpu
        self._log.append(
            {
                "format": ENERGY_FORMAT,
                "gpu": "NVIDIA H200",
                "gpu_uid": f"GPU-00000000-0000-0000-0000-{rank:012d}",
                "rank": rank,
                "stage": rank % 16,
                "phase": Phase.STEADY.value if number else Phase.WARMUP.value,
                "first_iteration": ITERATIONS * number,
                "last_iteration": ITERATIONS * (number + 1) - 1,
                "begin_s": 1e5 + number * interval_s,
                "duration_s": interval_s,
                "energy_j": energy_j,
                "energy_uncertainty_j": 0.01 * energy_j,
                "compute_s": 0.8 * interval_s,
                "blocking_s": 0.15 * interval_s,
                "idle_s": 0.05 * interval_s,
            }
        )


def measure(load: Load) -> dict[str, Any]:
    """Run a collector and its agents."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="collector-") as folder:
        ours, theirs = context.Pipe()
        collector = context.Process(target=serve, args=(theirs, Path(folder)), daemon=True)
        collector.start()
        endpoint = _received(ours, START_S)
        senders = []
        for first in range(0, load.agents, AGENTS_OF_A_SENDER):
            mine, its = context.Pipe()
            names = range(first, min(first + AGENTS_OF_A_SENDER, load.agents))
            given = its, endpoint, Path(folder), load, names
            process = context.Process(target=send, args=given, daemon=True)
            process.start()
            senders.append((mine, process))
        for mine, _ in senders:
            _received(mine, START_S)
        begin_s = time.monotonic() + 0.1
        for mine, _ in senders:
            mine.send(begin_s)
        time.sleep(0.1 + WARM_UP * load.seconds)  # the measurement's own time
        before = _sample(ours)
        sent: list[Sent] = [_received(mine, load.seconds + LAST_S) for mine, _ in senders]
        after = _sample(ours, "end")
        for process in (collector, *(process for _, process in senders)):
            process.join(LAST_S)
    return _measured(load, before, after, sent, after.time_s - begin_s)


def _measured(
    load: Load, before: Sample, after: Sample, sent: Sequence[Sent], wall_s: float
) -> dict[str, Any]:
    """The row of a measurement.

    A latency is from the append of an agent's lines until it knows that they are added up; a cut is
    a connection that had to be made again.
    """
    latencies_ms = 1e3 * np.array([latency_s for part in sent for latency_s in part.latencies_s])
    total_j = math.fsum(part.total_j for part in sent)
    known = not any(part.unknown_bytes for part in sent)
    return {
        "agents": load.agents,
        "lines_per_s": after.lines / wall_s,
        "latency_p50_ms": float(np.quantile(latencies_ms, 0.5)),
        "latency_p99_ms": float(np.quantile(latencies_ms, 0.99)),
        "latency_max_ms": float(latencies_ms.max()),
        "cpu_percent": 100 * (after.cpu_s - before.cpu_s) / (after.time_s - before.time_s),
        "rss_start_mib": before.rss_bytes / 2**20,
        "rss_end_mib": after.rss_bytes / 2**20,
        "cuts": sum(part.cuts for part in sent),
        "exact": known and math.isclose(after.total_j, total_j, rel_tol=1e-11),  # far below a line
    }


def _sample(pipe: Connection, word: str = "sample") -> Sample:
    pipe.send(word)
    sample: Sample = _received(pipe, LAST_S)
    return sample


def _received(pipe: Connection, timeout_s: float) -> Any:
    if not pipe.poll(timeout_s):
        raise click.ClickException(f"A process of the benchmark is silent for {timeout_s:g} s.")
    return pipe.recv()


def _allow_many_files() -> None:
    """A connection is a file, and as many as a shell may open by itself are not enough."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


@click.command(help=__doc__.split("\n\n")[0])
@click.option("--agents", type=click.IntRange(1), default=256, show_default=True)
@click.option("--gpus", type=click.IntRange(1), default=8, show_default=True, help="Of an agent.")
@click.option("--interval-s", type=click.FloatRange(0.01), default=1.0, show_default=True)
@click.option("--seconds", type=click.FloatRange(0.1), default=60.0, show_default=True)
@click.option("--sweep", is_flag=True, help=f"{', '.join(map(str, SWEPT_AGENTS))} agents.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON in place of a table.")
def main(
    agents: int, gpus: int, interval_s: float, seconds: float, sweep: bool, as_json: bool
) -> None:
    """Measure."""
    # The collector's process imports this module: what draws pictures is none of its memory.
    from benchmarks.outputs import make_console, make_table

    loads = [Load(n, gpus, interval_s, seconds) for n in (SWEPT_AGENTS if sweep else (agents,))]
    rows = [measure(load) for load in loads]
    if as_json:
        click.echo(json.dumps(rows, indent=1))
    else:
        title = f"{gpus} GPUs an agent, a line each {interval_s:g} s, {seconds:g} s"
        make_console().print(make_table(title, rows))
    if not all(row["exact"] for row in rows):
        raise click.ClickException("A total is not that of what was sent.")


if __name__ == "__main__":
    main()
