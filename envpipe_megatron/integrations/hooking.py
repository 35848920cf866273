"""Code that the hooks of all frameworks share.

A hook that is never reached would leave a job that trains without EnvPipe and does not say so.
So each notes that it was reached, and an error is logged if one was not; training goes on.

What frameworks run between training steps may compare GPUs, and one that a plan has slowed looks
sick. So a job pauses before each row of `BETWEEN_STEPS`: the GPU is seen to run at its highest
clock. Tools that read times of training itself meet slowed GPUs all the same: NVRx gets its
thresholds lowered by as much as that explains; a job with Megatron's `--log-straggler`, which has
none, has one clock for all GPUs (`megatron.limits`).
"""

from __future__ import annotations

import argparse
import inspect
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial, wraps
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.integrations.framework_units import once
from envpipe_megatron.integrations.leveled import LeveledJob
from envpipe_megatron.integrations.levels import JobError
from envpipe_megatron.integrations.options import (
    by_variables,
    flag_of,
    flags_given,
    prepare_files,
    read_options,
)
from envpipe_megatron.runtime.job.options import JobOptions
from envpipe_megatron.search.layer_profile import FULL, SELECTIVE

logger = logging.getLogger(__name__)

#: Arguments of any Megatron that decide the time and energy of units: the model, its split,
#: experts, number formats, kernels, recomputation, optimizer. A stored profile is of no use where
#: one differs.
_SAME_JOB = (
    "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups",
    "num_key_value_heads seq_length padded_vocab_size micro_batch_size swiglu normalization",
    "kv_channels mtp_num_layers multi_latent_attention untie_embeddings_and_output_weights",
    "pipeline_model_parallel_size virtual_pipeline_model_parallel_size",
    "pipeline_model_parallel_layout decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "tensor_model_parallel_size sequence_parallel context_parallel_size tp_comm_overlap",
    "num_experts moe_ffn_hidden_size moe_router_topk moe_token_dispatcher_type moe_layer_freq",
    "expert_model_parallel_size expert_tensor_parallel_size overlap_moe_expert_parallel_comm",
    "moe_shared_expert_intermediate_size moe_latent_size moe_expert_capacity_factor",
    "hybrid_layer_pattern hybrid_override_pattern heterogeneous_layers_config_path",
    "experimental_attention_variant linear_attention_freq window_size decoder_seq_length",
    "q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim gtp_weight_remat_size",
    "params_dtype fp8 fp4 fp8_recipe fp8_param_gather transformer_impl attention_backend",
    "use_flash_attn cpu_offloading_num_layers fine_grained_activation_offloading",
    "cuda_graph_impl cross_entropy_loss_fusion calculate_per_token_loss",
    "recompute_granularity recompute_method recompute_num_layers recompute_modules",
    "envpipe_recompute checkpoint_activations checkpoint_num_layers",
    "deepspeed_activation_checkpointing",
    "optimizer cpu_optimizer use_distributed_optimizer overlap_grad_reduce overlap_param_gather",
    "use_precision_aware_optimizer main_params_dtype main_grads_dtype exp_avg_dtype",
    "exp_avg_sq_dtype",
)
T = TypeVar("T", bound=LeveledJob)


class Hooks(Generic[T]):
    """State that the hooks of one patch share: a process trains one job at a time.

    Args:
        file: of the framework's, whose hook reads the options.
        needed: hooks that every job reaches within its first steps. Without those before them, it
            has no options, or is not there: see `validated` and `running`.
    """

    def __init__(self, file: str, *needed: str) -> None:
        self._file = file
        self._needed = needed
        self._counts = Counter[str]()
        #: By which iteration calls have reached all of them.
        self.needed_by = 3
        #: The options, once they are read, and the job from begin to end.
        self.options: JobOptions | None = None
        self.job: T | None = None
        #: Closed when training ends, with what was replaced for it.
        self.while_training = ExitStack()

    def note(self, name: str, iterations: int = 1) -> None:
        """Note a call of this hook: there is at most one in this many iterations.

        Log, once a node, which of the needed ones no call has reached.
        """
        self._counts[name] += iterations
        if self._counts[name] <= self.needed_by:
            return
        missing = [name for name in self._needed if not self._counts[name]]
        self._needed = ()
        if missing and _logs_here():
            logger.error(
                "Hooks of EnvPipe were not reached by iteration %d: %s. Training goes on without "
                "what they do; `envpipe patch check` says what is wrong with this checkout",
                self.needed_by,
                ", ".join(missing),
            )

    def validated(self) -> JobOptions:
        """Return the options for a job that begins; a JobError if none were read."""
        if self.job is not None:  # an exception ended its training, and was caught
            self.ended().close()
        if self.options is None:
            raise JobError(
                f"The arguments of this job came from elsewhere than the command line, or the hook "
                f"in {self._file} is missing",
                remedy="Give all options on the command line; `envpipe patch check` looks at "
                "hooks.",
            )
        return self.options

    def running(self) -> T:
        """Return the job; a JobError if there is none."""
        if self.job is None:
            raise JobError(
                "A hook was called outside training",
                remedy="`envpipe patch check` says what is wrong with this checkout.",
            )
        return self.job

    def ended(self) -> T:
        """Return the job, and forget it."""
        self.while_training.close()
        job, self.job = self.running(), None
        return job


def options_of(
    args: argparse.Namespace, settings: Mapping[str, object] | None = None
) -> JobOptions:
    """Return EnvPipe's options, checked before anything is built.

    They are flags among Megatron's arguments, or settings by name.
    """
    given, named = (flags_given(args), flag_of) if settings is None else (settings, str)
    options = read_options(
        given,
        num_stages=args.pipeline_model_parallel_size,
        on_gpu=torch.cuda.is_available(),
        save_folder=args.save,
        named=named,
    )
    return prepare_files(options, args.pipeline_model_parallel_size, named)


