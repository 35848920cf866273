"""A node's agent at its Unix socket: what ranks say, do not say, and how they end."""

import asyncio
import contextlib
import errno
import json
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from agent_ranks import LONG_S, Rank, connect
from open_files import open_files

from envpipe_megatron.formats.bill import Bill
from envpipe_megatron.formats.energy import read_energy_logs
from envpipe_megatron.gpu.guard.messages import receive, send
from envpipe_megatron.launch.agent import agent as agent_module
from envpipe_megatron.launch.agent import ledger as ledger_module
from envpipe_megatron.launch.agent.agent import NodeAgent


def until(condition: Callable[[], Any]) -> None:
    """For what happens on the agent's thread and tells nobody."""
    give_up_s = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < give_up_s
        time.sleep(0.002)


def ranks_have_ended(agent: NodeAgent) -> None:
    until(lambda: not agent.connected())


def lines(agent: NodeAgent) -> list[dict[str, Any]]:
    return [json.loads(line) for line in agent.log.path.read_text().splitlines()]


def kinds(agent: NodeAgent) -> list[str]:
    return [line.get("phase", line.get("note")) for line in lines(agent)]


def bill(*agents: NodeAgent) -> Bill:
    return Bill(read_energy_logs([agent.log.path for agent in agents]).lines)


def test_a_rank_from_hello_to_bye(nodes):
    agent, gpu = nodes.agent(), nodes.gpu()
    rank = nodes.rank(agent, gpu)
    until(agent.connected)
    assert agent.connected() == [f"process {os.getpid()}"]
    rank.say_hello()
    assert agent.connected() == ["rank 0"]
    send(rank.connection, {"op": "job", "facts": {"num_gpus": 1}})
    gpu.advance_to(gpu.time_s() + 0.35)
    for iteration in range(3):
        rank.train(iteration)
    rank.bye()
    ranks_have_ended(agent)
    assert agent.finish(0, 0.0) == []
    assert kinds(agent) == ["begun", "job", "between", *["steady"] * 3, "ended"]
    made = bill(agent)
    assert made.total().energy_j == pytest.approx(nodes.counted_j(gpu), rel=1e-12)
    assert made.missing() == []
    assert made.num_iterations == 3
    (line,) = [line for line in lines(agent) if line.get("phase") == "between"]
    metered = ("begin_s", "duration_s", "energy_j", "energy_uncertainty_j", "idle_s")
    assert {key: value for key, value in line.items() if key not in metered} == {
        "format": "envpipe-energy/1", "phase": "between", "node": "n0", "gpu": gpu.name,
        "gpu_uid": gpu.address.uid, "rank": 0, "stage": 0, "first_iteration": 0,
        "last_iteration": 0, "compute_s": 0.0, "blocking_s": 0.0,
    }  # fmt: skip
    assert agent.bill is None


def test_a_rank_that_starts_again_goes_on_where_the_bill_ended(nodes):
    agent, gpu = nodes.agent(), nodes.gpu()
    for start in range(3):
        rank = nodes.rank(agent, gpu, start).say_hello()
        rank.train(start)
        rank.connection.close()
        ranks_have_ended(agent)
        gpu.advance_to(gpu.time_s() + 1.0)
    agent.finish(0, 0.0)
    assert len(agent.gpus.ledgers()) == 1
    assert bill(agent).total().energy_j == pytest.approx(nodes.counted_j(gpu), rel=1e-12)
    ranks = [line["rank"] for line in lines(agent) if line.get("phase") == "steady"]
    assert ranks == [0, 1, 2]
    # What lies between is of the rank that comes next.
    between = [line["rank"] for line in lines(agent) if line.get("phase") == "between"]
    assert sorted(set(between)) == [1, 2]


NONSENSE = [
    b"garbage",
    b"{}",
    b'{"op": "lock", "mhz": 1000}',
    b'{"op": ["hello"]}',
    b'{"op": "send_to", "endpoint": 5}',
    b'{"op": "job"}',
    b"x" * 20_000,
]


@pytest.mark.parametrize("data", NONSENSE)
def test_a_rank_that_talks_nonsense_is_hung_up_on_and_billed(nodes, data, caplog):
    agent, gpus = nodes.agent(), [nodes.gpu(0), nodes.gpu(1)]
    mad, sane = (nodes.rank(agent, gpu, index).say_hello() for index, gpu in enumerate(gpus))
    mad.train(0)
    mad.connection.send(data)
    assert mad.is_hung_up()
    sane.train(0)
    sane.bye()
    ranks_have_ended(agent)
    assert caplog.text.count("rank 0: ") == 1
    assert bill(agent).total().energy_j == pytest.approx(nodes.counted_j(*gpus), rel=1e-12)
    assert "never retrieved" not in caplog.text


