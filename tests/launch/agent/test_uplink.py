"""A node's uplink, over real loopback TCP that fails in every way."""

import asyncio
import contextlib
import json
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from collecting_nodes import (
    LONG_S,
    SHORT_S,
    agents,
    assert_is_the_files_bill,
    collecting,
    ended,
    holds,
    in_time,
)

from envpipe_megatron.formats.bill import Bill
from envpipe_megatron.formats.energy import ENDED, read_energy_logs
from envpipe_megatron.launch.agent import collector as collector_module
from envpipe_megatron.launch.agent.collector import Collector

# Cuts ----------------------------------------------------------------------------------------


class Proxy:
    """Passes bytes on, and cuts each connection after some that are drawn, in either direction."""

    def __init__(self, port: int, seed: int) -> None:
        self.cuts = 0
        self._port = port
        self._random = random.Random(seed)
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> int:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        there = writer
        try:
            back, there = await asyncio.open_connection("127.0.0.1", self._port)
            up = asyncio.create_task(self._pass(reader, there, self._random.randrange(4000)))
            down = asyncio.create_task(self._pass(back, writer, self._random.randrange(300)))
            await asyncio.wait([up, down], return_when=asyncio.FIRST_COMPLETED)
            self.cuts += 1
            for passing in (up, down):
                passing.cancel()
        finally:
            writer.transport.abort()
            there.transport.abort()
            self._tasks.discard(task)

    @staticmethod
    async def _pass(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, most_bytes: int
    ) -> None:
        with contextlib.suppress(OSError):
            while most_bytes and (data := await reader.read(most_bytes)):
                writer.write(data)
                await writer.drain()
                most_bytes -= len(data)


@pytest.mark.parametrize("seed", range(3))
@in_time
async def test_a_network_that_is_cut_anywhere_loses_nothing_and_repeats_nothing(
    tmp_path, seed, caplog, monkeypatch
):
    caplog.set_level(logging.CRITICAL)
    monkeypatch.setattr(collector_module, "_PIECE_BYTES", 1500)
    async with collecting() as collector, agents(tmp_path, "a", "b", gpus=2) as nodes:
        endpoint = await collector.start("127.0.0.1")
        proxy = Proxy(endpoint["port"], seed)
        through = {**endpoint, "port": await proxy.start()}
        for agent in nodes:
            agent.uplink.send_to(through)
        for i in range(60):
            for agent in nodes:
                agent.append(i)
            await asyncio.sleep(0.001)  # where cuts come between
        for agent in nodes:
            agent.log.note(ENDED, exit_code=0)
        for agent in nodes:
            await agent.is_known()
        assert await holds(ended(collector), SHORT_S)
        assert_is_the_files_bill(collector.bill, *nodes)
        assert proxy.cuts > 20
        await proxy.close()