def same_job(args: argparse.Namespace) -> dict[str, object]:
    """Return Megatron's arguments for `FrameworkJob.same_job`; None for what a version lacks.

    Of Megatron-DeepSpeed, these are its flags beside DeepSpeed's configuration.
    """
    return {name: getattr(args, name, None) for row in _SAME_JOB for name in row.split()}


@contextmanager
def refusals(of: type[EnvPipeError] = EnvPipeError) -> Iterator[None]:
    """Within, or in a function under it, an error ends the job as argparse does.

    By a message without a stack, printed once on each node: it must be one that all ranks have. But
    where a rank's variables set options, which others may not have, each prints its own.
    """
    try:
        yield
    except of as error:
        if _logs_here() or by_variables():
            print(f"{Path(sys.argv[0]).name}: error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(2) from None


def _logs_here() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Within, the owner's names have these values; it has all of them, or its class has."""
    own = {name: getattr(owner, name) for name in values}
    of_class = {name for name in own if hasattr(type(owner), name)} - vars(owner).keys()
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in own.items():
            if name in of_class:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


def recompute(blocks: Iterable[Any], what: str | None, count: int) -> None:
    """Make the first layers of Megatron's transformer blocks recompute, and the others not.

    What layers do is read from their configuration and attributes when they run, so a model can be
    changed after it was built. Results stay the same.

    Args:
        blocks: of the model, without wrappers.
        what: `FULL` or `SELECTIVE`; else none do.
        count: layers of each block, at most.
    """
    full = what == FULL and count > 0
    for block in blocks:
        block.config.recompute_granularity = FULL if full else None
        block.config.recompute_method = "block" if full else None
        block.config.recompute_num_layers = count if full else None
        for number, layer in enumerate(block.layers):
            if hasattr(layer, "self_attention"):  # not where it has none, as of state spaces
                selected = what == SELECTIVE and number < count
                layer.self_attention.checkpoint_core_attention = selected


class Between(NamedTuple):
    """A function, by its name in a module or in an attribute of a trainer."""

    owner: str
    function: str
    when: str = ""  # name of a function that says by the same arguments if it does anything


_LM, _BRIDGE = "megatron.training.training", "megatron.bridge.training.train"
_ENGINE, _HASHES = "deepspeed.runtime.pipe.engine", "check_param_hashes_across_dp_replicas"

#: By framework: checks of GPUs and of weights over replicas, evaluations, checkpoints. Versions
#: that lack a function do without. Any forward-only call pauses too, and Megatron-LM's patch pauses
#: before a checkpoint.
BETWEEN_STEPS = {
    "Megatron-LM": (
        Between(_LM, "_run_gpu_sniff_test"),
        Between(_LM, "evaluate"),
        Between(_LM, _HASHES),
    ),
    "Megatron-Bridge": (
        Between(_BRIDGE, "evaluate_and_print_results"),
        Between(_BRIDGE, "save_checkpoint_and_time"),
        Between(_BRIDGE, _HASHES),
    ),
    "DeepSpeed": (
        Between(_ENGINE, "eval_batch"),
        Between(_ENGINE, "save_checkpoint"),
        Between(_ENGINE, "load_checkpoint"),
    ),
    "torchtitan": (
        Between("checkpointer", "save", when="_should_save"),
        Between("validator", "validate"),
    ),
}
#: Where NVRx has its reports, in newer and in older versions.
_NVRX = [f"nvidia_resiliency_ext.{path}straggler.reporting" for path in ("attribution.", "")]


@contextmanager
def between_steps(framework: str, job: LeveledJob, trainer: object = None) -> Iterator[None]:
    """Within, the job pauses before each row of a framework, and NVRx has lower thresholds."""
    with ExitStack() as stack:

        def put(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
            if function := getattr(owner, name, None):
                stack.enter_context(replaced(owner, **{name: make(function)}))

        for row in BETWEEN_STEPS[framework]:
            owner = sys.modules.get(row.owner) or getattr(trainer, row.owner, None)
            does = getattr(owner, row.when, lambda *_, **__: False) if row.when else None
            put(owner, row.function, partial(paused, lambda *_: job.pause(), does=does))
        for name in _NVRX:
            report = getattr(sys.modules.get(name), "Report", None)
            put(report, "identify_stragglers", partial(_lowered, job))
        yield


def paused(
    pause: Callable[..., object],
    function: Callable[..., Any],
    does: Callable[..., bool] | None = None,
) -> Callable[..., Any]:
    """Return a function that calls `pause`, with its first argument, before it `does` anything.

    Where that cannot be asked by its arguments, it pauses.
    """

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        pauses = True
        if does is not None:
            with suppress(Exception):  # one of the user's may have other arguments
                pauses = does(*args, **kwargs)
        if pauses:
            pause(*args[:1])
        return function(*args, **kwargs)

    return run


def _lowered(job: LeveledJob, identify: Callable[..., Any]) -> Callable[..., Any]:
    """Return NVRx's search for stragglers with thresholds that a slowed GPU that is well meets.

    A score is a share of the speed of the fastest GPU, or of this one's own best; at a lower clock
    no kernel is slower than by the ratio of the clocks.
    """
    signature, say = inspect.signature(identify), once()

    @wraps(identify)
    def lowered(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        share = 1.0 if job.job is None else job.session.slowest_share()
        if share < 1:
            say(f"NVRx's thresholds are lowered to {share:.0%}, as the slowest unit's clock was")
        for name, value in given.arguments.items():
            if name.endswith("_threshold") and value is not None:
                given.arguments[name] = share * value
        return identify(*given.args, **given.kwargs)

    return lowered
