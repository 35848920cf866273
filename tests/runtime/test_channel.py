"""The channel over gloo, between three ranks without a training framework; and its making."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import channel_ranks
import pytest
import torch
import torch.distributed as dist
from plain_stages import SPECS
from torch.futures import Future

from envpipe_megatron.builders import one_f_one_b
from envpipe_megatron.runtime import channel
from envpipe_megatron.runtime import links as runtime_links
from envpipe_megatron.runtime.messages import MessageError, StageSpecs, TensorSpec
from envpipe_megatron.schedule import Kind, Unit

pytestmark = pytest.mark.xdist_group("ranks")


def test_sends_return_at_once_and_keep_their_order(three_ranks):
    (times_s, _), (_, messages), _ = three_ranks.run(channel_ranks.many_pending, 64)
    # Returned while the receiver stood at a barrier behind them: none waited for it.
    assert len(times_s) == 64
    assert sorted(times_s)[32] < 0.01
    assert messages == [(number, pytest.approx(0.1 * number)) for number in range(64)]


def test_freeing_an_output_does_not_touch_its_send(three_ranks):
    assert three_ranks.run(channel_ranks.swapped, 32)[1] == list(range(32))


def test_output_that_does_not_lie_in_one_piece(three_ranks):
    assert three_ranks.run(channel_ranks.transposed)[1] == ([[0, 2, 4], [1, 3, 5]], None)


def test_directions_do_not_wait_for_each_other(three_ranks):
    taken = three_ranks.run(channel_ranks.both_ways, 8)[1]
    assert taken == [*(("B", 200 + m) for m in range(8)), *(("F", m) for m in range(8))]


def test_one_receive_is_posted_at_a_time(three_ranks):
    """The first at the start of the step, then one whenever one is taken."""
    assert three_ranks.run(channel_ranks.posted_receives, 5)[1] == [1, 1, 1, 1, 1, 0]


def test_message_left_over_is_an_error(three_ranks):
    text = three_ranks.run(channel_ranks.left_over)[1]
    assert text.startswith("ChannelError: Stage 1 ended a step with messages not taken")
    assert three_ranks.run(channel_ranks.swapped, 3)[1] == [0, 1, 2]  # the links are as before


def test_messages_of_several_tensors(three_ranks):
    upstream, downstream, _ = three_ranks.run(channel_ranks.several_tensors)
    for number in range(2):
        assert upstream[number] == [(torch.bfloat16, [-number] * 7, False)]
        assert downstream[number] == [
            (torch.float32, [[number + 0.5] * 3] * 2, True),
            (torch.int64, [number] * 5, False),
            (torch.bool, [position % 2 == number for position in range(4)], False),
        ]


def test_messages_that_vary(three_ranks):
    assert three_ranks.run(channel_ranks.varying, 7) == [[True] * 7, [True] * 7, []]


def test_messages_that_vary_need_several_hardware_queues():
    made = channel.P2PChannel([0, 1], 0, {}, stamped=False, timeout=None, capacity=1)
    with pytest.raises(channel.ChannelError, match="CUDA_DEVICE_MAX_CONNECTIONS=8"):
        made.begin_step(one_f_one_b(2, 2), replace(SPECS, vary=True))


@pytest.mark.parametrize(
    ("shapes", "dtypes"),
    [
        (((),), (torch.float32,)),
        (((2, 3), (5,), (0, 4)), (torch.bfloat16, torch.bool, torch.int32)),
    ],
)
def test_headers_say_what_a_message_carries(shapes, dtypes):
    spec = TensorSpec(shapes, dtypes, torch.device("cpu"))
    assert TensorSpec.of_header(spec.header(), spec.device) == spec


def test_a_message_with_too_much_for_its_header_is_refused():
    many = TensorSpec.of_one_type(((1, 2, 3),) * 40, torch.float32, torch.device("cpu"))
    with pytest.raises(MessageError, match="fewer tensors"):
        many.header()


@pytest.fixture
def backend(monkeypatch):
    """A pipeline's process group of any backend, whose links are made up."""
    made = SimpleNamespace(name="nccl")
    monkeypatch.setattr(dist, "get_backend", lambda group: made.name)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1])
    monkeypatch.setattr(dist, "get_group_rank", lambda group, rank: 0)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(runtime_links, "_nccl_links", lambda *args, **kwargs: {})
    return made


