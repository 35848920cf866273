"""What the hooks of all patched frameworks share.

A hook that is never reached would leave a job that trains without EnvPipe and says nothing of it.
So each notes that it was reached, and the job ends with an error if one was not.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn, TypeVar

import torch

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.integrations.options import Options, prepare_files, read_options

NEEDED_BY_ITERATION = 3
T = TypeVar("T")


class HookError(EnvPipeError):
    """A hook of the patch is missing or was not reached."""


def check_reached(
    reached: Counter[str], needed: Iterable[str], iteration: int = NEEDED_BY_ITERATION
) -> None:
    """Raise a HookError that names the needed hooks which no call has reached by an iteration."""
    missing = [name for name in needed if not reached[name]]
    if missing:
        raise HookError(
            f"Hooks of EnvPipe were not reached by iteration {iteration}",
            value=missing,
            remedy="`envpipe patch check` says what is wrong with this checkout; train without "
            "--envpipe until it is right.",
        )


def options_of(args: argparse.Namespace) -> Options:
    """EnvPipe's options among Megatron's arguments, checked before anything is built."""
    options = read_options(
        args,
        num_stages=args.pipeline_model_parallel_size,
        save_folder=args.save,
        on_gpu=torch.cuda.is_available(),
    )
    prepare_files(options, args.pipeline_model_parallel_size)
    return options


def validated(options: Options | None, file: str) -> Options:
    """The options that the hook in a file of the framework has read; a HookError without."""
    if options is None:
        raise HookError(
            f"The arguments of this job came from elsewhere than the command line, or the hook in "
            f"{file} is missing",
            remedy="Give all options on the command line; `envpipe patch check` looks at hooks.",
        )
    return options


def running(job: T | None) -> T:
    """The job that is given; a HookError if there is none."""
    if job is None:
        raise HookError(
            "A hook was called outside training",
            remedy="`envpipe patch check` says what is wrong with this checkout.",
        )
    return job


def check_profiled(options: Options, has_profile: bool) -> None:
    """End by a HookError a job that was started for its profile alone and has none."""
    if options.profile_only and not has_profile:
        raise HookError(
            "Training ended before every stage was profiled", remedy="Raise --train-iters."
        )


def refuse(error: EnvPipeError) -> NoReturn:
    """End as argparse does, by a message without a stack; printed once on each node."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"{Path(sys.argv[0]).name}: error: {error}", file=sys.stderr, flush=True)
    raise SystemExit(2) from None
