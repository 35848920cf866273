"""megatron-core on a machine without a GPU.

megatron-core asks torch for the current CUDA device while it builds modules and buffers, even where
everything is to live on the CPU. Answering `cpu` is all that its GPTModel needs; CUDA itself is not
touched. Meant for emulated GPUs and tests, never for a machine that has GPUs.
"""

from __future__ import annotations

import torch

from envpipe_megatron.errors import EnvPipeError


def use_cpu() -> None:
    """Let megatron-core build and run on the CPU in this process, from now on."""
    if torch.cuda.is_available():
        raise EnvPipeError(
            "Emulated GPUs are for machines without GPUs",
            value=torch.cuda.get_device_name(),
            remedy="Hide them with CUDA_VISIBLE_DEVICES= to try the emulation here.",
        )
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
