"""megatron-core's forward-backward function, executed from a schedule.

`ForwardBackward` has the signature of megatron-core's forward-backward functions (0.16 to 0.19)
and does what they do around the units (gradient synchronisation, finalising, timers, deallocation).
The units run by megatron-core's own `forward_step` and `backward_step`; the
schedule says which comes when. With chunks, two overlaps differ, not the result: gradients that a
`grad_sync_func` reduces are reduced after the last unit, and parameters are gathered by the
reducer's own hooks, without `param_sync_func`.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.schedules import (
    backward_step,
    clear_embedding_activation_buffer,
    deallocate_output_tensor,
    finish_embedding_wgrad_compute,
    forward_step,
    get_forward_backward_func,
    get_tensor_shapes,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config, get_model_type

from envpipe_megatron.core.kinds import Kind, Unit
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.integrations.device import current_device
from envpipe_megatron.runtime.channel.messages import StageSpecs, TensorSpec
from envpipe_megatron.runtime.job.session import Session

Tensors = list[torch.Tensor | None]

#: In 0.16 alone; it mattered for models of encoders and decoders.
_BACKWARD_TAKES_MODEL_TYPE = "model_type" in inspect.signature(backward_step).parameters


class UnsupportedModelError(EnvPipeError):
    """A feature of Megatron that EnvPipe does not run."""


class ForwardBackward:
    """Stands in for the function that `get_forward_backward_func` returns.

    Args:
        session: executes iterations, one per call.
        framework_iterations: training iterations that megatron-core's own function makes first. On
            GPUs some are needed: a kernel that is loaded while a receive spins can hang both.
        framework_function: that function; by default what `get_forward_backward_func` gives.
    """

    def __init__(
        self,
        session: Session,
        framework_iterations: int | None = None,
        framework_function: Callable[..., list[Any]] | None = None,
    ) -> None:
        self._session = session
        self._framework_function = framework_function
        if framework_iterations is None:
            framework_iterations = 2 if torch.cuda.is_available() else 0
        self._framework_iterations_left = framework_iterations

    def __call__(
        self,
        *,
        forward_step_func: Callable[..., Any],
        data_iterator: Iterator[Any] | list[Iterator[Any]],
        model: torch.nn.Module | list[torch.nn.Module],
        num_microbatches: int,
        seq_length: int,
        micro_batch_size: int,
        decoder_seq_length: int | None = None,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        first_val_step: bool | None = None,
        adjust_tensor_shapes_fn: Callable[..., Any] | None = None,
        p2p_communicator: Any | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        force_all_reduce: bool | None = False,
    ) -> list[Any]:
        """Run all forwards and backwards of one iteration.

        Arguments and result are those of megatron-core's function: on the last stage what the loss
        function reduced, one entry per microbatch. Raises UnsupportedModelError for a feature that
        EnvPipe does not run.
        """
        chunks = model if isinstance(model, list) else [model]
        iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
        config = get_model_config(chunks[0])
        if (p2p_communicator is None) != (pg_collection is None):
            raise UnsupportedModelError(
                "p2p_communicator and pg_collection go together",
                value=(p2p_communicator, pg_collection),
                remedy="Give both, as megatron-core asks for, or neither.",
            )
        groups = pg_collection or _default_groups()
        alone = groups.pp.size() == 1  # nothing to order
        if forward_only:
            # Not by the interpreter: evaluation loads kernels of its own, and a kernel that is
            # loaded while a posted receive spins hangs.
            self._session.pause()
        elif not alone:  # before the framework's own iterations, too
            check_supported(config, len(chunks), groups.pp.size())
            self._check_ranks(groups)
        if alone or forward_only or self._framework_iterations_left:
            self._framework_iterations_left -= not (alone or forward_only)
            framework_function = self._framework_function or get_forward_backward_func()
            losses: list[Any] = framework_function(
                forward_step_func=forward_step_func,
                data_iterator=data_iterator,
                model=model,
                num_microbatches=num_microbatches,
                seq_length=seq_length,
                micro_batch_size=micro_batch_size,
                decoder_seq_length=decoder_seq_length,
                forward_only=forward_only,
                collect_non_loss_data=collect_non_loss_data,
                first_val_step=first_val_step,
                adjust_tensor_shapes_fn=adjust_tensor_shapes_fn,
                p2p_communicator=p2p_communicator,
                pg_collection=pg_collection,
                force_all_reduce=force_all_reduce,
            )
            return losses
        shapes = get_tensor_shapes(
            seq_length=seq_length,
            micro_batch_size=micro_batch_size,
            decoder_seq_length=decoder_seq_length,
            config=config,
            tp_group=groups.tp,
            cp_group=groups.cp,
        )
        if adjust_tensor_shapes_fn is not None:
            shapes, sent_shapes = adjust_tensor_shapes_fn(shapes, shapes)
            if sent_shapes != shapes:
                raise UnsupportedModelError(
                    "EnvPipe's channel needs messages of one shape through the pipeline",
                    value=(shapes, sent_shapes),
                    remedy="Run without --envpipe.",
                )
        spec = TensorSpec.of_one_type(
            tuple(tuple(shape) for shape in shapes), config.pipeline_dtype, current_device()
        )
        works: list[_MegatronWork] = []

        def make_work(schedule: Schedule) -> _MegatronWork:
            works.append(
                _MegatronWork(schedule, forward_step_func, iterators, chunks, config, groups)
            )
            return works[0]

        embedding_module = None
        if config.finalize_model_grads_func is not None:
            last_stage = groups.pp.rank() == groups.pp.size() - 1
            embedding_module = clear_embedding_activation_buffer(config, chunks, last_stage)
        if config.timers is not None:
            config.timers("forward-backward", log_level=1).start(
                barrier=config.barrier_with_L1_time
            )
        self._session.run_iteration(num_microbatches, StageSpecs.alike(spec), make_work)
        (work,) = works
        work.finish_grads()
        if config.finalize_model_grads_func is not None:
            finish_embedding_wgrad_compute(config, embedding_module, work.last_stage, groups.tp)
            config.finalize_model_grads_func(
                chunks,
                work.num_tokens if config.calculate_per_token_loss else None,
                pg_collection=groups,
                force_all_reduce=force_all_reduce,
            )
        if config.timers is not None:
            config.timers("forward-backward").stop()
        return work.losses

    def begin_step(self) -> None:
        """A training step begins."""

    def end_step(self, *, skipped: bool) -> None:
        """The optimizer has stepped, or has skipped the step.

        If it skipped, and nothing else has run yet, megatron-core's own function runs once more:
        optimizer state, and so its memory, is allocated at the first step that is not skipped.
        """
        if skipped and not self._session.executed:
            self._framework_iterations_left += 1

    def _check_ranks(self, groups: ProcessGroupCollection) -> None:
        ranks = dist.get_process_group_ranks(groups.pp)
        if ranks != self._session.pipeline_ranks:
            raise UnsupportedModelError(
                "The pipeline group of this call is not the one that EnvPipe's channel joins",
                value=ranks,
                remedy=f"The channel joins ranks {self._session.pipeline_ranks}.",
            )


class _MegatronWork:
    """Units of one stage in one iteration, by megatron-core's own step functions."""

    def __init__(
        self,
        schedule: Schedule,
        forward_step_func: Callable[..., Any],
        iterators: list[Iterator[Any]],
        chunks: list[torch.nn.Module],
        config: Any,
        groups: ProcessGroupCollection,
    ) -> None:
        self._forward_step_func = forward_step_func
        self._iterators = iterators
        self._chunks = chunks
        self._config = config
        self._groups = groups
        self._num_microbatches = schedule.num_microbatches
        self._model_type = get_model_type(chunks[0])
        self._stage: int = groups.pp.rank()
        self.last_stage: bool = self._stage == groups.pp.size() - 1
        if schedule.num_chunks != len(chunks):
            raise UnsupportedModelError(
                f"The model has {len(chunks)} chunk(s) a stage, the schedule {schedule.num_chunks}",
                remedy="Plan for as many chunks as the model has.",
            )
        backwards = {u.chunk: u for u in schedule.stages[self._stage] if u.kind is Kind.BACKWARD}
        self._last_backwards = frozenset(backwards.values())
        self._inputs: dict[tuple[int, int], Tensors] = {}
        self._outputs: dict[tuple[int, int], Tensors] = {}
        self._no_sync = contextlib.ExitStack()
        self._sync_held = False
        self.losses: list[Any] = []
        self.num_tokens = torch.zeros([], dtype=torch.int, device=current_device())
        self._hold_sync()

    def forward(self, unit: Unit, inputs: list[torch.Tensor] | None) -> list[torch.Tensor]:
        """Run a forward; what a backward needs is kept."""
        input_tensor: Tensors = list(inputs) if inputs is not None else [None]
        several = len(self._chunks) > 1
        output_tensor, num_tokens = forward_step(
            self._forward_step_func,
            self._iterators[unit.chunk],
            self._chunks[unit.chunk],
            self._num_microbatches,
            input_tensor,
            self.losses,
            self._config,
            cp_group_size=self._groups.cp.size(),
            is_first_microbatch=unit.microbatch == 0,
            current_microbatch=unit.microbatch,
            vp_stage=unit.chunk if several else None,
            is_last_stage=self.last_stage and unit.chunk == len(self._chunks) - 1,
        )
        self.num_tokens += num_tokens
        outputs = output_tensor if isinstance(output_tensor, list) else [output_tensor]
        key = (unit.microbatch, unit.chunk)
        self._inputs[key], self._outputs[key] = input_tensor, outputs
        return outputs

    def backward(self, unit: Unit, gradients: list[torch.Tensor] | None) -> list[torch.Tensor]:
        """Run a backward, and let gradients synchronise in a chunk's last one."""
        key = (unit.microbatch, unit.chunk)
        if unit in self._last_backwards and self._syncs_in_last_backward():
            self._release_sync()
        gradient: Tensors = list(gradients) if gradients is not None else [None]
        model_type = (self._model_type,) if _BACKWARD_TAKES_MODEL_TYPE else ()
        result = backward_step(
            self._inputs.pop(key), self._outputs.pop(key), gradient, *model_type, self._config
        )
        if len(self._chunks) > 1:
            self._hold_sync()  # another chunk's gradients are not complete yet
        sent: list[torch.Tensor] = result
        return sent

    def sent(self, unit: Unit) -> None:
        """Free an output's data: the channel keeps what it still sends."""
        outputs = self._outputs.get((unit.microbatch, unit.chunk))
        if outputs is not None:
            deallocate_output_tensor(outputs[0], self._config.deallocate_pipeline_outputs)

    def finish_grads(self) -> None:
        """Launch the gradient reductions that no backward launched."""
        held = self._sync_held
        self._release_sync()
        sync = self._config.grad_sync_func
        if sync is None or not held:
            return
        per_chunk = sync if isinstance(sync, list) else [sync] * len(self._chunks)
        for function, chunk in zip(per_chunk, self._chunks, strict=True):
            function(chunk.parameters())

    def _syncs_in_last_backward(self) -> bool:
        """Megatron's rule: with its own reducer always, with a grad_sync_func on stage 0 alone.

        In all other cases, stages reduce after their units, in the bubble at the end.
        """
        if self._config.grad_sync_func is None:
            return True
        return self._stage == 0 and len(self._chunks) == 1

    def _hold_sync(self) -> None:
        if self._sync_held:
            return
        no_sync = self._config.no_sync_func
        for function in no_sync if isinstance(no_sync, list) else [no_sync]:
            if function is not None:
                self._no_sync.enter_context(function())
        self._sync_held = True

    def _release_sync(self) -> None:
        self._no_sync.close()
        self._sync_held = False