def test_what_a_rank_says_before_hello_is_not_taken(nodes, caplog):
    agent, gpu = nodes.agent(), nodes.gpu()
    rank = nodes.rank(agent, gpu)
    rank.train(0)
    assert rank.is_hung_up()
    ranks_have_ended(agent)
    assert kinds(agent) == ["begun"]
    assert agent.gpus.ledgers() == []


@pytest.mark.parametrize("bad", [{"gpu_uid": "/nowhere#0"}, {"rank": [1]}, {"gpu": 5}])
def test_a_rank_whose_gpu_cannot_be_billed_is_told_so(nodes, bad, caplog):
    """It writes an energy log of its own then."""
    agent, gpu = nodes.agent(), nodes.gpu()
    rank = nodes.rank(agent, gpu)
    send(rank.connection, rank.hello(**bad))
    assert rank.is_hung_up()
    ranks_have_ended(agent)
    assert "Error" in caplog.text
    nodes.rank(agent, gpu).say_hello().bye()


def test_another_user_is_not_served(nodes, monkeypatch):
    """Who has a name of that kind may connect: it is no file."""
    agent, gpu = nodes.agent(), nodes.gpu()
    monkeypatch.setattr(agent_module, "peer_uid_and_pid", lambda _: (os.geteuid() + 1, 1))
    rank = nodes.rank(agent, gpu)
    with contextlib.suppress(OSError):  # the agent may be faster
        send(rank.connection, rank.hello())
    with contextlib.suppress(ConnectionError):  # what was sent is not read
        assert rank.is_hung_up()
    assert agent.gpus.ledgers() == []


def test_a_rank_that_talks_without_end_holds_up_no_other(nodes, monkeypatch):
    """There is always one more message of it."""
    talks: list[socket.socket] = []

    def received(connection: socket.socket) -> dict[str, Any] | None:
        if connection in talks:
            return {"op": "window", "line": {}}
        message = receive(connection)
        if message == {"op": "job", "facts": {"talks": True}}:
            talks.append(connection)
        return message

    monkeypatch.setattr(agent_module, "receive", received)
    agent, gpus = nodes.agent(), [nodes.gpu(0), nodes.gpu(1)]
    talker = nodes.rank(agent, gpus[0]).say_hello()
    send(talker.connection, {"op": "job", "facts": {"talks": True}})
    try:
        nodes.rank(agent, gpus[1], 1).say_hello().bye()
        assert talks
    finally:
        talks.clear()


def test_an_agent_without_room_for_files_takes_ranks_when_there_is_some(nodes, monkeypatch):
    loop_type = asyncio.selector_events.BaseSelectorEventLoop
    accept, failures = loop_type.sock_accept, [errno.EMFILE] * 3

    async def crowded(loop, listener):
        accepted = await accept(loop, listener)
        if failures:
            accepted[0].close()
            raise OSError(failures.pop(), "Too many open files")
        return accepted

    monkeypatch.setattr(loop_type, "sock_accept", crowded)
    agent, gpu = nodes.agent(), nodes.gpu()
    for _ in range(3):
        assert nodes.rank(agent, gpu).is_hung_up()
    nodes.rank(agent, gpu).say_hello().bye()


def test_a_disk_that_takes_nothing_is_told_of_once_and_its_energy_is_billed_later(
    nodes, monkeypatch, caplog
):
    agent, gpu = nodes.agent(), nodes.gpu()
    rank = nodes.rank(agent, gpu).say_hello()
    tried = threading.Semaphore(0)

    def full(path: Path, entry: object) -> None:
        tried.release()
        raise OSError(errno.ENOSPC, "No space left on device")

    send(rank.connection, {"op": "window", "line": {}})  # which is none, and hangs nobody up
    for times in (2, 3):
        with monkeypatch.context() as filled:
            filled.setattr(ledger_module, "append_line", full)
            for iteration in range(3):
                rank.train(iteration)
                assert tried.acquire(timeout=LONG_S)
        rank.train(3)
        until(lambda written=2 * times - 2: len(lines(agent)) > written)
        assert caplog.text.count("cannot take a line") == times
    rank.bye()
    ranks_have_ended(agent)
    assert bill(agent).total().energy_j == pytest.approx(nodes.counted_j(gpu), rel=1e-12)


def test_a_disk_that_hangs_for_three_minutes_costs_no_joule_and_holds_no_rank_up(
    nodes, monkeypatch
):
    """A window a second, which a rank sends without a wait; what has no room is `between`."""
    agent, gpu = nodes.agent(), nodes.gpu()
    rank = nodes.rank(agent, gpu).say_hello()
    append, hangs, goes_on = ledger_module.append_line, threading.Event(), threading.Event()

    def hang(path: Path, entry: dict[str, Any]) -> None:
        hangs.set()
        assert goes_on.wait(LONG_S)
        append(path, entry)

    monkeypatch.setattr(ledger_module, "append_line", hang)
    rank.train(0)
    assert hangs.wait(LONG_S)
    rank.connection.setblocking(False)
    lost = 0
    for second in range(1, 181):
        try:
            rank.train(second, work_s=1.0)
        except BlockingIOError:
            lost += 1
    assert lost < 90
    goes_on.set()
    rank.connection.settimeout(LONG_S)
    rank.bye()
    ranks_have_ended(agent)
    made = bill(agent)
    assert made.num_iterations == 181 - lost
    assert made.total().energy_j == pytest.approx(nodes.counted_j(gpu), rel=1e-12)


