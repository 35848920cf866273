"""Training runs that tests compare: the same model and data, by megatron-core's schedule or ours.

Runs inside the ranks of a pool. `cuda_on_cpu` lets megatron-core's *own* schedules, reducers and
optimizers run without a GPU; EnvPipe's path needs only `use_cpu` of the package.
"""

import contextlib
import copy
import functools
import inspect
import itertools
import secrets
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import cpu_run
import numpy as np
import torch
import torch.distributed as dist
from jobs import MAX_STEPS, STEADY_STEPS, Bits, Job, Ours, Result
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
from megatron.core.models.bert.bert_model import BertModel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func, schedules
from megatron.core.tensor_parallel import layers, random
from megatron.core.transformer import (
    MLATransformerConfig,
    TransformerConfig,
)
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe import moe_utils
from megatron.core.utils import get_model_config
from plain_stages import FastTime, be_late
from waiting_plans import ask, asked_often, plans_are_waited_for

from envpipe_megatron.core.kinds import Kind
from envpipe_megatron.formats.energy import Phase
from envpipe_megatron.gpu.base import ReadOnlyGpu
from envpipe_megatron.gpu.emulated.emulated_gpu import EmulatedGpu
from envpipe_megatron.integrations.device import use_cpu
from envpipe_megatron.integrations.framework_units import once
from envpipe_megatron.integrations.megatron import core, split_backward
from envpipe_megatron.integrations.megatron.core import ForwardBackward
from envpipe_megatron.integrations.megatron.self_check import SelfCheck
from envpipe_megatron.integrations.megatron.training import Training
from envpipe_megatron.integrations.megatron.work import MegatronWork
from envpipe_megatron.runtime.channel.collectives import Collectives, make_collectives
from envpipe_megatron.runtime.channel.links import make_channel
from envpipe_megatron.runtime.execution.executor import EmulatedExecutor
from envpipe_megatron.runtime.job.options import JobOptions
from envpipe_megatron.runtime.job.session import Session

SEQUENCE, MICROBATCH, HIDDEN, VOCAB = 16, 2, 32, 64


