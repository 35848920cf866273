"""Runs EnvPipe in torchtitan's trainer, of any version that has one; torchtitan is not changed.

Enter by `hook(Trainer)`, where your own script makes the trainer, or by `main`. Metrics go
where torchtitan's own go.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import logging
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.integrations.hooking import between_steps, replaced
from envpipe_megatron.integrations.job import say_line
from envpipe_megatron.integrations.options import divided
from envpipe_megatron.integrations.torch_pipelining.attached import AttachedPipeline, attach
from envpipe_megatron.integrations.torch_pipelining.orders import AttachError

logger = logging.getLogger(__name__)

#: Sections of a configuration that decide the time and energy of units.
_SAME_JOB = (
    "model",
    "model_spec",
    "training",
    "parallelism",
    "activation_checkpoint",
    "compile",
    "quantize",
    "hf_assets_path",
)
#: Fields of these that may change from start to start.
_LEFT_OUT = ("steps", "dataset_path", "global_batch_size", "data_parallel_replicate_degree")
#: The argument of torchtitan's `log` for more metrics than its own.
_MORE = "extra_metrics"


def hook(trainer: type[Any], **settings: Any) -> None:
    """Attach EnvPipe to the pipeline of every trainer of a class, while it trains.

    Args:
        trainer: torchtitan's `Trainer`, or a class like it.
        settings: as `torch_pipelining.attach` takes them; by default `output` is the folder
            `envpipe` in torchtitan's dump folder.

    Raises AttachError if the class has no `train`.
    """
    train = getattr(trainer, "train", None)
    if train is None:
        raise AttachError("A trainer has a method train", value=trainer.__name__)

    @functools.wraps(train)
    def with_envpipe(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _train(self, functools.partial(train, self, *args, **kwargs), settings)

    trainer.train = with_envpipe


def _train(trainer: Any, train: Callable[[], Any], settings: dict[str, Any]) -> Any:
    schedule = getattr(trainer, "pp_schedule", None)
    if schedule is None:
        logger.warning("EnvPipe does nothing: this job has no pipeline (pipeline_parallel_degree)")
        return train()
    # Versions before 2026-04 have these by other names.
    config = getattr(trainer, "job_config", None) or trainer.config
    if settings.get("output") is None:
        folder = config.dump_folder if hasattr(config, "dump_folder") else config.job.dump_folder
        settings = {**settings, "output": Path(folder) / "envpipe"}
    try:
        pipeline = attach(schedule, facts=_facts(config), say=say_line, **settings)
    except AttachError as error:  # alike on every rank
        logger.warning("EnvPipe does nothing: %s", error)
        return train()
    metrics = trainer.metrics_processor
    log = _with_energy(metrics.log, pipeline)
    between = between_steps("torchtitan", pipeline, trainer)
    with closing(pipeline), replaced(metrics, log=log), between:
        result = train()
        pipeline.end_training()  # where training failed, other ranks are asked nothing
    return result


def _with_energy(log: Callable[..., Any], pipeline: AttachedPipeline) -> Callable[..., Any]:
    """Return a function that logs energy beside torchtitan's metrics; all ranks log together.

    A user's own `log` has its own arguments: where more metrics are none, it gets no more.
    """
    signature = inspect.signature(log)

    @functools.wraps(log)
    def with_energy(*args: Any, **kwargs: Any) -> Any:
        report = pipeline.report()
        pipeline.say(report.line().strip(" |"))
        if _MORE in kwargs:  # also one that hands on all that it gets
            kwargs[_MORE] = {**(kwargs[_MORE] or {}), **report.scalars()}
        elif _MORE in signature.parameters:
            given = signature.bind(*args, **kwargs)
            given.arguments[_MORE] = {**(given.arguments.get(_MORE) or {}), **report.scalars()}
            args, kwargs = given.args, given.kwargs
        return log(*args, **kwargs)

    return with_energy


def _facts(config: Any) -> dict[str, Any]:
    """Return facts by which jobs differ: a name, and a digest of what decides units' cost."""
    parts = [repr(_plain(getattr(config, name, None))) for name in _SAME_JOB]
    model = getattr(config, "model", None) or getattr(config, "model_spec", None)
    names = (getattr(model, "name", None), getattr(model, "flavor", None))
    return {
        "model": " ".join(str(name) for name in names if name) or "torchtitan",
        "configuration": hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16],
    }


def _plain(value: Any) -> Any:
    """Return a value without what may change from start to start, and addresses in memory."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        own = [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
        return [(name, _plain(each)) for name, each in own if name not in _LEFT_OUT]
    if isinstance(value, Mapping):
        return [(str(name), _plain(each)) for name, each in value.items()]
    if isinstance(value, set | frozenset):  # in an order that each process has for itself
        return sorted(str(_plain(each)) for each in value)
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if callable(value):
        return getattr(value, "__qualname__", type(value).__qualname__)
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


def main() -> None:
    """Hook torchtitan's trainer, and run its own command."""
    try:
        settings, sys.argv[1:] = divided(sys.argv[1:])
        try:
            import torchtitan.train as command  # type: ignore[import-not-found]
        except ImportError as error:
            raise AttachError(
                f"torchtitan cannot be imported: {error}",
                remedy="Install it, or run this in its checkout, with its requirements.",
            ) from error
        hook(command.Trainer, **settings)
    except EnvPipeError as error:
        sys.exit(f"Error: {error}")
    # Releases up to 0.2 are given the class of the trainer.
    takes_trainer = bool(inspect.signature(command.main).parameters)
    command.main(*[command.Trainer] * takes_trainer)
