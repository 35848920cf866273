"""torchtitan's own command on the CPU, with EnvPipe where options of it are given.

torchtitan runs on GPUs alone; what it asks of one is answered here. Losses and the final weights
are told to the last bit.
"""

import faulthandler
import functools
import hashlib
import signal
import sys
from types import SimpleNamespace
from typing import Any

import torch
import torch._utils as utils

from envpipe_megatron.integrations.options import divided
from envpipe_megatron.integrations.torch_pipelining.torchtitan import hook


def main() -> None:
    """Answer for the GPU, and run the command."""
    faulthandler.register(signal.SIGUSR1)
    settings, sys.argv[1:] = divided(sys.argv[1:])  # torchtitan reads them as it is imported
    install()
    import torchtitan.train as command  # type: ignore[import-not-found]

    _tell(command.Trainer)
    if settings:
        hook(command.Trainer, **settings)
    command.main(command.Trainer)


def install() -> None:
    """Stand in for a GPU; torchtitan_ratio.py takes this module as its --cpu-shim, too."""
    counted = ("active_bytes.all.peak", "reserved_bytes.all.peak", "num_alloc_retries", "num_ooms")
    device = SimpleNamespace(
        get_device_name=lambda device=None: "cpu",
        get_device_properties=lambda device=None: SimpleNamespace(total_memory=2**33),
        current_device=lambda: 0,
        set_device=lambda device: None,
        memory_stats=lambda device=None: dict.fromkeys(counted, 0),
        reset_peak_memory_stats=lambda: None,
        empty_cache=lambda: None,
        synchronize=lambda *_: None,
    )
    utils._get_available_device_type = lambda: "cpu"
    utils._get_device_module = lambda device_type: device


def _tell(trainer: Any) -> None:
    step, train = trainer.forward_backward_step, trainer.train

    @functools.wraps(step)
    def forward_backward_step(self: Any, **batch: Any) -> torch.Tensor:
        loss: torch.Tensor = step(self, **batch)
        print("titan_run: loss", float(loss.detach()).hex(), flush=True)
        return loss

    @functools.wraps(train)
    def trained(self: Any) -> None:
        train(self)
        digest = hashlib.sha256()
        for part in self.model_parts:
            for weight in part.parameters():
                digest.update(weight.detach().contiguous().view(torch.uint8).numpy().tobytes())
        print("titan_run: weights", digest.hexdigest(), flush=True)

    trainer.forward_backward_step, trainer.train = forward_backward_step, trained


if __name__ == "__main__":
    main()
