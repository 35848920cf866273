"""What the ranks of the channel tests run; each is a stage of one pipeline."""

import random
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import numpy as np
import plain_stages
import torch
import torch.distributed as dist
from random_orders import random_order

from envpipe_megatron.core.kinds import WHOLE, Kind, Unit, unit
from envpipe_megatron.runtime.channel import collectives, links
from envpipe_megatron.runtime.channel.carrier import StageSpecs, TensorSpec
from envpipe_megatron.runtime.channel.collectives import (
    SUM,
    CollectivesError,
    HostGroup,
    make_collectives,
    of_all_ranks,
)
from envpipe_megatron.runtime.channel.p2p import P2PChannel


def message(number: int) -> torch.Tensor:
    return torch.full(plain_stages.SHAPE, float(number))


def units(kind: Kind, count: int) -> list[Unit]:
    return [unit(kind, number) for number in range(count)]


def expecting(count: int) -> P2PChannel:
    channel = plain_stages.channel(10)
    plain_stages.expect(channel, units(Kind.FORWARD, count), plain_stages.SPECS)
    return channel


def received(channel: P2PChannel, number: int) -> float:
    """First element of what was received; all elements are alike."""
    (tensor,) = channel.receive(unit(Kind.FORWARD, number))
    assert torch.equal(tensor.detach(), torch.full_like(tensor.detach(), tensor[0, 0].item()))
    assert tensor.requires_grad
    return tensor[0, 0].item()


def exchanged(rank: int, times: int) -> Any:
    """Return what each boundary's other side gave, over the hosts' connections."""
    stages = dist.get_world_size()
    world, hosts = dist.group.WORLD, plain_stages.lone_pipeline(stages)
    maker = links._Maker(world, hosts, timedelta(seconds=10), wraps=True)  # type: ignore[arg-type]
    got: dict[int, list[Any]] = {}
    for boundary in maker._own:
        side = int(rank != boundary)
        values = ((boundary, side, number, bytes(300 * number)) for number in range(times))
        got[boundary] = [maker._exchange(boundary, side, value) for value in values]
    return got


def many_pending(rank: int, count: int) -> Any:
    """Stage 0 sends `count` messages while stage 1 takes none; then stage 1 takes all.

    Outputs are freed as Megatron does, while their sends are pending.
    """
    channel = expecting(count if rank == 1 else 0)
    times_s, messages = [], []
    if rank == 0:
        for number in range(count):
            output = message(number).requires_grad_()
            begin_s = time.monotonic()
            channel.send(unit(Kind.FORWARD, number), [output])
            times_s.append(time.monotonic() - begin_s)
            output.data = torch.empty(1)
            del output
            for _ in range(8):
                message(-1)  # takes the freed memory, if there is any
    dist.barrier()  # only now may stage 1 start: all sends have returned
    if rank == 1:
        messages = [received(channel, number) for number in range(count)]
    channel.end_step()
    return times_s, messages


def several_tensors(rank: int) -> Any:
    """Messages of several shapes and types, others forward than backward; one not in one piece."""
    channel = plain_stages.channel(10)
    cpu = torch.device("cpu")
    forward = TensorSpec(((2, 3), (5,), (4,)), (torch.float32, torch.int64, torch.bool), cpu)
    backward = TensorSpec(((7,),), (torch.bfloat16,), cpu)
    by_kind = {Kind.FORWARD: forward, Kind.BACKWARD: backward}
    comes = [*WHOLE][1 - rank : 2 - rank]  # nothing on the last stage
    specs = StageSpecs({kind: by_kind[kind] for kind in comes}, by_kind)
    plain_stages.expect(channel, [own for kind in comes for own in units(kind, 2)], specs)
    result = []
    for number in range(2):
        if rank == 0:
            mask = torch.arange(4) % 2 == number
            turned = torch.arange(6).float().reshape(3, 2).t() + number
            sent = [turned, torch.full((5,), number), mask]
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


