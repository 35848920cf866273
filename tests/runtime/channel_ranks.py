"""What the ranks of the channel tests run; each is a stage of one pipeline."""

from __future__ import annotations

import time
from typing import Any

import plain_stages
import torch
import torch.distributed as dist

from envpipe_megatron.core.schedule import Kind, unit
from envpipe_megatron.runtime.channel.messages import StageSpecs, TensorSpec
from envpipe_megatron.runtime.channel.p2p import P2PChannel


def message(number: int) -> torch.Tensor:
    return torch.full(plain_stages.SHAPE, float(number))


def received(channel: P2PChannel, number: int, kind: Kind = Kind.FORWARD) -> float:
    """First element of what was received; all elements are alike."""
    (tensor,) = channel.receive(unit(kind, number))
    assert torch.equal(tensor.detach(), torch.full_like(tensor.detach(), tensor[0, 0].item()))
    assert tensor.requires_grad is (kind is Kind.FORWARD)
    return tensor[0, 0].item()


def many_pending(rank: int, count: int) -> Any:
    """Stage 0 sends `count` messages while stage 1 takes none; then stage 1 takes all."""
    channel = plain_stages.channel(10)
    channel.expect({Kind.FORWARD: count if rank == 1 else 0}, plain_stages.SPECS)
    times_s, messages = [], []
    if rank == 0:
        for number in range(count):
            begin_s = time.monotonic()
            channel.send(unit(Kind.FORWARD, number), [message(number)])
            times_s.append(time.monotonic() - begin_s)
    dist.barrier()  # only now may stage 1 start: all sends have returned
    if rank == 1:
        messages = [received(channel, number) for number in range(count)]
    channel.end_step()
    return times_s, messages


def swapped(rank: int, count: int) -> Any:
    """Stage 0 frees its outputs as Megatron does, while their sends are pending."""
    channel = plain_stages.channel(10)
    channel.expect({Kind.FORWARD: count if rank == 1 else 0}, plain_stages.SPECS)
    messages = []
    if rank == 0:
        for number in range(count):
            output = message(number).requires_grad_()
            channel.send(unit(Kind.FORWARD, number), [output])
            output.data = torch.empty(1)
            del output
            for _ in range(8):
                message(-1)  # takes the freed memory, if there is any
    dist.barrier()
    if rank == 1:
        messages = [received(channel, number) for number in range(count)]
    channel.end_step()
    return messages


def transposed(rank: int) -> Any:
    """An output that does not lie in one piece."""
    channel = plain_stages.channel(10)
    channel.expect({Kind.FORWARD: 1 if rank == 1 else 0}, plain_stages.SPECS)
    rows, columns = plain_stages.SHAPE
    result = None
    if rank == 0:
        output = torch.arange(rows * columns).float().reshape(columns, rows).t()
        channel.send(unit(Kind.FORWARD, 0), [output])
    elif rank == 1:
        result = channel.receive(unit(Kind.FORWARD, 0))[0].tolist()
    channel.end_step()
    return result


def both_ways(rank: int, count: int) -> Any:
    """The stage in the middle is sent to from both sides, and takes in another order than sent."""
    channel = plain_stages.channel(10)
    middle = rank == 1
    wanted = {Kind.FORWARD: count if middle else 0, Kind.BACKWARD: count if middle else 0}
    channel.expect(wanted, plain_stages.SPECS)
    taken = []
    if middle:
        for number in range(count):
            taken.append(("B", received(channel, number, Kind.BACKWARD)))
        for number in range(count):
            taken.append(("F", received(channel, number, Kind.FORWARD)))
    else:
        kind = Kind.FORWARD if rank == 0 else Kind.BACKWARD
        for number in range(count):
            channel.send(unit(kind, number), [message(number + 100 * rank)])
    channel.end_step()
    return taken


