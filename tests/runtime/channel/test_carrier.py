"""Sends and receives: each on its link, kept until it has left, and neighbours that are gone."""

import weakref
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from plain_stages import SHAPE, SPECS, expect
from torch.futures import Future

from envpipe_megatron.core.kinds import WHOLE, Kind, Unit
from envpipe_megatron.core.orders.builders import one_f_one_b
from envpipe_megatron.runtime.channel.carrier import ChannelError, Peers, TransferCarrier
from envpipe_megatron.runtime.channel.p2p import P2PChannel

SECOND = timedelta(seconds=1)
FORWARDS, BACKWARDS = ([Unit(kind, number) for number in range(3)] for kind in WHOLE)


def channel_of(
    stages: int,
    stage: int = 0,
    *,
    timeout: timedelta | None = SECOND,
    ahead: bool = True,
    hosts: Any = None,
    **options: Any,
) -> P2PChannel:
    """With both neighbours, on links that say the kind and who sends it."""
    carriers = {}
    for kind, neighbour in zip(WHOLE, ((stage - 1) % stages, (stage + 1) % stages), strict=True):
        peers = Peers(stage, neighbour, 10 + neighbour, kind)
        links: Any = ((kind, neighbour), (peers.sends, stage))
        carriers[kind] = TransferCarrier(peers, links, hosts, timeout=timeout, ahead=ahead)
    return P2PChannel(range(10, 10 + stages), stage, carriers, **options)


def exchange(made: P2PChannel, count: int = 1) -> None:
    """A step of a forward that leaves and a backward that comes, so many times."""
    expect(made, BACKWARDS[:count], SPECS)
    for forward, backward in zip(FORWARDS[:count], BACKWARDS, strict=False):
        made.send(forward, [torch.zeros(SHAPE)])
        made.receive(backward)
    made.end_step()


class Transfer:
    """One of NCCL's: `wait` returns at once, and the watchdog tells how it ended, or not yet."""

    def __init__(self, result: int | None, waited: list[int]) -> None:
        self._future: Future[int] = Future()
        self._waited = waited
        if result is not None:
            self._future.set_result(result)

    def wait(self) -> None:
        self._waited.append(1)

    def is_completed(self) -> bool:
        return True

    def get_future_result(self) -> Future[int]:
        return self._future


@pytest.mark.parametrize("lost", ["receive", "send"])
@pytest.mark.parametrize("result", [1, 2])
def test_what_nccl_gave_up_ends_the_step(monkeypatch, lost, result):
    """Else the step's garbage goes into the framework's collectives."""
    results: dict[str, list[int | None]] = {"receive": [0, None], "send": [0, None]}
    waited: list[int] = []
    for name, transfer in (("receive", "irecv"), ("send", "isend")):
        monkeypatch.setattr(
            dist, transfer, lambda *a, name=name, **kw: Transfer(results[name].pop(0), waited)
        )
    made = channel_of(2, timeout=None)
    exchange(made, 2)  # those of which the watchdog does not know yet are no error
    assert len(waited) == 2  # by the stream, for each receive
    results |= {"receive": [0, 0], "send": [0, 0]}
    results[lost][1] = result
    with pytest.raises(ChannelError, match=r"lost its neighbour, stage 1 \(rank 11\)"):
        exchange(made, 2)
    results |= {"receive": [0, 0], "send": [0, 0]}
    exchange(made, 2)


@pytest.mark.parametrize("silent", ["irecv", "isend"])
def test_a_silent_neighbour_is_waited_for_no_longer_than_told(monkeypatch, silent):
    """The group may have a patience of its own, of half an hour."""
    patience = timedelta(seconds=7)

    def transfer(name: str) -> Any:
        def wait(timeout: timedelta) -> None:
            assert timeout == patience
            if name == silent:
                raise RuntimeError("timed out")

        return SimpleNamespace(wait=wait, is_completed=lambda: False)

    for name in ("irecv", "isend"):
        monkeypatch.setattr(dist, name, lambda *a, name=name, **kw: transfer(name))
    with pytest.raises(ChannelError, match=r"lost its neighbour, stage 1 \(rank 11\)"):
        exchange(channel_of(2, timeout=patience))


