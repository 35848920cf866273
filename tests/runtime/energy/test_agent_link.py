"""What a rank tells its node's agent, and that it never waits for it."""

import contextlib
import errno
import json
import os
import queue
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import pytest
from fake_gpu import FakeGpu

from envpipe_megatron.gpu.base import ClockState
from envpipe_megatron.gpu.guard.messages import AGENT_VARIABLE
from envpipe_megatron.runtime.energy import agent_link
from envpipe_megatron.runtime.energy.agent_link import AgentLink, connect_to_agent

LONG_S = 20.0
ENDPOINT = {"host": "n0", "port": 5, "token": "t"}
WELCOME = {"event": "welcome", "node": "n0", "endpoint": None}
COLLECTING = {**WELCOME, "endpoint": ENDPOINT}
LABELS = {"rank": 3, "stage": 1}
#: Node and GPU of the rank under test.
OWN = ("n0", "fake#0")


class Ranks:
    """Collectives of a rank, and what the ranks of other nodes say.

    Args:
        others: for each other rank, the endpoint that it knows, or that and the GPU that is billed.
        is_planner: whether this rank is.
    """

    def __init__(self, *others: Any, is_planner: bool = True) -> None:
        self.is_planner = is_planner
        self.others = [
            other if isinstance(other, tuple) else (other, ("n1", f"fake#{index}"))
            for index, other in enumerate(others)
        ]
        self.gathered: list[Any] = []

    def from_planner(self, endpoint: Any) -> Any:
        self._endpoint = endpoint
        return endpoint if self.is_planner else self.others[0][0]

    def all_to_planner(self, billed: Any) -> list[list[Any]]:
        self.gathered.append((self._endpoint, billed))
        return [[billed], [billed for _, billed in self.others]] if self.is_planner else []


class PretendedAgent:
    """Listens, answers with what it was given, and remembers what it heard.

    Args:
        answers: to each message in turn, None for none; after the last it hangs up or, by a `...`,
            listens on.
    """

    def __init__(self, *answers: Any) -> None:
        self.heard: queue.Queue[Any] = queue.Queue()
        self._answers = answers
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.address = f"link-{uuid.uuid4().hex}"
        self._listener.bind(f"\0{self.address}")
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            with connection:
                for answer in self._answers:
                    if answer is ...:
                        while data := connection.recv(16384):
                            self.heard.put(json.loads(data))
                        self.heard.put("it hung up")
                        return
                    self.heard.put(json.loads(connection.recv(16384)))
                    if isinstance(answer, bytes):
                        connection.send(answer)
                    elif answer is not None:
                        connection.send(json.dumps(answer).encode())

    def hears(self) -> Any:
        return self.heard.get(timeout=LONG_S)

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def pretend(monkeypatch) -> Iterator[Callable[..., PretendedAgent]]:
    made: list[PretendedAgent] = []

    def make(*answers: Any) -> PretendedAgent:
        made.append(PretendedAgent(*answers))
        monkeypatch.setenv(AGENT_VARIABLE, made[-1].address)
        return made[-1]

    yield make
    for agent in made:
        agent.close()


def link_to(ranks: Ranks) -> AgentLink | None:
    return connect_to_agent(FakeGpu(), LABELS, ranks)  # type: ignore[arg-type]


