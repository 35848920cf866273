"""Runs a stage's units, in any order, by megatron-core's own step functions."""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterator
from functools import partial
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
from envpipe_megatron.integrations.device import current_device
from envpipe_megatron.integrations.hooking import replaced
from envpipe_megatron.integrations.levels import JobError
from envpipe_megatron.integrations.megatron import split_backward
from envpipe_megatron.runtime.channel.carrier import StageSpecs, TensorSpec

Tensors = list[torch.Tensor | None]

#: Only in 0.16; it mattered for models of encoders and decoders.
_BACKWARD_TAKES_MODEL_TYPE = "model_type" in inspect.signature(backward_step).parameters


class MegatronWork:
    """Runs the units of one stage in one iteration.

    `checked` is what messages carry: a forward with another output raises a JobError.
    None checks nothing.
    """

    def __init__(
        self,
        schedule: Schedule,
        forward_step_func: Callable[..., Any],
        iterators: list[Iterator[Any]],
        chunks: list[torch.nn.Module],
        config: Any,
        groups: ProcessGroupCollection,
        checked: StageSpecs | None = None,
    ) -> None:
        self._chunks, self._config, self._checked = chunks, config, checked
        stage: int = groups.pp.rank()
        self.last_stage: bool = stage == groups.pp.size() - 1
        order = schedule.stages[stage]
        forwards = [unit for unit in order if unit.kind is Kind.FORWARD]
        self._first_forwards = set({unit.chunk: unit for unit in reversed(forwards)}.values())
        #: By forward, the chunk whose parameters are gathered before it: at the same time on all
        #: stages, though later stages come to a chunk later (Megatron's own rule).
        self._gathered_before = {
            forwards[max(0, forwards.index(first) - stage)]: first.chunk + 1
            for first in self._first_forwards
            if 1 < first.chunk + 1 < len(chunks)
        }
        for chunk in range(2 if len(chunks) > 1 else 0):
            _for_chunk(config.param_sync_func, chunk, chunks)
        #: Microbatch and chunk of each backward in two parts, and what its second part computes.
        self._put_off: dict[tuple[int, int], list[split_backward.PutOff]] = {
            _key(unit): []
            for unit in order
            if unit.kind is Kind.INPUT_GRADIENT and not unit.combined
        }
        #: Inputs and outputs of each forward whose backward has not begun.
        self._kept: dict[tuple[int, int], tuple[Tensors, Tensors]] = {}
        self._reduction = _Reduction(schedule, stage, chunks, config)
        self.losses: list[Any] = []
        self.num_tokens = torch.zeros([], dtype=torch.int, device=current_device())
        self._forward_steps = [
            partial(
                forward_step,
                forward_step_func,
                iterator,
                chunk,
                schedule.num_microbatches,
                forward_data_store=self.losses,
                config=config,
                cp_group_size=groups.cp.size(),
            )
            for iterator, chunk in zip(iterators, chunks, strict=True)
        ]

    def forward(self, unit: Unit, inputs: list[torch.Tensor] | None) -> list[torch.Tensor]:
        """Run a forward; what a backward needs is kept."""
        input_tensor: Tensors = list(inputs) if inputs is not None else [None]
        if unit in self._gathered_before:
            chunk = self._gathered_before[unit]
            _for_chunk(self._config.param_sync_func, chunk, self._chunks)
        key = _key(unit)
        is_last = self.last_stage and unit.chunk == len(self._chunks) - 1
        with self._put_off_later(key):
            output_tensor, num_tokens = self._forward_steps[unit.chunk](
                input_tensor,
                is_first_microbatch=unit in self._first_forwards,
                current_microbatch=unit.microbatch,
                vp_stage=unit.chunk if len(self._chunks) > 1 else None,
                is_last_stage=is_last,
            )
        self.num_tokens += num_tokens
        outputs = listed(output_tensor)
        if self._checked is not None and not is_last:
            _check_message(outputs, self._checked)
        self._kept[key] = input_tensor, outputs
        return outputs

    def backward(self, unit: Unit, gradients: list[torch.Tensor] | None) -> list[torch.Tensor]:
        """Run a whole backward, or its first part."""
        key = _key(unit)
        gradient: Tensors = list(gradients) if gradients is not None else [None]
        model_type = (get_model_type(self._chunks[0]),) if _BACKWARD_TAKES_MODEL_TYPE else ()
        inputs, outputs = self._kept.pop(key)
        with self._put_off_later(key), self._reduction.around(unit):
            sent: list[torch.Tensor] = backward_step(
                inputs, outputs, gradient, *model_type, self._config
            )
        del outputs
        for each in filter(torch.is_tensor, inputs):
            each.grad = None  # what is put off holds the graph, and that this input
        return sent

    def weight_gradient(self, unit: Unit) -> None:
        """Compute the weight gradients that the first part of a backward put off."""
        with self._reduction.around(unit):
            split_backward.second_part(self._put_off[_key(unit)])

    def _put_off_later(self, key: tuple[int, int]) -> contextlib.AbstractContextManager[None]:
        """Within, put weight gradients off where the order splits this backward."""
        if key not in self._put_off:
            return contextlib.nullcontext()
        return split_backward.first_part(self._put_off[key])

    def sent(self, unit: Unit) -> None:
        """Free an output's data: the channel keeps what it still sends."""
        if (kept := self._kept.get(_key(unit))) is not None:
            deallocate_output_tensor(kept[1][0], self._config.deallocate_pipeline_outputs)

    def drop(self) -> None:
        """Free activations, and what second parts need: no unit will run."""
        self._kept.clear()
        self._put_off.clear()

    def finish_grads(self, *, broken_off: bool) -> None:
        """Launch the gradient reductions that no backward launched."""
        self._reduction.finish(broken_off=broken_off)


