"""Opens the GPU that a rank trains on: a real one, or an emulated one if there is none.

Emulation, for trying a whole job on CPUs and for tests, is asked for by two environment variables:
ENVPIPE_EMULATED_GPU names the preset (such as a100-sxm), which an option of the job may, too;
ENVPIPE_EMULATED_FORWARD_S says what a forward takes at the highest clock, in s: one number, or one
for each stage. A backward takes twice, and in two parts what splitting one was measured to cost.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from envpipe_megatron.core.kinds import Kind
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.gpu.base import Gpu, GpuError
from envpipe_megatron.gpu.control import Control
from envpipe_megatron.gpu.emulated.emulated_gpu import EmulatedGpu
from envpipe_megatron.gpu.registry import uid_of_cuda_device
from envpipe_megatron.runtime.channel.collectives import Collectives
from envpipe_megatron.runtime.clocks.rank_clock import open_rank_gpu
from envpipe_megatron.runtime.execution.executor import CudaExecutor, EmulatedExecutor, Executor
from envpipe_megatron.runtime.job.options import JobOptions

PRESET_VARIABLE = "ENVPIPE_EMULATED_GPU"
FORWARD_VARIABLE = "ENVPIPE_EMULATED_FORWARD_S"
_BACKWARD_RATIO = 2.0


class DeviceError(EnvPipeError):
    """A stage is on another GPU than its process's, or there is no such emulation."""


@dataclass(frozen=True)
class Device:
    """A rank's GPU, what changes its clock, and how time passes on it.

    `make_executor` takes what waits for the clock controller.
    """

    gpu: Gpu
    control: Control
    make_executor: Callable[[Callable[[], None]], Executor]


def current_device() -> torch.device:
    """Return the device of this process's tensors: its GPU, or the CPU if there is none."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def check_current(device: torch.device) -> None:
    """Refuse a stage that is on another GPU than this process's current one: a DeviceError.

    EnvPipe meters, times and clocks only the current one.
    """
    if device.type == "cuda" and device.index not in (None, torch.cuda.current_device()):
        raise DeviceError(
            f"A stage is on another GPU than this process's, cuda:{torch.cuda.current_device()}",
            value=str(device),
            remedy="Call torch.cuda.set_device(device) before the process group is made.",
        )


def open_device(collectives: Collectives, num_stages: int, options: JobOptions) -> Device:
    """Open this rank's GPU; every rank of the job calls it. `collectives` are to all ranks.

    Raises EnvPipeError on every rank if there is no GPU and no emulation, a GPU cannot be opened,
    or control is required and not available.
    """
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        uid = collectives.everywhere(lambda: uid_of_cuda_device(str(properties.uuid)))
        gpu, control = open_rank_gpu(
            uid,
            collectives,
            options.gpu_control,
            require=options.require_control,
            one_clock=options.one_clock,
        )
        return Device(gpu, control, lambda settle: CudaExecutor())
    wanted = options.gpu_control
    emulated, times_s = collectives.everywhere(
        lambda: _emulation(collectives.stage, num_stages, wanted, options.gpu)
    )
    wanted = "emulated" if wanted == "auto" else wanted
    gpu, control = open_rank_gpu(emulated.address.uid, collectives, wanted)
    return Device(
        gpu, control, lambda settle: EmulatedExecutor(emulated, times_s, collectives, settle)
    )


def _emulation(
    stage: int, num_stages: int, wanted: str, preset: str | None
) -> tuple[EmulatedGpu, dict[Kind, float]]:
    preset = preset or os.environ.get(PRESET_VARIABLE)
    if not preset:
        raise GpuError(
            "EnvPipe found no CUDA GPU in this process",
            remedy=f"On a machine without GPUs, {PRESET_VARIABLE}=a100-sxm emulates them.",
        )
    if wanted not in ("auto", "emulated", "none"):
        raise DeviceError(
            "Emulated GPUs have one way to control their clocks",
            value=wanted,
            remedy="Use --envpipe-gpu-control auto, emulated or none.",
        )
    forward_s = _forward_times_s(num_stages)[stage]
    gpu = EmulatedGpu.create(preset, int(os.environ.get("LOCAL_RANK", "0")))
    return gpu, {Kind.FORWARD: forward_s, Kind.BACKWARD: _BACKWARD_RATIO * forward_s}


def _forward_times_s(num_stages: int) -> list[float]:
    text = os.environ.get(FORWARD_VARIABLE, "0.02")
    try:
        times_s = [float(part) for part in text.split(",")]
    except ValueError:
        times_s = []
    if len(times_s) == 1:
        times_s *= num_stages
    if len(times_s) != num_stages or not all(0 < time_s < math.inf for time_s in times_s):
        raise DeviceError(
            f"{FORWARD_VARIABLE} is a time in s above 0, one for all stages or one for each of the "
            f"{num_stages}",
            value=text,
        )
    return times_s


def use_cpu() -> None:
    """Let megatron-core build and run on the CPU in this process, from now on.

    It asks torch for the current CUDA device while it builds modules and buffers, even where all
    is to live on the CPU. The answer `cpu` is all that its GPTModel needs; CUDA is not touched. For
    emulated GPUs and tests only. EnvPipeError on a machine with GPUs.
    """
    if torch.cuda.is_available():
        raise EnvPipeError(
            "Emulated GPUs are for machines without GPUs",
            value=torch.cuda.get_device_name(),
            remedy="Hide them with CUDA_VISIBLE_DEVICES= to try the emulation here.",
        )
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