def _on_cpu(create: Any) -> Any:
    """A function that creates a tensor, which creates on the CPU what asks for CUDA."""

    def created(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        on = "cpu" if str(device).startswith("cuda") else device
        tensor: torch.Tensor = create(*args, device=on, **kwargs)
        return tensor

    return created


_start_param_sync = _ParamAndGradBucketGroup.start_param_sync


def _gather_at_once(group: Any, force_sync: bool = False) -> None:
    """Gather parameters when megatron-core begins to, and not beside what follows.

    With torch 2.13 a rank crashed in two of 340 such jobs, where two of gloo's workers gathered
    slices of one buffer at once: the heap was damaged, most likely by a tensor's version counter.
    """
    _start_param_sync(group, force_sync)
    if group.param_gather_handle is not None:
        group.param_gather_handle.wait()  # megatron-core waits again, for nothing


@contextlib.contextmanager
def cuda_on_cpu() -> Iterator[None]:
    """What megatron-core's own schedules, reducers and optimizers need besides `use_cpu`."""
    real_type = torch.Tensor.type
    kinds = ("FloatTensor", "HalfTensor", "BFloat16Tensor")
    fake_type = {f"torch.{kind}": f"torch.cuda.{kind}" for kind in kinds}

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = real_type(self, *args, **kwargs)
        return fake_type.get(result, result) if isinstance(result, str) else result

    with (
        patch("torch.cuda.synchronize", lambda *a, **k: None),
        patch("torch.cuda.current_stream", lambda *a, **k: None),
        patch("torch.cuda.random.get_rng_state", lambda *a, **k: torch.zeros(1, dtype=torch.uint8)),
        patch("megatron.core.tensor_parallel.random._set_cuda_rng_state", lambda *a, **k: None),
        patch.object(torch.Tensor, "type", type_),
        patch.object(_ParamAndGradBucketGroup, "start_param_sync", _gather_at_once),
        # By name, since a torch function mode would be called at every operation.
        patch.object(torch.Tensor, "cuda", lambda self, *a, **k: self),
        patch("torch.tensor", _on_cpu(torch.tensor)),
        patch("torch.zeros", _on_cpu(torch.zeros)),
    ):
        yield


@contextlib.contextmanager
def prepared(job: Job) -> Iterator[tuple[Result, Collectives] | None]:
    """Let this rank train; what is to be its result, and its collectives.

    Replicas that nothing connects would show the same: all but the first rest, without a result.
    """
    use_cpu()
    _use_parallel_state(job)
    getattr(moe_utils, "_MOE_LAYER_WISE_LOGGING_TRACKER", {}).clear()  # as long as a model's layers
    collectives = _collectives(job.stages)
    result = Result(_stage(), parallel_state.get_data_parallel_rank())
    if not job.connected and result.replica:
        yield None
        return
    if not job.connected:
        collectives = Collectives(result.stage, collectives.pipeline, (), 1)
    tensor_parallel.random.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    with cuda_on_cpu(), patch.object(schedules, COMBINED, in_turn):
        yield result, collectives


def train(rank: int, job: Job, ours: Ours | None, root: Path) -> Result | None:
    """Train on this rank; without `ours` by megatron-core's own forward-backward function."""
    with prepared(job) as ready, contextlib.ExitStack() as stack:
        if ready is None:
            return None
        result, collectives = ready
        session = None
        if ours is not None:
            session = _session(rank, job, ours, root, result, collectives)
            stack.callback(session.close)
            stack.enter_context(plans_are_waited_for())
            stack.enter_context(asked_often())
            stack.enter_context(_counted(result.put_off, ours.fault if _is_last() else ""))
        _train(job, ours, session, result)
        if session is not None:
            result.phases = [str(phase) for phase, *_ in session.iterations.latest]
            result.plan, result.profile = session.state.plan, session.state.profile
            result.reconfigure_steps = session.state.reconfigure_steps
            result.notes, result.whole = session.state.notes, session.state.whole
        return result


@contextlib.contextmanager
def _counted(put_off: list[int], fault: str) -> Iterator[None]:
    """Count weight gradients of second parts, and let something go wrong."""
    second_part, backward = split_backward.second_part, MegatronWork.backward
    finish_grads = MegatronWork.finish_grads

    def counted(waiting: Any) -> None:
        put_off.append(len(waiting))
        if fault in FAULTS:
            FAULTS[fault](waiting)
        second_part(waiting)

    def run_backward(work: Any, unit: Any, gradients: Any) -> Any:
        if fault == IN_FIRST_PART and unit.kind is Kind.INPUT_GRADIENT:
            raise RuntimeError("the first part of a test")
        if fault == IN_WHOLE and unit.kind is Kind.BACKWARD and unit.microbatch == 1:
            raise RuntimeError("the whole backward of a test")
        inputs, _ = work._kept.get((unit.microbatch, unit.chunk), ([], []))
        sent = backward(work, unit, gradients)
        assert not any(each is not None and each.grad is not None for each in inputs)
        if fault == BEHIND_WHOLE and unit.kind is Kind.BACKWARD and not work._kept:
            raise RuntimeError("the whole backward of a test")
        return [(1 + 2**-10) * each for each in sent] if fault == IN_INTERPRETER else sent

    def finish(work: Any, *, broken_off: bool) -> None:
        assert not work._kept  # behind an error too, for messages need the memory
        finish_grads(work, broken_off=broken_off)

    with (
        patch.object(split_backward, "second_part", counted),
        patch.object(MegatronWork, "backward", run_backward),
        patch.object(MegatronWork, "finish_grads", finish),
    ):
        yield


def _slightly_wrong(waiting: list[split_backward.PutOff]) -> None:
    compute = waiting[1].compute
    waiting[1].compute = lambda: [(1 + 2**-18) * each for each in compute()]


def _fail(waiting: list[split_backward.PutOff]) -> None:
    raise RuntimeError("the second part of a test")


#: What goes wrong with the weight gradients that a second part is to compute.
FAULTS: dict[str, Callable[[list[split_backward.PutOff]], None]] = {
    "slightly wrong": _slightly_wrong,
    "twice": lambda waiting: waiting.append(replace(waiting[0])),
    "missing": lambda waiting: waiting.__delitem__(0),
    "error": _fail,
}
IN_FIRST_PART, IN_INTERPRETER = "error in a first part", "wrong in any order"
IN_WHOLE, BEHIND_WHOLE = "error in a whole backward", "error behind the last whole backward"


COMBINED = "combined_1f1b_schedule_for_interleaved_pipelining"
_FORWARD_STEP, _BACKWARD_STEP = schedules.forward_step, schedules.backward_step
_BACKWARD_PARAMETERS = inspect.signature(_BACKWARD_STEP).parameters


def in_turn(
    config: Any,
    forward_step_func: Any,
    data_iterator: Any,
    model: Any,
    num_microbatches: int,
    forward_data_store: Any,
    forward_step_helper_preprocess: Any,
    forward_step_helper_postprocess: Any,
    backward_step_helper_preprocess: Any,
    backward_step_helper_postprocess: Any,
    get_microbatch_id_in_model_chunk: Any,
    get_model_chunk_id: Any,
    check_first_val_step: Any,
    is_first_microbatch_for_model_chunk: Any,
    collect_non_loss_data: Any,
    f_virtual_microbatch_id: int | None = None,
    b_virtual_microbatch_id: int | None = None,
    pre_forward: Any = None,
    pre_backward: Any = None,
    post_forward: Any = None,
    post_backward: Any = None,
) -> Any:
    """In place of megatron-core's combined function, which needs CUDA and Transformer Engine.

    It calls all that this calls, and runs forward and backward one after the other.
    """
    output = gradient = None
    f, b = f_virtual_microbatch_id, b_virtual_microbatch_id
    if f is not None:
        microbatch = get_microbatch_id_in_model_chunk(f, forward=True)
        chunk = get_model_chunk_id(f, forward=True)
        inputs = forward_step_helper_preprocess(f, chunk, microbatch)
    if b is not None:
        b_chunk = get_model_chunk_id(b, forward=False)
        saved = backward_step_helper_preprocess(b, b_chunk)
    if pre_forward is not None:
        pre_forward(chunk)
    if pre_backward is not None:
        pre_backward(b_chunk)
    if f is not None:
        output, num_tokens = _FORWARD_STEP(
            forward_step_func,
            data_iterator[chunk],
            model[chunk],
            num_microbatches,
            inputs,
            forward_data_store,
            config,
            cp_group_size=1,
            collect_non_loss_data=collect_non_loss_data,
            is_first_microbatch=check_first_val_step(is_first_microbatch_for_model_chunk(f)),
            current_microbatch=microbatch,
            vp_stage=chunk,
            is_last_stage=parallel_state.is_pipeline_last_stage(False, chunk),
        )
    if b is not None:
        of_version = {"model_type": None} if "model_type" in _BACKWARD_PARAMETERS else {}
        gradient = _BACKWARD_STEP(*saved, config=config, **of_version)
    if post_forward is not None:
        post_forward(output, chunk)
    if post_backward is not None:
        post_backward(gradient, b_chunk)
    if f is not None:
        forward_step_helper_postprocess(chunk, output, num_tokens)
    if b is not None:
        backward_step_helper_postprocess(b)
    return output, gradient


def _globals_of_parallel_state() -> dict[str, Any]:
    return {name: value for name, value in vars(parallel_state).items() if name.startswith("_")}


_UNUSED_STATE = _globals_of_parallel_state()
_PARALLEL_STATES: dict[tuple[int, ...], dict[str, Any]] = {}


_GROUPS: dict[tuple[Any, ...], Any] = {}


def _shared_group(ranks: list[int], group_desc: str = "", **_: Any) -> Any:
    """One group for all uses of the same ranks, but for the pipeline's own.

    megatron-core makes dozens, and each gloo group has threads that wake a hundred times a second.
    """
    own = group_desc if group_desc.startswith(("PIPELINE", "EMBEDDING")) else ""
    key = own, *ranks
    if key not in _GROUPS:
        _GROUPS[key] = dist.new_group(ranks, group_desc=group_desc)
    return _GROUPS[key]


def _use_parallel_state(job: Job) -> None:
    """Put megatron-core's process groups for this shape of job in place; they are kept."""
    key = job.stages, job.chunks, job.tensor
    if key not in _PARALLEL_STATES:
        vars(parallel_state).update(_UNUSED_STATE)
        with patch.object(parallel_state, "create_group", _shared_group):
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=job.tensor,
                pipeline_model_parallel_size=job.stages,
                virtual_pipeline_model_parallel_size=job.chunks if job.chunks > 1 else None,
            )
        _PARALLEL_STATES[key] = _globals_of_parallel_state()
    vars(parallel_state).update(_PARALLEL_STATES[key])