def random_orders(rank: int, seeds: Sequence[int], vary: bool) -> Any:
    """Steps of random orders; what units got that was not theirs, and messages kept for later."""
    channel, wrong, kept = plain_stages.channel(10), list[str](), 0
    for seed in seeds:
        rng, own_rng = random.Random(seed), random.Random(10 * seed + rank)
        job = 3, rng.randint(1, 8), rng.randint(1, 3)
        schedule = random_order(rng, *job, split=rng.random() < 0.5)
        nodes = schedule.cross_dependency.reshape(3, -1)[rank].tolist()
        leaves = {
            place + own.combined: own
            for place, own in enumerate(schedule.stages[rank])
            if schedule.sends[rank, place]
        }
        channel.begin_step(schedule, replace(plain_stages.SPECS, vary=vary))
        for place, own in enumerate(schedule.stages[rank]):
            if nodes[place] >= 0:
                (got,) = channel.receive(own)
                wrong += [f"{own}: {got}"] * (not bool((got == nodes[place]).all()))
                kept += len(channel._kept)
            if own_rng.random() < 0.1:
                time.sleep(0.001)
            if place in leaves:
                number = rank * schedule.units_per_stage + place
                channel.send(leaves[place], [message(number)])
        channel.end_step()
    return wrong, kept


def exchange(rank: int, pipelines: Sequence[Sequence[int]], fan_in: int) -> dict[str, Any]:
    """Return what each kind of exchange gives this rank."""
    with (
        patch.object(collectives, "FAN_IN", fan_in),
        patch.object(collectives, "HostGroup", side_effect=HostGroup) as groups,
    ):
        made = make_collectives(pipelines, timedelta(seconds=20))
    numbers = np.array([[rank, 0.1 * rank]])
    return {
        "groups": [list(call.args[0]) for call in groups.call_args_list],
        "is_planner": made.is_planner,
        "num_replicas": made.num_replicas,
        "in_pipeline": made.in_pipeline(rank),
        "sum": [stage.tolist() for stage in made.by_stage(numbers, SUM)],
        "to_planner": made.to_planner(rank, max),
        "objects": made.by_stage({rank}, lambda parts: set().union(*parts)),
        "over_replicas": made.over_replicas({rank}, lambda parts: set().union(*parts)),
        "all": made.all_to_planner(rank),
        "replica": made.replica,
        "latest": made.latest(float(rank)),
        "on_all": [made.on_all(True), made.on_all(rank != 3)],
        "first": [made.first(None), made.first(rank if rank == 5 else None)],
        "from_planner": made.from_planner(str(rank)),
        "agreed": made.agreed(lambda: rank),
    }


def come_late(rank: int, late_s: float) -> list[int]:
    """Return what the first of two ranks gathers; the other comes when it would have given up."""
    if rank > 1:
        return []
    with patch.object(collectives, "_CONNECT", timedelta(seconds=0.05)):
        time.sleep(rank * late_s)
        return HostGroup([0, 1], "late", timedelta(seconds=20), leader=0).gather(rank)


def one_cannot_come(rank: int, timeout_s: float) -> list[bool]:
    """A rank that fails before its groups are made; which ranks are without, as all know."""
    without = rank == 1
    if not without:
        try:
            make_collectives([range(dist.get_world_size())], timedelta(seconds=timeout_s))
        except CollectivesError:
            without = True
    return of_all_ranks(without)


def lengths(rank: int, sizes: Sequence[int]) -> list[bool]:
    """Return True if values of these lengths arrive unchanged: from planner, all and a neighbour.

    Also where the script has another default device, as by `torch.set_default_device("cuda")`.
    """
    made = make_collectives([range(12)], timedelta(seconds=20))
    before, behind = (rank - 1) % 12, (rank + 1) % 12
    with torch.device("meta"):
        sent = [made.pipeline.send(bytes([rank]) * size, behind, 1) for size in sizes]
        same = [
            made.from_planner(bytes([rank]) * size) == bytes([0]) * size
            and made.in_pipeline(bytes([rank]) * (size + rank))
            == [bytes([other]) * (size + other) for other in range(12)]
            and made.pipeline.receive(before, 1) == bytes([before]) * size
            for size in sizes
        ]
    made.on_all(True)  # what was sent has left
    assert len(sent) == len(sizes)
    return same
