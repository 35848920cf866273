"""Which clocks waiting is measured at, what a stage does meanwhile, and the curve that results."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from envpipe_megatron.core.kinds import WHOLE, Kind, unit
from envpipe_megatron.runtime.energy.meter import MeterError
from envpipe_megatron.runtime.profiling.wait_power import (
    WaitPower,
    measure_p2p_latency_s,
    measure_wait_power,
    wait_clocks,
)


@pytest.mark.parametrize(
    ("sweep_mhz", "clocks_mhz"),
    [
        ([1400, 1300, 1200, 1100, 1000, 900, 800], [800, 1000, 1200, 1400]),
        ([1400, 1390, 1380, 900, 800], [800, 900, 1380, 1400]),
        ([1000, 1400], [1000, 1400]),
        ([1400], [1400]),
    ],
)
def test_waiting_is_measured_at_few_clocks_of_the_sweep(sweep_mhz, clocks_mhz):
    assert wait_clocks(sweep_mhz) == clocks_mhz


def test_power_between_clocks_lies_on_a_line():
    power = WaitPower({1400: 70.0, 1000: 50.0, 1200: 54.0})
    told_w = [power.at(mhz) for mhz in (900, 1000, 1150, 1200, 1250, 1400, 1500)]
    assert told_w == [50, 50, 53, 54, 58, 70, 70]


@pytest.mark.parametrize(
    ("stage", "receives", "sends"),
    [
        (0, Kind.BACKWARD, [Kind.FORWARD]),
        (1, Kind.FORWARD, [Kind.BACKWARD, Kind.FORWARD]),
        (2, Kind.FORWARD, [Kind.FORWARD]),
        (3, Kind.FORWARD, []),
    ],
)
@pytest.mark.parametrize("seen", [True, False])
def test_what_a_stage_does_while_the_pipeline_stands_still(
    monkeypatch, stage, receives, sends, seen
):
    """It waits for a neighbour that sends 1.7 s after all met, and is metered for 1.3 s of them."""
    done: list[tuple[object, ...]] = []

    def energy_j(start_s: float, end_s: float) -> float:
        done.append(("meter", pytest.approx(start_s), pytest.approx(end_s)))
        if not seen:
            raise MeterError("The counter stands still")
        return 130.0

    channel = SimpleNamespace(
        expect=lambda counts, specs: done.append(("expect", counts)),
        send=lambda *sent: done.append(("send", *sent)),
        receive=lambda unit: done.append(("receive", unit)),
        end_step=lambda: done.append(("end",)),
    )
    executor = SimpleNamespace(
        meet=lambda: done.append(("meet",)) or 10.0,
        idle=lambda time_s: done.append(("idle", time_s)),
        wait_for_messages=lambda: done.append(("wait",)),
    )
    clock = SimpleNamespace(request=lambda mhz, after: done.append(("clock", mhz, after.query())))
    meter = SimpleNamespace(catch_up=lambda: done.append(("look",)), energy_j=energy_j)
    specs = SimpleNamespace(
        sends={kind: SimpleNamespace(make=lambda zeros, kind=kind: kind) for kind in WHOLE}
    )
    power_w = measure_wait_power(1200, stage, 4, channel, specs, executor, clock, meter)
    assert power_w == pytest.approx(100) if seen else math.isnan(power_w)
    messages = [*(("send", unit(kind, 0), kind) for kind in sends), ("receive", unit(receives, 0))]
    assert done == [
        ("clock", 1200, True),
        ("expect", {receives: 1}),
        ("wait",),
        ("meet",),
        ("idle", 0.2),
        ("look",),
        ("idle", 1.5),
        *(messages if stage == 0 else [messages[-1], *messages[:-1]]),
        ("wait",),
        ("end",),
        ("look",),
        ("meter", 10.2, 11.5),
    ]


@pytest.mark.parametrize("measure", ["waits", "hops"])
@pytest.mark.parametrize("stages", [2, 3, 4, 5])
def test_no_transfer_waits_for_one_behind_it_on_a_single_communicator(measure, stages):
    """As if a host stood still in each until its neighbour came to the same."""
    left = [transfers_of(measure, stage, stages) for stage in range(stages)]
    while any(left):
        first = {stage: transfers[0] for stage, transfers in enumerate(left) if transfers}
        pairs = [
            (stage, peer)
            for stage, (way, peer, kind) in first.items()
            if way == "send" and first.get(peer) == ("receive", stage, kind)
        ]
        assert pairs, first
        for stage in pairs[0]:
            del left[stage][0]


def transfers_of(measure: str, stage: int, stages: int) -> list[tuple[str, int, Kind]]:
    """What a stage sends and receives, with which neighbour, in its order."""
    done: list[tuple[str, int, Kind]] = []
    back = {Kind.FORWARD: -1, Kind.BACKWARD: 1}
    channel: Any = SimpleNamespace(
        expect=lambda counts, specs: None,
        send=lambda unit, _: done.append(("send", stage - back[unit.kind], unit.kind)),
        receive=lambda unit: done.append(("receive", stage + back[unit.kind], unit.kind)),
        end_step=lambda: None,
    )
    executor: Any = SimpleNamespace(
        meet=lambda: 0.0,
        now_s=lambda: 0.0,
        idle=lambda time_s: None,
        wait_for_messages=lambda: None,
    )
    spec = SimpleNamespace(make=lambda zeros: None)
    specs: Any = SimpleNamespace(sends=dict.fromkeys(WHOLE, spec))
    if measure == "hops":
        measure_p2p_latency_s(stage, stages, channel, specs, executor)
    else:
        clock: Any = SimpleNamespace(request=lambda mhz, after: None)
        meter: Any = SimpleNamespace(catch_up=lambda: None, energy_j=lambda start_s, end_s: 1.0)
        measure_wait_power(1200, stage, stages, channel, specs, executor, clock, meter)
    return done
