"""Hooks that the patch calls; a patched checkout imports them if --envpipe is an argument.

DeepSpeed's engine executes EnvPipe's schedules once training begins, and is DeepSpeed's own again
when it has ended. `hooking` says what happens where a hook is never reached.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from deepspeed.runtime.pipe.engine import PipelineEngine

from envpipe_megatron.integrations.deepspeed.initialize import (
    begin,
    check_version,
    parsed_config,
)
from envpipe_megatron.integrations.hooking import (
    Hooks,
    options_of,
    refusals,
    same_job,
)
from envpipe_megatron.integrations.leveled import LeveledJob
from envpipe_megatron.integrations.levels import (
    FREES_WHILE_TRAINING,
    JobError,
    Predicate,
    above_one,
    any_of,
    frees_while_training,
    on,
)
from envpipe_megatron.integrations.options import add_arguments as add_arguments  # for the patch


def _configured(*path: str) -> Predicate:
    """Return whether a block or a switch of DeepSpeed's configuration is on."""

    def asks(args: argparse.Namespace) -> bool:
        value: Any = deepspeed_config(args)
        for name in path:
            value = value.get(name) if isinstance(value, Mapping) else None
        if isinstance(value, Mapping):
            return bool(value.get("enabled", bool(value)))
        return bool(value)

    return asks


#: Feature, and whether arguments or DeepSpeed's configuration ask for it.
REFUSED: Mapping[str, Predicate] = {
    "a level below order (--envpipe-level)": lambda args: (
        (getattr(args, "envpipe_level", None) or "auto").lower() not in ("auto", "order")
    ),
    "DeepSpeed's pipeline turned off (--no-pipeline-parallel)": on("no_pipeline_parallel"),
    "training without DeepSpeed (no --deepspeed)": lambda args: not args.deepspeed,
    "virtual pipeline stages (--num-layers-per-virtual-pipeline-stage)": on(
        "num_layers_per_virtual_pipeline_stage"
    ),
    "a split rank or a stage only for the embedding": any_of(
        on("standalone_embedding_stage"),
        lambda args: getattr(args, "pipeline_model_parallel_split_rank", None) is not None,
    ),
    "mixture of experts": lambda args: max(getattr(args, "num_experts", None) or [1]) > 1,
    "distillation and mixtures of students (--kd, --mos)": on("kd", "mos"),
    "compression (compression_training)": _configured("compression_training"),
    "curriculum learning": any_of(
        on("data_efficiency_curriculum_learning"), _configured("curriculum_learning")
    ),
    "random layer token dropping (--random-ltd)": on("random_ltd"),
    "data efficiency (data_efficiency)": _configured("data_efficiency"),
    "progressive layer dropping (progressive_layer_drop)": _configured("progressive_layer_drop"),
    "elastic batch sizes (elasticity)": _configured("elasticity"),
    "autotuning": _configured("autotuning"),
    "the zero-bubble schedule (--enable-zbh1-pipeline, --enable-zbh1-exact-semantics)": on(
        "enable_zbh1_pipeline", "enable_zbh1_exact_semantics"
    ),
    "DeepSpeed's sequence parallelism": any_of(
        above_one("ds_sequence_parallel_size"),
        on("force_ds_sequence_parallel", "ds_sequence_parallel_fpdt"),
    ),
    "inference (--inference, --ds-inference)": on("inference", "ds_inference"),
    "Retro": on("retro_add_retriever"),
    "FP8": on("fp8_e4m3", "fp8_hybrid"),
    "contiguous activation checkpoints (--contigious-checkpointing)": any_of(
        on("contigious_checkpointing"),
        _configured("activation_checkpointing", "contiguous_memory_optimization"),
    ),
    # These wait for the device in each unit, and so for a posted receive.
    "waiting for the device in each unit (--synchronize-each-layer, --profile-backward, "
    "wall_clock_breakdown)": any_of(
        on("synchronize_each_layer", "profile_backward"),
        _configured("wall_clock_breakdown"),
        _configured("activation_checkpointing", "synchronize_checkpoint_boundary"),
        _configured("activation_checkpointing", "profile"),
    ),
    "--skip-train": on("skip_train"),
    FREES_WHILE_TRAINING: lambda _: frees_while_training(),
}


