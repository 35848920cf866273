"""The channel's making: what carries messages between which stages, agreed by all ranks."""

import threading
from collections import defaultdict
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from fake_device import FakeDevice
from plain_stages import SHAPE, SPECS, expect
from taking_turns import Turns

from envpipe_megatron.core.kinds import Kind, unit
from envpipe_megatron.runtime.channel import links, puts
from envpipe_megatron.runtime.channel.carrier import ChannelError, Peers
from envpipe_megatron.runtime.channel.flag_page import FlagPage
from envpipe_megatron.runtime.channel.p2p import P2PChannel
from envpipe_megatron.runtime.channel.puts import PutCarrier, PutSide

SECONDS = timedelta(seconds=9)


class PipelineCollectives:
    """Of `Collectives`, what the channel's making calls."""

    def __init__(self, turns: Turns, pipeline: Sequence[int], size: int) -> None:
        self._turns, self._members, self._size = turns, list(pipeline), size
        self.stage = self._members.index(turns.rank)
        self.pipeline = f"hosts of {self._members}"

    def in_pipeline(self, value: Any) -> list[Any]:
        return self._turns.gather(self._members, value, "in_pipeline")

    def on_all(self, holds: bool) -> bool:
        return all(self._turns.gather(range(self._size), holds, "on_all"))


class MadeUpJob:
    """Pipelines of one process whose ranks lie as Megatron's, with torch's groups made up.

    Args:
        stages: of each pipeline.
        pipelines: how many.
        backend: of the pipelines' groups.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        stages: int,
        pipelines: int = 1,
        backend: str = "nccl",
    ) -> None:
        self.turns = Turns()
        self.size = stages * pipelines
        self.pipelines = [range(n, self.size, pipelines) for n in range(pipelines)]
        #: Of each rank: the groups that it helped to make, and its first exchanges in them.
        self.groups: dict[int, list[Any]] = defaultdict(list)
        self.exchanges: dict[int, list[Any]] = defaultdict(list)
        self.synchronized: list[int] = []
        made_up = {
            "get_backend": lambda group: backend,
            "get_backend_config": lambda group: f"cpu:{backend},cuda:{backend}",
            "get_process_group_ranks": lambda group: list(group),
            "get_world_size": lambda: self.size,
            "all_gather_object": self._all_gather,
            "ProcessGroupNCCL": SimpleNamespace(Options=_Options),
            "new_group": self._new_group,
            "send": lambda probe, peer, group: self._exchange("send", probe, peer, group),
            "recv": lambda probe, peer, group: self._exchange("recv", probe, peer, group),
        }
        for name, function in made_up.items():
            monkeypatch.setattr(dist, name, function, raising=False)
        #: Why a rank's GPU cannot take part in one-sided copies.
        self.lacks: dict[int, str] = {}
        #: Ranks that have none of their neighbours' files, or whose GPU shares no memory.
        self.apart: dict[int, str] = {}
        self.refuses: dict[int, str] = {}
        self.watched: list[PutSide] = []
        monkeypatch.setattr(links.cuda_device, "obstacle", lambda: self.lacks.get(self.turns.rank))
        monkeypatch.setattr(links.cuda_device, "CudaDevice", self._device)
        monkeypatch.setattr(links.cuda_device, "uuid", lambda: self.turns.rank)
        monkeypatch.setattr(links.cuda_device, "check_distance", self._check_distance)
        #: Ranks whose GPU is too far from that before.
        self.far: dict[int, str] = {}
        monkeypatch.setattr(links, "FlagPage", self._page)
        monkeypatch.setattr(puts, "time", self.turns)
        monkeypatch.setattr(PutSide, "watch", lambda side: self.watched.append(side))
        cuda = SimpleNamespace(
            is_available=lambda: backend == "nccl",
            current_device=lambda: 7,
            mem_get_info=lambda: (0, 2**30),
            synchronize=lambda: self.synchronized.append(self.turns.rank),
        )
        torch = SimpleNamespace(cuda=cuda, zeros=lambda size, device: (size, device))
        monkeypatch.setattr(links, "torch", torch)
        for variable in ("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING"):
            monkeypatch.delenv(variable, raising=False)

    def channels(self, **options: Any) -> list[P2PChannel]:
        """Each rank's."""
        outcomes = self.outcomes(**options)
        for error in outcomes:
            if isinstance(error, BaseException):
                raise error
        return outcomes

    def outcomes(self, **options: Any) -> list[Any]:
        """Each rank's channel, or its error."""

        def make() -> P2PChannel:
            pipeline: Any = self.pipelines[self.turns.rank % len(self.pipelines)]
            collectives: Any = PipelineCollectives(self.turns, pipeline, self.size)
            return links.make_channel(pipeline, collectives, timeout=SECONDS, **options)

        return self.turns.run(*[make] * self.size)

    def _device(self, exchange: Any) -> FakeDevice:
        device = FakeDevice(self.turns, self.turns.rank)
        device.pipeline = self.turns.rank % len(self.pipelines)
        device.blocks = True
        if device.rank in self.refuses:
            device.share = self._refuse  # type: ignore[method-assign]
        return device

    def _refuse(self, *arguments: Any) -> Any:
        raise RuntimeError(f"{self.refuses[self.turns.rank]}\nof a test")

    def _check_distance(self, *ranks: int) -> None:
        if max(ranks) in self.far:
            raise ChannelError(self.far[max(ranks)])

    def _page(self, path: Path, side: int, peers: Peers) -> FlagPage:
        if self.turns.rank in self.apart and side == 1:
            raise FileNotFoundError(path)
        return FlagPage(path, side, peers)

    def _all_gather(self, values: list[Any], own: Any) -> None:
        values[:] = self.turns.gather(range(self.size), own, "world")

    def _new_group(
        self, pair: Sequence[int], *, timeout: Any, pg_options: Any, group_desc: str
    ) -> Any:
        config = pg_options.config
        assert pg_options._timeout == timeout, "torch would warn"
        made = self.groups[self.turns.rank]
        made.append((tuple(pair), timeout, config.max_ctas, config.min_ctas, group_desc))
        return (len(made), *made[-1])

    def _exchange(self, name: str, probe: Any, peer: int, group: Any) -> None:
        """Blocks both hosts, as the first of NCCL's communicators does."""
        assert probe == (1, 7)
        assert set(group[1]) == {self.turns.rank, peer}
        assert set(self.turns.gather(group[1], name, str(group))) == {"send", "recv"}
        self.exchanges[self.turns.rank].append(group)


