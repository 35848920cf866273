"""What the patch calls; imported by a patched checkout when --envpipe is among its arguments.

A hook that is never reached would leave a job that trains without EnvPipe and says nothing of it.
So each notes that it was reached, and the job ends with an error by its third iteration if one was
not.
"""

from __future__ import annotations

import argparse
import atexit
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from envpipe_megatron import __version__
from envpipe_megatron.energy_file import Phase
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.integrations.megatron_lm import options as _options
from envpipe_megatron.integrations.megatron_lm.job import Job, JobError
from envpipe_megatron.integrations.megatron_lm.options import (
    Options,
    check_files,
    make_output_folder,
    read_options,
)
from envpipe_megatron.integrations.megatron_lm.refusals import RefusedError, check_supported
from envpipe_megatron.integrations.megatron_lm.reporting import IntervalReport, end_of_job

_NEEDED_BY_ITERATION = 3
_NEEDED = ("validate", "begin_training", "begin_step", "forward_backward", "end_step", "log")


class HookError(EnvPipeError):
    """A hook of the patch is missing or was not reached."""


@dataclass
class _State:
    """One process trains one job at a time."""

    options: Options | None = None
    job: Job | None = None
    reached: Counter[str] = field(default_factory=Counter)


_state = _State()


def add_arguments(group: argparse._ArgumentGroup) -> None:
    """Add the options that go with --envpipe."""
    _options.add_arguments(group)


def validate(args: argparse.Namespace) -> None:
    """Refuse what EnvPipe does not run, before anything is built.

    Raises:
        SystemExit: an unsupported feature, a wrong option or file, or a checkout that is half
            patched; told as argparse tells what is wrong, and once on each node.
    """
    _state.reached["validate"] += 1
    try:
        check_supported(args)
        _state.options = read_options(args, on_gpu=torch.cuda.is_available())
        make_output_folder(_state.options)
        if os.environ.get("RANK", "0") == "0":
            check_files(_state.options, args.pipeline_model_parallel_size)
        _hooked_schedules()
    except EnvPipeError as error:
        _refuse(error)


def begin_training(args: argparse.Namespace) -> None:
    """Make the job; from here on Megatron gets EnvPipe's forward-backward function.

    Raises:
        HookError: the arguments were not validated, or Megatron does not get that function.
        SystemExit: ranks that were started differently, or a limit that cannot be kept.
        EnvPipeError: no GPU, no control where it is required, or another rank raised one.
    """
    _state.reached["begin_training"] += 1
    if _state.options is None:
        raise HookError(
            "The arguments of this job came from elsewhere than the command line, or the hook in "
            "megatron/training/arguments.py is missing",
            remedy="Give all options on the command line; `envpipe patch check` looks at hooks.",
        )
    if not args.log_energy:
        _quiet_energy_monitor()
    try:
        job = _state.job = Job(args, _state.options, _say)
    except JobError as error:
        _refuse(error)
    atexit.register(_close)
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _leave)

    schedules = _hooked_schedules()

    def hook(framework_function: Callable[..., Any]) -> Callable[..., Any]:
        if framework_function is not schedules.forward_backward_pipelining_without_interleaving:
            return framework_function  # of another model, without a pipeline
        return _reaching(job.stand_in(framework_function))

    schedules.envpipe_hook = hook
    training = sys.modules["megatron.training.training"]
    if not hasattr(training.get_forward_backward_func(), "is_envpipe"):
        raise HookError(
            "Megatron's training loop does not get EnvPipe's forward-backward function",
            value=training.get_forward_backward_func.__module__,
            remedy="Something replaced get_forward_backward_func; `envpipe patch check` looks.",
        )
    if job.collectives.is_planner:
        _say(_banner(job))
        if args.train_iters is not None and args.train_iters <= job.options.baseline_steps:
            _say("training ends within its baseline steps, so nothing will be planned")


def begin_step(iteration: int) -> None:
    """The training step of this iteration begins.

    Args:
        iteration: Megatron's number, from 0.
    """
    _state.reached["begin_step"] += 1
    _running().session.begin_step(iteration)


def end_step(skipped: int) -> None:
    """The optimizer has stepped: the iteration ends here.

    Args:
        skipped: 1 where it did not step, since gradients overflowed.

    Raises:
        HookError: a hook was not reached by the third iteration.
        SystemExit: only the profile was asked for, and it is written.
    """
    _state.reached["end_step"] += 1
    job = _running()
    job.session.end_step()
    if skipped and job.forward_backward is not None:
        job.forward_backward.stay_with_framework()
    if _state.reached["end_step"] >= _NEEDED_BY_ITERATION:
        _check_reached()
    if job.options.profile_only and job.session.state.phase is not Phase.WARMUP:
        _end_after_profile(job)


