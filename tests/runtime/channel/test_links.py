"""The channel in one process: its making, its links, and neighbours that are gone or silent."""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from plain_stages import SHAPE, SPECS
from torch.futures import Future

from envpipe_megatron.core.builders import one_f_one_b
from envpipe_megatron.core.schedule import Kind, Unit
from envpipe_megatron.runtime.channel import links as runtime_links
from envpipe_megatron.runtime.channel import p2p as channel
from envpipe_megatron.runtime.channel.messages import StageSpecs, TensorSpec


@pytest.fixture
def backend(monkeypatch):
    """A pipeline's process group of any backend, whose links are made up."""
    made = SimpleNamespace(name="nccl", linked=[])
    monkeypatch.setattr(dist, "get_backend", lambda group: made.name)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1])
    monkeypatch.setattr(dist, "get_group_rank", lambda group, rank: 0)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)

    def linked(*args, **options):
        made.linked.append((args, options))
        return {}

    monkeypatch.setattr(runtime_links, "_nccl_links", linked)
    return made


SECOND = timedelta(seconds=1)


def made_channel(**options):
    return runtime_links.make_channel("pipeline", timeout=SECOND, **options)


def channel_of(
    stages: int, stage: int = 0, timeout: timedelta | None = SECOND, **options: Any
) -> channel.P2PChannel:
    links: Any = {(kind, sender): (kind, sender) for kind in Kind for sender in range(stages)}
    return channel.P2PChannel(range(10, 10 + stages), stage, links, timeout=timeout, **options)


@pytest.mark.parametrize("name", ["nccl", "gloo"])
def test_a_channel_is_made_of_what_was_asked_for(backend, name):
    backend.name = name
    made = made_channel(num_chunks=2, max_ctas=5, hosts="hosts")
    made_channel()
    if name == "nccl":
        assert (made._timeout, made._hosts) == (None, "hosts")
        default = {"wraps": False, "max_ctas": runtime_links.MAX_CTAS}
        options = [{"wraps": True, "max_ctas": 5}, default]
        assert backend.linked == [(([0, 1], 0, SECOND), option) for option in options]
    else:
        assert (made._timeout, made._hosts) == (SECOND, "hosts")
        assert set(made._groups.values()) == {"pipeline"}
        assert not backend.linked


@pytest.mark.parametrize(
    ("queues", "capacity"),
    [(None, None), ("32", None), ("8", None), ("7", 1), ("1", 1), ("", None)],
)
def test_few_hardware_queues_hold_one_message(backend, monkeypatch, queues, capacity):
    if queues is None:
        monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    else:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", queues)
    assert made_channel().capacity == capacity


def test_transfers_that_cannot_work_are_refused(backend, monkeypatch):
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "0")
    made_channel()
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    with pytest.raises(channel.ChannelError, match="CUDA_LAUNCH_BLOCKING"):
        made_channel()
    backend.name = "ucc"
    with pytest.raises(channel.ChannelError, match="'ucc'"):
        made_channel()


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
    specs = StageSpecs.alike(TensorSpec.of_one_type(((1,),), torch.float32, torch.device("cpu")))

    def step() -> None:
        made.expect({Kind.BACKWARD: 2}, specs)
        for microbatch in range(2):
            made.send(Unit(Kind.FORWARD, microbatch), [torch.zeros(1)])
            made.receive(Unit(Kind.BACKWARD, microbatch))
        made.end_step()

    step()  # those of which the watchdog does not know yet are no error
    assert len(waited) == 2  # by the stream, for each receive
    results |= {"receive": [0, 0], "send": [0, 0]}
    results[lost][1] = result
    with pytest.raises(channel.ChannelError, match=r"lost its neighbour, stage 1 \(rank 11\)"):
        step()
    results |= {"receive": [0, 0], "send": [0, 0]}
    step()


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
    made = channel_of(2, timeout=patience)

    def step() -> None:
        made.expect({Kind.BACKWARD: 1}, SPECS)
        made.send(Unit(Kind.FORWARD, 0), [torch.zeros(1)])
        made.receive(Unit(Kind.BACKWARD, 0))
        made.end_step()

    with pytest.raises(channel.ChannelError, match=r"lost its neighbour, stage 1 \(rank 11\)"):
        step()