class _Reduction:
    """Reduces the gradients of a stage's chunks over its replicas.

    Where no backward is split, that is when Megatron does it: with its own reducer in a chunk's
    last backward; with a `grad_sync_func` on stage 0 in that, too, on others after their units,
    in the bubble at the end. With chunks that is at the same time on all stages, though
    later stages come to a chunk later.

    Its own reducer wants each parameter's gradient in that backward, and one in two parts has none
    of some in either. So where some are split, its hooks only add gradients up, and it is called
    after a chunk's last unit, as a `grad_sync_func` is.
    """

    def __init__(
        self, schedule: Schedule, stage: int, chunks: list[torch.nn.Module], config: Any
    ) -> None:
        self._chunks = chunks
        self._splits = schedule.split
        self._no_sync_func = config.no_sync_func
        self._sync_func = config.grad_sync_func
        self._reducer = getattr(chunks[0], "ddp_config", None)
        self._overlaps: bool = getattr(self._reducer, "overlap_grad_reduce", False)
        if self._splits and self._overlaps and self._sync_func is None:
            self._sync_func = [chunk.start_grad_sync for chunk in chunks]
        ends = Kind.WEIGHT_GRADIENT if self._splits else Kind.BACKWARD
        backwards = [unit for unit in schedule.stages[stage] if unit.kind is ends]
        last = {unit.chunk: at for at, unit in enumerate(backwards)}
        in_backward = self._sync_func is None or (stage == 0 and len(chunks) == 1)
        self._reduced_in = {
            _key(backwards[at]) for at in last.values() if in_backward and not self._splits
        }
        self._reduced_behind = {
            _key(backwards[at + stage]): chunk
            for chunk, at in last.items()
            if len(chunks) > 1 and self._sync_func is not None and at + stage < len(backwards)
        }
        self._not_reduced = set(range(len(chunks)))
        self._no_sync = contextlib.ExitStack()
        self._held = False
        self._hold()

    @contextlib.contextmanager
    def around(self, unit: Unit) -> Iterator[None]:
        """Run a backward, or a part of one, within."""
        key = _key(unit)
        if key in self._reduced_in:
            self._release()
        if self._splits and self._reducer is not None:
            with replaced(self._reducer, overlap_grad_reduce=False):
                yield
        else:
            yield
        if unit.kind is Kind.INPUT_GRADIENT or len(self._chunks) == 1:
            return
        if key in self._reduced_behind:
            self._release()
            self._reduce(self._reduced_behind[key])
        self._hold()  # another chunk's gradients are not complete yet

    def finish(self, *, broken_off: bool) -> None:
        """Launch the reductions that no backward launched.

        An order that was broken off may lack any of them, and replicas wait for each.
        """
        held = self._held
        self._release()
        if held:
            for chunk in sorted(self._not_reduced):
                self._reduce(chunk)
        if broken_off and self._overlaps:
            for model in self._chunks:
                groups: Any = model.bucket_groups, model.expert_parallel_bucket_groups
                for group in itertools.chain(*groups):
                    if group.grad_reduce_handle is None:
                        group.start_grad_sync()

    def _reduce(self, chunk: int) -> None:
        self._not_reduced.discard(chunk)
        _for_chunk(self._sync_func, chunk, self._chunks)

    def _hold(self) -> None:
        if not self._held:
            for function in listed(self._no_sync_func):
                if function is not None:
                    self._no_sync.enter_context(function())
            self._held = True

    def _release(self) -> None:
        self._no_sync.close()
        self._held = False


def _key(unit: Unit) -> tuple[int, int]:
    return unit.microbatch, unit.chunk


def listed(one_or_more: Any) -> list[Any]:
    """Return what Megatron has as one or as a list, as a list."""
    return one_or_more if isinstance(one_or_more, list) else [one_or_more]


def _check_message(outputs: Tensors, specs: StageSpecs) -> None:
    expected = specs.sends[Kind.FORWARD]
    fits = all(isinstance(part, torch.Tensor) for part in outputs)
    if fits:
        found = TensorSpec.of([part for part in outputs if part is not None])
        fits = found.dtypes == expected.dtypes and (specs.vary or found.shapes == expected.shapes)
    if not fits:
        raise JobError("messages of other tensors than one of hidden states")


def _for_chunk(functions: Any, chunk: int, chunks: list[torch.nn.Module]) -> None:
    """Call Megatron's function for a chunk's parameters: one for all, one each, or none."""
    if functions is not None:
        function = functions[chunk] if isinstance(functions, list) else functions
        function(chunks[chunk].parameters())