def made_channel():
    return runtime_links.make_channel(None, stamped=False, timeout=timedelta(seconds=1))


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

    def __init__(self, result: int | None) -> None:
        self._future: Future[int] = Future()
        if result is not None:
            self._future.set_result(result)

    def wait(self) -> None: ...

    def is_completed(self) -> bool:
        return True

    def get_future_result(self) -> Future[int]:
        return self._future


@pytest.mark.parametrize("lost", ["receive", "send"])
@pytest.mark.parametrize("result", [1, 2])
def test_what_nccl_gave_up_ends_the_step(monkeypatch, lost, result):
    """Else the step's garbage goes into the framework's collectives."""
    results: dict[str, list[int | None]] = {"receive": [0, None], "send": [0, None]}
    for name, transfer in (("receive", "irecv"), ("send", "isend")):
        monkeypatch.setattr(
            dist, transfer, lambda *a, name=name, **kw: Transfer(results[name].pop(0))
        )
    links: Any = dict.fromkeys((kind, sender) for kind in Kind for sender in range(2))
    made = channel.P2PChannel([0, 1], 0, links, stamped=False, timeout=None)
    specs = StageSpecs.alike(TensorSpec.of_one_type(((1,),), torch.float32, torch.device("cpu")))

    def step() -> None:
        made.expect({Kind.BACKWARD: 2}, specs)
        for microbatch in range(2):
            made.send(Unit(Kind.FORWARD, microbatch), [torch.zeros(1)], None)
            made.receive(Unit(Kind.BACKWARD, microbatch))
        made.end_step()

    step()  # those of which the watchdog does not know yet are no error
    results |= {"receive": [0, 0], "send": [0, 0]}
    results[lost][1] = result
    with pytest.raises(channel.ChannelError, match=r"lost its neighbour, stage 1 \(rank 1\)"):
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
    links: Any = dict.fromkeys((kind, sender) for kind in Kind for sender in range(2))
    made = channel.P2PChannel([0, 1], 0, links, stamped=False, timeout=patience)

    def step() -> None:
        made.expect({Kind.BACKWARD: 1}, SPECS)
        made.send(Unit(Kind.FORWARD, 0), [torch.zeros(1)], None)
        made.receive(Unit(Kind.BACKWARD, 0))
        made.end_step()

    with pytest.raises(channel.ChannelError, match=r"lost its neighbour, stage 1 \(rank 1\)"):
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
    links: Any = {(kind, sender): (kind, sender) for kind in Kind for sender in range(3)}
    ranks = [10, 11, 12]
    made = channel.P2PChannel(ranks, stage, links, stamped=False, timeout=timedelta(seconds=1))
    schedule, expected = one_f_one_b(3, 1), []
    made.begin_step(schedule, SPECS)
    for unit in schedule.stages[stage]:
        towards = 1 if unit.kind is Kind.FORWARD else -1
        if 0 <= stage - towards < 3:
            made.receive(unit)
            expected.append(("irecv", ranks[stage - towards], (unit.kind, stage - towards)))
        if 0 <= stage + towards < 3:
            made.send(unit, [torch.zeros(1)], None)
            expected.append(("isend", ranks[stage + towards], (unit.kind, stage)))
    made.end_step()
    assert sorted(taken) == sorted(expected)


@pytest.mark.parametrize("vary", [False, True])
@pytest.mark.parametrize("capacity", [None, 1])
def test_messages_that_vary_are_refused_over_one_queue_alone(monkeypatch, vary, capacity):
    monkeypatch.setattr(dist, "irecv", lambda *a, **kw: None)
    links: Any = dict.fromkeys((kind, sender) for kind in Kind for sender in range(2))
    timeout = timedelta(seconds=1)
    made = channel.P2PChannel([0, 1], 0, links, stamped=False, timeout=timeout, capacity=capacity)
    refused = pytest.raises(channel.ChannelError, match="several hardware queues")
    with refused if vary and capacity else nullcontext():
        made.begin_step(one_f_one_b(2, 2), replace(SPECS, vary=vary))