def log(iteration: int, writer: Any, wandb_writer: Any) -> str:
    """Energy since the last call, for Megatron's log line, TensorBoard and W&B.

    Every rank calls it at the same iteration.

    Args:
        iteration: Megatron's number.
        writer: TensorBoard's, None on all ranks but one.
        wandb_writer: likewise.

    Returns:
        what to add to the log line.
    """
    _state.reached["log"] += 1
    job = _running()
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
    job = _running()
    _hooked_schedules().envpipe_hook = None
    job.session.gather(job.session.lap())  # what no log line told yet
    _close()
    if job.options.profile_only and job.session.state.profile is None:
        raise HookError(
            "Training ended before every stage was profiled", remedy="Raise --train-iters."
        )
    for line in end_of_job(job.session, job.collectives, job.options.output_dir):
        _say(line)


def _quiet_energy_monitor() -> None:
    """Keep Megatron's monitor from asking NVML of no device at each checkpoint.

    Without --log-energy it has none, which does no harm until somebody loads NVML, as EnvPipe does:
    then 0.16.1 passes a null handle to the driver (0.19 looks before it does).
    """
    from megatron.training.global_vars import get_energy_monitor

    monitor = get_energy_monitor()
    monitor.pause = monitor.resume = lambda: None


def _end_after_profile(job: Job) -> None:
    state = job.session.state
    if state.profile is not None:
        end_training()
        dist.barrier()  # the planner has written it
        raise SystemExit(0)
    if state.phase is Phase.STEADY:
        raise HookError(f"There is no profile to write: {' '.join(state.notes)}")


def _refuse(error: EnvPipeError) -> NoReturn:
    """End as argparse does, which tells what is wrong and no stack; once on each node."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"{Path(sys.argv[0]).name}: error: {error}", file=sys.stderr, flush=True)
    raise SystemExit(2) from None


def _reaching(stand_in: Callable[..., Any]) -> Callable[..., Any]:
    """The forward-backward function, which notes that Megatron called it."""

    def forward_backward(**arguments: Any) -> Any:
        _state.reached["forward_backward"] += 1
        if _state.reached["forward_backward"] == 1:
            check_model(arguments["model"])
        if _state.reached["forward_backward"] > _NEEDED_BY_ITERATION:
            _check_reached()
        return stand_in(**arguments)

    forward_backward.is_envpipe = True  # type: ignore[attr-defined]  # what `begin_training` asks
    return forward_backward


def check_model(model: Any) -> None:
    """Refuse models that flags do not tell, such as those of other entry scripts.

    Raises:
        RefusedError: it is none of GPT's kind.
    """
    from megatron.core.models.gpt import GPTModel

    inner = model[0] if isinstance(model, list) else model
    while not isinstance(inner, GPTModel) and hasattr(inner, "module"):
        inner = inner.module
    if not isinstance(inner, GPTModel):
        raise RefusedError(
            "Under --envpipe, models other than GPTModel are refused until they are proven",
            value=type(inner).__name__,
            remedy="Train without --envpipe.",
        )


def _check_reached() -> None:
    missing = [name for name in _NEEDED if not _state.reached[name]]
    if missing:
        raise HookError(
            f"Hooks of EnvPipe were not reached by iteration {_NEEDED_BY_ITERATION}",
            value=missing,
            remedy="`envpipe patch check` says what is wrong with this checkout; train without "
            "--envpipe until it is right.",
        )


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


def _running() -> Job:
    if _state.job is None:
        raise HookError(
            "A hook was called outside training",
            remedy="`envpipe patch check` says what is wrong with this checkout.",
        )
    return _state.job


def _close() -> None:
    if _state.job is not None:
        job, _state.job = _state.job, None
        job.close()


def _leave(signum: int, frame: FrameType | None) -> None:
    """Leave through `atexit`, which gives the clock back."""
    raise SystemExit(128 + signum)


def _say(text: str) -> None:
    print(f" [envpipe] {text}", flush=True)


def _banner(job: Job) -> str:
    options, control = job.options, job.device.control
    asked = f"type {options.policy}, order {options.scheduling}, reconfigure {options.reconfigure}"
    if options.plan_file is not None:
        asked = f"the plan {options.plan_file}"
    if control.backend is None:
        asked = f"measuring alone, in Megatron's order and at the clocks as they are, not {asked}"
    lines = [
        f"EnvPipe {__version__} is active: {asked}",
        f"clocks of {job.device.gpu.name}: {control.backend or 'left alone'} ({control.why})",
        f"in flight: {options.max_in_flight or 'no limit'}; output: {options.output_dir or 'none'}",
    ]
    if job.single_queue:
        lines.append(
            f"CUDA_DEVICE_MAX_CONNECTIONS is below 8: {job.channel.capacity} message(s) may wait "
            "between neighbours, so their extra forwards are kept close"
        )
    return "; ".join(lines)
