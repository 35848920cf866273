"""Refusing features of a framework by name, until they are proven; free of frameworks."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.integrations.levels import Asks


class RefusedError(EnvPipeError):
    """A feature of the framework that does not run under EnvPipe."""


def frees_while_training(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether torch's allocator may give memory back at any time.

    That waits for all that the device does, and so for a posted receive whose sender may be waiting
    for this stage: both would hang.
    """
    settings = [
        setting.partition(":")
        for variable in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
        for setting in environment.get(variable, "").split(",")
    ]
    return any(
        name.strip() == "garbage_collection_threshold" and value.strip() not in ("", "0", "0.0")
        for name, _, value in settings
    )


#: What no framework may ask of torch, and whether the environment does.
FREES_WHILE_TRAINING = "garbage_collection_threshold in PYTORCH_CUDA_ALLOC_CONF"


def check_refused(args: argparse.Namespace, refused: Mapping[str, Asks]) -> None:
    """Refuse a job without a pipeline, or with what is not proven to give the same result.

    Raises a RefusedError that names each of the features that Megatron's arguments ask for.
    """
    if args.pipeline_model_parallel_size < 2:
        raise RefusedError(
            "--envpipe needs a pipeline",
            value=args.pipeline_model_parallel_size,
            remedy="Give --pipeline-model-parallel-size of at least 2, or leave --envpipe out.",
        )
    asked_for = [feature for feature, asks in refused.items() if asks(args)]
    if frees_while_training():
        asked_for.append(FREES_WHILE_TRAINING)
    if asked_for:
        raise RefusedError(
            f"Under --envpipe, these are refused until they are proven: {'; '.join(asked_for)}",
            remedy="Leave them out, or train without --envpipe.",
        )
