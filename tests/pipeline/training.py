"""Training runs that tests compare: the same model and data, by megatron-core's own schedule or ours.

Runs inside the ranks of a pool. `cuda_on_cpu` lets megatron-core's *own* schedules run without a
GPU; EnvPipe's path needs none of it but `megatron_cpu.use_cpu`, which is part of the package.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

SEQUENCE, MICROBATCH, HIDDEN, VOCAB = 16, 2, 32, 64


@dataclass(frozen=True)
class Job:
    """What both runs train."""

    stages: int
    microbatches: int = 6
    chunks: int = 1
    steps: int = 3
    tied: bool = False
    deallocate: bool = True
    data_parallel: int = 1
    ddp: dict[str, Any] | None = None
    recompute: bool = False
    partial_checkpoint: int | None = None
    per_token_loss: bool = False
    evaluate_at: int | None = None


@dataclass(frozen=True)
class Ours:
    """How EnvPipe runs it; none of it may change a bit of the result."""

    schedule: str = "1f1b"
    policy: str = "baseline"
    reconfigure: str = "default"
    extra_forwards: tuple[int, ...] | None = None
    unit_s: float = 0.002
    profile_file: Path | None = None
    profiler: dict[str, int] = field(default_factory=dict)


class _CudaOnCpu(TorchFunctionMode):
    """Creates on the CPU what asks for `device="cuda"`, and keeps `.cuda()` there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.cuda:
            return args[0]
        return func(*args, **kwargs)


@contextlib.contextmanager
def cuda_on_cpu() -> Iterator[None]:
    """What megatron-core's own schedules, reducers and optimizers need besides `use_cpu`."""
    from unittest.mock import patch

    real_type = torch.Tensor.type
    fake_type = {"torch.FloatTensor": "torch.cuda.FloatTensor"}

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = real_type(self, *args, **kwargs)
        return fake_type.get(result, result) if isinstance(result, str) else result

    with (
        patch("torch.cuda.synchronize", lambda *a, **k: None),
        patch("torch.cuda.get_rng_state", lambda *a, **k: torch.zeros(1, dtype=torch.uint8)),
        patch("megatron.core.tensor_parallel.random._set_cuda_rng_state", lambda *a, **k: None),
        patch.object(torch.Tensor, "type", type_),
        _CudaOnCpu(),
    ):
        yield


def train(rank: int, job: Job, ours: Ours | None, root: Path) -> dict[str, Any]:
    """Train on this rank; losses of the last stage, weights, and what the session came to."""
    from megatron.core import parallel_state, tensor_parallel

    from envpipe_megatron.integrations.megatron_cpu import use_cpu

    use_cpu()
    torch.manual_seed(1234)
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=job.stages,
        virtual_pipeline_model_parallel_size=job.chunks if job.chunks > 1 else None,
    )
    tensor_parallel.random.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    try:
        with cuda_on_cpu():
            return _train(rank, job, ours, root)
    finally:
        parallel_state.destroy_model_parallel()


def _train(rank: int, job: Job, ours: Ours | None, root: Path) -> dict[str, Any]:
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    chunks, optimizer, finish_step = _build(job)
    replica = parallel_state.get_data_parallel_rank()
    function: Any = get_forward_backward_func()
    session = None
    if ours is not None:
        from envpipe_megatron.integrations.megatron_core import ForwardBackward

        session = _session(rank, job, ours, root)
        function = ForwardBackward(session)
    losses: list[list[float]] = []
    evaluated: list[float] = []
    grads: dict[str, torch.Tensor] = {}
    try:
        for step in range(job.steps):
            for chunk in chunks:
                if hasattr(chunk, "zero_grad_buffer"):
                    chunk.zero_grad_buffer()
            optimizer.zero_grad()
            call = partial(
                function,
                forward_step_func=_forward_step,
                model=chunks,
                num_microbatches=job.microbatches,
                seq_length=SEQUENCE,
                micro_batch_size=MICROBATCH,
            )
            reduced = call(data_iterator=_data(job, step, replica))
            losses.append([float(loss) for loss in _loss_values(reduced)])
            if step == job.steps - 1:
                grads = _gradients(chunks)
            finish_step()
            if job.evaluate_at == step:
                with torch.no_grad():
                    result = call(data_iterator=_data(job, 1000, replica), forward_only=True)
                evaluated = [float(loss) for loss in _loss_values(result)]
    finally:
        if session is not None:
            session.close()
    return {
        "losses": losses,
        "evaluated": evaluated,
        "grads": grads,
        "weights": _weights(chunks),
        "stage": parallel_state.get_pipeline_model_parallel_rank(),
        "executed": None if session is None else session.state,
    }


