"""What the ranks of the memory tests run: sessions on emulated GPUs with fake memory."""

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import plain_stages
import torch
from fake_memory import FakeMemory, FakeStage, Sizes
from plain_stages import PlainWork

from envpipe_megatron.core.kinds import Kind, Unit
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.integrations.leveled import end_of_job
from envpipe_megatron.runtime.memory.stage import StageMemory

#: An input is one of `plain_stages.SPECS`.
SIZES = Sizes(message=0, input=24)
#: Long backwards, so that EnvPipe's rule wants many extra forwards.
TIMES = {Kind.FORWARD: 0.002, Kind.BACKWARD: 0.012}


class HoldingWork(PlainWork):
    """Messages as `PlainWork`, memory as a `FakeStage`."""

    def __init__(self, schedule: Schedule, rank: int, stage: FakeStage) -> None:
        super().__init__(schedule, rank)
        self._holds = stage

    def forward(self, unit: Unit, inputs: list[torch.Tensor] | None) -> list[torch.Tensor]:
        self._holds.forward(unit)
        return super().forward(unit, inputs)

    def backward(self, unit: Unit, gradients: list[torch.Tensor] | None) -> list[torch.Tensor]:
        self._holds.backward(unit)
        return super().backward(unit, gradients)

    def weight_gradient(self, unit: Unit) -> None:
        self._holds.weight_gradient(unit)
        super().weight_gradient(unit)

    def sent(self, unit: Unit) -> None:
        self._holds.sent(unit)


@dataclass
class Told:
    """Results of a rank."""

    said: list[str] = field(default_factory=list)
    phase: str = ""
    notes: tuple[str, ...] = ()
    peak_in_flight: tuple[int, ...] = ()
    memory: tuple[StageMemory, ...] | None = None
    bill: list[str] = field(default_factory=list)
    readings_by_phase: dict[str, int] = field(default_factory=dict)
    peak_bytes: int = 0
    free_bytes: tuple[float, ...] | None = None


def train(
    rank: int,
    root: Path,
    capacities: tuple[int, ...] | None,
    microbatches: int,
    request: dict[str, Any],
    profile_file: Path | None = None,
    fingerprint: dict[str, Any] | None = None,
    splits: bool = False,
    sizes: Sizes = SIZES,
) -> Told:
    """Train past the compared iterations of the steady phase.

    Args:
        capacities: of each rank's device; None where there is no memory to watch.
        request: options of `PlanRequest`.
        fingerprint: of a job that can be started again.
        splits: whether orders may split backwards.
        sizes: what each stage holds.
    """
    told = Told()
    config = plain_stages.options(
        root,
        num_microbatches=microbatches,
        baseline_steps=3,
        profile=profile_file,
        fingerprint=fingerprint,
        why_whole="" if splits else "of a test",
        **{"type": "baseline", **request},
    )
    device = FakeMemory(capacities[rank] if capacities else 10**9)
    stage = FakeStage(device, sizes, random.Random(rank), is_first=rank == 0)
    seen = device if capacities else None
    with patch("envpipe_megatron.runtime.job.session.device_memory", lambda: seen):
        session, gpu = plain_stages.session(
            rank, config, root, time_at_max_s=TIMES, say=told.said.append
        )
    gpu.supported_frequencies_mhz = gpu.supported_frequencies_mhz[::40]  # a short sweep
    for clocks_mhz in session.parts.clocks_mhz:
        clocks_mhz.intersection_update(gpu.supported_frequencies_mhz)
    try:
        steady = 0
        while steady < 5:
            readings, device.most = device.readings, device.allocated
            session.run_iteration(
                microbatches,
                plain_stages.SPECS,
                lambda schedule: HoldingWork(schedule, rank, stage),
            )
            phase = session.state.phase.value
            read = device.readings - readings
            told.readings_by_phase[phase] = told.readings_by_phase.get(phase, 0) + read
            told.peak_bytes = device.most
            stage.end_iteration()
            stage.step()
            steady += phase == "steady"
    finally:
        session.close()
    told.bill = end_of_job(session, None)
    state = session.state
    told.phase, told.notes, told.memory = (
        state.phase.value,
        state.notes,
        session.parts.memory.stages,
    )
    if state.plan is not None and state.profile is not None:
        told.peak_in_flight = state.plan.schedule.peak_in_flight
        told.free_bytes = state.profile.sidecar.free_bytes
    return told