def posted_receives(rank: int, count: int) -> Any:
    """How many messages each receive of stage 1 finds posted and not taken, by direction."""
    posted: list[int] = []
    real = dist.irecv

    def irecv(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        posted[-1] += 1
        return real(tensor, *args, **kwargs)

    channel = plain_stages.channel(10)
    dist.irecv = irecv
    try:
        posted.append(0)
        channel.expect({Kind.FORWARD: count if rank == 1 else 0}, plain_stages.SPECS)
        for number in range(count):
            if rank == 0:
                channel.send(unit(Kind.FORWARD, number), [message(number)])
            elif rank == 1:
                posted.append(0)
                received(channel, number)
        channel.end_step()
    finally:
        dist.irecv = real
    return posted


def left_over(rank: int) -> str:
    """Stage 1 expects two messages and takes one."""
    channel = plain_stages.channel(10)
    channel.expect({Kind.FORWARD: 2 if rank == 1 else 0}, plain_stages.SPECS)
    text = ""
    if rank == 0:
        for number in range(2):
            channel.send(unit(Kind.FORWARD, number), [message(number)])
    elif rank == 1:
        received(channel, 0)
        try:
            channel.end_step()
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
        received(channel, 1)  # so that nothing is left for the next test
    channel.end_step()
    return text


def several_tensors(rank: int) -> Any:
    """Messages of several shapes and types, others forward than backward."""
    channel = plain_stages.channel(10)
    cpu = torch.device("cpu")
    forward = TensorSpec(((2, 3), (5,), (4,)), (torch.float32, torch.int64, torch.bool), cpu)
    backward = TensorSpec(((7,),), (torch.bfloat16,), cpu)
    by_kind = {Kind.FORWARD: forward, Kind.BACKWARD: backward}
    expected = {0: {Kind.BACKWARD: 2}, 1: {Kind.FORWARD: 2}}.get(rank, {})
    specs = StageSpecs({kind: by_kind[kind] for kind in expected}, by_kind)
    channel.expect(expected, specs)
    result = []
    for number in range(2):
        if rank == 0:
            mask = torch.arange(4) % 2 == number
            sent = [torch.full((2, 3), number + 0.5), torch.full((5,), number), mask]
            channel.send(unit(Kind.FORWARD, number), sent)
            got = channel.receive(unit(Kind.BACKWARD, number))
        elif rank == 1:
            got = channel.receive(unit(Kind.FORWARD, number))
            gradient = torch.full((7,), -float(number), dtype=torch.bfloat16)
            channel.send(unit(Kind.BACKWARD, number), [gradient])
        else:
            continue
        result.append([(t.dtype, t.tolist(), t.requires_grad) for t in got])
    channel.end_step()
    return result


def varying(rank: int, count: int) -> Any:
    """Messages of which each has a shape, a type and a number of tensors of its own, both ways.

    What the specs say is an example, and another shape.
    """
    channel = plain_stages.channel(10)
    types = (torch.float32, torch.bool, torch.int64)

    def sent(number: int) -> list[torch.Tensor]:
        return [
            torch.full((number + 1,) * part, number, dtype=types[part])
            for part in range(1 + number % 3)
        ]

    expected = {0: {Kind.BACKWARD: count}, 1: {Kind.FORWARD: count}}.get(rank, {})
    channel.expect(expected, plain_stages.SPECS, vary=True)
    result: list[Any] = []
    if rank == 0:
        for number in range(count):
            channel.send(unit(Kind.FORWARD, number), sent(number))
    for number in range(count):
        if rank == 0:
            got = channel.receive(unit(Kind.BACKWARD, number))
        elif rank == 1:
            got = channel.receive(unit(Kind.FORWARD, number))
            channel.send(unit(Kind.BACKWARD, number), sent(number + 1))
        else:
            break
        wanted = sent(number + 1 if rank == 0 else number)
        result.append(
            [t.dtype for t in got] == [t.dtype for t in wanted]
            and all(torch.equal(t, w) for t, w in zip(got, wanted, strict=True))
        )
    channel.end_step()
    return result
