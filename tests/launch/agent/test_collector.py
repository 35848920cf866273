"""Nodes' logs and the job's collector, over real loopback TCP that fails in every way."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from energy_lines import Line, note, window

from envpipe_megatron.formats.energy import read_energy_logs
from envpipe_megatron.launch.agent import collector as collector_module
from envpipe_megatron.launch.agent import uplink as uplink_module
from envpipe_megatron.launch.agent.collector import Collector
from envpipe_megatron.launch.agent.node_log import NodeLog
from envpipe_megatron.launch.agent.uplink import Uplink
from envpipe_megatron.launch.bill.bill import Bill, bill_of
from envpipe_megatron.launch.bill.tables import Tariff, bill_facts

#: For what should take no time at all.
LONG_S = 20.0
#: For what must not come, and for what is refused after a time.
SHORT_S = 0.1


@pytest.fixture(autouse=True)
def _tries_often(monkeypatch):
    monkeypatch.setattr(uplink_module, "_FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(uplink_module, "_LONGEST_PAUSE_S", 0.01)


def in_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test on an event loop, and fail where it hangs."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        asyncio.run(asyncio.wait_for(test(**fixtures), LONG_S))

    return run


class Agent:
    """A node's log and its uplink."""

    def __init__(self, folder: Path, node: str, gpus: int = 1) -> None:
        self.log = NodeLog(folder, node)
        self.uplink = Uplink(self.log)
        self.log.grown = self.uplink.grown
        self.gpus = gpus

    def append(self, first: int, count: int = 1) -> None:
        for iteration in range(first, first + count):
            for gpu in range(self.gpus):
                self.log.append(line_of(self.log.node, gpu, iteration))

    async def is_known(self) -> None:
        assert await self.uplink.all_known(LONG_S), self.uplink.trouble

    async def is_troubled(self) -> str:
        while not self.uplink.trouble:
            await asyncio.sleep(0.001)
        return self.uplink.trouble

    async def close(self) -> None:
        await self.uplink.close()
        self.log.close()


def line_of(node: str, gpu: int, iteration: int) -> Line:
    energy_j = random.Random(f"{node} {gpu} {iteration}").uniform(0, 1e4)
    return window(gpu, iteration, energy_j, gpu_uid=f"GPU-{node}-{gpu}")


@contextlib.asynccontextmanager
async def collecting(bill: Bill | None = None, **options: Any) -> AsyncIterator[Collector]:
    collector = Collector(bill or Bill(), **options)
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
    assert facts_of(bill) == facts_of(bill_of(logs.lines))
    assert bill.total().windows == len(logs.windows)
    assert bill.unreadable == len(logs.unreadable)


# In order ------------------------------------------------------------------------------------


@in_time
async def test_the_live_sum_is_that_of_the_files(tmp_path):
    told = []
    bill = Bill()
    async with (
        collecting(bill, on_lines=lambda: told.append(bill.total().windows)) as collector,
        agents(tmp_path, "a", "b", gpus=2) as nodes,
    ):
        endpoint = await collector.start("localhost")
        assert await collector.start("localhost") == endpoint  # asked for again
        nodes[0].append(0, 20)
        for agent in nodes:
            agent.uplink.send_to(endpoint)
        for i in range(20, 40):
            for agent in nodes:
                agent.append(i)
            await asyncio.sleep(0)
        for agent in nodes:
            await agent.is_known()
            sending = agent.uplink._task
            agent.uplink.send_to(dict(endpoint))  # told of again
            assert agent.uplink._task is sending
        assert sorted(collector.bill.running()) == ["a", "b"]
        for agent in nodes:
            agent.log.end(0)
        assert await collector.all_ended(LONG_S)
        assert_is_the_files_bill(collector.bill, *nodes)
        assert told == sorted(told)
        assert told[-1] == 2 * 20 + 4 * 20 - 40 + 20 * 2
        assert all(agent.uplink.trouble == "" for agent in nodes)


