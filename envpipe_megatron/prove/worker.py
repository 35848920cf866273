"""One rank of a proof, under torchrun: measures, trains all turns, and reports to the command."""

from __future__ import annotations

import math
import os
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from envpipe_megatron.gpu.backends.read_through import DryRunGpu
from envpipe_megatron.gpu.emulated.emulated_gpu import EmulatedGpu
from envpipe_megatron.integrations.device import FORWARD_VARIABLE, Device, open_device, use_cpu
from envpipe_megatron.prove.arms import order_of_round
from envpipe_megatron.prove.settings import TURN_S, ProveSettings
from envpipe_megatron.prove.turns import Trainer
from envpipe_megatron.quickstart import ranks
from envpipe_megatron.quickstart.pipeline import joined_pipeline
from envpipe_megatron.runtime.channel.collectives import Collectives, make_collectives
from envpipe_megatron.runtime.clocks.latency import (
    CudaKernelTimer,
    EmulatedKernelTimer,
    KernelTimer,
    measure_latency,
    usual_clocks_mhz,
)

#: A rank may measure the latency of its clock while others have done so.
_TIMEOUT = timedelta(seconds=300)
#: Changes between every two clocks, each way.
_LATENCY_REPEATS = 10


def emit(event: str, **fields: Any) -> None:
    """Tell the command something."""
    ranks.emit(Path(sys.argv[1]), event, **fields)


def main() -> None:
    """Run as one rank under torchrun: `worker.py SETTINGS.json`."""
    ranks.leave_on_sigterm()
    emit("rank", pid=os.getpid())
    settings = ProveSettings.read(Path(sys.argv[1]))
    if settings.emulated:
        os.environ[FORWARD_VARIABLE] = ",".join(map(str, settings.job.forward_times_s))
        use_cpu()
    else:
        # Losses are compared to the last bit: no kernel may add in an order of its own.
        torch.use_deterministic_algorithms(True)
        # It takes kernels of its own.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    with joined_pipeline(settings.job.num_stages, _TIMEOUT):
        prove(settings)


def prove(settings: ProveSettings) -> None:
    """All that a rank does, between joining its pipeline and leaving it."""
    job = settings.job
    collectives = make_collectives([range(job.num_stages)], _TIMEOUT)
    wanted = "dry_run" if settings.dry_run and not settings.emulated else "auto"
    device = open_device(
        collectives,
        job.num_stages,
        wanted,
        job.preset if settings.emulated else None,
        require=wanted == "auto" and not settings.emulated,
    )
    if settings.dry_run and settings.emulated:
        device = replace(device, gpu=DryRunGpu(device.gpu))
    if collectives.is_planner:
        emit("versions", torch=torch.__version__, cuda=torch.version.cuda or "none")
    if not settings.dry_run:
        found = collectives.in_pipeline(_latency(device, collectives))
        if collectives.is_planner:
            emit("latency", gpus=found)
    trainer = Trainer(settings, device, collectives, _TIMEOUT, emit)
    iteration_s = trainer.profile()
    iterations = settings.iterations or collectives.from_planner(
        max(3, math.ceil(TURN_S / iteration_s))
    )
    for number in range(settings.rounds):
        for arm in order_of_round(number):
            trainer.train(arm, number, iterations)


def _latency(device: Device, collectives: Collectives) -> dict[str, Any]:
    """How long a change of this rank's clock takes; a guard holds the GPU meanwhile."""
    if collectives.is_planner:
        emit("say", text="latency of a change of clock")
    gpu = device.gpu
    timer: KernelTimer = (
        EmulatedKernelTimer(gpu) if isinstance(gpu, EmulatedGpu) else CudaKernelTimer()
    )
    return collectives.everywhere(
        lambda: measure_latency(gpu, timer, usual_clocks_mhz(gpu), _LATENCY_REPEATS)
    )


if __name__ == "__main__":
    main()