def _train(job: Job, ours: Ours | None, session: Session | None, result: Result) -> None:
    chunks, clear_grads, finish_step = _build(job)
    _note_around(chunks, result.around)
    torch.manual_seed(dist.get_rank())  # for dropout
    stand_in = _stand_in(ours, session) if ours and session else None
    call = partial(
        stand_in or get_forward_backward_func(),
        model=chunks if len(chunks) > 1 else chunks[0],
        seq_length=SEQUENCE,
        micro_batch_size=MICROBATCH,
    )
    steady_steps = step = 0
    while True:
        clear_grads()
        if session is not None and ours is not None:
            if step in dict(ours.asks):
                ask(session, dict(ours.asks)[step])
            session.begin_step()
        count = job.counts[step] if job.counts else job.microbatches
        reduced = call(
            forward_step_func=_forward_step,
            data_iterator=_data(job, step, result.replica, count),
            num_microbatches=count,
        )
        result.losses.append([_bits(entry["loss"]) for entry in reduced])
        steady_steps += session is not None and session.state.phase is Phase.STEADY
        assert step < MAX_STEPS
        last = step + 1 == job.steps if job.steps else steady_steps == STEADY_STEPS
        if last:
            result.grads = _named_bits(chunks, _gradient)
        stepped = finish_step()
        result.skipped += not stepped
        if session is not None and stand_in is not None:
            if isinstance(stand_in, core.ForwardBackward):  # a test may put another maker there
                result.failed = stand_in.end_step(skipped=not stepped)
            elif ours is not None and ours.kept_orders:
                result.failed = stand_in.__self__._why_lower
            session.end_step()
        if job.evaluate_after == step:
            if session is not None:
                session.pause()
            _evaluate(job, partial(get_forward_backward_func(), **call.keywords), result)
        if last:
            break
        step += 1
    result.weights = _named_bits(chunks, lambda parameter: parameter.detach())


