"""DeepSpeed's PipelineEngine, whose training steps are executed from a schedule.

What a unit does is DeepSpeed's own: its instructions to load a microbatch, to run a forward or a
backward, to reduce gradients and to step. Which comes when, and how messages travel, is EnvPipe's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import MethodType
from typing import Any

import torch
from deepspeed.runtime.pipe import schedule as pipe
from deepspeed.runtime.pipe.engine import PipelineEngine

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.runtime.collectives import Collectives
from envpipe_megatron.runtime.executor import StageRecord
from envpipe_megatron.runtime.messages import StageSpecs, TensorSpec
from envpipe_megatron.runtime.session import Session
from envpipe_megatron.schedule import Kind, Unit


class UnsupportedEngineError(EnvPipeError):
    """A feature of DeepSpeed's pipelines that EnvPipe does not run."""


class EnvPipeEngine(PipelineEngine):  # type: ignore[misc]  # DeepSpeed has no types
    """A PipelineEngine that `adopt` has given a session.

    Attributes:
        last_record: what the last step measured that the session executed; None before.
    """

    _session: Session
    _collectives: Collectives
    _own_steps_left: int
    _specs: StageSpecs | None
    last_record: StageRecord | None

    def train_batch(self, data_iter: Any = None) -> torch.Tensor:
        """As DeepSpeed's, in the order of the session's present phase."""
        self._session.begin_step(self.global_steps)
        loss: torch.Tensor = super().train_batch(data_iter)
        self._session.end_step()
        return loss

    def eval_batch(self, *arguments: Any, **named: Any) -> Any:
        """As DeepSpeed's, by its own schedule at the highest clock; not billed as training."""
        self._session.pause()
        return super().eval_batch(*arguments, **named)

    def reset_activation_shape(self) -> None:
        """As DeepSpeed's; it also runs the next step, from which new shapes are learned."""
        super().reset_activation_shape()
        self._specs = None

    def _exec_schedule(self, pipe_schedule: pipe.PipeSchedule) -> None:
        """Execute a step: one of training from the session's schedule, others by DeepSpeed."""
        if not isinstance(pipe_schedule, pipe.TrainSchedule):
            super()._exec_schedule(pipe_schedule)
            return
        if self._own_steps_left or self._specs is None:
            self._own_steps_left = max(0, self._own_steps_left - 1)
            super()._exec_schedule(pipe_schedule)
            self._specs = self._learned_specs()
            return
        # A slot a microbatch: units may come in any order. They hold what they need, no longer.
        self._reserve_pipe_buffers(self.micro_batches)
        self.fwd_outputs: list[Any] = []
        self.last_record = self._session.run_iteration(
            self.micro_batches, self._specs, lambda schedule: _Units(self)
        )
        for instruction in (pipe.ReduceTiedGrads(), pipe.ReduceGrads(), pipe.OptimizerStep()):
            self.run(instruction)

    def run(self, instruction: pipe.PipeInstruction) -> None:
        """Run one of DeepSpeed's instructions."""
        MethodType(self._INSTRUCTION_MAP[type(instruction)], self)(**instruction.kwargs)

    @property
    def carries_mask(self) -> bool:
        """Whether a message's last tensor holds truth values, which DeepSpeed sends as fp16."""
        return bool(self.has_attention_mask or self.has_bool_tensors)

    def _learned_specs(self) -> StageSpecs:
        """What messages carry, from the buffers that DeepSpeed has received them in."""
        receives = {}
        if not self.is_first_stage():
            received = _as_list(self.pipe_recv_buf)
            if self.carries_mask:
                received[-1] = received[-1].bool()
            receives[Kind.FORWARD] = _spec(received)
        if not self.is_last_stage():
            receives[Kind.BACKWARD] = _spec(_as_list(self.grad_layer))
        everyone = [own for own, *_ in self._collectives.gather_by_stage(receives)]
        sends = {}
        if not self.is_last_stage():
            sends[Kind.FORWARD] = everyone[self.stage_id + 1][Kind.FORWARD]
        if not self.is_first_stage():
            sends[Kind.BACKWARD] = everyone[self.stage_id - 1][Kind.BACKWARD]
        here = {kind: TensorSpec(s.shapes, s.dtypes, self.device) for kind, s in sends.items()}
        return StageSpecs(receives, here)


