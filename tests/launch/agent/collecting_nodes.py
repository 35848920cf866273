"""Nodes' logs and uplinks, and a job's collector, over real loopback TCP."""

import asyncio
import contextlib
import functools
import json
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

from energy_lines import Line, window

from envpipe_megatron.formats.bill import Bill
from envpipe_megatron.formats.energy import read_energy_logs
from envpipe_megatron.launch.agent.collector import Collector, Uplink
from envpipe_megatron.launch.agent.ledger import NodeLog
from envpipe_megatron.launch.bill import Tariff, bill_facts

#: For what should take no time at all.
LONG_S = 120.0
#: For what must not come, and for what is refused after a time.
SHORT_S = 0.1


def in_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test on an event loop, and fail where it hangs."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        asyncio.run(asyncio.wait_for(test(**fixtures), LONG_S))

    return run


async def holds(condition: Callable[[], bool], timeout_s: float = LONG_S) -> bool:
    """Wait until a condition holds; False after a time."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while not condition():
                await asyncio.sleep(0.001)
    return condition()


def ended(collector: Collector) -> Callable[[], bool]:
    """A condition: all nodes have ended."""
    return lambda: not collector.bill.running()


class Agent:
    """A node's log and its uplink."""

    def __init__(self, folder: Path, node: str, gpus: int = 1) -> None:
        self.log = NodeLog(folder, node)
        self.uplink = Uplink(self.log)
        self.gpus = gpus

    def append(self, first: int, count: int = 1) -> None:
        for iteration in range(first, first + count):
            for gpu in range(self.gpus):
                self.log.append(line_of(self.log.node, gpu, iteration))

    async def is_known(self) -> None:
        assert await holds(self.uplink.knows_all), self.uplink.failure

    async def failure(self) -> str:
        while not self.uplink.failure:
            await asyncio.sleep(0.001)
        return self.uplink.failure

    async def hang_up(self) -> None:
        if self.uplink._task is not None:
            self.uplink._task.cancel()
            await asyncio.wait([self.uplink._task])

    async def close(self) -> None:
        await self.hang_up()
        self.log.close()


def line_of(node: str, gpu: int, iteration: int) -> Line:
    energy_j = random.Random(f"{node} {gpu} {iteration}").uniform(0, 1e4)
    return window(gpu, iteration, energy_j, gpu_uid=f"GPU-{node}-{gpu}")


@contextlib.asynccontextmanager
async def collecting() -> AsyncIterator[Collector]:
    collector = Collector()
    try:
        yield collector
    finally:
        await asyncio.wait_for(collector.close(), LONG_S)


@contextlib.asynccontextmanager
async def agents(folder: Path, *nodes: str, **options: Any) -> AsyncIterator[list[Agent]]:
    made = [Agent(folder, node, **options) for node in nodes]
    try:
        yield made
    finally:
        for agent in made:
            await agent.close()


def facts_of(bill: Bill) -> dict[str, Any]:
    """All of a bill."""
    return bill_facts(bill, Tariff(0.2, 300.0))


def assert_is_the_files_bill(bill: Bill, *nodes: Agent) -> None:
    logs = read_energy_logs([agent.log.path for agent in nodes])
    assert facts_of(bill) == facts_of(Bill(logs.lines))
    assert bill.total().windows == len(logs.windows)
    assert bill.unreadable == len(logs.unreadable)


async def connected(port: int, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    return reader, writer


async def is_hung_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):  # the end may come before all was sent
        await reader.read()
    writer.close()


def piece_of(collector: Collector, at: int = 0, *lines: Line, **fields: Any) -> bytes:
    """A piece of a log whose lines have a byte each."""
    piece = {"token": collector.token, "node": "x", "log": "1", "at": at, "bytes": len(lines)}
    text = "\n".join(map(json.dumps, lines))
    return json.dumps({**piece, "lines": text, **fields}).encode() + b"\n"
