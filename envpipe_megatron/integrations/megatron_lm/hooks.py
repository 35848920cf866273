"""What the patch calls; imported by a patched checkout when --envpipe is among its arguments.

`hooking` says what happens where a hook is never reached.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.integrations.flags import add_arguments as add_arguments  # for the patch
from envpipe_megatron.integrations.hooking import (
    NEEDED_BY_ITERATION,
    HookError,
    check_profiled,
    check_reached,
    options_of,
    refuse,
    running,
    validated,
)
from envpipe_megatron.integrations.job import Job, JobError, close_at_exit
from envpipe_megatron.integrations.levels import Level, LevelError, decide
from envpipe_megatron.integrations.megatron.core import ForwardBackward
from envpipe_megatron.integrations.megatron.kept import KeptOrder, WholeSteps
from envpipe_megatron.integrations.megatron_lm.job import limits_of, make_job, make_stand_in
from envpipe_megatron.integrations.megatron_lm.limits import LIMITS, REFUSED
from envpipe_megatron.integrations.options import Options
from envpipe_megatron.integrations.refusals import RefusedError
from envpipe_megatron.integrations.reporting import IntervalReport

_NEEDED = ("validate", "begin_training", "begin_step", "forward_backward", "end_step", "log")


@dataclass
class _State:
    """One process trains one job at a time."""

    options: Options | None = None
    job: Job | None = None
    #: What runs in place of Megatron's own function, once Megatron has asked for it.
    stand_in: ForwardBackward | KeptOrder | WholeSteps | None = None
    replaced: Callable[..., Any] | None = None
    reached: Counter[str] = field(default_factory=Counter)


_state = _State()


def validate(args: argparse.Namespace) -> None:
    """End as argparse does if EnvPipe does not run the job, before anything is built.

    For an unsupported feature, a wrong option or file, or a checkout that is half patched.
    """
    _state.reached["validate"] += 1
    try:
        if refused := [feature for feature, asks in REFUSED.items() if asks(args)]:
            raise RefusedError(
                "EnvPipe cannot meter such a job", value=refused, remedy="Leave out --envpipe."
            )
        _state.options = options_of(args)
        decide(args, LIMITS, _state.options.level)
        _hooked_schedules()
    except EnvPipeError as error:
        refuse(error)


def begin_training(args: argparse.Namespace, model: Sequence[Any]) -> None:
    """Make the job; from here on Megatron gets EnvPipe's forward-backward function.

    `model` has the chunks of this rank. Raises HookError if Megatron does not get that function,
    and SystemExit and EnvPipeError as `Job` raises JobError and EnvPipeError.
    """
    _state.reached["begin_training"] += 1
    options = validated(_state.options, "megatron/training/arguments.py")
    if not args.log_energy:
        _quiet_energy_monitor()
    try:
        limits = *LIMITS, *limits_of(model)
        # Stages may have models of different classes.
        decision = decide(args, limits, _lowest(decide(args, limits, options.level).level))
        job = _state.job = make_job(args, options, decision.level, _say)
    except (JobError, LevelError) as error:
        refuse(error)
    close_at_exit(_close)

    schedules = _hooked_schedules()

    def hook(framework_function: Callable[..., Any]) -> Callable[..., Any]:
        if _state.stand_in is None:
            _state.replaced = framework_function
            _state.stand_in = make_stand_in(args, model, decision, job, framework_function)
        if framework_function is not _state.replaced:
            return framework_function  # of another model
        return _reaching(_state.stand_in)

    schedules.envpipe_hook = hook
    training = sys.modules["megatron.training.training"]
    if not hasattr(training.get_forward_backward_func(), "is_envpipe"):
        raise HookError(
            "Megatron's training loop does not get EnvPipe's forward-backward function",
            value=training.get_forward_backward_func.__module__,
            remedy="Something replaced get_forward_backward_func; `envpipe patch check` looks.",
        )
    if job.collectives.is_planner:
        _say(f"{decision}; {job.banner()}")
        if args.train_iters is not None and args.train_iters <= job.options.baseline_steps:
            _say("training ends within its baseline steps, so nothing will be planned")


def begin_step(iteration: int) -> None:
    """The training step of this iteration begins; the first is 0."""
    _state.reached["begin_step"] += 1
    running(_state.job).session.begin_step(iteration)
    if _state.stand_in is not None:
        _state.stand_in.begin_step()


def end_step(skipped: int) -> None:
    """The iteration ends after the optimizer, which may have skipped: gradients overflowed.

    Raises:
        HookError: a hook was not reached by the third iteration.
        SystemExit: only the profile was asked for, and it is written.
    """
    _state.reached["end_step"] += 1
    job = running(_state.job)
    if _state.stand_in is not None:
        _state.stand_in.end_step(skipped=bool(skipped))
    job.session.end_step()
    if _state.reached["end_step"] >= NEEDED_BY_ITERATION:
        check_reached(_state.reached, _NEEDED)
    if job.has_its_profile():
        end_training()
        dist.barrier()  # the planner has written it
        raise SystemExit(0)


def log(iteration: int, writer: Any, wandb_writer: Any) -> str:
    """Energy since the last call, to add to Megatron's log line, for TensorBoard and W&B.

    Every rank calls it at the same iteration; all but one without writers.
    """
    _state.reached["log"] += 1
    job = running(_state.job)
    report = IntervalReport.gather(job.session)
    for name, value in report.scalars().items():
        if writer:
            writer.add_scalar(name, value, iteration)
        if wandb_writer:
            wandb_writer.log({name: value}, iteration)
    return report.line()


def pause() -> None:
    """Something that is not training follows, until the next iteration begins."""
    if _state.job is not None:  # a checkpoint may be saved after training, too
        _state.job.session.pause()


def end_training() -> None:
    """Give clocks back, and print the bill; Megatron gets its own function again."""
    job = running(_state.job)
    _hooked_schedules().envpipe_hook = None
    job.end()
    _close()
    check_profiled(job.options, job.session.state.profile is not None)


def _lowest(level: Level) -> Level:
    """Of all ranks."""
    levels = [level] * dist.get_world_size()
    dist.all_gather_object(levels, level)
    return min(levels)


def _quiet_energy_monitor() -> None:
    """Keep Megatron's monitor from asking NVML at each checkpoint of a device that it has not.

    Without --log-energy, 0.16.1 passes a null handle to the driver if NVML is loaded.
    """
    from megatron.training.global_vars import get_energy_monitor

    monitor = get_energy_monitor()
    monitor.pause = monitor.resume = lambda: None


def _reaching(stand_in: Callable[..., Any]) -> Callable[..., Any]:
    """The forward-backward function, which notes that Megatron called it."""

    def forward_backward(**arguments: Any) -> Any:
        # Forwards alone may be many in a step.
        _state.reached["forward_backward"] += not arguments.get("forward_only")
        if _state.reached["forward_backward"] > NEEDED_BY_ITERATION:
            check_reached(_state.reached, _NEEDED)
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


def _close() -> None:
    if _state.job is not None:
        job, _state.job, _state.stand_in = _state.job, None, None
        job.close()


def _say(text: str) -> None:
    print(f" [envpipe] {text}", flush=True)
