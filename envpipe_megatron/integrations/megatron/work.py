"""A stage's units by megatron-core's own step functions, in whatever order they come."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.pipeline_parallel.schedules import (
    backward_step,
    deallocate_output_tensor,
    forward_step,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_type

from envpipe_megatron.core.kinds import Kind, Unit
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.integrations.device import current_device
from envpipe_megatron.integrations.hooking import replaced
from envpipe_megatron.integrations.megatron import split_backward

Tensors = list[torch.Tensor | None]

#: In 0.16 alone; it mattered for models of encoders and decoders.
_BACKWARD_TAKES_MODEL_TYPE = "model_type" in inspect.signature(backward_step).parameters


class UnsupportedModelError(EnvPipeError):
    """A feature of Megatron that EnvPipe does not run."""


class MegatronWork:
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
        order = schedule.stages[self._stage]
        forwards = [unit for unit in order if unit.kind is Kind.FORWARD]
        ends = Kind.WEIGHT_GRADIENT if schedule.split else Kind.BACKWARD
        backwards = [unit for unit in order if unit.kind is ends]
        self._first_forwards = set({unit.chunk: unit for unit in reversed(forwards)}.values())
        last_backwards = {unit.chunk: unit for unit in backwards}.values()
        self._last_backwards = frozenset(map(_key, last_backwards))
        # Parameters are gathered, and gradients reduced, at the same time on all stages, of which
        # those behind come to a chunk later (Megatron's own rule).
        self._gathered_at = {
            forwards[max(0, forwards.index(first) - self._stage)]: first.chunk + 1
            for first in self._first_forwards
            if 1 < first.chunk + 1 < len(chunks)
        }
        self._reduced_behind = {
            _key(backwards[at]): last.chunk
            for last in last_backwards
            if (at := backwards.index(last) + self._stage) < len(backwards)
        }
        self._not_reduced = set(range(len(chunks)))
        self._places = {unit: place for place, unit in enumerate(forwards)}
        self._window = next(at for at, unit in enumerate(order) if unit.kind is not Kind.FORWARD)
        #: Microbatch and chunk of each backward in two parts, and what its second part computes.
        self._put_off: dict[tuple[int, int], list[split_backward.PutOff]] = {
            _key(unit): []
            for unit in order
            if unit.kind is Kind.INPUT_GRADIENT and not unit.combined
        }
        self._splits = schedule.split
        self._grad_sync_func = config.grad_sync_func
        overlaps = getattr(getattr(chunks[0], "ddp_config", None), "overlap_grad_reduce", False)
        if self._splits and overlaps and self._grad_sync_func is None:  # see `_reducer_waits`
            self._grad_sync_func = [chunk.start_grad_sync for chunk in chunks]
        self._inputs: dict[tuple[int, int], Tensors] = {}
        self._outputs: dict[tuple[int, int], Tensors] = {}
        self._no_sync = contextlib.ExitStack()
        self._sync_held = False
        self.losses: list[Any] = []
        self.num_tokens = torch.zeros([], dtype=torch.int, device=current_device())
        self._hold_sync()
        for chunk in range(min(2, len(chunks)) if len(chunks) > 1 else 0):
            self._gather_parameters(chunk)

    def forward(self, unit: Unit, inputs: list[torch.Tensor] | None) -> list[torch.Tensor]:
        """Run a forward; what a backward needs is kept."""
        input_tensor: Tensors = list(inputs) if inputs is not None else [None]
        several = len(self._chunks) > 1
        if unit in self._gathered_at:
            self._gather_parameters(self._gathered_at[unit])
        key = _key(unit)
        with self._put_off_later(key):
            output_tensor, num_tokens = forward_step(
                self._forward_step_func,
                self._iterators[unit.chunk],
                self._chunks[unit.chunk],
                self._num_microbatches,
                input_tensor,
                self.losses,
                self._config,
                cp_group_size=self._groups.cp.size(),
                checkpoint_activations_microbatch=self._checkpoints_all(unit),
                is_first_microbatch=unit in self._first_forwards,
                current_microbatch=unit.microbatch,
                vp_stage=unit.chunk if several else None,
                is_last_stage=self.last_stage and unit.chunk == len(self._chunks) - 1,
            )
        self.num_tokens += num_tokens
        outputs = listed(output_tensor)
        self._inputs[key], self._outputs[key] = input_tensor, outputs
        return outputs

    def backward(self, unit: Unit, gradients: list[torch.Tensor] | None) -> list[torch.Tensor]:
        """Run a backward or its first part; gradients synchronise in a chunk's last backward."""
        key = _key(unit)
        if key in self._last_backwards and self._syncs_in_last_backward():
            self._release_sync()
        gradient: Tensors = list(gradients) if gradients is not None else [None]
        model_type = (self._model_type,) if _BACKWARD_TAKES_MODEL_TYPE else ()
        with self._put_off_later(key), self._reducer_waits(unit.chunk):
            sent: list[torch.Tensor] = backward_step(
                self._inputs.pop(key), self._outputs.pop(key), gradient, *model_type, self._config
            )
        if unit.kind is Kind.BACKWARD:
            self._backward_ended(key)
        return sent

    def weight_gradient(self, unit: Unit) -> None:
        """Compute the weight gradients that the first part of a backward put off."""
        key = _key(unit)
        with self._reducer_waits(unit.chunk):
            split_backward.second_part(self._put_off[key])
        self._backward_ended(key)

    def _backward_ended(self, key: tuple[int, int]) -> None:
        if len(self._chunks) > 1:
            if self._grad_sync_func is not None and key in self._reduced_behind:
                self._release_sync()
                self._reduce_gradients(self._reduced_behind[key])
            self._hold_sync()  # another chunk's gradients are not complete yet

    def _put_off_later(self, key: tuple[int, int]) -> contextlib.AbstractContextManager[None]:
        """Around a forward or a first part: weight gradients are put off where the order says."""
        if key not in self._put_off:
            return contextlib.nullcontext()
        return split_backward.first_part(self._put_off[key])

    def _reducer_waits(self, chunk: int) -> contextlib.AbstractContextManager[None]:
        """Around backwards of an order with split ones: the reducer's hooks only add gradients.

        To reduce them, too, they want each parameter's in every backward. Here they are reduced
        behind a chunk's last one, as if Megatron aligned that over the pipeline.
        """
        config = getattr(self._chunks[chunk], "ddp_config", None)
        if not self._splits or config is None:
            return contextlib.nullcontext()
        return replaced(config, overlap_grad_reduce=False)

    def sent(self, unit: Unit) -> None:
        """Free an output's data: the channel keeps what it still sends."""
        outputs = self._outputs.get((unit.microbatch, unit.chunk))
        if outputs is not None:
            deallocate_output_tensor(outputs[0], self._config.deallocate_pipeline_outputs)

    def finish_grads(self) -> None:
        """Launch the gradient reductions that no backward launched."""
        held = self._sync_held
        self._release_sync()
        if self._grad_sync_func is not None and held:
            for chunk in sorted(self._not_reduced):
                self._reduce_gradients(chunk)

    def _gather_parameters(self, chunk: int) -> None:
        """Launch it, where Megatron aligns it over the pipeline."""
        _for_chunk(self._config.param_sync_func, chunk, self._chunks)

    def _reduce_gradients(self, chunk: int) -> None:
        self._not_reduced.discard(chunk)
        _for_chunk(self._grad_sync_func, chunk, self._chunks)

    def _checkpoints_all(self, unit: Unit) -> bool | None:
        """Whether all layers of a forward are computed again in its backward; None: as always.

        Of each window of as many microbatches as are in flight, some keep more of them
        (Korthikanti et al., 2022, appendix C).
        """
        most = self._config.num_microbatches_with_partial_activation_checkpoints
        return None if most is None else self._places[unit] % self._window >= most

    def _syncs_in_last_backward(self) -> bool:
        """Megatron's rule: with its own reducer always, with a grad_sync_func on stage 0 alone.

        In all other cases, stages reduce after their units, in the bubble at the end.
        """
        if self._splits:
            return False
        if self._grad_sync_func is None:
            return True
        return self._stage == 0 and len(self._chunks) == 1

    def _hold_sync(self) -> None:
        if self._sync_held:
            return
        for function in listed(self._config.no_sync_func):
            if function is not None:
                self._no_sync.enter_context(function())
        self._sync_held = True

    def _release_sync(self) -> None:
        self._no_sync.close()
        self._sync_held = False


def _key(unit: Unit) -> tuple[int, int]:
    return unit.microbatch, unit.chunk


def listed(one_or_more: Any) -> list[Any]:
    """What Megatron has as one or as a list, as a list."""
    return one_or_more if isinstance(one_or_more, list) else [one_or_more]


def _for_chunk(functions: Any, chunk: int, chunks: list[torch.nn.Module]) -> None:
    """Call Megatron's function for a chunk's parameters: one for all, one each, or none."""
    if functions is not None:
        function = functions[chunk] if isinstance(functions, list) else functions
        function(chunks[chunk].parameters())