class _Options:
    def __init__(self) -> None:
        self.config = SimpleNamespace(max_ctas=None, min_ctas=None)


def groups_of(channel: P2PChannel) -> dict[tuple[str, Kind, int], Any]:
    """Return what carries each kind to and from each neighbour."""
    found: dict[tuple[str, Kind, int], Any] = {}
    for kind, carrier in channel._carriers.items():
        peers = carrier._peers
        assert peers.rank == channel.ranks[peers.neighbour]
        assert kind is peers.receives
        found["from", kind, peers.rank] = carrier._receives_over
        found["to", peers.sends, peers.rank] = carrier._sends_over
    return found


def hops_of(pipeline: Sequence[int], stage: int, *, wraps: bool) -> set[tuple[str, Kind, int]]:
    """The keys of these groups."""
    return {
        (way, kind, pipeline[(stage + step) % len(pipeline)])
        for kind, back in ((Kind.FORWARD, -1), (Kind.BACKWARD, 1))
        for way, step in (("from", back), ("to", -back))
        if wraps or 0 <= stage + step < len(pipeline)
    }


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_over_gloo_the_pipelines_own_group_carries_all(monkeypatch, stages):
    """It has tags, and watches over no transfer: the carrier does."""
    job = MadeUpJob(monkeypatch, stages, backend="gloo")
    for stage, channel in enumerate(job.channels()):
        assert (channel.ranks, channel.capacity) == (list(range(stages)), None)
        assert not channel.lets_go
        assert channel.about == ""
        hops = hops_of(range(stages), stage, wraps=True) if stages > 1 else ()
        assert groups_of(channel) == dict.fromkeys(hops, range(stages))
        for carrier in channel._carriers.values():
            assert (carrier._timeout, carrier._ahead) == (SECONDS, True)
            assert carrier._hosts == f"hosts of {list(range(stages))}"
    assert not job.groups


