"""What no framework may do under EnvPipe; free of frameworks."""

from __future__ import annotations

import os

from envpipe_megatron.errors import EnvPipeError


class RefusedError(EnvPipeError):
    """A feature of the framework that does not run under EnvPipe."""


def frees_while_training() -> bool:
    """Whether torch's allocator may give memory back at any time.

    That waits for all that the device does, and so for a posted receive whose sender may be waiting
    for this stage: both would hang.
    """
    settings = [
        setting.partition(":")
        for variable in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
        for setting in os.environ.get(variable, "").split(",")
    ]
    return any(
        name.strip() == "garbage_collection_threshold" and value.strip() not in ("", "0", "0.0")
        for name, _, value in settings
    )


#: What no framework may ask of torch, and whether the environment does.
FREES_WHILE_TRAINING = "garbage_collection_threshold in PYTORCH_CUDA_ALLOC_CONF"
