"""`deepspeed.initialize` with EnvPipe: the engine it returns saves energy."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule

from envpipe_megatron.core.sidecar import Sidecar
from envpipe_megatron.integrations.deepspeed.engine import EnvPipeEngine, not_run
from envpipe_megatron.integrations.job import FrameworkJob, say_line
from envpipe_megatron.integrations.leveled import LeveledJob
from envpipe_megatron.integrations.levels import DEEPSPEED, JobError, check_tested
from envpipe_megatron.integrations.options import OF_LEVELS, merged, read_settings
from envpipe_megatron.runtime.job.options import JobOptions

BLOCK = "envpipe"
#: Where DeepSpeed looks for its configuration, before `args`.
_PLACES = ("config", "config_params")


def check_version() -> None:
    """Refuse by a JobError those that EnvPipe was not tried with."""
    check_tested(deepspeed.__version__, DEEPSPEED, ", or train without EnvPipe")


def settings_of(
    config: Mapping[str, Any], given: Mapping[str, object] | bool | None
) -> dict[str, object] | None:
    """Return EnvPipe's settings; None to train without EnvPipe.

    Args:
        config: DeepSpeed's configuration, which ignores EnvPipe's block.
        given: settings of the call, which go before those of the block; True for none but those of
            the block, False to train without EnvPipe, None to leave it to the block.
    """
    block = config.get(BLOCK)
    if block is not None and not isinstance(block, Mapping):
        raise JobError(
            f"The block '{BLOCK}' of the DeepSpeed configuration is a table of options",
            value=block,
            remedy='Write "envpipe": {"type": "envelope", "scheduling": "ours"}, say.',
        )
    if given is False or (given is None and block is None):
        return None
    return merged(block or {}, given if isinstance(given, Mapping) else {})


def parsed_config(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return DeepSpeed's configuration from the arguments of its `initialize`; empty without."""
    config = next((arguments[name] for name in _PLACES if arguments.get(name) is not None), None)
    if config is None:
        config = getattr(arguments.get("args"), "deepspeed_config", None)
    if config is None or isinstance(config, dict):
        return config or {}
    parsed: dict[str, Any] = deepspeed.load_ds_config(config)  # a path, or encoded text
    return parsed


#: Parts of DeepSpeed's configuration that change no unit's time or energy.
_LEFT_OUT = ("train_batch_size", "gradient_accumulation_steps", BLOCK)


def initialize(
    *arguments: Any, envpipe: Mapping[str, object] | bool | None = None, **named: Any
) -> tuple[Any, ...]:
    """Make what `deepspeed.initialize` makes, whose arguments it takes, with EnvPipe.

    With a block `"envpipe"` in DeepSpeed's configuration, or `envpipe` given, the engine executes
    EnvPipe's schedules; without either it is DeepSpeed's own. Every rank calls it.

    Args:
        arguments: those of `deepspeed.initialize`.
        envpipe: options by name (`{"type": "envelope", "scheduling": "ours", "reconfig":
            "balanced"}`), which go before those of the block; True for the defaults;
            False to train without EnvPipe, with or without a block.
        named: those of `deepspeed.initialize`.

    Raises:
        EnvPipeError: a version of DeepSpeed, a feature of the engine or an option that does not
            go with EnvPipe, or another rank raised one.
    """
    given = inspect.signature(deepspeed.initialize).bind(*arguments, **named).arguments
    config = parsed_config(given)
    settings = settings_of(config, envpipe)
    if settings is None:
        whole: tuple[Any, ...] = deepspeed.initialize(**given)
        return whole
    check_version()
    model = given.get("model")
    if not isinstance(model, PipelineModule):
        raise JobError(
            "EnvPipe needs a pipeline: a model that is a deepspeed.pipe.PipelineModule",
            value=type(model).__name__,
            remedy="Make it one, or train without EnvPipe.",
        )
    on_gpu = torch.cuda.is_available()
    options = read_settings(settings, OF_LEVELS, num_stages=model.num_stages, on_gpu=on_gpu)
    engine, *others = deepspeed.initialize(**given)
    begin(engine, options, config)
    return engine, *others


def end_training(engine: Any) -> None:
    """Give clocks back and print the energy bill; nothing if the engine is DeepSpeed's own.

    Every rank calls it, after its last step.
    """
    if isinstance(engine, EnvPipeEngine):
        engine.end_training()


def begin(
    engine: Any,
    options: JobOptions,
    config: Mapping[str, Any],
    *,
    sequence_length: int | None = None,
    prints: bool = True,
) -> LeveledJob:
    """Make the job of an engine that DeepSpeed has made; every rank does. Raises as `initialize`.

    The engine is an EnvPipeEngine from here on, or stays DeepSpeed's own where a GPU cannot be
    read.

    Args:
        engine: a PipelineEngine.
        options: EnvPipe's.
        config: DeepSpeed's configuration, and other facts by which jobs differ.
        sequence_length: length of a sample, in tokens.
        prints: whether the engine prints energy when DeepSpeed prints its steps.
    """
    if found := not_run(engine):
        raise JobError(
            "EnvPipe does not run this under DeepSpeed",
            value=found,
            remedy="Train without EnvPipe, or without these.",
        )
    job = LeveledJob(options, _framework_job(engine, config, sequence_length), say_line)
    if job.job is not None:
        engine.__class__ = EnvPipeEngine  # nothing else of DeepSpeed is touched
        engine.take_job(job, prints=prints)
    return job


def _framework_job(
    engine: Any, config: Mapping[str, Any], sequence_length: int | None
) -> FrameworkJob:
    microbatch_size, samples = engine.train_micro_batch_size_per_gpu(), engine.train_batch_size()
    slices = engine.grid.get_slice_parallel_world_size()
    parameters = list(engine.module.parameters())
    elements = torch.tensor([sum(each.numel() for each in parameters)], device=engine.device)
    dist.all_reduce(elements)
    bill = {
        "model": type(engine.module).__name__,
        "samples_per_iteration": samples,
        "microbatch_size": microbatch_size,
    }
    if sequence_length is not None:
        bill["tokens_per_iteration"] = samples * sequence_length
    return FrameworkJob(
        engine.grid.get_pipe_parallel_group(),
        engine.gradient_accumulation_steps(),
        messages_vary=engine.dynamic_shape,
        sidecar=Sidecar(
            tensor_parallel=slices,
            microbatch_size=microbatch_size,
            sequence_length=sequence_length,
        ),
        bill=bill,
        same_job={
            "deepspeed": deepspeed.__version__,
            **{
                f"deepspeed {name}": json.dumps(value, sort_keys=True, default=str)
                for name, value in config.items()
                if name not in _LEFT_OUT
            },
            "microbatch_size": microbatch_size,
            "slice_parallel_size": slices,
            "parameters": int(elements),
            "dtypes": sorted({str(each.dtype) for each in parameters}),
            "activation_checkpoint_interval": engine.module.activation_checkpoint_interval,
            "dynamic_shape": engine.dynamic_shape,
            "layers_of_stages": [int(first) for first in engine.module.parts],
        },
    )