@in_time
async def test_torn_lines_are_counted_and_passed_over(tmp_path):
    async with collecting() as collector, agents(tmp_path, "a") as (agent,):
        for torn in (b'{"format": "env', b"\xff\0", b"[]", b"[" * 20_000, b'{"energy_j": -1}'):
            with agent.log.path.open("ab") as file:
                file.write(torn + b"\n\n")
            agent.append(0)
        agent.uplink.send_to(await collector.start("127.0.0.1"))
        await agent.is_known()
        assert collector.bill.unreadable == 5
        assert collector.bill.total().windows == 5


@in_time
async def test_waiting_ends_in_time(tmp_path):
    async with collecting() as collector, agents(tmp_path, "a") as (agent,):
        assert not await agent.uplink.all_known(LONG_S)  # nobody ever said where to send
        assert "no agent adds up" in agent.uplink.why_unknown()
        endpoint = await collector.start("localhost")
        assert await collector.all_ended(SHORT_S)  # there is no node
        agent.uplink.send_to({**endpoint, "token": "wrong"})
        assert not await agent.uplink.all_known(SHORT_S)
        agent.uplink.send_to(endpoint)
        await agent.is_known()
        assert agent.uplink.why_unknown() == ""
        assert not await collector.all_ended(SHORT_S)
        assert collector.bill.running() == ["a"]
        waiting = asyncio.create_task(collector.all_ended(LONG_S))
        await asyncio.sleep(0)
        agent.log.end(0)
        assert await waiting


@in_time
async def test_whoever_listens_cannot_disturb_the_sums(tmp_path, caplog):
    """A line that cannot be printed, for one, just when the last node ends."""
    pieces = []

    def fail_later() -> None:
        pieces.append(1)
        if len(pieces) > 1:
            raise BrokenPipeError("the terminal is gone")

    async with (
        collecting(on_lines=fail_later) as collector,
        agents(tmp_path, "a") as (agent,),
    ):
        agent.uplink.send_to(await collector.start("localhost"))
        await agent.is_known()
        waiting = asyncio.create_task(collector.all_ended(10 * LONG_S))
        await asyncio.sleep(0)
        agent.append(0, 10)
        agent.log.end(0)
        assert await waiting
        agent.append(10)
        await agent.is_known()
        assert_is_the_files_bill(collector.bill, agent)
    assert len(pieces) == 2
    assert "no longer shown" in caplog.text
    assert "tried again" not in caplog.text


@in_time
async def test_growth_is_told_of_at_once_then_a_second_later_and_at_the_end():
    bill, told = Bill(), []
    collector = Collector(bill, lambda: told.append(bill.total().windows))
    log = "a", "1"
    collector._known_bytes[log] = 0

    def take(*entries: Line) -> None:
        for entry in entries:
            collector._take(log, [json.dumps(entry).encode()])

    take(note("begun", "a"), window(node="a"))
    assert told == []
    while not told:
        await asyncio.sleep(0)
    take(window(node="a"), window(node="a"))
    assert collector._reporting.when() == collector._reported_s + 1
    collector._report()  # it is due
    assert told == [1, 3]
    take(window(node="a"))
    pending = collector._reporting
    assert pending.when() == collector._reported_s + 1
    take(note("ended", "a"))
    assert told == [1, 3, 4]
    assert pending.cancelled()
    take(note("begun", "a"))
    pending = collector._reporting
    await collector.close()
    assert pending.cancelled(), "a bill that is over is told of no more"


@pytest.mark.parametrize("both", [True, False])
@in_time
async def test_a_machine_without_ipv6_will_do(monkeypatch, both):
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: both)
    async with collecting() as collector:
        endpoint = await collector.start("localhost")
        reader, writer = await connected(endpoint["port"], hello_of(collector))
        assert json.loads(await reader.readline()) == {"have": 0}
        writer.close()


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
    tmp_path, seed, caplog
):
    caplog.set_level(logging.CRITICAL)
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
            agent.log.end(0)
        for agent in nodes:
            await agent.is_known()
        assert await collector.all_ended(SHORT_S)
        assert_is_the_files_bill(collector.bill, *nodes)
        assert proxy.cuts > 20
        await proxy.close()