def unsupported(config: Any, num_chunks: int, num_stages: int) -> list[str]:
    """What of a model's configuration EnvPipe's interpreter does not do."""
    group = config.microbatch_group_size_per_vp_stage
    refused = {
        "variable_seq_lengths": config.variable_seq_lengths,
        "overlap_moe_expert_parallel_comm": config.overlap_moe_expert_parallel_comm,
        # From 0.18 on; megatron-core's own function resets the stash as it begins.
        "moe_paged_stash": getattr(config, "moe_paged_stash", False),
        "fine_grained_activation_offloading": config.fine_grained_activation_offloading,
        # What a unit costs then depends on the order that plans choose.
        "num_microbatches_with_partial_activation_checkpoints": (
            config.num_microbatches_with_partial_activation_checkpoints is not None
        ),
        "microbatch_group_size_per_vp_stage other than the pipeline's size": (
            num_chunks > 1 and group not in (None, num_stages)
        ),
        f"cuda_graph_impl '{config.cuda_graph_impl}'": config.cuda_graph_impl != "none",
    }
    return [feature for feature, used in refused.items() if used]


def check_supported(config: Any, num_chunks: int, num_stages: int) -> None:
    """Refuse by an UnsupportedModelError what EnvPipe's interpreter does not do."""
    if features := unsupported(config, num_chunks, num_stages):
        raise UnsupportedModelError(
            f"EnvPipe does not run {'; '.join(features)}",
            remedy="Switch it off, or run without --envpipe.",
        )
    if config.pipeline_dtype is None:
        raise UnsupportedModelError(
            "pipeline_dtype is not set", remedy="Set it to the type of the activations."
        )


def _default_groups() -> ProcessGroupCollection:
    """The groups of parallel_state, as megatron-core's own schedules collect them."""
    groups = ProcessGroupCollection()
    groups.tp = parallel_state.get_tensor_model_parallel_group()
    groups.cp = parallel_state.get_context_parallel_group()
    groups.embd = parallel_state.get_embedding_group(check_initialized=False)
    groups.pos_embd = parallel_state.get_position_embedding_group(check_initialized=False)
    groups.pp = parallel_state.get_pipeline_model_parallel_group()
    groups.dp_cp = parallel_state.get_data_parallel_group(
        with_context_parallel=True, partial_data_parallel=False
    )
    groups.dp = parallel_state.get_data_parallel_group(
        with_context_parallel=False, partial_data_parallel=False
    )
    groups.tp_dp_cp = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    return groups
