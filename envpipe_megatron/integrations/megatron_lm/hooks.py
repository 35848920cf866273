"""Hooks that the patch calls; a patched checkout imports them if --envpipe is an argument.

`hooking` says what happens where a hook is never reached. Recomputation by stage is here too:
Megatron's flags are for all stages alike.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from megatron.core import parallel_state
from megatron.core.transformer.transformer_block import TransformerBlock

from envpipe_megatron.integrations import options as job_options
from envpipe_megatron.integrations.hooking import (
    Hooks,
    between_steps,
    options_of,
    recompute,
    refusals,
    replaced,
)
from envpipe_megatron.integrations.levels import JobError, decide, limits_of_arguments
from envpipe_megatron.integrations.megatron.arguments import RECOMPUTE_FLAG, by_stage
from envpipe_megatron.integrations.megatron.limits import LIMITS, check_metered
from envpipe_megatron.integrations.megatron.training import Training

_hooks = Hooks[Training](
    "megatron/training/arguments.py",
    *("begin_step", "forward_backward", "end_step", "log"),
)


def add_arguments(group: argparse._ArgumentGroup) -> None:
    """Add EnvPipe's options to Megatron's command line."""
    job_options.add_arguments(group)
    group.add_argument(
        RECOMPUTE_FLAG,
        metavar="WHAT[,WHAT...]",
        help="What each stage recomputes, in place of --recompute-granularity: none, full:N or "
        "selective:N for the first N layers of each of its virtual stages; `envpipe search` prints "
        "it.",
    )


@refusals()
def validate(args: argparse.Namespace) -> None:
    """End as argparse does if EnvPipe does not run the job, before anything is built.

    For an unsupported feature, a wrong option or file, or a checkout that is half patched.
    """
    check_metered(args)
    by_stage(args)
    options = _hooks.options = options_of(args)
    limits = limits_of_arguments(args, LIMITS)
    decide(limits, options.level, checks=options.self_check != "off")
    _hooked_schedules()


@refusals(JobError)
def begin_training(args: argparse.Namespace, model: Sequence[Any]) -> None:
    """Make the job; from here on Megatron gets EnvPipe's forward-backward function.

    `model` has the chunks of this rank. Raises SystemExit if arguments did not come from a command
    line or the job cannot run as asked, and EnvPipeError as `Training` does.
    """
    options = _hooks.validated()
    if not args.log_energy:
        _quiet_energy_monitor()
    if (stages := by_stage(args)) is not None:
        own = stages[parallel_state.get_pipeline_model_parallel_rank()]
        modules = [module for chunk in model for module in chunk.modules()]
        recompute([each for each in modules if isinstance(each, TransformerBlock)], *own)
    group = parallel_state.get_pipeline_model_parallel_group()
    training = _hooks.job = Training(args, options, LIMITS, model, group)
    if training.job is None:
        _hooks.note("forward_backward")  # which stays Megatron's
        return

    def hook(framework_function: Callable[..., Any]) -> Callable[..., Any]:
        _hooks.note("forward_backward")
        return training.in_place_of(framework_function)

    _hooks.while_training.enter_context(replaced(_hooked_schedules(), envpipe_hook=hook))
    _hooks.while_training.enter_context(between_steps("Megatron-LM", training))


def begin_step(iteration: int) -> None:
    """Begin the training step of this iteration; the first is 0."""
    _hooks.note("begin_step")
    _hooks.running().begin_step(iteration)


def end_step(skipped: int) -> None:
    """End the step after its optimizer, which may have skipped: gradients overflowed.

    Raises SystemExit if only the profile was asked for, and it is written.
    """
    _hooks.note("end_step")
    _hooks.running().end_step(skipped=bool(skipped))


def log(iteration: int, writer: Any, wandb_writer: Any) -> str:
    """Return energy since the last call for Megatron's log line, and write it to the writers.

    Every rank calls it at the same iteration; all but one without writers.
    """
    _hooks.note("log")
    return _hooks.running().log(iteration, writer, wandb_writer)


def pause() -> None:
    """Pause for what is not training, until the next iteration begins."""
    if _hooks.job is not None:  # a checkpoint may be saved after training, too
        _hooks.job.pause()


def end_training() -> None:
    """Give clocks back, and print the bill; Megatron gets its own function again."""
    _hooks.ended().end()


def _quiet_energy_monitor() -> None:
    """Keep Megatron's energy monitor from asking the driver at each checkpoint of no device.

    Without --log-energy, 0.16.1 passes a null handle if the driver's library is loaded.
    """
    from megatron.training.global_vars import get_energy_monitor

    monitor = get_energy_monitor()
    monitor.pause = monitor.resume = lambda: None


def _hooked_schedules() -> Any:
    """Return the patched module that chooses Megatron's forward-backward function."""
    from megatron.core.pipeline_parallel import schedules

    if not hasattr(schedules, "envpipe_hook"):
        raise JobError(
            "The megatron-core that is imported is not patched",
            value=schedules.__file__,
            remedy="Put the patched checkout first in PYTHONPATH, before an installed "
            "megatron-core; `envpipe patch check` looks at it.",
        )
    return schedules