def adopt(
    engine: PipelineEngine,
    session: Session,
    collectives: Collectives,
    own_steps: int | None = None,
) -> EnvPipeEngine:
    """Let a session execute the training steps of an engine that `deepspeed.initialize` has made.

    The engine becomes one of the subclass; nothing else of DeepSpeed is touched.

    Args:
        engine: of a pipeline of at least two stages.
        session: executes iterations.
        collectives: to all ranks.
        own_steps: training steps that DeepSpeed makes first by its own schedule. One at least,
            from which the shapes of messages are learned; on GPUs two, since a kernel that is
            loaded while a receive spins can hang both.

    Raises:
        UnsupportedEngineError: a feature that is not run.
    """
    _check_supported(engine)
    if own_steps is None:
        own_steps = 2 if engine.device.type == "cuda" else 1
    engine.__class__ = EnvPipeEngine
    assert isinstance(engine, EnvPipeEngine)
    engine._session = session
    engine._collectives = collectives
    engine._own_steps_left = own_steps
    engine._specs = None
    engine.last_record = None
    return engine


class _Units:
    """The units of one stage in one step."""

    def __init__(self, engine: EnvPipeEngine) -> None:
        self._engine = engine
        self._buffers: dict[str, list[Any]] = engine.pipe_buffers
        self._losses: dict[int, Any] = {}

    def forward(self, unit: Unit, inputs: list[torch.Tensor] | None) -> list[torch.Tensor]:
        """Run a forward."""
        engine, slot = self._engine, unit.microbatch
        if inputs is not None:
            # A tuple of one tensor arrives as one, which is what layers get of either.
            self._buffers["inputs"][slot] = inputs[0] if len(inputs) == 1 else tuple(inputs)
        if engine.is_first_stage() or engine.is_last_stage():
            engine.run(pipe.LoadMicroBatch(slot))
        engine.run(pipe.ForwardPass(slot))
        if engine.is_last_stage():
            self._losses[slot] = engine.loss
            return []
        outputs = _as_list(self._buffers["outputs"][slot])
        if engine.carries_mask:
            outputs[-1] = outputs[-1].half().bool()  # what DeepSpeed's receivers make of it
        return outputs

    def backward(self, unit: Unit, gradients: list[torch.Tensor] | None) -> list[torch.Tensor]:
        """Run a backward; what the microbatch held is let go."""
        engine, slot = self._engine, unit.microbatch
        if gradients is None:
            engine.loss = self._losses.pop(slot)
        else:
            outputs = self._buffers["outputs"][slot]
            engine.grad_layer = gradients if isinstance(outputs, tuple) else gradients[0]
        engine.run(pipe.BackwardPass(slot))
        inputs = [] if engine.is_first_stage() else _as_list(self._buffers["inputs"][slot])
        for held in self._buffers.values():
            held[slot] = None
        engine.grad_layer = None
        sent = [tensor.grad for tensor in inputs if tensor.is_floating_point()]
        missing = [index for index, gradient in enumerate(sent) if gradient is None]
        if missing:
            raise UnsupportedEngineError(
                f"An input of stage {engine.stage_id} got no gradient in {unit}",
                value=missing,
                remedy="Let layers use all floating-point tensors that they are handed.",
            )
        return [gradient for gradient in sent if gradient is not None]

    def sent(self, unit: Unit) -> None:
        """The channel has the output: nothing is left to do."""


def _check_supported(engine: PipelineEngine) -> None:
    not_run = {
        "a pipeline of one stage": engine.num_stages < 2,
        "dynamic_shape": engine.dynamic_shape,
        "pipe_partitioned with tensor parallelism": engine.is_pipe_partitioned,
    }
    found = [name for name, used in not_run.items() if used]
    if found:
        raise UnsupportedEngineError(
            "EnvPipe does not run this under DeepSpeed",
            value=found,
            remedy="Train without EnvPipe, or without these.",
        )


def _as_list(tensors: torch.Tensor | Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _spec(tensors: Iterable[torch.Tensor]) -> TensorSpec:
    parts = list(tensors)
    shapes, dtypes = tuple(tuple(t.shape) for t in parts), tuple(t.dtype for t in parts)
    return TensorSpec(shapes, dtypes, parts[0].device)