def test_what_no_window_has_for_long_is_billed_while_the_rank_goes_on(nodes, monkeypatch):
    """An evaluation, of which a node that is lost would otherwise leave nothing."""
    monkeypatch.setattr(agent_module, "_TICK_S", 0.01)
    agent, gpu = nodes.agent(), nodes.gpu()
    nodes.rank(agent, gpu).say_hello().train(0)
    gpu.advance_to(gpu.time_s() + 301)
    until(lambda: kinds(agent) == ["begun", "steady", "between"])
    assert agent.connected()
    assert bill(agent).total().energy_j == pytest.approx(nodes.counted_j(gpu), rel=1e-12)


def test_a_driver_that_hangs_holds_no_end_up(nodes, monkeypatch):
    monkeypatch.setattr(agent_module, "_READ_S", 0.01)
    agent, gpu = nodes.agent(), nodes.gpu()
    rank = nodes.rank(agent, gpu).say_hello()
    goes_on = threading.Event()
    (ledger,) = agent.gpus.ledgers()
    monkeypatch.setattr(ledger.gpu, "read_energy", lambda: goes_on.wait(LONG_S))
    rank.train(0)
    rank.bye()
    agent.finish(1, 0.0)
    agent.close()
    goes_on.set()
    assert kinds(agent) == ["begun", "steady", "ended"]


def test_nothing_follows_the_end_of_a_bill(nodes):
    """Neither of a rank that no signal could end."""
    agent, gpus = nodes.agent(), [nodes.gpu(0), nodes.gpu(1)]
    left = [nodes.rank(agent, gpu, index).say_hello() for index, gpu in enumerate(gpus)]
    for rank in left:
        rank.train(0)
    agent.finish(137, 0.0)
    assert agent.connected() == []
    for rank in left:
        assert rank.is_hung_up()
    total_j = nodes.counted_j(*gpus)
    gpus[0].run_unit("forward", 1.0, 0.0)
    agent.close()
    assert kinds(agent)[-1] == "ended"
    assert lines(agent)[-1]["exit_code"] == 137
    assert bill(agent).total().energy_j == pytest.approx(total_j, rel=1e-12)


def test_nothing_is_left_behind(nodes):
    def left() -> tuple[Counter[str], set[str]]:
        for thread in threading.enumerate():
            if thread.name.startswith(("asyncio", "envpipe-reading")):  # not waited for
                thread.join(LONG_S)
        return open_files(nodes.folder, "socket:"), {t.name for t in threading.enumerate()}

    gpus = [nodes.gpu(0), nodes.gpu(1)]
    before = left()
    for _ in range(3):
        agent = nodes.agent()
        ranks = [nodes.rank(agent, gpu, index).say_hello() for index, gpu in enumerate(gpus)]
        stranger = connect(agent)
        ranks[0].train(0)
        agent.close()
        agent.close()
        assert all(rank.is_hung_up() for rank in ranks)
        for rank in ranks:
            rank.close()
        stranger.close()
        files, threads = left()
        assert files <= before[0]  # an earlier test's may be closed meanwhile
        assert threads <= before[1]
    assert "ended" not in kinds(agent)
    assert bill(agent).missing()[0].startswith("n0 was lost")


def test_agents_of_one_name_and_folder_bill_their_own_nodes(nodes, caplog):
    """Of two live jobs, or where NFS keeps the lock of a machine that died: jobs were refused."""
    agents = [nodes.agent() for _ in range(3)]
    assert [agent.log.path.name for agent in agents] == [
        "energy-n0.jsonl", "energy-n0.2.jsonl", "energy-n0.3.jsonl"
    ]  # fmt: skip
    assert caplog.text.count("energy-n0.jsonl: its node is not this one") == 2
    for index, agent in enumerate(agents):
        rank = nodes.rank(agent, nodes.gpu(index), index).say_hello()
        rank.train(0)
        rank.bye()
    for index, agent in enumerate(agents):
        agent.finish(0, 0.0)
        (own,) = bill(agent).nodes
        assert own == ("n0", "n0.2", "n0.3")[index]
    assert bill(*agents).missing() == []
    agents[0].close()
    assert nodes.agent().log.node == "n0"


