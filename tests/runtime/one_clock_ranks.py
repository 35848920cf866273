"""What the ranks of the tests of one clock for a whole job run."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import plain_stages

from envpipe_megatron.core.kinds import Kind
from envpipe_megatron.core.orders import builders
from envpipe_megatron.gpu.base import DryRunGpu, Gpu, GpuError
from envpipe_megatron.gpu.emulated.emulated_gpu import EmulatedGpu
from envpipe_megatron.policies.request import PlanRequest
from envpipe_megatron.runtime.execution.orders import IterationOrder
from envpipe_megatron.runtime.job.session import Session, SessionConfig
from envpipe_megatron.tuning import one_clock
from envpipe_megatron.tuning.probes.sweep import ProfilerSettings

#: Of an iteration of each stage at the highest clock.
UNSEEN_S = (1.0, 1.2, 0.8)


class _EmulatedDryRun(DryRunGpu):
    """No guard could open it by its address, so the rank serves its requests."""

    backend = "dry_run of an emulated GPU"


def step(session: Session) -> IterationOrder:
    session.begin_step()
    run = session.open_iteration(builders.whole_iteration(len(UNSEEN_S)), plain_stages.SPECS)
    run.begin_unit()
    run.end_unit()
    session.end_step()
    return run.order


def train_on(rank: int, root: Path, waits_first: float, waits_later: float) -> Any:
    """Train on, and let the share of a step that waits for memory be another once it is steady.

    Returns phase and clock of each step, and what the planning rank said.
    """
    config = SessionConfig(
        PlanRequest(1, policy="uniform"),
        warmup_iterations=2,
        profiler=ProfilerSettings(1, 1),
        one_clock_slowdown_percent=5.0,
    )
    said: list[str] = []
    session, gpu = plain_stages.session(
        rank, config, root, time_at_max_s={Kind.FORWARD: UNSEEN_S[rank]}, say=said.append
    )

    def waits(share: float) -> None:
        gpu.preset = replace(gpu.preset, forward=replace(gpu.preset.forward, memory_fraction=share))

    waits(waits_first)
    steps: list[tuple[str, int | None]] = []
    often = mock.patch.multiple(one_clock, _COMPARED_AFTER=3, _MEASUREMENTS_APART=0)
    with often, contextlib.closing(session):
        for _ in range(120):
            step(session)
            steps.append((session.state.phase.value, gpu.requested_frequency_mhz))
            if steps[-1][0] == "steady":
                waits(waits_later)
    return steps, said


def train_unseen(
    rank: int,
    root: Path,
    allowed_percent: float,
    dry_run: bool,
    clocks_mhz: tuple[int, ...] = (),
    victim: int | None = None,
) -> Any:
    """Train a framework that runs whole iterations of which no unit is seen.

    The control of the victim's clock ends while clocks are measured.
    """
    config = SessionConfig(
        PlanRequest(1, policy="uniform"),
        warmup_iterations=2,
        profiler=ProfilerSettings(1, 1),
        one_clock_slowdown_percent=allowed_percent,
    )

    def seen_as(gpu: EmulatedGpu) -> Gpu:
        gpu.supported_frequencies_mhz = clocks_mhz or gpu.supported_frequencies_mhz
        return _EmulatedDryRun(gpu) if dry_run else gpu

    session, gpu = plain_stages.session(
        rank, config, root, time_at_max_s={Kind.FORWARD: UNSEEN_S[rank]}, seen_as=seen_as
    )
    requested: dict[str, set[int | None]] = {"warm-up": set(), "profile": set(), "steady": set()}
    timed: list[bool] = []
    try:
        while len(timed) < 12:
            order = step(session)
            if rank == victim and requested["profile"]:
                session.clock.stop(GpuError("the driver of a test"))
            requested[session.state.phase.value].add(gpu.requested_frequency_mhz)
            if requested["steady"]:
                timed.append(order.times_units)
        state = session.state
        return {
            "notes": state.notes,
            "requested": requested,
            "executed": session.executed,
            "timed": timed,
            "iterations": [time_s for _, time_s, _ in session.iterations.latest],
        }
    finally:
        session.close()
