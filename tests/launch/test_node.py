"""A node's launcher around a made-up torchrun: its bill and exit status, whatever happens."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from agent_ranks import Nodes

from envpipe_megatron.gpu.guard_protocol import GuardError, send
from envpipe_megatron.launch import bill_report, node
from envpipe_megatron.launch.node import NodeSettings, run_node
from envpipe_megatron.launch.prometheus import MetricsError
from envpipe_megatron.launch.signals import Signals

#: A job's waits, none of which a test has the time for.
LONG_S = 1000.0


@pytest.fixture
def output(monkeypatch) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="node-", dir="/tmp"))  # a socket's path must be short
    (folder / "run").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder / "run"))
    monkeypatch.setattr(node, "_guarded", lambda name: contextlib.nullcontext("no guard"))
    monkeypatch.setattr(node, "_OTHERS_END_S", LONG_S)
    yield folder / "output"
    shutil.rmtree(folder)


@pytest.fixture
def train(monkeypatch, output) -> Callable[..., int]:
    """Runs a node whose torchrun is one rank that trains an iteration; returns its exit status."""

    def run(nodes: Nodes, *, others: bool = False, code: int = 0, **settings: Any) -> int:
        def torchrun(arguments: object, environment: dict[str, str], signals: Signals) -> int:
            agent: Any = SimpleNamespace(
                socket_path=environment["ENVPIPE_AGENT_SOCKET"], log=SimpleNamespace(node="n0")
            )
            rank = nodes.rank(agent, nodes.gpu()).say_hello()
            endpoint = rank.ask({"op": "collect", "host": "127.0.0.1"})["endpoint"]
            send(rank.connection, {"op": "send_to", "endpoint": endpoint})
            if others:
                other = nodes.rank(nodes.agent("n1"), nodes.gpu(1), 1).say_hello()
                send(other.connection, {"op": "send_to", "endpoint": endpoint})
            rank.train(0)
            rank.bye()
            return code

        monkeypatch.setattr(node, "run_torchrun", torchrun)
        return run_node([], NodeSettings(output, "n0", **settings))

    return run


def notes(output: Path) -> list[str]:
    lines = (output / "energy-n0.jsonl").read_text().splitlines()
    return [entry["note"] for line in lines if "note" in (entry := json.loads(line))]


def bill_of(output: Path) -> dict[str, Any]:
    return json.loads((output / "bill.json").read_text())


def test_a_node_from_begin_to_end(nodes, train, output):
    assert train(nodes, code=3) == 3
    assert bill_of(output)["complete"]
    assert notes(output) == ["begun", "ended"]
    assert (output / "bill.csv").exists()


def test_signals_while_other_nodes_are_waited_for_end_the_waiting(
    nodes, train, output, monkeypatch
):
    """And not the launcher: the bill is told, and the exit status is training's."""
    bill = node._bill

    def signalled(*arguments: Any) -> None:
        for number in (signal.SIGTERM, signal.SIGHUP):
            os.kill(os.getpid(), number)
        bill(*arguments)

    monkeypatch.setattr(node, "_bill", signalled)
    assert train(nodes, others=True, code=1) == 1
    assert bill_of(output)["missing"] == [
        "n1 was lost: its energy up to its last line is in the bill"
    ]
    assert notes(output) == ["begun", "ended"]


@pytest.mark.parametrize("error", [SystemExit(1), BrokenPipeError("closed")])
def test_nobody_reads_the_bill(nodes, train, output, monkeypatch, error):
    def show(*arguments: object) -> None:
        raise error

    monkeypatch.setattr(bill_report, "show_bill", show)
    assert train(nodes) == 0
    assert bill_of(output)["complete"]
    assert (output / "bill.csv").exists()


def test_one_file_that_cannot_be_written_spoils_no_other(nodes, train, output, caplog):
    (output / "bill.json").mkdir(parents=True)
    assert train(nodes) == 0
    assert "bill.json is not written" in caplog.text
    assert (output / "bill.csv").exists()
    assert json.loads((output / "bill.jsonl").read_text())["complete"]


def test_a_start_that_fails_is_no_lost_node(nodes, train, output, caplog):
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(MetricsError):
        train(nodes, prometheus_port=taken.getsockname()[1])
    assert notes(output) == ["begun", "ended"]
    assert train(nodes) == 0
    assert bill_of(output)["complete"]


def test_an_output_that_has_lines_is_told_of(nodes, train, output, capfd, caplog):
    train(nodes)
    assert "is gone on with" not in capfd.readouterr().err
    shutil.copy(output / "energy-n0.jsonl", output / "energy-n7.jsonl")
    train(nodes)
    assert "energy-n0.jsonl is gone on with" in capfd.readouterr().err
    assert "energy-n7.jsonl is not in this bill" in caplog.text


def test_a_folder_too_deep_for_sockets_is_refused(nodes, train, output, monkeypatch):
    deep = output.parent / ("x" * 90)
    deep.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    with pytest.raises(GuardError, match="shorter path"):
        train(nodes)


# Signals -------------------------------------------------------------------------------------


def test_a_guard_that_ends_is_followed_by_one_other(monkeypatch):
    guards: queue.Queue[socket.socket] = queue.Queue()

    def connect(*_: object) -> socket.socket:
        here, there = socket.socketpair()
        guards.put(there)
        return here

    monkeypatch.setattr(node, "connect_to_guard", connect)
    with node._guarded("n0"):
        with guards.get(timeout=LONG_S) as first:
            first.settimeout(0.1)
            with pytest.raises(TimeoutError):  # while it lives, it is kept
                first.recv(1)
        second = guards.get(timeout=LONG_S)
    assert second.recv(1) == b""
    assert guards.empty()
    second.close()


def test_without_another_guard_the_node_goes_on(monkeypatch):
    here, there = socket.socketpair()
    ends, failed = iter([here]), []
    ended = threading.Event()
    monkeypatch.setattr(node, "connect_to_guard", lambda *_: next(ends))
    monkeypatch.setattr(node.logger, "exception", lambda *_: ended.set())
    monkeypatch.setattr(threading, "excepthook", failed.append)
    with node._guarded("n0"):
        there.close()
        assert ended.wait(LONG_S)
    assert not failed


def test_the_first_signal_and_the_others():
    taken: list[str] = []
    before = signal.getsignal(signal.SIGTERM)
    with Signals() as signals:
        signals.call(lambda: taken.append("first"), lambda: taken.append("again"))
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(os.getpid(), number)
        signals.call(lambda: taken.append("first of others"), lambda: None)
        os.kill(os.getpid(), signal.SIGTERM)
    assert taken == ["first", "again", "again", "first of others"]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_that_means_nothing_yet_ends_the_process():
    with pytest.raises(SystemExit) as ended, Signals():
        os.kill(os.getpid(), signal.SIGTERM)
    assert ended.value.code == 128 + signal.SIGTERM
