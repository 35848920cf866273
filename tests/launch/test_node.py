"""A node's launcher around a made-up torchrun: its bill and exit status, whatever happens."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
from agent_ranks import Nodes
from energy_lines import parsed, window

from envpipe_megatron.child import Signals
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.formats.bill import Bill
from envpipe_megatron.gpu.guard.messages import send
from envpipe_megatron.launch import bill as bill_report
from envpipe_megatron.launch import node
from envpipe_megatron.launch.agent import agent as agent_module
from envpipe_megatron.launch.agent import ledger, prometheus
from envpipe_megatron.launch.bill import BillReport, Tariff, bill_facts
from envpipe_megatron.launch.node import NodeSettings, run_node

#: A job's waits, none of which a test has the time for.
LONG_S = 1000.0


@pytest.fixture
def output(monkeypatch, tmp_path) -> Path:
    monkeypatch.setattr(node, "_OTHERS_END_S", LONG_S)
    return tmp_path / "output"


@pytest.fixture
def train(monkeypatch, output) -> Callable[..., int]:
    """Runs a node whose torchrun is one rank that trains an iteration; returns its exit status."""

    def run(
        nodes: Nodes,
        *,
        others: bool = False,
        code: int = 0,
        options: Sequence[str] = (),
        meanwhile: Callable[..., None] = lambda *given: None,
        hangs: Callable[..., None] = lambda *given: None,
        **settings: Any,
    ) -> int:
        def torchrun(arguments: object, environment: dict[str, str], signals: Signals) -> int:
            meanwhile(arguments, environment, signals)
            agent: Any = SimpleNamespace(
                address=environment["ENVPIPE_AGENT_SOCKET"], log=SimpleNamespace(node="n0")
            )
            rank = nodes.rank(agent, nodes.gpu()).say_hello()
            endpoint = rank.collect("127.0.0.1")
            send(rank.connection, {"op": "send_to", "endpoint": endpoint})
            if others:
                other = nodes.rank(nodes.agent("n1"), nodes.gpu(1), 1).say_hello()
                send(other.connection, {"op": "send_to", "endpoint": endpoint})
                other.say_hello()  # answered after what was sent before it
                until = other.agent._holds(other.agent.uplink.knows_all, LONG_S)
                assert asyncio.run_coroutine_threadsafe(until, other.agent._loop).result()
            rank.train(0)
            rank.bye()
            hangs()
            return code

        monkeypatch.setattr(node, "run_torchrun", torchrun)
        return run_node([*options, "--", "train.py"], NodeSettings(output, "n0", **settings))

    return run


def notes(output: Path) -> list[str]:
    lines = map(json.loads, (output / "energy-n0.jsonl").read_text().splitlines())
    return [entry["note"] for entry in lines if "note" in entry]


def exit_codes(output: Path) -> list[int]:
    lines = map(json.loads, (output / "energy-n0.jsonl").read_text().splitlines())
    return [entry["exit_code"] for entry in lines if "exit_code" in entry]


def bill_of(output: Path) -> dict[str, Any]:
    return json.loads((output / "bill.json").read_text())


@pytest.mark.parametrize("wanted", [True, False])
def test_a_nodes_settings_and_torchruns_environment(
    nodes, train, output, monkeypatch, capfd, wanted
):
    served, given = [], []

    def serve(agent: Any, address: str, port: int, job: str, tariff: Any) -> Callable[[], None]:
        served.append((agent.log.node, address, port, job, tariff.price_per_kwh))
        return lambda: served.append("ended")

    def meanwhile(arguments: object, environment: dict[str, str], signals: Signals) -> None:
        given.append((arguments, signals.until_stdin_ends))
        own = {"ENVPIPE_AGENT_SOCKET", "ENVPIPE_JOB_NAME"}
        assert environment.keys() == {*os.environ, *own}
        assert environment["ENVPIPE_JOB_NAME"] == settings.get("job_name", "")

    monkeypatch.setattr(prometheus, "serve_metrics", serve)
    monkeypatch.setattr(Signals, "_watch_stdin", lambda self: None)
    settings: dict[str, Any] = {"prometheus_port": None, "bill_interval": 0}
    if wanted:
        settings = {
            "bill_interval": 1, "price_per_kwh": 3.6e6, "grid_g_per_kwh": 7.2e6,
            "prometheus_port": 9, "prometheus_address": "::1", "until_stdin_ends": True,
            "job_name": "j",
        }  # fmt: skip
    assert train(nodes, meanwhile=meanwhile, **settings) == 0
    assert given == [(["--", "train.py"], wanted)]
    assert served == ([("n0", "::1", 9, "j", 3.6e6), "ended"] if wanted else [])
    job = bill_of(output)["job"]
    assert job.get("cost") == (pytest.approx(job["energy_j"]) if wanted else None)
    assert job.get("co2_g") == (pytest.approx(2 * job["energy_j"]) if wanted else None)
    assert ("] 1 iterations: " in capfd.readouterr().err) is wanted


@pytest.mark.parametrize("ends", [True, False])
def test_a_node_ends_behind_the_guards_of_its_ranks(
    nodes, train, output, monkeypatch, caplog, ends
):
    """Its end may kill them, where it is the first process of a container."""
    guard, gone = (subprocess.Popen(["sleep", "1000"]) for _ in range(2))
    gone.kill()
    gone.wait()

    def lease(gpu: str, **other: Any) -> SimpleNamespace:
        own = {"rank": SimpleNamespace(is_alive=lambda: False), "guard": guard, "live": True}
        address = SimpleNamespace(uid=gpu)
        return SimpleNamespace(**{**own, "uid": os.geteuid(), "address": address, **other})

    leases = [
        lease("of a rank that lives", rank=SimpleNamespace(is_alive=lambda: True)),
        lease("of another container", rank=SimpleNamespace(is_alive=lambda: None)),
        lease("of a command", rank=None),
        lease("without a guard", live=False),
        lease("of a stranger", uid=os.geteuid() + 1),
        lease("whose guard has just ended", guard=gone),
        lease("of ours"),
    ]
    monkeypatch.setattr(node, "list_leases", lambda: leases)
    monkeypatch.setattr(node, "_GUARDS_S", LONG_S if ends else 0.01)
    if ends:
        guard.kill()
    assert train(nodes) == 0
    guard.kill()
    guard.wait()
    said = [record.getMessage() for record in caplog.records if "reset yet" in record.getMessage()]
    assert said == ([] if ends else ["of ours is not reset yet by its guard"])


class Ended:
    """An agent at its end."""

    def __init__(
        self, *own_j: float, late: list[str] | None = None, bill: Any = None, why: str = ""
    ) -> None:
        self.log = SimpleNamespace(path="its log")
        self.finished: list[tuple[int, float]] = []
        ledgers = [SimpleNamespace(energy_j=energy_j) for energy_j in own_j]
        self.gpus = SimpleNamespace(ledgers=lambda: ledgers)
        self.uplink = SimpleNamespace(why_unknown=lambda: why)
        self._late, self.bill = late or [], bill

    def finish(self, exit_code: int, wait_s: float) -> list[str]:
        self.finished.append((exit_code, wait_s))
        return self._late


def end(agent: Any, code: int, report: Any = None) -> None:
    codes: SimpleQueue[int] = SimpleQueue()
    codes.put(code)
    node._bill(agent, report, codes)


@pytest.mark.parametrize(
    ("agent", "code", "said"),
    [
        (Ended(), 0, ["no rank of this node reported any training"]),
        (Ended(), 3, []),
        (Ended(1.25, 2.5), 0, ["3.8 J on this node, in its log\n"]),
        (
            Ended(1.0, why="why"),
            5,
            ["1.0 J on this node, in its log\n", "the job's bill may lack them: why\n"],
        ),
    ],
)
def test_what_a_node_says_that_has_no_bill(output, capfd, agent, code, said):
    end(agent, code)
    lines = capfd.readouterr().err.splitlines(keepends=True)
    assert len(lines) == len(said)
    assert all(f"[envpipe] {text}" in line for text, line in zip(said, lines, strict=True))
    assert agent.finished == [(code, LONG_S)]


def test_nodes_that_are_late_are_named_with_the_bill(output, caplog):
    told: list[object] = []
    agent = Ended(1.0, late=["n1", "n2"], bill="the bill")
    end(agent, 0, SimpleNamespace(look=lambda bill: None, end=told.append))
    assert told == ["the bill"]
    assert [record.getMessage()[:21] for record in caplog.records] == [
        "n1 did not end in tim", "n2 did not end in tim"
    ]  # fmt: skip


@pytest.mark.parametrize("collects", [True, False])
def test_a_terminal_that_is_stopped_holds_up_nothing(tmp_path, monkeypatch, collects):
    """What is shown and written late is of the time of its line; others are left out meanwhile."""
    goes_on, asked, told = threading.Event(), threading.Semaphore(0), []

    def say(text: str) -> None:
        told.append(text)
        assert goes_on.wait(LONG_S)

    class Asked(Bill):
        def snapshot(self) -> Bill:
            made = super().snapshot()
            asked.release()
            return made

    monkeypatch.setattr(bill_report, "say_as_launcher", say)
    monkeypatch.setattr(node, "_BILL_LOOK_S", 0.001)
    report, bill, codes = BillReport(tmp_path, Tariff(), 1), Asked(), SimpleQueue[int]()
    agent = Ended(bill=bill if collects else None)
    billing = threading.Thread(target=node._bill, args=(agent, report, codes), daemon=True)
    billing.start()
    bill.add(*parsed([window()]))
    if collects:
        assert asked.acquire(timeout=LONG_S)
        before = json.loads(json.dumps(bill_facts(bill, Tariff(), over=False)))
        for number in range(1, 1000):
            bill.add(*parsed([window(iteration=number)]))
    else:
        assert not asked.acquire(timeout=0.01)
    facts: list[Any] = []
    monkeypatch.setattr(report, "_write", lambda path, text: facts.append(text))
    goes_on.set()
    codes.put(1)
    billing.join(LONG_S)
    if not collects:
        assert facts == told == []
        return
    assert facts[0] == before
    numbers = [int(line.split()[0]) for line in told]
    assert numbers[0] == 1
    assert numbers[-1] == 1000
    assert len(numbers) <= 3, "of a thousand"


def test_a_launcher_that_gets_no_thread_shows_the_bill_at_the_end_only(
    nodes, train, output, monkeypatch, caplog
):
    def refuse(thread: Any) -> None:
        if thread._target is node._bill:
            raise RuntimeError("can't start new thread")
        start(thread)

    start = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert train(nodes) == 0
    assert "can't start new thread" in caplog.text
    assert bill_of(output)["complete"]


@pytest.mark.parametrize("interrupts", [True, False])
@pytest.mark.usefixtures("signals_at_default")
def test_signals_while_other_nodes_are_waited_for_end_the_waiting(
    nodes, train, output, monkeypatch, interrupts
):
    """And not the launcher: the bill is told, and the exit status is training's.

    A signal that comes just before the main thread waits, or to another thread, interrupts nothing.
    """
    bill, own = node._bill, signal.pthread_sigmask(signal.SIG_BLOCK, ())

    def block() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, () if interrupts else signal.valid_signals())

    def signalled(agent: Any, report: Any, codes: SimpleQueue[int]) -> None:
        code = codes.get()
        for number in (signal.SIGTERM, signal.SIGHUP):
            os.kill(os.getpid(), number)
        codes.put(code)
        bill(agent, report, codes)

    monkeypatch.setattr(node, "_bill", signalled)
    try:
        assert train(nodes, others=True, code=1, hangs=block) == 1
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, own)
    assert bill_of(output)["missing"] == [
        "n1 was lost: its energy up to its last line is in the bill"
    ]
    assert notes(output) == ["begun", "ended"]
    assert exit_codes(output) == [1]


NOT_ASCII = UnicodeEncodeError("ascii", "\u00e9", 0, 1, "ordinal not in range(128)")


@pytest.mark.parametrize("error", [SystemExit(1), BrokenPipeError("closed"), NOT_ASCII])
def test_nobody_reads_the_bill(nodes, train, output, monkeypatch, error):
    def show(*arguments: object) -> None:
        raise error

    monkeypatch.setattr(bill_report, "show_bill", show)
    assert train(nodes) == 0
    assert bill_of(output)["complete"]


@pytest.mark.parametrize("of", ["the log", "the bill"])
def test_a_disk_that_hangs_at_the_end_keeps_no_launcher(
    nodes, train, output, monkeypatch, caplog, of
):
    """It waited for ever, and the job kept its nodes."""
    mended = threading.Event()

    def hang(*call: Any) -> None:
        mended.wait(LONG_S)

    def meanwhile(*given: Any) -> None:
        module, name = (
            (ledger, "append_line") if of == "the log" else (bill_report, "replace_files")
        )
        monkeypatch.setattr(module, name, hang)

    for name in ("_OTHERS_END_S", "_DISK_S"):
        monkeypatch.setattr(node, name, 0.1)
    monkeypatch.setattr(agent_module, "_READ_S", 0.1)
    try:
        assert train(nodes, code=7, bill_interval=1, hangs=meanwhile) == 7
        assert f"the disk of {output}, or who reads" in caplog.text
    finally:
        mended.set()


def test_a_start_that_fails_is_no_lost_node(nodes, train, output, caplog):
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(EnvPipeError):
        train(nodes, prometheus_port=taken.getsockname()[1])
    assert notes(output) == ["begun", "ended"]
    assert exit_codes(output) == [1]
    assert train(nodes) == 0
    assert bill_of(output)["complete"]


def test_an_output_that_has_lines_is_told_of(nodes, train, output, capfd, caplog):
    train(nodes)
    assert "is continued" not in capfd.readouterr().err
    shutil.copy(output / "energy-n0.jsonl", output / "energy-n7.jsonl")
    train(nodes)
    assert "energy-n0.jsonl is continued" in capfd.readouterr().err
    assert "energy-n7.jsonl is not in this bill" in caplog.text


def test_a_signal_that_torchrun_is_told_to_handle_ends_no_launcher(nodes, train, output):
    def meanwhile(arguments: object, environment: object, signals: Signals) -> None:
        signals.call(lambda: passed_on.append(signals.to_pass_on), lambda: None)
        os.kill(os.getpid(), signal.SIGUSR1)

    passed_on: list[signal.Signals] = []
    options = ["--signals-to-handle", "SIGTERM,SIGUSR1"]
    assert train(nodes, options=options, meanwhile=meanwhile, code=1) == 1
    assert passed_on == [signal.SIGUSR1]
    assert bill_of(output)["complete"]


# Signals -------------------------------------------------------------------------------------
@pytest.fixture
def stdin() -> Iterator[int]:
    """Standard input is a pipe, whose other end this is."""
    before, (its_end, end) = os.dup(0), os.pipe()
    os.dup2(its_end, 0)
    os.close(its_end)
    yield end
    with contextlib.suppress(OSError):  # a test has closed it
        os.close(end)
    os.dup2(before, 0)
    os.close(before)


@pytest.mark.parametrize("already", [True, False])
def test_the_end_of_standard_input_is_a_sigterm(stdin, already):
    taken = threading.Event()
    with Signals(until_stdin_ends=True) as signals:
        if already:
            os.close(stdin)
        signals.call(taken.set, pytest.fail)
        if not already:
            os.write(stdin, b"x" * 5000)  # is passed over
            assert not taken.is_set()
            os.close(stdin)
        assert taken.wait(LONG_S)
        assert signals.to_pass_on is signal.SIGTERM


def test_standard_input_that_ends_later_means_nothing(stdin):
    taken: list[str] = []
    with Signals(until_stdin_ends=True) as signals:
        signals.call(lambda: taken.append("first"), lambda: taken.append("again"))
        watching = signals._watch
        assert watching is not None
        assert watching.daemon
    os.close(stdin)
    watching.join(LONG_S)
    assert not taken


def test_a_signal_that_means_nothing_yet_ends_the_process():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended, Signals():
        os.kill(os.getpid(), signal.SIGTERM)
    assert ended.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before