@pytest.mark.parametrize("stage", range(3))
def test_each_message_takes_its_own_link(monkeypatch, stage):
    """Over gloo all links are one group; over NCCL another's would hang both ends."""
    taken = []
    for transfer in ("isend", "irecv"):
        monkeypatch.setattr(
            dist,
            transfer,
            lambda tensor, peer, group, tag, transfer=transfer: taken.append(
                (transfer, peer, group)
            ),
        )
    made = channel_of(3, stage)
    schedule, expected = one_f_one_b(3, 1), []
    made.begin_step(schedule, SPECS)
    for unit in schedule.stages[stage]:
        towards = 1 if unit.kind is Kind.FORWARD else -1
        if 0 <= stage - towards < 3:
            made.receive(unit)
            expected.append(("irecv", 10 + stage - towards, (unit.kind, stage - towards)))
        if 0 <= stage + towards < 3:
            made.send(unit, [torch.zeros(1)])
            expected.append(("isend", 10 + stage + towards, (unit.kind, stage)))
    made.end_step()
    assert sorted(taken) == sorted(expected)


@pytest.mark.parametrize("vary", [False, True])
@pytest.mark.parametrize("capacity", [None, 1])
def test_messages_that_vary_are_refused_over_one_queue_alone(monkeypatch, vary, capacity):
    monkeypatch.setattr(dist, "irecv", lambda *a, **kw: None)
    made = channel_of(2, capacity=capacity)
    refused = pytest.raises(channel.ChannelError, match="several hardware queues")
    with refused if vary and capacity else nullcontext():
        made.begin_step(one_f_one_b(2, 2), replace(SPECS, vary=vary))


@pytest.mark.parametrize("wraps", [False, True])
@pytest.mark.parametrize("stages", [2, 3])
def test_every_link_over_nccl_is_a_group_of_its_two_ranks(monkeypatch, stages, wraps):
    """All ranks make all groups in one order; each brings its own up, where its peer does."""
    pipelines = [tuple(range(n, 2 * stages, 2)) for n in range(2)]
    made: list[Any] = []

    class Options:
        def __init__(self) -> None:
            self.config = SimpleNamespace(max_ctas=None, min_ctas=None)

    def new_group(pair: list[int], *, timeout: Any, pg_options: Any, group_desc: str) -> Any:
        config = pg_options.config
        made.append((tuple(pair), timeout, config.max_ctas, config.min_ctas, group_desc))
        return len(made) - 1, *made[-1]

    exchanges: list[Any] = []
    monkeypatch.setattr(dist, "new_group", new_group)
    nccl = SimpleNamespace(Options=Options)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", nccl, raising=False)
    for name in ("send", "recv"):
        monkeypatch.setattr(
            dist,
            name,
            lambda probe, peer, group, name=name: exchanges.append((name, probe, peer, group)),
        )
    synchronized: list[int] = []
    cuda = SimpleNamespace(
        current_device=lambda: 7, synchronize=lambda: synchronized.append(len(exchanges))
    )
    made_up = SimpleNamespace(cuda=cuda, zeros=lambda size, device: (size, device))
    monkeypatch.setattr(runtime_links, "torch", made_up)
    monkeypatch.setattr(runtime_links, "all_pipelines", lambda ranks: pipelines)
    waiting, all_made = {}, []
    timeout = timedelta(seconds=9)
    for pipeline in pipelines:
        for stage, rank in enumerate(pipeline):
            made.clear()
            exchanges.clear()
            links = runtime_links._nccl_links(pipeline, stage, timeout, wraps=wraps, max_ctas=3)
            all_made.append(tuple(made))
            hops = [
                (kind, sender, (sender + step) % stages)
                for kind, step in ((Kind.FORWARD, 1), (Kind.BACKWARD, -1))
                for sender in range(stages)
                if wraps or 0 <= sender + step < stages
            ]
            own = {(k, a): {pipeline[a], pipeline[b]} for k, a, b in hops if stage in (a, b)}
            assert {link: set(group[1]) for link, group in links.items()} == own
            assert all(rank in group[1] for group in links.values())
            waiting[rank] = [(name, peer, group) for name, _, peer, group in exchanges]
            assert {probe for _, probe, _, _ in exchanges} == {(1, 7)}
            assert synchronized.pop() == len(exchanges) == len(own)
    assert len(set(all_made)) == 1
    for pair, *rest in all_made[0]:
        assert pair == tuple(sorted(pair))
        assert rest[:3] == [timeout, 3, 1]
        assert rest[3] in ("envpipe-forward", "envpipe-backward")
    while any(waiting.values()):  # each waits for its peer
        met = [
            (rank, peer)
            for rank, left in waiting.items()
            if left and left[0][0] == "send"
            for peer in [left[0][1]]
            if waiting[peer] and waiting[peer][0] == ("recv", rank, left[0][2])
        ]
        assert met
        for pair in met:
            for rank in pair:
                waiting[rank].pop(0)


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

    def channel(self) -> channel.P2PChannel:
        return channel_of(2, self.rank, hosts=self)

    def isend(self, tensor: torch.Tensor, peer: int, group: Any, tag: int) -> Any:
        self._fail("isend")
        assert tensor.dtype is not torch.bool  # of which transports know nothing
        self.under_way.setdefault((self.rank, peer % 10, tag), []).append(tensor.clone())
        return self._work(lambda: None)

    def irecv(self, tensor: torch.Tensor, peer: int, group: Any, tag: int) -> Any:
        self._fail("irecv")
        queue = self.under_way.setdefault((peer % 10, self.rank, tag), [])

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
        return self.under_way[source, self.rank, "header", tag].pop(0)

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