def check_supported(args: argparse.Namespace) -> None:
    """Refuse by a JobError what is not proven to give the same result under EnvPipe.

    And a job without a pipeline.
    """
    if args.pipeline_model_parallel_size < 2:
        raise JobError(
            "--envpipe needs a pipeline",
            value=args.pipeline_model_parallel_size,
            remedy="Give --pipeline-model-parallel-size of at least 2, or leave --envpipe out.",
        )
    if asked_for := [feature for feature, asks in REFUSED.items() if asks(args)]:
        raise JobError(
            f"Under --envpipe, these are refused until they are proven: {'; '.join(asked_for)}",
            remedy="Leave them out, or train without --envpipe.",
        )


def deepspeed_config(args: argparse.Namespace) -> dict[str, Any]:
    """Return DeepSpeed's configuration, from where Megatron keeps it at the moment."""
    given = getattr(args, "deepspeed_config_dict", None) or getattr(args, "deepspeed_config", None)
    try:
        return parsed_config({"config": given})
    except (OSError, ValueError) as error:
        raise JobError(
            f"The configuration of DeepSpeed cannot be read: {error}",
            value=str(given),
            remedy="Give the path of a JSON file by --deepspeed_config.",
        ) from error


_hooks = Hooks[LeveledJob]("megatron/arguments.py", "end_step", "log")


@refusals()
def validate(args: argparse.Namespace) -> None:
    """End as argparse does if EnvPipe does not run the job, before anything is built.

    For an unsupported feature, a version of DeepSpeed that was not tried, a wrong option or file.
    """
    check_supported(args)
    check_version()
    _hooks.options = options_of(args)


@refusals(JobError)
def begin_training(args: argparse.Namespace, model: list[Any]) -> None:
    """Have the engine, the one item of the list, execute EnvPipe's schedules.

    Raises:
        SystemExit: arguments that did not come from the command line, a model without DeepSpeed's
            pipeline, ranks that were started differently, or a limit that cannot be kept.
        EnvPipeError: no control though it is required, or another rank raised one.
    """
    options = _hooks.validated()
    check_model(model)
    _hooks.needed_by = max(_hooks.needed_by, args.log_interval)
    _hooks.while_training.callback(setattr, model[0], "__class__", PipelineEngine)
    _hooks.job = begin(
        model[0],
        options,
        {**deepspeed_config(args), "megatron": same_job(args)},
        sequence_length=args.seq_length,
        prints=False,
    )


def end_step() -> None:
    """End an iteration."""
    _hooks.note("end_step")
    _hooks.running()


def log(iteration: int, writer: Any) -> str:
    """Return energy since the last call for Megatron's log line, and write it to the writer.

    Every rank calls it at the same iteration; the writer, for both, is enabled on one.
    """
    _hooks.note("log", _hooks.needed_by)
    return _hooks.running().log(iteration, writer if writer.is_enabled() else None)


def end_training() -> None:
    """Give clocks back, and print the bill; the engine is DeepSpeed's own again."""
    _hooks.ended().end()


def check_model(model: list[Any]) -> None:
    """Refuse by a JobError models that no flag names, such as other entry scripts'."""
    from megatron.model import GPTModelPipe

    engine = model[0]
    if not isinstance(engine, PipelineEngine) or not isinstance(engine.module, GPTModelPipe):
        raise JobError(
            "Under --envpipe, models other than GPTModelPipe are refused until they are proven",
            value=type(getattr(engine, "module", engine)).__name__,
            remedy="Train without --envpipe.",
        )
