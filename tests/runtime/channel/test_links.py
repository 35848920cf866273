"""The channel's making: what carries messages between which stages, agreed by all ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from taking_turns import Turns

from envpipe_megatron.core.schedule import Kind
from envpipe_megatron.runtime.channel import links
from envpipe_megatron.runtime.channel.carrier import ChannelError
from envpipe_megatron.runtime.channel.p2p import P2PChannel

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
        cuda = SimpleNamespace(
            current_device=lambda: 7,
            synchronize=lambda: self.synchronized.append(self.turns.rank),
        )
        torch = SimpleNamespace(cuda=cuda, zeros=lambda size, device: (size, device))
        monkeypatch.setattr(links, "torch", torch)
        for variable in ("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING"):
            monkeypatch.delenv(variable, raising=False)

    def channels(self, **options: Any) -> list[P2PChannel]:
        """Each rank's."""

        def make() -> P2PChannel:
            pipeline: Any = self.pipelines[self.turns.rank % len(self.pipelines)]
            collectives: Any = PipelineCollectives(self.turns, pipeline, self.size)
            return links.make_channel(pipeline, collectives, timeout=SECONDS, **options)

        outcomes = self.turns.run(*[make] * self.size)
        made = [each for each in outcomes if isinstance(each, P2PChannel)]
        for error in outcomes:
            if isinstance(error, BaseException):
                raise error
        return made

    def _all_gather(self, values: list[Any], own: Any) -> None:
        values[:] = self.turns.gather(range(self.size), own, "world")

    def _new_group(
        self, pair: Sequence[int], *, timeout: Any, pg_options: Any, group_desc: str
    ) -> Any:
        config = pg_options.config
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
    """What carries each kind to and from each neighbour."""
    found: dict[tuple[str, Kind, int], Any] = {}
    for kind, carrier in channel._carriers.items():
        peers = carrier._peers
        assert peers.rank == channel.ranks[peers.neighbour]
        assert kind is peers.receives
        found["from", kind, peers.rank] = carrier._receives_over
        found["to", peers.sends, peers.rank] = carrier._sends_over
    return found


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_over_gloo_the_pipelines_own_group_carries_all(monkeypatch, stages):
    """It has tags, and watches over no transfer: the carrier does."""
    job = MadeUpJob(monkeypatch, stages, backend="gloo")
    for stage, channel in enumerate(job.channels()):
        assert (channel.ranks, channel.capacity) == (list(range(stages)), None)
        assert channel.about == ""
        hops = {
            (way, kind, (stage + step) % stages)
            for kind, back in ((Kind.FORWARD, -1), (Kind.BACKWARD, 1))
            for way, step in (("from", back), ("to", -back))
        }
        assert groups_of(channel) == dict.fromkeys(hops if stages > 1 else (), range(stages))
        for carrier in channel._carriers.values():
            assert (carrier._timeout, carrier._ahead) == (SECONDS, True)
            assert carrier._hosts == f"hosts of {list(range(stages))}"
    assert not job.groups


@pytest.mark.parametrize("wraps", [False, True])
@pytest.mark.parametrize("stages", [2, 3])
def test_every_link_over_nccl_is_a_group_of_its_two_ranks(monkeypatch, stages, wraps):
    """All ranks make all groups in one order; each brings its own up, where its peer does."""
    job = MadeUpJob(monkeypatch, stages, pipelines=2)
    channels = job.channels(carrier="posted", num_chunks=1 + wraps)
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
        stage = pipeline.index(rank)
        hops = {
            (way, kind, pipeline[(stage + step) % stages])
            for kind, back in ((Kind.FORWARD, -1), (Kind.BACKWARD, 1))
            for way, step in (("from", back), ("to", -back))
            if wraps or 0 <= stage + step < stages
        }
        assert set(own) == hops
        for (way, kind, peer), group in own.items():
            sender, receiver = (rank, peer) if way == "to" else (peer, rank)
            carries[group].add((kind, sender, receiver))
            assert group[-1] == f"envpipe-{kind.value}"
    # Both ends agree, and nothing else goes over a link.
    assert all(len(hops) == 1 for hops in carries.values())
    assert len(carries) == len(made)


@pytest.mark.parametrize(
    ("queues", "capacity"),
    [(None, None), ("32", None), ("8", None), ("7", 1), ("1", 1), ("", None)],
)
@pytest.mark.parametrize("carrier", ["posted", "receives"])
def test_over_few_hardware_queues_one_receive_is_posted_ahead(
    monkeypatch, carrier, queues, capacity
):
    """There an unmatched send stops all behind it, and so the header that would match it."""
    job = MadeUpJob(monkeypatch, 2)
    if queues is not None:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", queues)
    for channel in job.channels(carrier=carrier):
        assert channel.capacity == capacity
        assert channel.about == f"NCCL between stages 0 and 1 (asked for: {carrier})"
        (made,) = channel._carriers.values()
        assert (made._timeout, made._ahead) == (None, carrier == "posted" or capacity == 1)


def test_transfers_that_cannot_work_are_refused(monkeypatch):
    job = MadeUpJob(monkeypatch, 2)
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "0")
    job.channels(carrier="receives")
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    with pytest.raises(ChannelError, match="CUDA_LAUNCH_BLOCKING"):
        job.channels(carrier="receives")
    with pytest.raises(ChannelError, match="'ucc'"):
        MadeUpJob(monkeypatch, 2, backend="ucc").channels()