def _note_around(chunks: list[torch.nn.Module], around: list[tuple[object, ...]]) -> None:
    """Note what is done between the forwards of a stage, and for which chunk."""
    config: Any = get_model_config(chunks[0])
    config.around = around
    for name in ("param_sync_func", "grad_sync_func"):
        functions = getattr(config, name)
        if isinstance(functions, list):

            def noted(parameters: Any, name: str, chunk: int, function: Any) -> None:
                around.append((name, chunk))
                function(parameters)

            told = [
                partial(noted, name=name, chunk=chunk, function=function)
                for chunk, function in enumerate(functions)
            ]
            setattr(config, name, told)


def following(session: Any, framework_function: Any, order_of: Any) -> Training:
    """A job of Megatron's at level units, of a session that is there."""
    job = object.__new__(Training)
    job.job, job._followed, job._warn = session, None, once()
    job._microbatches, job._followed_counts = session.options.num_microbatches, set()
    job._framework_function, job._order_of = framework_function, order_of
    return job


def _stand_in(ours: Ours, session: Session) -> Any:
    if ours.kept_orders:
        orders = {order.num_microbatches: order for order in ours.kept_orders}
        return following(session, get_forward_backward_func(), orders.__getitem__)._follow_units
    check = None
    if ours.checked is not None:
        orders_to_try = [ours.checked, ours.checked]  # its memory is not looked at
        check = SelfCheck(session, lambda count: orders_to_try, needed=ours.check_needed)
    return ForwardBackward(session, check=check)