class Written:
    """The writing end of a connection that a test holds in its hands."""

    def __init__(self) -> None:
        self.answers: list[Any] = []
        self.answered = asyncio.Event()

    def write(self, data: bytes) -> None:
        self.answers += [json.loads(line) for line in data.splitlines()]
        self.answered.set()

    async def drain(self) -> None:
        pass

    def close(self) -> None:
        pass


@in_time
async def test_what_comes_late_over_a_cut_connection_counts_once():
    """An agent has given it up and connects anew, just when the network brings the rest."""
    collector = Collector(Bill())
    hello = {"token": collector.token, "node": "a", "log": "1"}
    line = json.dumps(window()).encode() + b"\n"
    ends = [(asyncio.StreamReader(), Written()) for _ in range(2)]
    (old, old_answers), (new, new_answers) = ends
    served = [collector._serve(reader, written) for reader, written in ends]  # type: ignore[arg-type]
    old.feed_data(json.dumps(hello).encode() + b"\n")
    first = asyncio.create_task(served[0])
    await old_answers.answered.wait()
    new.feed_data(json.dumps(hello).encode() + b"\n" + line)
    second = asyncio.create_task(served[1])
    old.feed_data(line)
    old.feed_eof()
    new.feed_eof()
    await asyncio.gather(first, second)
    assert new_answers.answers == [{"have": 0}, {"have": len(line)}]
    assert collector.bill.total().windows == 1