@in_time
async def test_a_start_sends_what_is_new_and_sums_of_what_was_before(tmp_path, monkeypatch):
    """Each piece once, also over a connection that is cut; torn lines are counted."""
    async with agents(tmp_path, "a", gpus=8) as (agent,):
        agent.append(0, 300)
        agent.log.note("job", facts={"num_gpus": 8})
        agent.log.note(ENDED, exit_code=1)
        with agent.log.path.open("ab") as file:
            file.write(b'{"format": "envpipe-ener\n{"torn')
    before, sent = agent.log.path.stat().st_size, []
    monkeypatch.setattr(collector_module, "_EARLIER_BYTES", before // 5)
    take = Collector._take

    def take_and_cut(collector: Collector, piece: dict[str, Any], writer: Any) -> Any:
        sent.append(json.dumps(piece))
        answer = take(collector, piece, writer)
        if len(sent) in (2, 4):
            for task in collector._connections:
                task.cancel()
        return answer

    monkeypatch.setattr(Collector, "_take", take_and_cut)
    async with agents(tmp_path, "a", gpus=8) as (agent,), collecting() as collector:
        agent.append(300, 10)
        agent.uplink.send_to(await collector.start("localhost"))
        await agent.is_known()
        assert agent.log.earlier_bytes == before
        assert sum(map(len, sent)) < agent.log.size - before + 0.05 * before
        live, whole = collector.bill, Bill(read_energy_logs([agent.log.path]).lines)
        assert live.total().energy_j == pytest.approx(whole.total().energy_j, rel=1e-12)
        assert live.total().duration_s == pytest.approx(whole.total().duration_s)
        assert live.num_iterations == whole.num_iterations == 310
        assert live.steps("steady").iterations == whole.steps("steady").iterations
        assert (live.unreadable, live.facts, live.nodes) == (2, whole.facts, whole.nodes)


@pytest.mark.parametrize(  # an id of megabytes leaves commands no room in their environment
    "zeros", [b"\0" * 1_000_000 + b"\n", b"\0" * 5_000_000], ids=["ended", "not ended"]
)
@in_time
async def test_what_a_disk_that_lost_power_left_of_a_log_holds_up_no_bill(tmp_path, zeros):
    """Blocks of zeros, which nothing ends, are longer than any piece: they are only counted."""
    async with agents(tmp_path, "a") as (agent,):
        agent.append(0, 3)
        with agent.log.path.open("ab") as file:
            file.write(zeros)
    async with agents(tmp_path, "a") as (agent,), collecting() as collector:
        agent.append(3)
        agent.uplink.send_to(await collector.start("localhost"))
        await agent.is_known()
        assert (collector.bill.num_iterations, collector.bill.unreadable) == (4, 1)


@in_time
async def test_a_collector_that_is_there_only_later(tmp_path, caplog):
    """The first tries fail, and it is tried again after a cut."""
    async with collecting() as closed:
        endpoint = await closed.start("127.0.0.1")
    async with collecting() as collector, agents(tmp_path, "a") as (agent,):
        agent.uplink.send_to(endpoint)
        assert await agent.failure()
        # As if it came up at the place that it was told to be at.
        agent.uplink.endpoint.update(await collector.start("127.0.0.1"))
        await agent.is_known()
        assert agent.uplink.failure == ""
        assert caplog.text.count("will try again") == 1
        for task in collector._connections:
            task.cancel()
        agent.append(0)
        await agent.is_known()
        assert_is_the_files_bill(collector.bill, agent)


# Collectors that are none --------------------------------------------------------------------

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def pretending(serve: Serve) -> AsyncIterator[dict[str, Any]]:
    async def quiet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            await serve(reader, writer)
        writer.close()

    server = await asyncio.start_server(quiet, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        yield {"host": "127.0.0.1", "port": port, "token": ""}
    finally:
        server.close()


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(None, id="silence"),
        b"",
        b"garbage\n",
        b"[]\n",
        b"{}\n",
        b'{"have": 0}\n',
        b'{"have": "x"}\n',
        b'{"error": "go away"}\n',
        b"[" * 60_000 + b"\n",
        b"x" * 200_000,
    ],
)
@in_time
async def test_a_collector_that_is_silent_or_talks_nonsense_is_tried_again(
    tmp_path, monkeypatch, answer
):
    monkeypatch.setattr(collector_module, "_ANSWER_S", SHORT_S / 2 if answer is None else LONG_S)
    connections = asyncio.Queue[None]()

    async def pretend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.put_nowait(None)
        await reader.readline()
        if answer is None:
            await reader.read()
        else:
            writer.write(answer)
            await writer.drain()

    async with (
        pretending(pretend) as nowhere,
        collecting() as collector,
        agents(tmp_path, "a") as (agent,),
    ):
        agent.append(0)
        agent.uplink.send_to(nowhere)
        for _ in range(2):
            await connections.get()
        trouble = await agent.failure()
        assert (trouble == "no answer within 0.05 s") is (answer is None)
        assert not agent.uplink._task.done()
        monkeypatch.setattr(collector_module, "_ANSWER_S", LONG_S)
        agent.uplink.send_to(await collector.start("localhost"))
        await agent.is_known()
        assert_is_the_files_bill(collector.bill, agent)