def _loss_values(reduced: list[Any]) -> list[Any]:
    return [entry["loss"] for entry in reduced]


def _build(job: Job) -> tuple[list[torch.nn.Module], Any, Any]:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=job.stages * job.chunks,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        pipeline_model_parallel_size=job.stages,
        virtual_pipeline_model_parallel_size=job.chunks if job.chunks > 1 else None,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        deallocate_pipeline_outputs=job.deallocate,
        # Megatron's interleaved order gives wrong gradients at p = 2 with its defaults.
        overlap_p2p_comm=job.chunks > 1,
        batch_p2p_comm=job.chunks == 1,
        calculate_per_token_loss=job.per_token_loss,
        recompute_granularity="full" if job.recompute or job.partial_checkpoint else None,
        recompute_method="block" if job.recompute or job.partial_checkpoint else None,
        recompute_num_layers=1 if job.recompute or job.partial_checkpoint else None,
        num_microbatches_with_partial_activation_checkpoints=job.partial_checkpoint,
    )
    chunks: list[torch.nn.Module] = []
    for chunk in range(job.chunks):
        vp_stage = chunk if job.chunks > 1 else None
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
        model = GPTModel(
            config,
            get_gpt_layer_local_spec(),
            VOCAB,
            SEQUENCE,
            pre_process=first,
            post_process=last,
            parallel_output=True,
            share_embeddings_and_output_weights=job.tied,
            vp_stage=vp_stage,
        )
        # Weights by global layer, whatever the split: the same for every job shape.
        generator = torch.Generator().manual_seed(7 + 100 * chunk + _stage())
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                tied_word = job.tied and "word_embeddings" in name + "output_layer"[:0]
                source = torch.Generator().manual_seed(99) if tied_word else generator
                if job.tied and ("word_embeddings" in name or "output_layer" in name):
                    source = torch.Generator().manual_seed(99)
                parameter.copy_(torch.randn(parameter.shape, generator=source) * 0.05)
        chunks.append(model)
    return _reducer_and_optimizer(job, config, chunks)