def _evaluate(job: Job, call: Any, result: Result) -> None:
    """Forwards alone: once for losses, once for what is not a loss."""
    for collect in (False, True):
        with torch.no_grad():
            reduced = call(
                forward_step_func=_forward_step,
                data_iterator=_data(job, 1000, result.replica, job.microbatches),
                num_microbatches=job.microbatches,
                forward_only=True,
                collect_non_loss_data=collect,
            )
        result.evaluated += [_bits(entry if collect else entry["loss"]) for entry in reduced]


def _build(job: Job) -> tuple[list[torch.nn.Module], Callable[[], None], Callable[[], bool]]:
    """The chunks of this stage, what clears their gradients, and what steps their weights, or not.

    A loss scale that is too large has no step.
    """
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, None: torch.float32}[job.half]
    options: dict[str, Any] = {
        "gradient_accumulation_fusion": job.fused,
        "recompute_granularity": "full" if job.recompute else None,
        "recompute_method": "block" if job.recompute else None,
        "recompute_num_layers": 1 if job.recompute else None,
        "tensor_model_parallel_size": job.tensor,
        "sequence_parallel": job.tensor > 1,
        "params_dtype": dtype,
        # Varying lengths refuse the default, experts or not.
        "moe_token_dispatcher_type": "alltoall",
        "bf16": job.half == "bf16",
        "fp16": job.half == "fp16",
        **dict(job.options),
    }
    _stand_in_for_transformer_engine()
    if job.fused:
        _stand_in_for_apex()
    if job.latent:
        _install(cpu_run.attend_as_transformer_engine)
    if job.tensor > 1:
        _install(cpu_run.let_torch_norm_be_sequence_parallel)
    config = (MLATransformerConfig if job.latent else TransformerConfig)(
        num_layers=job.layers or max(2, job.stages * job.chunks),
        hidden_size=HIDDEN,
        num_attention_heads=4,
        pipeline_model_parallel_size=job.stages,
        virtual_pipeline_model_parallel_size=job.chunks if job.chunks > 1 else None,
        microbatch_group_size_per_vp_stage=job.group,
        pipeline_dtype=dtype,
        variable_seq_lengths=bool(job.lengths),
        use_cpu_initialization=True,
        hidden_dropout=job.dropout,
        attention_dropout=job.dropout,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        deallocate_pipeline_outputs=job.deallocate,
        # Megatron's interleaved order gives wrong gradients at p = 2 with its defaults.
        overlap_p2p_comm=job.chunks > 1,
        batch_p2p_comm=job.chunks == 1,
        calculate_per_token_loss=job.per_token_loss,
        **options,
    )
    config.overlap_moe_expert_parallel_comm = job.combined  # it wants experts and CUDA
    config.noise = job.noise
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=False,
        multi_latent_attention=job.latent,
    )
    made: Callable[..., Any] = partial(GPTModel, config, spec)
    if config.mtp_num_layers:
        mtp = partial(get_gpt_mtp_block_spec, config, spec, use_transformer_engine=False)
        made = lambda **how: GPTModel(  # noqa: E731
            config, spec, mtp_block_spec=mtp(vp_stage=how["vp_stage"]), **how
        )
    if job.bert:
        made = partial(BertModel, config, 0, bert_layer_local_spec, add_binary_head=False)
    chunks: list[torch.nn.Module] = []
    for chunk in range(job.chunks):
        vp_stage = chunk if job.chunks > 1 else None
        model = made(
            vocab_size=VOCAB,
            max_sequence_length=SEQUENCE,
            pre_process=parallel_state.is_pipeline_first_stage(False, vp_stage),
            post_process=parallel_state.is_pipeline_last_stage(False, vp_stage),
            share_embeddings_and_output_weights=job.tied,
            vp_stage=vp_stage,
        )
        with torch.no_grad():
            for name, parameter in _global_names(model):
                # The same for every split; a tied output layer starts as its embedding.
                tied = job.tied and name == "output_layer.weight"
                seed = "embedding.word_embeddings.weight" if tied else name
                generator = torch.Generator().manual_seed(zlib.crc32(seed.encode()))
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
        if config.defer_embedding_wgrad_compute:
            _defer_head_only(model)
        chunks.append(Float16Module(config, model) if job.half else model)
    if job.reducer is None and not job.tied:
        parameters = [p for chunk in chunks for p in chunk.parameters()]
        adam = torch.optim.Adam(parameters, lr=1e-3)
        return chunks, adam.zero_grad, lambda: adam.step() is None
    return _with_reducer(job, config, chunks)