def test_where_the_framework_sends_its_own_messages_they_take_no_memory_of_ours():
    made, order = P2PChannel([10, 11], 0, {}), one_f_one_b(2, 8)
    assert made.make_room(order, SPECS)
    assert made.capacity is None


class Loopback:
    """Transfers within one process: a receive takes what was sent when it is waited for.

    Args:
        rank: who sends and receives; a test changes it.
    """

    fails, error = "", ""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rank: int = 0) -> None:
        self.rank = rank
        self.under_way: dict[Any, list[Any]] = {}
        #: Sends that have not left.
        self.works: list[Any] = []
        for name in ("isend", "irecv"):
            monkeypatch.setattr(dist, name, getattr(self, name))

    def channel(self, *, ahead: bool = True) -> P2PChannel:
        return channel_of(2, self.rank, hosts=self, ahead=ahead)

    def isend(self, tensor: torch.Tensor, peer: int, group: Any, tag: int) -> Any:
        self._fail("isend")
        assert tensor.dtype is not torch.bool  # of which transports know nothing
        assert group[1] == self.rank  # the link of a kind from its sender; NCCL's others would hang
        self.under_way.setdefault((group, peer % 10, tag), []).append(tensor.clone())
        return self._work(lambda: None)

    def irecv(self, tensor: torch.Tensor, peer: int, group: Any, tag: int) -> Any:
        self._fail("irecv")
        queue = self.under_way.setdefault((group, self.rank, tag), [])

        def take() -> None:
            sent = queue.pop(0)
            assert (sent.shape, sent.dtype) == (tensor.shape, tensor.dtype)
            tensor.copy_(sent)

        return self._work(take)

    def send(self, value: Any, to: int, tag: int) -> Any:
        """As a host group does, whose values are headers."""
        self._fail("send")
        self.under_way.setdefault((self.rank, to, "header", tag), []).append(value)
        return []

    def receive(self, source: int, tag: int) -> Any:
        self._fail("receive")
        return self.under_way.get((source, self.rank, "header", tag), []).pop(0)

    def _fail(self, name: str) -> None:
        if self.fails == name:
            raise RuntimeError(self.error)

    def _work(self, take: Any) -> Any:
        class Work:
            left = False

            def is_completed(self) -> bool:
                return self.left

            def wait(self, timeout: timedelta | None = None) -> None:
                take()

        self.works.append(weakref.ref(work := Work()))
        return work


@pytest.mark.parametrize(
    ("fails", "what"),
    [
        ("isend", "sending the output of F0"),
        ("send", "sending the output of F0"),
        ("irecv", "posting a receive"),
        ("receive", "waiting for the header of B0"),
    ],
)
@pytest.mark.parametrize(
    ("error", "reason"), [("\n gone \n and its stack", "gone"), (" \n", "RuntimeError")]
)
def test_a_transfer_that_cannot_begin_names_the_neighbour(monkeypatch, fails, what, error, reason):
    loopback = Loopback(monkeypatch)
    loopback.fails, loopback.error = fails, error
    made = loopback.channel()

    def step() -> None:
        expect(made, BACKWARDS[:1], replace(SPECS, vary=fails in ("send", "receive")))
        if fails in ("isend", "send"):
            made.send(FORWARDS[0], [torch.zeros(2)])
        made.receive(Unit(Kind.BACKWARD, 0))

    said = rf"Stage 0 lost its neighbour, stage 1 \(rank 11\), while {what}: {reason}"
    with pytest.raises(ChannelError, match=said):
        step()


def test_what_has_left_is_not_kept(monkeypatch):
    """Else a step would hold the outputs of all its units."""
    loopback = Loopback(monkeypatch)
    made = loopback.channel()
    expect(made, [], SPECS)

    def kept() -> list[bool]:
        return [work() is not None for work in loopback.works]

    def leave(number: int) -> None:
        loopback.works[number]().left = True

    for unit in FORWARDS[:2]:
        made.send(unit, [torch.zeros(2), torch.zeros(3)])
    for number in (0, 2, 3):
        leave(number)
    made.send(FORWARDS[2], [torch.zeros(2)])
    assert kept() == [True] * 5  # half of the first message has not left
    leave(1)
    made.send(FORWARDS[0], [torch.zeros(2)])
    assert kept() == [False] * 4 + [True] * 2
    made.end_step()
    assert kept() == [False] * 6


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("vary", [False, True])
@pytest.mark.parametrize("count", [1, 3])
def test_messages_not_taken_are_named(monkeypatch, count, vary, ahead):
    made = Loopback(monkeypatch).channel(ahead=ahead)
    expect(made, BACKWARDS[:count], replace(SPECS, vary=vary))
    with pytest.raises(ChannelError, match=rf"\(got backward: {count}\)"):
        made.end_step()


