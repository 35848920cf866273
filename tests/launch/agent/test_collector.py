"""The job's collector, over real loopback TCP: sums, and those who are none of its agents."""

import asyncio
import contextlib
import json
import socket

import pytest
from collecting_nodes import (
    SHORT_S,
    agents,
    assert_is_the_files_bill,
    collecting,
    connected,
    holds,
    in_time,
    is_hung_up,
    piece_of,
)
from energy_lines import window

from envpipe_megatron.launch.agent import collector as collector_module

# In order ------------------------------------------------------------------------------------


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
async def test_why_a_collector_does_not_know_all(tmp_path):
    async with collecting() as collector, agents(tmp_path, "a") as (agent,):
        assert agent.uplink.endpoint is None  # nobody ever said where to
        assert "runs no collector" in agent.uplink.why_unknown()
        endpoint = await collector.start("localhost")
        agent.uplink.send_to({**endpoint, "token": "wrong"})
        assert not await holds(agent.uplink.knows_all, SHORT_S)
        assert await collector.start("localhost") == endpoint  # asked for again
        agent.uplink.send_to(endpoint)
        await agent.is_known()
        sending = agent.uplink._task
        agent.uplink.send_to(dict(endpoint))  # told of again
        assert agent.uplink._task is sending
        assert agent.uplink.why_unknown() == ""


@pytest.mark.parametrize("both", [True, False])
@in_time
async def test_a_machine_without_ipv6_will_do(monkeypatch, both):
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: both)
    async with collecting() as collector:
        endpoint = await collector.start("localhost")
        reader, writer = await connected(endpoint["port"], piece_of(collector))
        assert json.loads(await reader.readline()) == {"have": 0}
        writer.close()


# Cut connections


@in_time
async def test_a_node_that_lost_its_power_is_noticed():
    """Nobody closes its connection: the kernel asks whether it is still there."""
    async with collecting() as collector:
        endpoint = await collector.start("localhost")
        reader, writer = await connected(endpoint["port"], piece_of(collector))
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
async def test_what_comes_late_over_a_cut_connection_counts_once():
    """An agent has given it up and connects anew, of which the network has told it alone."""
    async with collecting() as collector:
        port = (await collector.start("localhost"))["port"]
        pieces = [piece_of(collector, at, window()) for at in (0, 1)]
        old, new = [await connected(port, pieces[0]) for _ in range(2)]
        for reader, _ in (old, new):
            assert json.loads(await reader.readline()) == {"have": 1}
        for reader, writer in (new, old):
            writer.write(pieces[1])
            assert json.loads(await reader.readline()) == {"have": 2}
        assert collector.bill.total().windows == 2
        for _, writer in (old, new):
            writer.close()


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
        trouble = await other.failure()
        assert "another agent calls its node a, too" in trouble
        assert "--node-name" in trouble
        one.append(0, 3)
        await one.is_known()
        assert_is_the_files_bill(collector.bill, one)
        await one.hang_up()  # it was this node after all, whose disk was replaced
        await other.is_known()
        assert other.uplink.failure == ""


@pytest.mark.parametrize("token", ["", "wrong", "é", None, 5])
@in_time
async def test_another_jobs_agent_is_refused(tmp_path, token):
    async with collecting() as collector, agents(tmp_path, "a") as (agent,):
        endpoint = await collector.start("localhost")
        agent.uplink.send_to({**endpoint, "token": token})
        trouble = await agent.failure()
        assert trouble in ("another job's collector is here", "the collector hung up")
        assert collector.bill.nodes == {}


@pytest.mark.parametrize(
    "data",
    [b"GET / HTTP/1.1\r\n\r\n", b"\xff\n", b"[]\n", b"x" * 5_000_000, b"[" * 60_000 + b"\n"],
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


@in_time
async def test_whoever_does_not_say_hello_in_time_is_hung_up_on(tmp_path, monkeypatch):
    """Also where a byte comes from time to time."""
    monkeypatch.setattr(collector_module, "_HELLO_S", SHORT_S)
    async with collecting() as collector, agents(tmp_path, "a") as (agent,):
        endpoint = await collector.start("localhost")
        agent.uplink.send_to(endpoint)
        silent, (reader, writer) = [await connected(endpoint["port"], b"") for _ in range(2)]
        with contextlib.suppress(ConnectionError):
            while not (reader.at_eof() or writer.is_closing()):
                writer.write(b"x")
                await asyncio.sleep(SHORT_S / 10)
        for stranger in (silent, (reader, writer)):
            await is_hung_up(*stranger)
        agent.append(0, 3)
        await agent.is_known()
        assert_is_the_files_bill(collector.bill, agent)


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
        assert not await holds(nodes[0].uplink.knows_all, SHORT_S)
        assert await nodes[0].failure()
