"""The power of a GPU that waits for a message, measured by letting it wait."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from envpipe_megatron.core.kinds import Kind, unit
from envpipe_megatron.gpu.clock.completion import Done
from envpipe_megatron.gpu.clock.controller import Clock
from envpipe_megatron.runtime.channel.messages import StageSpecs
from envpipe_megatron.runtime.channel.p2p import P2PChannel
from envpipe_megatron.runtime.energy.meter import EnergyMeter, MeterError
from envpipe_megatron.runtime.execution.executor import METER_MARGIN_S, Executor

#: How long the pipeline stands still at each clock: some ten refreshes of the counter.
_HOLD_S = 1.5
#: Waiting power bends little over the clock: a few points give its curve.
_NUM_CLOCKS = 4


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
