"""Code that the hooks of all frameworks share.

A hook that is never reached would leave a job that trains without EnvPipe and does not say so.
So each notes that it was reached, and an error is logged if one was not; training goes on.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

import torch

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.integrations.options import flag_of, flags_given, prepare_files, read_options
from envpipe_megatron.runtime.job.options import JobOptions

logger = logging.getLogger(__name__)

_NEEDED_BY_ITERATION = 3
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
    "params_dtype fp8 fp4 fp8_recipe transformer_impl attention_backend use_flash_attn",
    "cuda_graph_impl cross_entropy_loss_fusion calculate_per_token_loss",
    "recompute_granularity recompute_method recompute_num_layers recompute_modules",
    "envpipe_recompute checkpoint_activations checkpoint_num_layers",
    "deepspeed_activation_checkpointing",
    "optimizer cpu_optimizer use_distributed_optimizer overlap_grad_reduce overlap_param_gather",
    "use_precision_aware_optimizer main_params_dtype main_grads_dtype exp_avg_dtype",
    "exp_avg_sq_dtype",
)
T = TypeVar("T")


class HookError(EnvPipeError):
    """A hook of the patch is missing, or was called where there is no job."""


class Hooks(Generic[T]):
    """State that the hooks of one patch share: a process trains one job at a time.

    Args:
        file: of the framework's, whose hook reads the options.
        needed: hooks that every job reaches within its first steps.
    """

    def __init__(self, file: str, *needed: str) -> None:
        self._file = file
        self._needed = needed
        self._counts = Counter[str]()
        self._missing: set[str] = set()
        #: The options, once they are read, and the job from begin to end.
        self.options: JobOptions | None = None
        self.job: T | None = None
        #: Closed when training ends, with what was replaced for it.
        self.while_training = ExitStack()
        #: Steps from one log line to the next, where not each has one.
        self.logged_every: int | None = None

    def note(self, name: str) -> int:
        """Note a call of this hook, of which a step has at most one; return how many there were."""
        self._counts[name] += 1
        if self._counts[name] == _NEEDED_BY_ITERATION + 1:
            self.check(_NEEDED_BY_ITERATION, *self._needed)
        return self._counts[name]

    def check(self, iteration: int, *needed: str) -> None:
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

    def validated(self) -> JobOptions:
        """Return the options; a HookError if none were read."""
        if self.options is None:
            raise HookError(
                f"The arguments of this job came from elsewhere than the command line, or the hook "
                f"in {self._file} is missing",
                remedy="Give all options on the command line; `envpipe patch check` looks at "
                "hooks.",
            )
        return self.options

    def running(self) -> T:
        """Return the job; a HookError if there is none."""
        if self.job is None:
            raise HookError(
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
    prepare_files(options, args.pipeline_model_parallel_size, named)
    return options


def same_job(args: argparse.Namespace) -> dict[str, object]:
    """Return Megatron's arguments for `JobFacts.same_job`; None where a version has no such one.

    Of Megatron-DeepSpeed, these are its flags beside DeepSpeed's configuration.
    """
    return {name: getattr(args, name, None) for row in _SAME_JOB for name in row.split()}


def refuse(error: EnvPipeError) -> NoReturn:
    """End as argparse does, by a message without a stack; printed once on each node."""
    if _logs_here():
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
