"""What the patch calls; imported by a patched checkout when --envpipe is among its arguments.

`hooking` says what happens where a hook is never reached. Recomputation by stage is here too:
Megatron's flags are for all stages alike, but what layers do is read from their configuration and
attributes when they run, so a stage can be changed after it was built. Results stay the same, for
what is recomputed is what was forgotten.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.core import parallel_state
from megatron.core.transformer.transformer_block import TransformerBlock

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.integrations import options as job_options
from envpipe_megatron.integrations.hooking import (
    NEEDED_BY_ITERATION,
    HookError,
    Reached,
    options_of,
    refuse,
    running,
    validated,
)
from envpipe_megatron.integrations.job import JobError
from envpipe_megatron.integrations.levels import LevelError, decide
from envpipe_megatron.integrations.megatron.limits import LIMITS, check_metered
from envpipe_megatron.integrations.megatron.training import Training
from envpipe_megatron.runtime.job.options import JobOptions

FLAG = "--envpipe-recompute"
_NONE, _FULL, _SELECTIVE = "none", "full", "selective"
_NEEDED = ("validate", "begin_training", "begin_step", "forward_backward", "end_step", "log")


@dataclass
class _State:
    """One process trains one job at a time."""

    options: JobOptions | None = None
    training: Training | None = None
    reached: Reached = field(default_factory=Reached)


_state = _State()


def add_arguments(group: argparse._ArgumentGroup) -> None:
    """Add EnvPipe's options to Megatron's command line."""
    job_options.add_arguments(group)
    group.add_argument(
        FLAG,
        metavar="WHAT[,WHAT...]",
        help="What each stage recomputes, in place of --recompute-granularity: none, full:N or "
        "selective:N for the first N layers of each of its virtual stages; `envpipe search` prints "
        "it.",
    )


def validate(args: argparse.Namespace) -> None:
    """End as argparse does if EnvPipe does not run the job, before anything is built.

    For an unsupported feature, a wrong option or file, or a checkout that is half patched.
    """
    _state.reached.note("validate")
    try:
        check_metered(args)
        by_stage(args)
        _state.options = options_of(args)
        options = _state.options
        decide(args, LIMITS, options.level, checks=options.self_check != "off")
        _hooked_schedules()
    except EnvPipeError as error:
        refuse(error)


def begin_training(args: argparse.Namespace, model: Sequence[Any]) -> None:
    """Make the job; from here on Megatron gets EnvPipe's forward-backward function.

    `model` has the chunks of this rank. Raises HookError if Megatron does not get that function,
    SystemExit if arguments did not come from the command line, and SystemExit and EnvPipeError as
    `Job` raises JobError and EnvPipeError.
    """
    _state.reached.note("begin_training")
    try:
        options = validated(_state.options, "megatron/training/arguments.py")
    except HookError as error:
        refuse(error)
    if not args.log_energy:
        _quiet_energy_monitor()
    if (stages := by_stage(args)) is not None:
        own = stages[parallel_state.get_pipeline_model_parallel_rank()]
        recompute(model, *own)
    try:
        group = parallel_state.get_pipeline_model_parallel_group()
        training = _state.training = Training(args, options, LIMITS, model, group)
    except (JobError, LevelError) as error:
        refuse(error)
    if training.job is None:
        return

    def hook(framework_function: Callable[..., Any]) -> Callable[..., Any]:
        chosen = training.in_place_of(framework_function)
        return chosen if chosen is framework_function else _reaching(chosen)

    _hooked_schedules().envpipe_hook = hook
    loop = sys.modules["megatron.training.training"]
    if not hasattr(loop.get_forward_backward_func(), "is_envpipe"):
        raise HookError(
            "Megatron's training loop does not get EnvPipe's forward-backward function",
            value=loop.get_forward_backward_func.__module__,
            remedy="Something replaced get_forward_backward_func; `envpipe patch check` looks.",
        )
    training.announce()


def begin_step(iteration: int) -> None:
    """The training step of this iteration begins; the first is 0."""
    _state.reached.note("begin_step")
    running(_state.training).begin_step(iteration)


def end_step(skipped: int) -> None:
    """The iteration ends after the optimizer, which may have skipped: gradients overflowed.

    Raises SystemExit if only the profile was asked for, and it is written.
    """
    count, training = _state.reached.note("end_step"), running(_state.training)
    training.end_step(skipped=bool(skipped))
    if count == NEEDED_BY_ITERATION and training.job is not None:
        _state.reached.check(_NEEDED, count)


def log(iteration: int, writer: Any, wandb_writer: Any) -> str:
    """Energy since the last call, to add to Megatron's log line, for TensorBoard and W&B.

    Every rank calls it at the same iteration; all but one without writers.
    """
    _state.reached.note("log")
    return running(_state.training).log(iteration, writer, wandb_writer, _meter())


def pause() -> None:
    """Something that is not training follows, until the next iteration begins."""
    if _state.training is not None:  # a checkpoint may be saved after training, too
        _state.training.pause()


def end_training() -> None:
    """Give clocks back, and print the bill; Megatron gets its own function again."""
    training, _state.training = running(_state.training), None
    _hooked_schedules().envpipe_hook = None
    training.end()


def _meter() -> Any:
    """That of Megatron's own OpenTelemetry, where that exports: versions above 0.19 may have it."""
    global_vars = sys.modules.get("megatron.training.global_vars")
    telemetry: Any = getattr(global_vars, "get_telemetry", lambda: None)()
    return telemetry.meter if getattr(telemetry, "is_exporting", False) else None


