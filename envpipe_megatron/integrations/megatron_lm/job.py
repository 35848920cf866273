"""One rank of a patched Megatron-LM job: its session, made from Megatron's arguments and groups."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import get_num_microbatches

from envpipe_megatron import __version__, builders
from envpipe_megatron.channel_model import QUEUES_VARIABLE
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.integrations.megatron_core import ForwardBackward
from envpipe_megatron.integrations.megatron_lm.device import open_device
from envpipe_megatron.integrations.megatron_lm.options import Options
from envpipe_megatron.runtime.channel import make_channel
from envpipe_megatron.runtime.collectives import Collectives
from envpipe_megatron.runtime.profiler import ProfilerSettings
from envpipe_megatron.runtime.session import Session, SessionConfig
from envpipe_megatron.sidecar import Sidecar

logger = logging.getLogger(__name__)

#: What a stored profile and plan were made for; another value of one of these makes them useless.
_SAME_JOB = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "seq_length",
    "padded_vocab_size",
    "swiglu",
    "normalization",
    "untie_embeddings_and_output_weights",
    "micro_batch_size",
    "global_batch_size",
    "params_dtype",
    "world_size",
    "pipeline_model_parallel_size",
    "tensor_model_parallel_size",
    "sequence_parallel",
    "use_distributed_optimizer",
    "transformer_impl",
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
    "kv_channels",
    "attention_backend",
    "use_flash_attn",
    "calculate_per_token_loss",
    "cross_entropy_loss_fusion",
    "overlap_grad_reduce",
    "overlap_param_gather",
    "optimizer",
    "use_precision_aware_optimizer",
    "main_params_dtype",
    "main_grads_dtype",
    "exp_avg_dtype",
    "exp_avg_sq_dtype",
    "pipeline_model_parallel_layout",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)


class JobError(EnvPipeError):
    """Ranks that were started differently, or a limit below what the pipeline needs."""


class Job:
    """What a rank keeps from the first iteration to the last.

    Every rank of the job makes one, at the same point of the program. Nothing of it outlives
    `close`, which gives the clock back.

    Args:
        args: Megatron's.
        options: EnvPipe's.
        say: told of progress, on the planning rank alone.

    Raises:
        JobError: ranks that were started differently, or too few microbatches in flight.
        EnvPipeError: no GPU, no control where it is required, or another rank raised one.
    """

    def __init__(
        self, args: argparse.Namespace, options: Options, say: Callable[[str], None]
    ) -> None:
        self.options = options
        timeout = timedelta(minutes=args.distributed_timeout_minutes)
        host_group = dist.new_group(backend="gloo", timeout=timeout, group_desc="envpipe-host")
        assert host_group is not None
        stage: int = parallel_state.get_pipeline_model_parallel_rank()
        num_stages: int = parallel_state.get_pipeline_model_parallel_world_size()
        # Replicas meet in every iteration, so emulated time runs for all of them together.
        self.collectives = Collectives(host_group, stage, num_stages, host_group)
        num_microbatches: int = get_num_microbatches()
        check_same_everywhere(self.collectives, _of_all_ranks(options, num_microbatches))
        check_in_flight(options.max_in_flight, num_stages, num_microbatches)
        self.device = open_device(
            self.collectives,
            stage,
            num_stages,
            options.gpu_control,
            require=options.require_control
            or (options.profile_only and options.gpu_control != "dry_run"),
        )
        self.channel = make_channel(
            parallel_state.get_pipeline_model_parallel_group(),
            stamped=self.device.emulated,
            timeout=timeout,
        )
        self.session = Session(
            SessionConfig(
                options.request(num_microbatches),
                warmup_iterations=options.baseline_steps,
                profiler=ProfilerSettings(measured_iterations=options.profile_steps),
                profile_file=options.profile_file,
                plan_file=options.plan_file,
                output_dir=options.output_dir,
                min_dwell_s=options.min_dwell_s,
                facts=Sidecar(
                    tensor_parallel=args.tensor_model_parallel_size,
                    microbatch_size=args.micro_batch_size,
                    sequence_length=args.seq_length,
                ),
            ),
            self.device.gpu,
            self.device.make_executor,
            self.channel,
            self.collectives,
            stage=stage,
            num_stages=num_stages,
            rank=dist.get_rank(),
            labels={"emulated": True} if self.device.emulated else {},
            say=say,
            print_grid=self._keep_grid,
            # A profile that is asked for is measured, whatever an earlier start left.
            fingerprint=(
                None if options.profile_only else _fingerprint(args, options, self.device.gpu.name)
            ),
        )
        self.session.describe_job(
            {
                "model": f"GPT, {args.num_layers} layers, width {args.hidden_size}",
                "tokens_per_iteration": args.global_batch_size * args.seq_length,
                "samples_per_iteration": args.global_batch_size,
                "microbatch_size": args.micro_batch_size,
                "type": options.policy,
                "scheduling": options.scheduling,
                "reconfigure": options.reconfigure,
            }
        )
        self.forward_backward: ForwardBackward | None = None

    def stand_in(self, framework_function: Callable[..., Any]) -> ForwardBackward:
        """What runs in place of Megatron's own 1F1B function."""
        if self.forward_backward is None:
            self.forward_backward = ForwardBackward(
                self.session, framework_function=framework_function
            )
        return self.forward_backward

    @property
    def single_queue(self) -> bool:
        """Whether the order is limited to what the channel holds over one hardware queue."""
        return self.channel.capacity is not None

    def close(self) -> None:
        """Give the clock back and finish the energy log; safe to call twice."""
        self.session.close()

    def _keep_grid(self, text: str) -> None:
        if self.options.output_dir is None:
            return
        path = self.options.output_dir / "reconfigure.txt"
        try:
            with path.open("a") as file:
                file.write(text + "\n\n")
        except OSError as error:  # a full disk, say; training goes on
            logger.error("%s could not be written: %s", path, error)