def two_nodes(nodes) -> tuple[NodeAgent, NodeAgent, list[Rank]]:
    """Agents `a` and `b`, each with a rank and a GPU; that of `a` collects."""
    a, b = nodes.agent("a"), nodes.agent("b")
    ranks = [nodes.rank(agent, nodes.gpu(i), i).say_hello() for i, agent in enumerate((a, b))]
    send_to_first(ranks)
    return a, b, ranks


def send_to_first(ranks: list[Rank]) -> None:
    endpoint = ranks[0].collect()
    for rank in ranks:
        send(rank.connection, {"op": "send_to", "endpoint": endpoint})


def test_the_agent_of_rank_0_gets_the_jobs_bill(nodes):
    a, b, ranks = two_nodes(nodes)
    for rank in ranks:
        for iteration in range(3):
            rank.train(iteration)
        rank.bye()
    for agent in (a, b):
        ranks_have_ended(agent)
    until(lambda: a.bill.snapshot().total().energy_j > 0)
    assert b.finish(0, LONG_S) == []
    assert a.finish(0, LONG_S) == []
    assert (b.bill, b.uplink.why_unknown(), a.uplink.why_unknown()) == (None, "", "")
    assert a.bill is not None
    assert a.bill.total() == bill(a, b).total()
    counted_j = nodes.counted_j(*(rank.gpu for rank in ranks))
    assert a.bill.total().energy_j == pytest.approx(counted_j, rel=1e-12)
    assert a.bill.missing() == []


def test_a_node_that_does_not_end_is_named_and_the_bill_that_is_shown_stays(nodes):
    """Though the node that was late goes on."""
    a, b, ranks = two_nodes(nodes)
    until(lambda: a.bill is not None and "b" in a.bill.nodes)
    assert a.finish(0, 0.05) == ["b"]
    assert a.bill is not None
    assert [reason.split(" was lost")[0] for reason in a.bill.missing()] == ["b"]
    shown = a.bill.total()
    ranks[1].train(0)
    ranks[1].bye()
    b.finish(0, 0.05)
    assert b.uplink.why_unknown()
    assert kinds(b)[-1] == "ended"
    assert b.gpus.ledgers()[0].energy_j == pytest.approx(nodes.counted_j(ranks[1].gpu), rel=1e-12)
    assert a.bill.total() == shown


def test_a_bill_that_the_own_nodes_lines_do_not_reach_is_incomplete(nodes):
    agent = nodes.agent("a")
    rank = nodes.rank(agent, nodes.gpu(0), 0).say_hello()
    endpoint = rank.collect()
    send(rank.connection, {"op": "send_to", "endpoint": {**endpoint, "port": 1}})  # nobody's
    rank.train(0)
    rank.bye()
    ranks_have_ended(agent)
    assert agent.finish(0, 0.05) == ["a"]
    assert [reason.split(" was lost")[0] for reason in agent.bill.missing()] == ["a"]


def test_a_log_that_another_host_of_its_nfs_deletes_costs_no_bill(nodes, monkeypatch, caplog):
    """What is written later is lost, and the bill says so."""
    a, b, ranks = two_nodes(nodes)
    for rank in ranks:
        rank.train(0)
        rank.bye()
    for agent in (a, b):
        ranks_have_ended(agent)
        until(agent.uplink.knows_all)
    assert a.bill is not None
    known = a.bill.snapshot().total()
    deleted = property(lambda log: Path(os.strerror(errno.ESTALE), log.node, "file"))
    monkeypatch.setattr(ledger_module.NodeLog, "_file", deleted)
    b.finish(0, 0.05)
    assert sorted(a.finish(0, 0.05)) == ["a", "b"]
    assert a.bill.total() == known
    assert [reason.split(" was lost")[0] for reason in a.bill.missing()] == ["a", "b"]
    assert "energy log cannot take a line" in caplog.text


def test_where_the_job_goes_on_with_another_rank_0_one_agent_has_the_bill(nodes):
    """The former one neither waits for others nor writes a bill of its own."""
    a, b, ranks = two_nodes(nodes)
    for first, second in ((a, b), (b, a)):
        for rank in ranks:
            rank.train(0)
            rank.bye()
        for agent in (a, b):
            ranks_have_ended(agent)
        assert first.bill is not None
        assert second.bill is None
        if first is a:
            gpus = [rank.gpu for rank in ranks]
            ranks = [nodes.rank(b, gpus[1], 0).say_hello(), nodes.rank(a, gpus[0], 1).say_hello()]
            send_to_first(ranks)
    begin_s = time.monotonic()
    assert a.finish(0, 3 * LONG_S) == []
    assert b.finish(0, 3 * LONG_S) == []
    assert time.monotonic() - begin_s < LONG_S
    assert b.bill is not None
    assert b.bill.total() == bill(a, b).total()
    assert b.bill.missing() == []