def _reducer_and_optimizer(job: Job, config: Any, chunks: list[Any]) -> tuple[list[Any], Any, Any]:
    """Plain Adam, or megatron-core's reducer, finalising and optimizer where the job says so."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    if job.ddp is None and not job.tied:
        parameters = [p for chunk in chunks for p in chunk.parameters()]
        optimizer = torch.optim.Adam(parameters, lr=1e-3)
        return chunks, optimizer, optimizer.step
    options = dict(job.ddp or {})
    distributed = bool(options.get("use_distributed_optimizer"))
    ddp_config = DistributedDataParallelConfig(bucket_size=2000, **options)
    wrapped = [
        DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]
    if options.get("overlap_grad_reduce"):
        config.no_sync_func = [chunk.no_sync for chunk in wrapped]
        if len(wrapped) == 1:
            config.no_sync_func = config.no_sync_func[0]
    config.finalize_model_grads_func = finalize_model_grads
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam", lr=1e-3, clip_grad=1.0, use_distributed_optimizer=distributed
        ),
        wrapped,
    )
    config.grad_scale_func = optimizer.scale_loss

    def finish_step() -> None:
        assert optimizer.step()[0]
        if options.get("overlap_param_gather"):
            for chunk in wrapped:
                chunk.start_param_sync(force_sync=True)

    return wrapped, optimizer, finish_step


def _session(rank: int, job: Job, ours: Ours, root: Path) -> Any:
    from megatron.core import parallel_state

    from envpipe_megatron.gpu.emulated import EmulatedGpu
    from envpipe_megatron.policies.planner import PlanRequest
    from envpipe_megatron.runtime.channel import make_channel
    from envpipe_megatron.runtime.collectives import Collectives
    from envpipe_megatron.runtime.emulated_executor import EmulatedExecutor
    from envpipe_megatron.runtime.profiler import ProfilerSettings
    from envpipe_megatron.runtime.session import Session, SessionConfig
    from envpipe_megatron.schedule import Kind

    pipeline = parallel_state.get_pipeline_model_parallel_group()
    stage = parallel_state.get_pipeline_model_parallel_rank()
    collectives = Collectives(dist.group.WORLD, stage, job.stages, pipeline)
    gpu = EmulatedGpu.create("a100-sxm", rank, root)
    times = {Kind.FORWARD: ours.unit_s, Kind.BACKWARD: 2 * ours.unit_s}
    output = root / "out"
    if collectives.is_planner:
        output.mkdir(exist_ok=True)
    dist.barrier()
    return Session(
        SessionConfig(
            PlanRequest(
                num_microbatches=job.microbatches,
                schedule=ours.schedule,
                policy=ours.policy,
                reconfigure=ours.reconfigure,
                num_chunks=job.chunks,
            ),
            warmup_iterations=2,
            profiler=ProfilerSettings(**ours.profiler),
            profile_file=ours.profile_file,
            output_dir=output,
        ),
        gpu,
        lambda settle: EmulatedExecutor(gpu, times, collectives.latest, settle),
        make_channel(pipeline, stamped=True, timeout=timedelta(seconds=20)),
        collectives,
        stage=stage,
        num_stages=job.stages,
        rank=rank,
    )


def _stage() -> int:
    from megatron.core import parallel_state

    return int(parallel_state.get_pipeline_model_parallel_rank())


def _data(job: Job, step: int, replica: int) -> Any:
    """For each chunk, an iterator over this replica's microbatches of a step."""
    generator = torch.Generator().manual_seed(step * 97 + replica)
    tokens = [
        torch.randint(0, VOCAB, (MICROBATCH, SEQUENCE + 1), generator=generator)
        for _ in range(job.microbatches)
    ]
    iterators = [iter(tokens) for _ in range(job.chunks)]
    return iterators if job.chunks > 1 else iterators[0]


def _forward_step(
    data_iterator: Iterator[torch.Tensor], model: torch.nn.Module, checkpoint: bool | None = None
) -> tuple[torch.Tensor, Any]:
    tokens = next(data_iterator)
    positions = torch.arange(SEQUENCE).expand(MICROBATCH, SEQUENCE)
    mask = torch.ones(SEQUENCE, SEQUENCE).triu(1).bool()[None, None]
    if checkpoint is not None:
        model.config.recompute_num_layers = int(checkpoint)
    output = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:])

    def loss_func(losses: torch.Tensor) -> Any:
        if model_config(model).calculate_per_token_loss:
            total = losses.sum()
            return total, torch.tensor(losses.numel(), dtype=torch.int), {"loss": total.detach()}
        mean = losses.mean()
        return mean, {"loss": mean.detach()}

    return output, loss_func


def model_config(model: torch.nn.Module) -> Any:
    from megatron.core.utils import get_model_config

    return get_model_config(model)


def _weights(chunks: list[torch.nn.Module]) -> dict[str, torch.Tensor]:
    return {
        f"{index}.{name}": parameter.detach().clone()
        for index, chunk in enumerate(chunks)
        for name, parameter in chunk.named_parameters()
    }


def _gradients(chunks: list[torch.nn.Module]) -> dict[str, torch.Tensor]:
    return {
        f"{index}.{name}": gradient.detach().clone()
        for index, chunk in enumerate(chunks)
        for name, parameter in chunk.named_parameters()
        if (gradient := getattr(parameter, "main_grad", None)) is not None
        or (gradient := parameter.grad) is not None
    }