def _quiet_energy_monitor() -> None:
    """Keep Megatron's energy monitor from asking the driver at each checkpoint of no device.

    Without --log-energy, 0.16.1 passes a null handle if the driver's library is loaded.
    """
    from megatron.training.global_vars import get_energy_monitor

    monitor = get_energy_monitor()
    monitor.pause = monitor.resume = lambda: None


def _reaching(stand_in: Callable[..., Any]) -> Callable[..., Any]:
    """The forward-backward function, which notes that Megatron called it."""

    def forward_backward(**arguments: Any) -> Any:
        # Forwards alone may be many in a step.
        if not arguments.get("forward_only"):
            count = _state.reached.note("forward_backward")
            if count == NEEDED_BY_ITERATION + 1:
                _state.reached.check(_NEEDED, NEEDED_BY_ITERATION)
        return stand_in(**arguments)

    forward_backward.is_envpipe = True  # type: ignore[attr-defined]  # what `begin_training` asks
    return forward_backward


def _hooked_schedules() -> Any:
    """The module that chooses Megatron's forward-backward function, which the patch has changed."""
    from megatron.core.pipeline_parallel import schedules

    if not hasattr(schedules, "envpipe_hook"):
        raise HookError(
            "The megatron-core that is imported is not patched",
            value=schedules.__file__,
            remedy="Put the patched checkout first in PYTHONPATH, before an installed "
            "megatron-core; `envpipe patch check` looks at it.",
        )
    return schedules


class RecomputationError(EnvPipeError):
    """Recomputation by stage that is not one, or does not go with other arguments."""


def by_stage(args: argparse.Namespace) -> list[tuple[str, int]] | None:
    """What each stage recomputes, and of how many layers; None if nothing was said.

    RecomputationError: unreadable, not one for each stage, or beside Megatron's own flag.
    """
    text = getattr(args, "envpipe_recompute", None)
    if text is None:
        return None
    if args.recompute_granularity is not None:
        raise RecomputationError(
            f"{FLAG} goes with no --recompute-granularity",
            value=args.recompute_granularity,
            remedy="Leave out one of the two.",
        )
    stages = [_read(part) for part in text.split(",")]
    if len(stages) != args.pipeline_model_parallel_size:
        raise RecomputationError(
            f"{FLAG} says what {len(stages)} stages recompute",
            value=text,
            remedy=f"The job has {args.pipeline_model_parallel_size}; say it for each.",
        )
    return stages


def recompute(chunks: Sequence[Any], what: str, count: int) -> None:
    """Make the first layers of each chunk of a model recompute, and the others not.

    Args:
        chunks: a rank's, perhaps wrapped.
        what: none, full or selective.
        count: layers of each chunk, at most.
    """
    for chunk in chunks:
        for block in chunk.modules():
            if isinstance(block, TransformerBlock):
                _recompute_in(block, what, count)


def _recompute_in(block: TransformerBlock, what: str, count: int) -> None:
    config = block.config
    full = what == _FULL and count > 0
    config.recompute_granularity = _FULL if full else None
    config.recompute_method = "block" if full else None
    config.recompute_num_layers = count if full else None
    for number, layer in enumerate(block.layers):
        selected = what == _SELECTIVE and number < count
        layer.self_attention.checkpoint_core_attention = selected


def _read(text: str) -> tuple[str, int]:
    what, _, count = text.strip().partition(":")
    if (what == _NONE and not count) or (what in (_FULL, _SELECTIVE) and count.isdecimal()):
        return what, int(count or 0)
    raise RecomputationError(
        f"{FLAG} is wrong", value=text, remedy="Say none, full:N or selective:N for each stage."
    )
