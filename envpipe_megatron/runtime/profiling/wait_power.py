"""Measurements between two iterations: the power of a GPU that waits, and the latency of a hop."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from envpipe_megatron.core.kinds import Kind, unit
from envpipe_megatron.gpu.clock.completion import Done
from envpipe_megatron.runtime.channel.carrier import StageSpecs
from envpipe_megatron.runtime.channel.p2p import P2PChannel
from envpipe_megatron.runtime.clocks.served import Clock
from envpipe_megatron.runtime.energy.meter import EnergyMeter, MeterError
from envpipe_megatron.runtime.execution.executor import METER_MARGIN_S, Executor

#: How long the pipeline stands still at each clock: some ten refreshes of the counter.
_HOLD_S = 1.5
#: Waiting power bends little over the clock: a few points give its curve.
_NUM_CLOCKS = 4
#: Round trips that count; those before them bring buffers and routes into use.
_ROUND_TRIPS = 11
_WARMUPS = 3


def wait_clocks(sweep_mhz: Sequence[int]) -> list[int]:
    """The clocks of a sweep to measure waiting at: the lowest, the highest, and two between."""
    rising = sorted(sweep_mhz)
    wanted_mhz = np.linspace(rising[0], rising[-1], _NUM_CLOCKS)
    nearest = [min(rising, key=lambda clock: abs(clock - wanted)) for wanted in wanted_mhz]
    return list(dict.fromkeys(nearest))


@dataclass(frozen=True)
class WaitPower:
    """Waiting power by the clock in MHz that is set while waiting; NaN where the meter failed."""

    power_w: Mapping[int, float]

    def at(self, frequency_mhz: int) -> float:
        """Power at a clock, W: between the measured ones on a line, beyond them constant."""
        clocks = sorted(self.power_w)
        return float(np.interp(frequency_mhz, clocks, [self.power_w[f] for f in clocks]))


def measure_wait_power(
    frequency_mhz: int,
    stage: int,
    num_stages: int,
    channel: P2PChannel,
    specs: StageSpecs,
    executor: Executor,
    clock: Clock,
    meter: EnergyMeter,
) -> float:
    """Hold the pipeline once, between two iterations, and give this GPU's power in W.

    Every stage expects a message from a neighbour that sends only after a while, and idles until
    then. A receive that is posted ahead spins meanwhile, as it does in a bubble; a stream that
    waits for a word takes as much power as that (117 to 118 W on an H100, either way). NaN if the
    meter failed: all ranks decide together.
    """
    receives, sends = (Kind.FORWARD, []) if stage else (Kind.BACKWARD, [])
    if stage == 1:
        sends.append(Kind.BACKWARD)
    if stage + 1 < num_stages:
        sends.append(Kind.FORWARD)
    # Before the receive: a kernel that is loaded while one spins can hang both.
    payloads = {kind: specs.sends[kind].make(torch.zeros) for kind in sends}
    clock.request(frequency_mhz, Done())
    channel.expect({receives: 1}, specs)
    executor.wait_for_messages()  # what an iteration before left to do must be over
    start_s = executor.meet() + METER_MARGIN_S  # refreshes on both sides of the window
    end_s = start_s + _HOLD_S - METER_MARGIN_S
    executor.idle(METER_MARGIN_S)  # the clock settles too
    meter.catch_up()
    executor.idle(_HOLD_S)  # the neighbour's GPU waits meanwhile
    # From the first stage on: where one communicator carries all, each transfer waits for the last.
    if stage:
        channel.receive(unit(receives, 0))
    for kind in sends:
        channel.send(unit(kind, 0), payloads[kind])
    if not stage:
        channel.receive(unit(receives, 0))
    executor.wait_for_messages()
    channel.end_step()
    meter.catch_up()
    try:
        return meter.energy_j(start_s, end_s) / (end_s - start_s)
    except MeterError:
        return math.nan


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
        channel.expect({Kind.FORWARD: rounds}, specs)
        for number in range(rounds):
            channel.receive(unit(Kind.FORWARD, number))
            channel.send(unit(Kind.BACKWARD, number), payload)
            executor.wait_for_messages()
        channel.end_step()
    if stage + 1 == num_stages:
        return 0.0
    trips_s = []
    payload = specs.sends[Kind.FORWARD].make(torch.zeros)
    channel.expect({Kind.BACKWARD: rounds}, specs)
    for number in range(rounds):
        sent_s = executor.now_s()
        channel.send(unit(Kind.FORWARD, number), payload)
        channel.receive(unit(Kind.BACKWARD, number))
        executor.wait_for_messages()
        trips_s.append(executor.now_s() - sent_s)
    channel.end_step()
    return statistics.median(trips_s[_WARMUPS:]) / 2
