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
    """End a job whose hooks are not all there.

    Args:
        reached: how often each was.
        needed: those without which there is no EnvPipe, or nothing is said of it.
        iteration: the one by which they must have been.

    Raises:
        HookError: naming those that were not.
    """
    missing = [name for name in needed if not reached[name]]
    if missing:
        raise HookError(
            f"Hooks of EnvPipe were not reached by iteration {iteration}",
            value=missing,
            remedy="`envpipe patch check` says what is wrong with this checkout; train without "
            "--envpipe until it is right.",
        )


def options_of(args: argparse.Namespace) -> Options:
    """EnvPipe's options among a framework's arguments, checked before anything is built.

    Args:
        args: Megatron's.

    Raises:
        EnvPipeError: an option or a file that is wrong.
    """
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
    """What trains at the moment; a HookError where nothing does."""
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
    """End as argparse does, which tells what is wrong and no stack; once on each node."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"{Path(sys.argv[0]).name}: error: {error}", file=sys.stderr, flush=True)
    raise SystemExit(2) from None