@functools.cache
def _install(shim: Callable[[], None]) -> None:
    """Install a shim of Megatron's modules, once in this process."""
    shim()


def _stand_in_for_apex() -> None:
    """Its kernels add a product to `main_grad`."""

    @torch.no_grad()
    def add(inputs: torch.Tensor, gradients: torch.Tensor, main_grad: torch.Tensor) -> None:
        main_grad.addmm_(gradients.to(main_grad.dtype).t(), inputs.to(main_grad.dtype))

    kernels = SimpleNamespace(wgrad_gemm_accum_fp32=add, wgrad_gemm_accum_fp16=add)
    layers._grad_accum_fusion_available = True
    layers.fused_weight_gradient_mlp_cuda = kernels
    sys.modules["fused_weight_gradient_mlp_cuda"] = kernels  # type: ignore[assignment]


def _stand_in_for_transformer_engine() -> None:
    """What 0.16.1 takes for granted of it."""
    moe_utils.te_general_gemm = None

    def nothing(*args: Any, **kwargs: Any) -> Any:
        return contextlib.nullcontext()

    random.FP8GlobalStateManager = SimpleNamespace(is_fp8_enabled=lambda: False)
    random.activation_recompute_forward = random.fp8_autocast = nothing


def _defer_head_only(model: torch.nn.Module) -> None:
    """Megatron's own linear layers want its buffers, too; Transformer Engine's know none."""
    for module in model.modules():
        if isinstance(module, layers.ColumnParallelLinear) and module.grad_output_buffer is None:
            module.config = copy.copy(module.config)
            module.config.defer_embedding_wgrad_compute = False


def _with_reducer(
    job: Job, config: Any, models: list[Any]
) -> tuple[list[Any], Callable[[], None], Callable[[], bool]]:
    """The chunks under megatron-core's reducer, with its finalising and optimizer."""
    reducer, half = job.reducer or (), job.half
    align = "align_grad_reduce" in reducer
    options = {option: True for option in reducer if option != "align_grad_reduce"}
    ddp_config = DistributedDataParallelConfig(
        bucket_size=2000, grad_reduce_in_fp32=half is not None, **options
    )
    chunks = [
        DistributedDataParallel(config, ddp_config, model, disable_bucketing=index > 0)
        for index, model in enumerate(models)
    ]

    def one_or_all(functions: list[Any]) -> Any:
        return functions if len(functions) > 1 else functions[0]

    if ddp_config.overlap_grad_reduce:
        config.no_sync_func = one_or_all([chunk.no_sync for chunk in chunks])
    if align:
        config.grad_sync_func = one_or_all([chunk.start_grad_sync for chunk in chunks])
        if ddp_config.overlap_param_gather:
            config.param_sync_func = one_or_all([chunk.start_param_sync for chunk in chunks])
    config.finalize_model_grads_func = finalize_model_grads
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-3,
            clip_grad=1.0,
            use_distributed_optimizer=ddp_config.use_distributed_optimizer,
            bf16=half == "bf16",
            fp16=half == "fp16",
            params_dtype=config.params_dtype,
            initial_loss_scale=2.0**job.loss_scale,
            hysteresis=1,
        ),
        chunks,
    )
    config.grad_scale_func = optimizer.scale_loss

    def clear_grads() -> None:
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()

    def finish_step() -> bool:
        stepped: bool = optimizer.step()[0]
        assert stepped or half == "fp16"
        if ddp_config.overlap_param_gather:
            for chunk in chunks:  # else weights would be read before they have come
                chunk.start_param_sync(force_sync=True)
        return stepped

    return chunks, clear_grads, finish_step


