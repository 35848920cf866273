"""What the patch calls; imported by a patched checkout when --envpipe is among its arguments.

DeepSpeed's engine executes EnvPipe's schedules once training begins, and is DeepSpeed's own again
when it has ended. `hooking` tells what happens where a hook is never reached.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from typing import Any

from deepspeed.runtime.pipe.engine import PipelineEngine

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.integrations.deepspeed.configuration import check_version
from envpipe_megatron.integrations.deepspeed.engine import EnvPipeEngine
from envpipe_megatron.integrations.deepspeed.initialize import begin
from envpipe_megatron.integrations.flags import add_arguments as add_arguments  # for the patch
from envpipe_megatron.integrations.hooks.hooking import (
    NEEDED_BY_ITERATION,
    HookError,
    Reached,
    check_profiled,
    options_of,
    refuse,
    running,
    validated,
)
from envpipe_megatron.integrations.job import JobError
from envpipe_megatron.integrations.megatron_deepspeed.refusals import (
    check_supported,
    deepspeed_config,
)
from envpipe_megatron.integrations.options import Options
from envpipe_megatron.integrations.refusals import RefusedError

_NEEDED = ("validate", "begin_training", "end_step")

#: What units cost rests on, beside what DeepSpeed knows of the job.
_SAME_JOB = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "seq_length",
    "padded_vocab_size",
    "swiglu",
    "normalization",
    "untie_embeddings_and_output_weights",
    "params_dtype",
    "tensor_model_parallel_size",
    "sequence_parallel",
    "checkpoint_activations",
    "checkpoint_num_layers",
    "deepspeed_activation_checkpointing",
    "recompute_granularity",
    "use_flash_attn",
    "optimizer",
    "cpu_optimizer",
)


@dataclass
class _State:
    """One process trains one job at a time."""

    options: Options | None = None
    engine: PipelineEngine | None = None
    log_interval: int = 1
    reached: Reached = field(default_factory=Reached)


_state = _State()


def validate(args: argparse.Namespace) -> None:
    """End as argparse does if EnvPipe does not run the job, before anything is built.

    For an unsupported feature, a version of DeepSpeed that was not tried, a wrong option or file.
    """
    _state.reached.note("validate")
    try:
        check_supported(args)
        check_version()
        _state.options = options_of(args)
    except EnvPipeError as error:
        refuse(error)


def begin_training(args: argparse.Namespace, model: list[Any]) -> None:
    """Have the engine, which is alone in the list, execute EnvPipe's schedules.

    Raises:
        SystemExit: arguments that did not come from the command line, a model without DeepSpeed's
            pipeline, ranks that were started differently, or a limit that cannot be kept.
        EnvPipeError: no control though it is required, or another rank raised one.
    """
    _state.reached.note("begin_training")
    try:
        options = validated(_state.options, "megatron/arguments.py")
        _state.log_interval = args.log_interval
        check_model(model)
        _state.engine = begin(
            model[0],
            options,
            {
                **deepspeed_config(args),
                "megatron": {name: getattr(args, name, None) for name in _SAME_JOB},
            },
            sequence_length=args.seq_length,
            tells=False,
        )
        # Before a ramp-up sets the size that it begins with.
        _state.engine.full_microbatches = _state.engine.micro_batches
    except (HookError, JobError, RefusedError) as error:
        refuse(error)


def end_step() -> None:
    """An iteration has ended."""
    steps = _state.reached.note("end_step")
    if steps == NEEDED_BY_ITERATION:
        _state.reached.check(_NEEDED, steps)
    if steps == _state.log_interval + 1:
        _state.reached.check(["log"], steps)
    running(_state.engine)


def log(iteration: int, writer: Any) -> str:
    """Energy since the last call, to add to Megatron's log line, for TensorBoard and W&B.

    Every rank calls it at the same iteration; the writer, for both, is enabled on one.
    """
    _state.reached.note("log")
    engine = running(_state.engine)
    if not isinstance(engine, EnvPipeEngine):  # it trains without EnvPipe
        return ""
    report = engine.report_interval()
    if writer.is_enabled():
        for name, value in report.scalars().items():
            writer.add_scalar(name, value, iteration)
    return report.line()


def end_training() -> None:
    """Give clocks back, and print the bill; the engine is DeepSpeed's own again."""
    engine = running(_state.engine)
    _state.engine = None
    if not isinstance(engine, EnvPipeEngine):
        return
    engine.end_training()
    has_profile = engine.session.state.profile is not None
    engine.__class__ = PipelineEngine
    check_profiled(validated(_state.options, "megatron/arguments.py"), has_profile)


def check_model(model: list[Any]) -> None:
    """Refuse by a RefusedError models that flags do not tell, such as other entry scripts'."""
    from megatron.model import GPTModelPipe

    engine = model[0]
    if not isinstance(engine, PipelineEngine) or not isinstance(engine.module, GPTModelPipe):
        raise RefusedError(
            "Under --envpipe, models other than GPTModelPipe are refused until they are proven",
            value=type(getattr(engine, "module", engine)).__name__,
            remedy="Train without --envpipe.",
        )