@pytest.fixture
def pair() -> Iterator[tuple[AgentLink, socket.socket]]:
    """A link, and the agent's end of it, which reads when the test does."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    there.settimeout(LONG_S)
    link = AgentLink(here, "n0")
    yield link, there
    link.close()
    there.close()


def test_looks_at_the_clock_are_told_until_the_link_is_closed(pair, caplog):
    link, there = pair
    link.clock(ClockState(1200, 1185, ("power cap",)))
    assert json.loads(there.recv(16384)) == {
        "op": "clock", "requested_mhz": 1200, "observed_mhz": 1185,
        "throttle_reasons": ["power cap"],
    }  # fmt: skip
    link.close()
    link.clock(ClockState(None, 1410))  # by a watch whose look came late
    assert caplog.text == ""


# At the start --------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [None, ""])
def test_without_an_agent_there_is_no_link(monkeypatch, value, caplog):
    monkeypatch.delenv(AGENT_VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(AGENT_VARIABLE, value)
    ranks = Ranks(None)
    assert link_to(ranks) is None
    assert ranks.gathered == [(None, None)]  # the other ranks wait for it
    assert caplog.text == ""


def test_a_rank_that_can_open_no_socket_keeps_no_other_waiting(monkeypatch, caplog):
    monkeypatch.setenv(AGENT_VARIABLE, "nobody-listens")
    full = OSError(errno.EMFILE, "Too many open files")
    monkeypatch.setattr(agent_link.socket, "socket", Mock(side_effect=full))
    ranks = Ranks(None)
    assert connect_to_agent(FakeGpu(), LABELS, ranks) is None  # type: ignore[arg-type]
    assert len(ranks.gathered) == 1
    assert "Too many open files" in caplog.text


def test_the_planner_has_its_agent_collect_and_tells_all_ranks(pretend, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "n0")
    agent = pretend(COLLECTING, ...)
    ranks = Ranks(None, None)
    link = link_to(ranks)
    assert link is not None
    link.post("window", line={"energy_j": 1.0})
    link.post("job", facts={"model": "gpt"})
    link.close()
    link.close()
    assert [agent.hears() for _ in range(7)] == [
        {
            "op": "hello", "gpu_uid": "fake#0", "rank": 3, "stage": 1,
            "collect": {"host": "n0", "control": None},
        },
        {"op": "send_to", "endpoint": ENDPOINT},
        {"op": "job", "facts": {"num_gpus": 3}},
        {"op": "window", "line": {"energy_j": 1.0}},
        {"op": "job", "facts": {"model": "gpt"}},
        {"op": "bye"},
        "it hung up",
    ]  # fmt: skip
    assert ranks.gathered == [(ENDPOINT, OWN)]


@pytest.mark.parametrize(
    ("others", "num_gpus"),
    [
        ([(None, OWN)], 1),  # ranks that share a GPU
        ([(None, ("n1", "fake#0"))], 2),  # the same name on another node
        ([(None, None), (None, None)], 3),  # of nodes without an agent
    ],
)
def test_gpus_are_counted_once(pretend, others, num_gpus):
    agent = pretend(COLLECTING, ...)
    link = link_to(Ranks(*others))
    assert link is not None
    link.close()
    heard = [agent.hears() for _ in range(3)]
    assert heard[2] == {"op": "job", "facts": {"num_gpus": num_gpus}}


@pytest.mark.parametrize("endpoint", [ENDPOINT, None])  # None: each node keeps its bill
def test_another_rank_sends_to_where_the_planner_said(pretend, endpoint):
    agent = pretend(WELCOME, ...)
    link = link_to(Ranks(endpoint, None, is_planner=False))
    assert link is not None
    link.close()
    sent = [{"op": "send_to", "endpoint": endpoint}] if endpoint else []
    heard = [agent.hears() for _ in range(2 + len(sent))]
    assert heard[0]["collect"] is None
    assert heard[1:] == [*sent, {"op": "bye"}]


@pytest.mark.parametrize("address", ["nobody", "x" * 200, None])
@pytest.mark.parametrize("answers", [(), (b"garbage",), (b"[]",), (None,), (None, ...)])
def test_an_agent_that_is_gone_hangs_up_or_is_silent_is_told_of(
    pretend, monkeypatch, address, answers, caplog
):
    """In time, and the other ranks do not wait for it."""
    monkeypatch.setattr(agent_link, "_ANSWER_S", 0.05)
    if address is None:
        pretend(*answers)
    else:
        monkeypatch.setenv(AGENT_VARIABLE, address)
    ranks = Ranks(None)
    assert link_to(ranks) is None
    assert ranks.gathered == [(None, None)]
    assert "writes its own log, unbilled-energy*.jsonl: " in caplog.text


def test_another_user_who_listens_in_an_agents_place_is_told_nothing(pretend, monkeypatch, caplog):
    monkeypatch.setattr(agent_link, "peer_uid_and_pid", lambda _: (os.geteuid() + 1, 1))
    agent = pretend(...)
    assert link_to(Ranks(None)) is None
    assert "Another user listens there" in caplog.text
    assert agent.hears() == "it hung up"


def test_an_agent_that_does_not_collect_still_bills_its_node(pretend):
    agent = pretend(WELCOME, ...)
    ranks = Ranks(None)
    link = link_to(ranks)
    assert link is not None
    assert ranks.gathered == [(None, OWN)]
    link.post("window", line={})
    link.close()
    heard = [agent.hears()["op"] for _ in range(4)]
    assert heard == ["hello", "job", "window", "bye"]


# While it trains -----------------------------------------------------------------------------


def test_an_agent_that_is_stuck_holds_up_no_training(pair, caplog):
    """What does not fit is dropped, and told once while it lasts; later windows come through."""
    link, agent = pair
    sent = 0
    while "does not take window" not in caplog.text:
        link.post("window", line={"number": sent})
        sent += 1
    begin_s = time.monotonic()
    for _ in range(1000):
        link.post("window", line={"number": "dropped"})
        assert time.monotonic() - begin_s < LONG_S / 4  # for all of them: none waited
    assert caplog.text.count("does not take") == 1
    numbers = [json.loads(agent.recv(16384))["line"]["number"] for _ in range(sent - 1)]
    assert numbers == list(range(sent - 1))
    link.post("window", line={"number": "later"})
    assert json.loads(agent.recv(16384))["line"]["number"] == "later"
    while caplog.text.count("does not take") == 1:
        link.post("window", line={})


@pytest.mark.parametrize(
    ("model", "said"), [(object(), "Object of type"), ("x" * 20_000, "[Errno 90] Message too")]
)
def test_facts_that_cannot_be_sent_end_no_training(pair, caplog, model, said):
    link, agent = pair
    link.post("job", facts={"model": model})
    link.post("job", facts={"model": "gpt"})
    assert json.loads(agent.recv(16384)) == {"op": "job", "facts": {"model": "gpt"}}
    assert f"does not take job: {said}" in caplog.text


def test_closing_with_a_full_buffer_returns(pair, caplog):
    link, agent = pair
    while not caplog.text:
        link.post("window", line={})
    link.close()
    link.close()
    link.post("window", line={})  # too late, and no error
    while agent.recv(16384):
        pass