def check_same_everywhere(collectives: Collectives, facts: Mapping[str, object]) -> None:
    """Refuse ranks that would go different ways, and wait for each other for ever.

    Raises:
        JobError: on every rank, with what differs.
    """
    everyone = [own for replicas in collectives.gather_by_stage(facts) for own in replicas]
    different = {
        name: sorted({str(own[name]) for own in everyone})
        for name in facts
        if any(own[name] != everyone[0][name] for own in everyone)
    }
    if different:
        raise JobError(
            "The ranks of this job were started differently",
            value=different,
            remedy="Give all nodes the same flags, the same ENVPIPE_TYPE, ENVPIPE_SCHEDULING, "
            f"ENVPIPE_RECONFIGURE and {QUEUES_VARIABLE}, and one version of the package.",
        )


def _of_all_ranks(options: Options, num_microbatches: int) -> dict[str, object]:
    # Paths may differ from node to node: the planner alone reads, and says where.
    own = {k: v is not None if isinstance(v, Path) else v for k, v in vars(options).items()}
    return {
        **own,
        "microbatches": num_microbatches,
        QUEUES_VARIABLE: os.environ.get(QUEUES_VARIABLE),
        "version": __version__,
    }


def check_in_flight(
    limit: int | tuple[int, ...] | str | None, num_stages: int, num_microbatches: int
) -> None:
    """Refuse a number of microbatches in flight with which not even 1F1B runs.

    Raises:
        JobError: naming what each stage needs.
    """
    if limit is None or isinstance(limit, str):
        return
    limits = limit if isinstance(limit, tuple) else (limit,) * num_stages
    needed = list(builders.one_f_one_b(num_stages, num_microbatches).peak_in_flight)
    if any(own < least for own, least in zip(limits, needed, strict=True)):
        raise JobError(
            f"--envpipe-max-in-flight is below what 1F1B holds, {needed}",
            value=limit,
            remedy=f"Give at least {needed[0]}, or one number for each stage.",
        )


def _fingerprint(args: argparse.Namespace, options: Options, gpu: str) -> dict[str, object]:
    """What a profile and a plan are good for, beside the session's own: the same, the same job."""
    job: dict[str, object] = {name: getattr(args, name, None) for name in _SAME_JOB}
    for name, value in job.items():
        if not isinstance(value, (str, int, float, list, type(None))):
            job[name] = str(value)  # types of torch's, and enumerations: it becomes JSON
    return job | {"gpu": gpu, "min_dwell_s": options.min_dwell_s, "torch": torch.__version__}
