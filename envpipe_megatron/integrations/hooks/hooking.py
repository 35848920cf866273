"""What the hooks of all patched frameworks share.

A hook that is never reached would leave a job that trains without EnvPipe and says nothing of it.
So each notes that it was reached, and an error is logged if one was not; training goes on.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn, TypeVar

import torch

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.integrations.options import Options, prepare_files, read_options

logger = logging.getLogger(__name__)

NEEDED_BY_ITERATION = 3
T = TypeVar("T")


class HookError(EnvPipeError):
    """A hook of the patch is missing, or was called where there is no job."""


class Reached:
    """Which hooks calls have reached: those of these names to begin with."""

    def __init__(self, *names: str) -> None:
        self._counts = Counter(names)
        self._missing: set[str] = set()

    def note(self, name: str) -> int:
        """A call has reached this hook; how often calls have."""
        self._counts[name] += 1
        return self._counts[name]

    def check(self, needed: Iterable[str], iteration: int) -> None:
        """Log, once a node, which hooks no call has reached by an iteration, and were needed."""
        missing = [n for n in needed if not self._counts[n] and n not in self._missing]
        self._missing.update(missing)
        if missing and _logs_here():
            logger.error(
                "Hooks of EnvPipe were not reached by iteration %d: %s. Training goes on without "
                "what they do; `envpipe patch check` says what is wrong with this checkout",
                iteration,
                ", ".join(missing),
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
    if _logs_here():
        print(f"{Path(sys.argv[0]).name}: error: {error}", file=sys.stderr, flush=True)
    raise SystemExit(2) from None


def _logs_here() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"