FORWARDS = [Unit(Kind.FORWARD, number) for number in range(3)]


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
        made.expect({Kind.BACKWARD: 1}, SPECS, vary=fails in ("send", "receive"))
        if fails in ("isend", "send"):
            made.send(FORWARDS[0], [torch.zeros(2)])
        made.receive(Unit(Kind.BACKWARD, 0))

    said = rf"Stage 0 lost its neighbour, stage 1 \(rank 11\), while {what}: {reason}"
    with pytest.raises(channel.ChannelError, match=said):
        step()


def test_what_has_left_is_not_kept(monkeypatch):
    """Else a step would hold the outputs of all its units."""
    loopback = Loopback(monkeypatch)
    made = loopback.channel()
    made.expect({}, SPECS)

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


@pytest.mark.parametrize("vary", [False, True])
def test_messages_not_taken_are_named(monkeypatch, vary):
    loopback = Loopback(monkeypatch)
    for count, left in ((1, "backward: 1" if vary else "backward"), (3, f"backward: {2 + vary}")):
        made = loopback.channel()
        made.expect({Kind.BACKWARD: count}, SPECS, vary=vary)
        with pytest.raises(channel.ChannelError, match=rf"\(got {left}\)"):
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
        made.expect({Kind.FORWARD: 2, Kind.BACKWARD: 2}, SPECS, vary=vary)
        ends.append(made)
    for loopback.rank in range(2):
        for number in range(2):
            for kind in (Kind.BACKWARD, Kind.FORWARD):
                text = 10 * loopback.rank + 2 * number + list(Kind).index(kind)
                ends[loopback.rank].send(Unit(kind, number), message(text))
    for loopback.rank in range(2):
        for number in range(2):
            for kind in Kind:
                text = 10 * (1 - loopback.rank) + 2 * number + list(Kind).index(kind)
                got = ends[loopback.rank].receive(Unit(kind, number))
                for tensor, sent in zip(got, message(text), strict=True):
                    assert torch.equal(tensor.detach(), sent)
                    assert tensor.requires_grad is (kind is Kind.FORWARD and tensor.ndim == 2)
    for made in ends:
        made.end_step()
    assert not any(loopback.under_way.values())


def test_one_receive_is_posted_at_a_time_and_none_before_its_header(monkeypatch):
    """The first at the start of the step, then one whenever one is taken."""
    loopback, receiver = Loopback(monkeypatch), Loopback(monkeypatch, 1)
    sender, made = loopback.channel(), receiver.channel()
    receiver.under_way = loopback.under_way
    made.begin_step(one_f_one_b(2, 3), replace(SPECS, vary=True))
    assert not receiver.works
    made.begin_step(one_f_one_b(2, 3), SPECS)
    posted = [len(receiver.works)]
    monkeypatch.setattr(dist, "isend", loopback.isend)
    sender.expect({}, SPECS)
    for unit in FORWARDS:
        sender.send(unit, [torch.zeros(SHAPE)])
        made.receive(unit)
        posted.append(len(receiver.works))
    assert posted == [1, 2, 3, 3]