@pytest.mark.parametrize("wraps", [False, True])
@pytest.mark.parametrize("stages", [2, 3])
def test_every_link_over_nccl_is_a_group_of_its_two_ranks(monkeypatch, stages, wraps):
    """All ranks make all groups in one order; each brings its own up, where its peer does."""
    job = MadeUpJob(monkeypatch, stages, pipelines=2)
    channels = job.channels(carrier="receives", num_chunks=1 + wraps)
    made = job.groups.pop(0)
    assert all(others == made for others in job.groups.values())
    for pair, *rest in made:
        assert pair == tuple(sorted(pair))
        assert rest[:3] == [SECONDS, links.MAX_CTAS, 1]
        assert rest[3] in ("envpipe-forward", "envpipe-backward")
    assert len(made) == 2 * 2 * (stages - (not wraps))
    assert sorted(job.synchronized) == list(range(2 * stages))
    carries: dict[Any, set[Any]] = defaultdict(set)
    for rank, channel in enumerate(channels):
        own = groups_of(channel)
        assert sorted(own.values()) == sorted(job.exchanges[rank])
        pipeline = job.pipelines[rank % 2]
        assert set(own) == hops_of(pipeline, pipeline.index(rank), wraps=wraps)
        for (way, kind, peer), group in own.items():
            sender, receiver = (rank, peer) if way == "to" else (peer, rank)
            carries[group].add((kind, sender, receiver))
            assert group[-1] == f"envpipe-{kind.value}"
    # Both ends agree, and nothing else goes over a link.
    assert all(len(hops) == 1 for hops in carries.values())
    assert len(carries) == len(made)


@pytest.mark.parametrize(("queues", "capacity"), [(None, None), ("7", 1)])
def test_over_few_hardware_queues_one_receive_is_posted_ahead(monkeypatch, queues, capacity):
    """There an unmatched send stops all behind it, and so the header that would match it."""
    job = MadeUpJob(monkeypatch, 2)
    if queues is not None:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", queues)
    for channel in job.channels(carrier="receives"):
        assert channel.capacity == capacity
        assert channel.lets_go
        assert channel.about.startswith("NCCL between stages 0 and 1")
        assert channel.about.endswith("(asked for: receives)")
        (made,) = channel._carriers.values()
        assert (made._timeout, made._ahead) == (None, capacity == 1)


@pytest.mark.parametrize("wraps", [False, True])
def test_where_gpus_reach_each_other_all_boundaries_are_one_sided(monkeypatch, wraps):
    """With a single hardware queue too, and then no order is lowered."""
    job = MadeUpJob(monkeypatch, 3, pipelines=2)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    channels = job.channels(num_chunks=1 + wraps)
    assert {(channel.about, channel.capacity, channel.lets_go) for channel in channels} == {
        ("one-sided copies", None, False)
    }
    assert not job.groups
    assert {id(channel._side) for channel in channels} == {id(side) for side in job.watched}

    def host() -> dict[Kind, float]:
        rank, channel = job.turns.rank, channels[job.turns.rank]
        comes = list(channel._carriers)
        expect(channel, [unit(kind, 0) for kind in comes], SPECS)
        for carrier in channel._carriers.values():
            kind = carrier._peers.sends  # type: ignore[attr-defined]
            channel.send(unit(kind, 0), [torch.full(SHAPE, float(rank))])
        got = {kind: channel.receive(unit(kind, 0))[0].max().item() for kind in comes}
        channel.end_step()
        return got

    for rank, got in enumerate(job.turns.run(*[host] * job.size)):
        neighbours = {Kind.FORWARD: rank - 2, Kind.BACKWARD: rank + 2}
        assert got == {k: r % 6 for k, r in neighbours.items() if wraps or 0 <= r < 6}