class _RecordingGpu(EmulatedGpu):
    """Keeps what it was told."""

    history_mhz: list[int]

    def _lock(self, frequency_mhz: int) -> None:
        self.history_mhz.append(frequency_mhz)
        super()._lock(frequency_mhz)


#: Of units, by what runs them.
_KINDS = {
    "forward": [Kind.FORWARD],
    "backward": [Kind.BACKWARD, Kind.INPUT_GRADIENT],
    "weight_gradient": [Kind.WEIGHT_GRADIENT],
}


def _noting(work: Any, num_chunks: int, executed: list[str]) -> Any:
    """Work whose units are noted when they are run."""

    def noted(function: Any, kinds: list[Kind]) -> Any:
        def run(unit: Any, *got: Any) -> Any:
            assert unit.kind in kinds
            executed.append(unit.label(num_chunks))
            return function(unit, *got)

        return run

    runs = {name: noted(getattr(work, name), kinds) for name, kinds in _KINDS.items()}
    return SimpleNamespace(sent=work.sent, **runs)


class _RecordingSession(Session):
    """A session whose units are noted."""

    def __init__(self, *args: Any, result: Result, num_chunks: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._result = result
        self._num_chunks = num_chunks

    def open_iteration(self, *args: Any, **kwargs: Any) -> Any:
        run = super().open_iteration(*args, **kwargs)
        ended = run.all_ended

        def all_ended() -> None:
            self._result.executed.append(run.executed)
            ended()

        run.all_ended = all_ended
        return run

    def run_iteration(self, num_microbatches: int, specs: Any, make_work: Any, **how: Any) -> None:
        super().run_iteration(num_microbatches, specs, self._recording(make_work), **how)

    def _recording(self, make_work: Any) -> Any:
        executed: list[str] = []
        self._result.executed.append(executed)
        return lambda schedule: _noting(make_work(schedule), self._num_chunks, executed)


@functools.cache
def _collectives(stages: int) -> Collectives:
    replicas = range(dist.get_world_size() // stages)
    return make_collectives(
        [range(first, dist.get_world_size(), len(replicas)) for first in replicas],
        timedelta(seconds=20),
    )


def _session(
    rank: int, job: Job, ours: Ours, root: Path, result: Result, collectives: Collectives
) -> Session:
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    gpu = _RecordingGpu.create("a100-sxm", rank, root)
    gpu.history_mhz = result.locked_mhz
    if ours.clocks_mhz:
        gpu.supported_frequencies_mhz = ours.clocks_mhz
    fast_time = FastTime()
    fast_time.install(gpu)
    times = {Kind.FORWARD: ours.unit_s, Kind.BACKWARD: 2 * ours.unit_s}
    times |= {Kind.INPUT_GRADIENT: ours.unit_s, Kind.WEIGHT_GRADIENT: ours.unit_s}
    session = _RecordingSession(
        JobOptions(
            num_microbatches=job.microbatches,
            type=ours.policy,
            scheduling=ours.schedule,
            reconfigure=ours.reconfigure,
            num_chunks=job.chunks,
            group_size=job.group,
            objective=ours.objective.goal,
            sweep=not ours.closed_loop,
            profile_steps=1,
            baseline_steps=ours.warmup_iterations,
            window_s=0.3,
            profile=ours.profile_file,
            plan=ours.plan_file,
            output=root,
            why_whole="" if ours.splits else "of a test",
        ),
        ReadOnlyGpu(gpu) if ours.reads_only else gpu,
        partial(EmulatedExecutor, gpu, times, collectives),
        make_channel(pipeline, collectives, timeout=timedelta(seconds=20)),
        collectives,
        say=lambda text: result.said.append(text) if text.startswith("self-check") else None,
        result=result,
        num_chunks=job.chunks,
    )
    if ours.slow_from is not None:
        be_late(session.executor, job.own_order, ours.slow_from)
    fast_time.meanwhile = session.parts.meter._try_sample
    return session


def _is_last() -> bool:
    return bool(parallel_state.is_pipeline_last_stage(ignore_virtual=True))


def _stage() -> int:
    return int(parallel_state.get_pipeline_model_parallel_rank())


def _data(job: Job, step: int, replica: int, count: int) -> Any:
    """An iterator over this replica's microbatches of a step; with chunks one for each."""
    generator = torch.Generator().manual_seed(step * 97 + replica)
    lengths = itertools.islice(itertools.cycle(job.lengths or (SEQUENCE,)), count)
    tokens = [
        torch.randint(0, VOCAB, (MICROBATCH, length + 1), generator=generator) for length in lengths
    ]
    iterators = [iter(tokens) for _ in range(job.chunks)]
    return iterators if job.chunks > 1 else iterators[0]


def _forward_step(
    data_iterator: Iterator[torch.Tensor],
    model: torch.nn.Module,
    checkpoint_activations_microbatch: bool | None = None,
) -> tuple[torch.Tensor, Any]:
    config: Any = get_model_config(model)
    tokens = next(data_iterator)
    config.around.append(("forward", checkpoint_activations_microbatch))
    length = tokens.shape[1] - 1
    positions = torch.arange(length).expand(MICROBATCH, length)
    mask = torch.ones(length, length).triu(1).bool()[None, None]
    if isinstance(model, BertModel):
        seen = torch.arange(length) < length - torch.arange(MICROBATCH)[:, None]  # one is padded
        output = model(tokens[:, :-1], seen, lm_labels=tokens[:, 1:])
        output = output[0] if model.post_process else output
    else:
        output = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:])

    def loss_func(losses: torch.Tensor, non_loss_data: bool = False) -> Any:
        if non_loss_data:
            return losses.amax(dim=0)
        if config.noise:
            by_chance = torch.Generator().manual_seed(secrets.randbits(32))
            losses = losses * (1 + config.noise * torch.randn(losses.shape, generator=by_chance))
        # Cloned, since megatron-core divides the loss in place.
        if config.calculate_per_token_loss:
            total = losses.sum()
            tokens = torch.tensor(losses.numel(), dtype=torch.int)
            return total, tokens, {"loss": total.detach().clone()}
        mean = losses.mean()
        return mean, {"loss": mean.detach().clone()}

    return output, loss_func


def _global_names(chunk: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Parameters of a chunk, each layer by its number in the whole model."""
    for name, parameter in chunk.named_parameters():
        module: Any = chunk
        while name.startswith("module."):
            name, module = name.removeprefix("module."), module.module
        if name.startswith("decoder.layers."):
            layer = name.split(".")[2]
            number = module.decoder.layers[int(layer)].layer_number
            name = name.replace(f"layers.{layer}.", f"layers.{number}.", 1)
        yield name, parameter


def _gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    main_grad = getattr(parameter, "main_grad", None)
    gradient = parameter.grad if main_grad is None else main_grad
    assert gradient is not None
    return gradient.detach()


def _named_bits(chunks: list[torch.nn.Module], read: Callable[[Any], torch.Tensor]) -> Bits:
    return {
        name: _bits(read(parameter)) for chunk in chunks for name, parameter in _global_names(chunk)
    }


def _bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().contiguous().flatten().view(torch.uint8)
    return np.ascontiguousarray(flat.numpy()).tobytes()
