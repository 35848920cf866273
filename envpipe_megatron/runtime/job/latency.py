"""The latency of a hop between two stages, measured between two iterations."""

from __future__ import annotations

import statistics

import torch

from envpipe_megatron.core.kinds import Kind, unit
from envpipe_megatron.runtime.channel.carrier import StageSpecs
from envpipe_megatron.runtime.channel.p2p import P2PChannel
from envpipe_megatron.runtime.execution.executor import Executor

#: Round trips that count; those before them bring buffers and routes into use.
_ROUND_TRIPS = 11
_WARMUPS = 3


def measure_p2p_latency_s(
    stage: int, num_stages: int, channel: P2PChannel, specs: StageSpecs, executor: Executor
) -> float:
    """Half the median round trip, in s, of a message between this stage and the next.

    Run by all stages between two iterations. A message of the size of training goes to the next
    stage over the activations' link and one comes back over the gradients', so the figure is the
    mean of both directions. It holds what a hop costs on the host, too.

    A stage serves the boundary before it first, then measures the one after it, so boundaries are
    measured one after another without any barrier. Of the two stages of a boundary each sends only
    what the other expects next: with any channel that training runs on, no order of arrival can
    stop it.

    It is 0 on the last stage, which has no next one, and on emulated GPUs.
    """
    rounds = _WARMUPS + _ROUND_TRIPS
    executor.meet()
    if stage > 0:
        payload = specs.sends[Kind.BACKWARD].make(torch.zeros)
        comes = [unit(Kind.FORWARD, number) for number in range(rounds)]
        channel.expect(comes, specs)
        for number, own in enumerate(comes):
            channel.receive(own)
            channel.send(unit(Kind.BACKWARD, number), payload)
            executor.wait_for_messages()
        channel.end_step()
    if stage + 1 == num_stages:
        return 0.0
    trips_s = []
    payload = specs.sends[Kind.FORWARD].make(torch.zeros)
    comes = [unit(Kind.BACKWARD, number) for number in range(rounds)]
    channel.expect(comes, specs)
    for number, own in enumerate(comes):
        sent_s = executor.now_s()
        channel.send(unit(Kind.FORWARD, number), payload)
        channel.receive(own)
        executor.wait_for_messages()
        trips_s.append(executor.now_s() - sent_s)
    channel.end_step()
    return statistics.median(trips_s[_WARMUPS:]) / 2