@pytest.mark.parametrize(
    ("what", "rank", "boundary", "reason"),
    [
        ("lacks", 3, 2, "no wheel"),
        ("lacks", 0, 0, "no wheel"),
        ("apart", 2, 1, "no common /dev/shm: other machines or containers"),
        ("refuses", 3, 2, "no such memory"),
        ("far", 1, 0, "NCCL_P2P_LEVEL=PIX, and too far"),
    ],
)
def test_a_boundary_where_one_side_cannot_goes_by_nccl_and_all_say_so(
    monkeypatch, what, rank, boundary, reason
):
    job = MadeUpJob(monkeypatch, 4)
    setattr(job, what, {rank: reason})
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    channels = job.channels()
    (about,) = {channel.about for channel in channels}
    assert about.startswith(f"NCCL between stages {boundary} and {boundary + 1}")
    assert about.endswith(f"({reason}); one-sided copies")
    assert {channel.capacity for channel in channels} == {1}
    for stage, channel in enumerate(channels):
        by_puts = {
            carrier._peers.neighbour  # type: ignore[attr-defined]
            for carrier in channel._carriers.values()
            if isinstance(carrier, PutCarrier)
        }
        pairs = [(b, b + 1) for b in range(3) if b != boundary]
        assert by_puts == {a + b - stage for a, b in pairs if stage in (a, b)}
        assert len(channel._carriers) == 1 + (0 < stage < 3)
        assert channel.lets_go == (stage in (boundary, boundary + 1))
    assert len(job.watched) == sum(channel._side is not None for channel in channels)


def test_a_read_only_dev_shm_leaves_all_boundaries_to_nccl(monkeypatch):
    def refuse(path, *args, **kwargs):  # Linux refuses to remove what is not there, too
        raise OSError(30, "Read-only file system", str(path))

    job = MadeUpJob(monkeypatch, 2)
    job.apart = {0: "", 1: ""}
    monkeypatch.setattr(Path, "unlink", refuse)
    for channel in job.channels():
        assert channel.about.endswith("(no common /dev/shm: other machines or containers)")


def test_a_channel_for_messages_that_vary_has_headers(monkeypatch):
    """Slots have one size."""
    for channel in MadeUpJob(monkeypatch, 2).channels(vary=True):
        assert channel.about.endswith("(messages vary in shape)")
        assert channel.capacity is None
        assert not any(isinstance(c, PutCarrier) for c in channel._carriers.values())


def test_transfers_that_cannot_work_are_refused(monkeypatch):
    job = MadeUpJob(monkeypatch, 2)
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "0")
    job.channels(carrier="receives")
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    with pytest.raises(ChannelError, match="CUDA_LAUNCH_BLOCKING"):
        job.channels(carrier="receives")
    # All ranks refuse, also where it is set on one: the others would wait for it.
    by_rank = SimpleNamespace(get=lambda *_: str(int(job.turns.rank == 1)))
    monkeypatch.setattr(links, "os", SimpleNamespace(environ=by_rank))
    monkeypatch.setattr(links, "hardware_capacity", lambda variables: None)
    outcomes = job.outcomes(carrier="receives")
    assert [type(outcome) for outcome in outcomes] == [ChannelError] * 2
    with pytest.raises(ChannelError, match="'ucc'"):
        MadeUpJob(monkeypatch, 2, backend="ucc").channels()


@pytest.mark.parametrize("backend", [None, "gloo", "cpu:gloo"])
def test_of_several_backends_that_of_this_process_s_device_counts(backend):
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert links.backend_of(dist.group.WORLD) == "gloo"
    finally:
        dist.destroy_process_group()


def test_a_backend_for_gpus_alone_is_that_of_any_device(monkeypatch):
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cuda:nccl")
    monkeypatch.setattr(dist, "get_backend", lambda group: "nccl")
    assert links.backend_of(None) == "nccl"
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert links.backend_of(None) == "nccl"


def test_groups_have_the_time_that_the_user_gave_theirs(monkeypatch):
    hour = timedelta(hours=1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=2 * hour)
    try:
        shorter, longer = (dist.new_group([0], timeout=time) for time in (hour, 3 * hour))
        found = [links.timeout_of(group) for group in (shorter, dist.group.WORLD, longer)]
        assert found == [2 * hour, 2 * hour, 3 * hour]
        monkeypatch.setattr(type(longer), "_get_backend", lambda group, device: object())
        assert links.timeout_of(longer) == timedelta(minutes=30)  # where nobody tells: torch's
    finally:
        dist.destroy_process_group()


def test_a_closed_channel_leaves_no_group(monkeypatch):
    job, gone = MadeUpJob(monkeypatch, 3), []
    channels = job.channels(carrier="receives")
    monkeypatch.setattr(dist, "destroy_process_group", gone.append, raising=False)
    with monkeypatch.context() as full:  # of threads: the groups stay, and training goes on
        full.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError))
        channels[0].close()
    assert not gone
    for rank, channel in enumerate(channels):
        gone.clear()
        channel.close()
        assert sorted(gone) == sorted(job.exchanges[rank])