@in_time
async def test_a_node_that_lost_its_power_is_noticed():
    """Nobody closes its connection: the kernel asks whether it is still there."""
    async with collecting() as collector:
        endpoint = await collector.start("localhost")
        reader, writer = await connected(endpoint["port"], hello_of(collector))
        await reader.readline()
        ((_, connection),) = collector._sending.values()
        there = connection.get_extra_info("socket")
        assert there.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        idle_s, interval_s, count = (
            there.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        assert idle_s + interval_s * count == 30
        writer.close()


@in_time
async def test_of_two_connections_of_one_log_the_later_one_counts(tmp_path):
    """The other was cut off, of which the network has told the agent alone."""
    async with collecting() as collector:
        endpoint = await collector.start("localhost")
        hello, line = hello_of(collector), json.dumps(window()).encode() + b"\n"
        old = await connected(endpoint["port"], hello + line)
        for have in (0, len(line)):
            assert json.loads(await old[0].readline()) == {"have": have}
        new = await connected(endpoint["port"], hello)
        assert json.loads(await new[0].readline()) == {"have": len(line)}
        await is_hung_up(*old)
        new[1].write(line)
        assert json.loads(await new[0].readline()) == {"have": 2 * len(line)}
        new[1].close()


@in_time
async def test_a_collector_that_moves_gets_everything_anew(tmp_path):
    async with (
        collecting() as first,
        collecting() as second,
        agents(tmp_path, "a", "b") as nodes,
    ):
        here, there = await first.start("localhost"), await second.start("localhost")
        for turn, endpoint in enumerate((here, there, here)):
            for agent in nodes:
                agent.append(10 * turn, 10)
                agent.uplink.send_to(endpoint)
            for agent in nodes:
                await agent.is_known()
            current = second if endpoint is there else first
            assert_is_the_files_bill(current.bill, *nodes)
        assert second.bill.total().windows == 40
        assert first.bill.total().windows == 60


@in_time
async def test_an_agent_that_starts_again_goes_on(tmp_path):
    async with collecting() as collector:
        endpoint = await collector.start("localhost")
        for start in range(3):
            async with agents(tmp_path, "a") as (agent,):
                agent.append(5 * start, 5)
                agent.uplink.send_to(endpoint)
                await agent.is_known()
                assert_is_the_files_bill(collector.bill, agent)
                assert collector.bill.running() == ["a"]
                if start == 1:
                    agent.log.end(1)
                    await agent.is_known()
                    assert collector.bill.running() == []


@in_time
async def test_a_collector_that_is_there_only_later(tmp_path, monkeypatch, caplog):
    """The first tries fail; the pause between tries grows, and is short again after a cut."""
    pauses_s: list[float] = []
    monkeypatch.setattr(uplink_module, "_FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(uplink_module, "_LONGEST_PAUSE_S", 0.004)
    sleep = asyncio.sleep

    async def noted(pause_s: float) -> None:
        pauses_s.append(pause_s)
        await sleep(pause_s)

    async with collecting() as closed:
        endpoint = await closed.start("127.0.0.1")
    async with collecting() as collector, agents(tmp_path, "a") as (agent,):
        monkeypatch.setattr(asyncio, "sleep", noted)
        agent.uplink.send_to(endpoint)
        while len(pauses_s) < 5:
            await sleep(0.001)
        assert pauses_s[:5] == [0.001, 0.002, 0.004, 0.004, 0.004]
        assert agent.uplink.trouble
        pauses_s.clear()
        # As if it came up at the place that it was told to be at.
        agent.uplink._endpoint.update(await collector.start("127.0.0.1"))
        await agent.is_known()
        pauses_s.clear()
        assert agent.uplink.trouble == ""
        assert caplog.text.count("tried again") == 1
        for task in collector._connections:
            task.cancel()
        agent.append(0)
        await agent.is_known()
        assert pauses_s == [0.001]
        assert_is_the_files_bill(collector.bill, agent)


# Whom it may not concern ---------------------------------------------------------------------


@in_time
async def test_two_agents_of_one_name_are_not_mixed_up(tmp_path):
    async with (
        collecting() as collector,
        agents(tmp_path / "1", "a") as (one,),
        agents(tmp_path / "2", "a") as (other,),
    ):
        endpoint = await collector.start("localhost")
        one.uplink.send_to(endpoint)
        await one.is_known()
        other.uplink.send_to(endpoint)
        trouble = await other.is_troubled()
        assert "another agent calls its node a, too" in trouble
        assert "--node-name" in trouble
        one.append(0, 3)
        await one.is_known()
        assert_is_the_files_bill(collector.bill, one)
        await one.uplink.close()  # it was this node after all, whose disk was replaced
        await other.is_known()
        assert other.uplink.trouble == ""


@pytest.mark.parametrize("token", ["", "wrong", "é", None, 5])
@in_time
async def test_another_jobs_agent_is_refused(tmp_path, token):
    async with collecting() as collector, agents(tmp_path, "a") as (agent,):
        endpoint = await collector.start("localhost")
        agent.uplink.send_to({**endpoint, "token": token})
        trouble = await agent.is_troubled()
        assert trouble in ("another job's collector is here", "the collector hung up")
        assert collector.bill.nodes == {}


async def connected(port: int, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    return reader, writer


async def is_hung_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):  # the end may come before all was sent
        await reader.read()
    writer.close()


def hello_of(collector: Collector, **fields: Any) -> bytes:
    return (
        json.dumps({"token": collector.token, "node": "x", "log": "1", **fields}).encode() + b"\n"
    )


@pytest.mark.parametrize(
    "data",
    [
        b"\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03\n",
        b"\xff\xfe\0\n",
        b"[]\n",
        b"{}\n",
        b"5\n",
        b"x" * 200_000,
        b"[" * 60_000 + b"\n",
        b'{"token": "x", "node": "a"}\n',
    ],
)
@in_time
async def test_garbage_is_hung_up_on_and_harms_no_other(tmp_path, data, caplog):
    async with collecting() as collector, agents(tmp_path, "a") as (agent,):
        endpoint = await collector.start("localhost")
        agent.uplink.send_to(endpoint)
        await agent.is_known()
        stranger = await connected(endpoint["port"], data)
        await is_hung_up(*stranger)
        agent.append(0, 3)
        await agent.is_known()
        assert_is_the_files_bill(collector.bill, agent)
        assert "exception" not in caplog.text.lower()


@pytest.mark.parametrize("sends", [b"", b'{"token": "'])
@in_time
async def test_whoever_does_not_say_hello_in_time_is_hung_up_on(tmp_path, monkeypatch, sends):
    """Also where a byte comes from time to time."""
    monkeypatch.setattr(collector_module, "_HELLO_S", SHORT_S)

    async def drip(writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while sends:
                writer.write(b"x")
                await asyncio.sleep(SHORT_S / 10)

    async with collecting() as collector, agents(tmp_path, "a") as (agent,):
        endpoint = await collector.start("localhost")
        strangers = [await connected(endpoint["port"], sends) for _ in range(10)]
        dripping = [asyncio.create_task(drip(writer)) for _, writer in strangers]
        agent.uplink.send_to(endpoint)
        agent.append(0, 3)
        await agent.is_known()  # meanwhile
        for stranger in strangers:
            await is_hung_up(*stranger)
        for task in dripping:
            task.cancel()
        agent.append(3)
        await agent.is_known()
        assert_is_the_files_bill(collector.bill, agent)


@in_time
async def test_a_line_without_an_end_is_not_kept(tmp_path):
    async with collecting() as collector:
        endpoint = await collector.start("localhost")
        stranger = await connected(endpoint["port"], hello_of(collector) + b"x" * 1_000_000)
        await is_hung_up(*stranger)
        assert list(collector._known_bytes.values()) == [0]
        assert collector._sending == {}


@in_time
async def test_closing_hangs_up_on_everybody(tmp_path):
    async with agents(tmp_path, "a", "b") as nodes:
        async with collecting() as collector:
            endpoint = await collector.start("localhost")
            silent = await connected(endpoint["port"], b"")
            for agent in nodes:
                agent.uplink.send_to(endpoint)
                await agent.is_known()
        await is_hung_up(*silent)
        assert not collector._connections
        nodes[0].append(0)
        assert not await nodes[0].uplink.all_known(SHORT_S)
        assert nodes[0].uplink.trouble


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


@pytest.mark.parametrize("answers", [b"", b'{"have": 0}\n'])
@in_time
async def test_a_collector_that_falls_silent_is_tried_again(tmp_path, monkeypatch, answers):
    monkeypatch.setattr(uplink_module, "_ANSWER_S", SHORT_S / 2)
    connections = asyncio.Queue[None]()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.put_nowait(None)
        writer.write(answers)
        while await reader.read(1000):
            pass

    async with (
        pretending(silent) as nowhere,
        collecting() as collector,
        agents(tmp_path, "a") as (agent,),
    ):
        agent.uplink.send_to(nowhere)
        for _ in range(3):
            await connections.get()
        assert await agent.is_troubled() == "no answer within 0.05 s"
        monkeypatch.setattr(uplink_module, "_ANSWER_S", LONG_S)
        agent.uplink.send_to(await collector.start("localhost"))
        await agent.is_known()
        assert_is_the_files_bill(collector.bill, agent)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\n",
        b"garbage\n",
        b"\xff\xfe\n",
        b"[]\n",
        b"{}\n",
        b'{"have": "x"}\n',
        b'{"have": -5}\n',
        b'{"have": null}\n',
        b'{"error": "go away"}\n',
        b"[" * 60_000 + b"\n",
        b"x" * 200_000,
    ],
)
@in_time
async def test_a_collector_that_talks_nonsense_is_tried_again(tmp_path, answer):
    connections = asyncio.Queue[None]()

    async def nonsense(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.put_nowait(None)
        await reader.readline()
        writer.write(answer)
        await writer.drain()

    async with (
        pretending(nonsense) as nowhere,
        collecting() as collector,
        agents(tmp_path, "a") as (agent,),
    ):
        agent.uplink.send_to(nowhere)
        for _ in range(2):
            await connections.get()
        assert await agent.is_troubled()
        assert not agent.uplink._task.done()
        agent.append(0)
        agent.uplink.send_to(await collector.start("localhost"))
        await agent.is_known()
        assert_is_the_files_bill(collector.bill, agent)


@pytest.mark.parametrize(
    "bad",
    [
        {"port": 70_000},
        {"port": None},
        {"port": [1]},
        {"host": 5},
        {"host": "no such host.invalid"},
        {"host": "x" * 300},
    ],
)
@in_time
async def test_an_endpoint_that_is_none_is_told_of(tmp_path, bad):
    async with collecting() as collector, agents(tmp_path, "a") as (agent,):
        endpoint = await collector.start("localhost")
        agent.uplink.send_to({**endpoint, **bad})
        assert await agent.is_troubled()
        agent.uplink.send_to(endpoint)
        await agent.is_known()