def test_messages_kept_for_units_that_never_came_are_named(monkeypatch):
    loopback = Loopback(monkeypatch)
    sender = loopback.channel()
    expect(sender, [], SPECS)
    loopback.rank = 1
    made = loopback.channel()
    expect(made, FORWARDS, SPECS)
    loopback.rank = 0
    for number, unit in enumerate(FORWARDS):
        sender.send(unit, [torch.full(SHAPE, float(number))])
    loopback.rank = 1
    for number in (2, 1):
        assert made.receive(FORWARDS[number])[0].unique().tolist() == [number]
    with pytest.raises(ChannelError, match=r"\(got forward: 1\)"):
        made.end_step()


@pytest.mark.parametrize("vary", [False, True])
def test_a_stage_sends_to_itself_in_order_on_links_of_their_own(monkeypatch, vary):
    """Two stages of two chunks: both kinds go both ways between the same ranks."""
    loopback = Loopback(monkeypatch)
    ends = []

    def message(text: int) -> list[torch.Tensor]:
        mask = torch.arange(4) % 2 == text % 3  # another shape and type than was expected
        return [torch.full((2, 3), float(text)), *([mask] if vary else [])]

    for loopback.rank in range(2):
        made = loopback.channel()
        expect(made, [*FORWARDS[:2], *BACKWARDS[:2]], replace(SPECS, vary=vary))
        ends.append(made)
    for loopback.rank in range(2):
        for number in range(2):
            for kind in (Kind.BACKWARD, Kind.FORWARD):
                text = 10 * loopback.rank + 2 * number + list(WHOLE).index(kind)
                ends[loopback.rank].send(Unit(kind, number), message(text))
    for loopback.rank in range(2):
        for number in range(2):
            for kind in WHOLE:
                text = 10 * (1 - loopback.rank) + 2 * number + list(WHOLE).index(kind)
                got = ends[loopback.rank].receive(Unit(kind, number))
                for tensor, sent in zip(got, message(text), strict=True):
                    assert torch.equal(tensor.detach(), sent)
                    assert tensor.requires_grad is (kind is Kind.FORWARD and tensor.ndim == 2)
    for made in ends:
        made.end_step()
    assert not any(loopback.under_way.values())


@pytest.mark.parametrize(("vary", "ahead"), [(False, False), (True, False), (True, True)])
def test_no_receive_is_posted_before_its_header(monkeypatch, vary, ahead):
    """The sender's host sends it behind the message, which no kernel then waits for in vain."""
    loopback = Loopback(monkeypatch)
    sender = loopback.channel(ahead=ahead)
    loopback.rank = 1
    made = loopback.channel(ahead=ahead)
    specs = replace(SPECS, vary=vary)
    made.begin_step(one_f_one_b(2, 3), specs)
    sender.begin_step(one_f_one_b(2, 3), specs)
    for number, unit in enumerate(FORWARDS):
        with pytest.raises(IndexError):  # no header: the host waits for it
            made.receive(unit)
        assert len(loopback.works) == 2 * number
        loopback.rank = 0
        sender.send(unit, [torch.full(SHAPE, float(number))])
        loopback.rank = 1
        assert made.receive(unit)[0].unique().tolist() == [number]


def test_one_receive_is_posted_at_a_time(monkeypatch):
    """The first at the start of the step, then one whenever one is taken."""
    loopback, receiver = Loopback(monkeypatch), Loopback(monkeypatch, 1)
    sender, made = loopback.channel(), receiver.channel()
    receiver.under_way = loopback.under_way
    made.begin_step(one_f_one_b(2, 3), SPECS)
    posted = [len(receiver.works)]
    monkeypatch.setattr(dist, "isend", loopback.isend)
    expect(sender, [], SPECS)
    for unit in FORWARDS:
        sender.send(unit, [torch.zeros(SHAPE)])
        made.receive(unit)
        posted.append(len(receiver.works))
    assert posted == [1, 2, 3, 3]
