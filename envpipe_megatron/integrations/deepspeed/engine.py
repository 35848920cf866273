"""DeepSpeed's PipelineEngine, whose training steps are executed from a schedule.

Units run DeepSpeed's own instructions: to load a microbatch, to run a forward or a backward, to
reduce gradients and to step. Their order, and the messages between stages, are EnvPipe's.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import MethodType
from typing import Any

import torch
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.runtime.pipe import schedule as pipe
from deepspeed.runtime.pipe.engine import TRAIN_BATCH_TIMER, PipelineEngine
from deepspeed.runtime.utils import PartitionedTensor

from envpipe_megatron.core.channel_model import QUEUES_VARIABLE, hardware_capacity
from envpipe_megatron.core.kinds import Kind, Unit
from envpipe_megatron.integrations.hooking import BETWEEN_STEPS, paused
from envpipe_megatron.integrations.leveled import LeveledJob
from envpipe_megatron.integrations.levels import (
    FREES_WHILE_TRAINING,
    JobError,
    Level,
    Limit,
    frees_while_training,
)
from envpipe_megatron.runtime.channel.carrier import StageSpecs, TensorSpec
from envpipe_megatron.runtime.execution.stage_run import StageWork
from envpipe_megatron.runtime.job.session import Session
from envpipe_megatron.runtime.memory.peak import MemoryFullError


class EnvPipeEngine(PipelineEngine):  # type: ignore[misc]  # DeepSpeed has no types
    """A PipelineEngine that was given a job; `initialize.begin` makes one of DeepSpeed's.

    DeepSpeed makes one training step first by its own schedule, from which the shapes of messages
    are learned; on GPUs two, since a kernel that is loaded while a receive spins can hang both.
    """

    job: LeveledJob
    _own_steps: int
    _own_steps_left: int
    _takes_tuple: bool
    _prints: bool
    _specs: StageSpecs

    def take_job(self, job: LeveledJob, *, prints: bool) -> None:
        """Have its session execute training steps; `prints`: print energy where DeepSpeed does."""
        self.job, self._prints = job, prints
        self._own_steps = self._own_steps_left = 2 if self.device.type == "cuda" else 1

    @property
    def _only_measures(self) -> bool:
        return self.job.level is Level.OBSERVE

    @property
    def session(self) -> Session:
        """Return what executes its training steps, with phase, profile, plan and meters."""
        return self.job.session

    def train_batch(self, data_iter: Any = None) -> torch.Tensor:
        """Run a training step as DeepSpeed does, in the order of the session's present phase.

        Raises SystemExit once the profile is written, if only that was asked for.
        """
        if self._own_steps_left and not self._only_measures:  # at the highest clock
            self.job.pause()
        self.job.begin_step(self.global_steps)
        try:
            loss: torch.Tensor = super().train_batch(data_iter)
        except BaseException:  # else the next call would report the timer and not this
            self.timers(TRAIN_BATCH_TIMER).reset()
            raise
        self.job.end_step()
        if not (self._only_measures or self.session.executed or self.was_step_applied()):
            # The optimizer's state, and so its memory, is allocated at the first one that is.
            self._own_steps_left += 1
        every = self.steps_per_print()
        if self._prints and every is not None and self.global_steps % every == 0:
            self._print_energy()
        return loss

    def end_training(self) -> None:
        """Give the clock back, and print the energy bill; every rank calls it.

        Training that ends without it gives clocks back as well, and has no bill.
        """
        self.job.end()

    def destroy(self) -> None:
        """Give the clock back, and destroy the engine as DeepSpeed does."""
        self.job.close()
        super().destroy()

    def reset_activation_shape(self) -> None:
        """Reset shapes, and leave the next steps to DeepSpeed: new shapes are learned there."""
        super().reset_activation_shape()
        self._own_steps_left = max(self._own_steps_left, self._own_steps)

    def _exec_schedule(self, pipe_schedule: pipe.PipeSchedule) -> None:
        """Execute a step: one of training from the session's schedule, others by DeepSpeed."""
        if not isinstance(pipe_schedule, pipe.TrainSchedule):
            super()._exec_schedule(pipe_schedule)
            return
        if not (self._only_measures or self._own_steps_left or self.session.executed):
            self._check_again()
        if self._only_measures or self._own_steps_left:
            super()._exec_schedule(pipe_schedule)
            if not self._only_measures:
                self._own_steps_left -= 1
                self._specs = self._learned_specs()
            return
        # A slot a microbatch: units may come in any order. They hold what they need, no longer.
        self._reserve_pipe_buffers(self.micro_batches)
        self.fwd_outputs: list[Any] = []
        try:
            units = _Units(self)
            self.session.run_iteration(self.micro_batches, self._specs, lambda schedule: units)
        except MemoryFullError as error:  # on all ranks, and no unit has run
            self._leave_to_deepspeed(str(error))
            super()._exec_schedule(pipe_schedule)
            return
        for instruction in (pipe.ReduceTiedGrads(), pipe.ReduceGrads(), pipe.OptimizerStep()):
            self.run_instruction(instruction)

    def _check_again(self) -> None:
        """Leave all steps to DeepSpeed, on all ranks, if one set what EnvPipe does not run."""
        first = self.session.parts.collectives.first(", ".join(not_run(self)) or None)
        if first is not None:
            self._leave_to_deepspeed(first[1])

    def _leave_to_deepspeed(self, why: str) -> None:
        """Leave this step and all later ones to DeepSpeed, and only measure."""
        self.job.lower([Limit("DeepSpeed's own schedule", Level.OBSERVE, why)])

    def run_instruction(self, instruction: pipe.PipeInstruction) -> None:
        """Run one of DeepSpeed's instructions."""
        MethodType(self._INSTRUCTION_MAP[type(instruction)], self)(**instruction.kwargs)

    @property
    def carries_mask(self) -> bool:
        """Return whether a message ends with truth values, which DeepSpeed sends as fp16."""
        return bool(self.has_attention_mask or self.has_bool_tensors)

    def _learned_specs(self) -> StageSpecs:
        """Return what messages carry, from the buffers that DeepSpeed has received them in."""
        receives = {}
        if not self.is_first_stage():
            received = _as_list(self.pipe_recv_buf)
            self._takes_tuple = isinstance(self.pipe_recv_buf, tuple)
            if self.carries_mask:
                received[-1] = received[-1].bool()
            receives[Kind.FORWARD] = TensorSpec.of(received)
        if not self.is_last_stage():
            gradients = _as_list(self.grad_layer)
            if not gradients:
                raise JobError(
                    f"No output of stage {self.stage_id} needs a gradient",
                    remedy="Split the layers elsewhere, or train without EnvPipe.",
                )
            receives[Kind.BACKWARD] = TensorSpec.of(gradients)
        # Those of this pipeline: parts of partitioned activations may differ in size.
        by_stage = self.session.parts.collectives.in_pipeline(receives)
        sends = {}
        if not self.is_last_stage():
            sends[Kind.FORWARD] = by_stage[self.stage_id + 1][Kind.FORWARD]
        if not self.is_first_stage():
            sends[Kind.BACKWARD] = by_stage[self.stage_id - 1][Kind.BACKWARD]
        here = {kind: TensorSpec(s.shapes, s.dtypes, self.device) for kind, s in sends.items()}
        return StageSpecs(receives, here, vary=self.dynamic_shape)

    def _print_energy(self) -> None:
        """Print and write the energy since the last time; all ranks do so after the same step."""
        report = self.job.report()
        line = report.line()
        self.job.say(line and f"steps: {self.global_steps} |{line}")
        if self.global_rank == 0 and self.monitor.enabled:
            self.monitor.write_events(
                [
                    (f"Train/Samples/{name}", value, self.global_samples)
                    for name, value in report.scalars().items()
                ]
            )


for _row in BETWEEN_STEPS["DeepSpeed"]:
    _own = getattr(PipelineEngine, _row.function)
    setattr(EnvPipeEngine, _row.function, paused(lambda engine: engine.job.pause(), _own))


class _Units(StageWork):
    """The units of one stage in one step."""

    def __init__(self, engine: EnvPipeEngine) -> None:
        self._engine = engine
        self._buffers: dict[str, list[Any]] = engine.pipe_buffers
        self._losses: dict[int, Any] = {}

    def forward(self, unit: Unit, inputs: list[torch.Tensor] | None) -> list[torch.Tensor]:
        """Run a forward."""
        engine, slot = self._engine, unit.microbatch
        if inputs is not None:
            self._buffers["inputs"][slot] = tuple(inputs) if engine._takes_tuple else inputs[0]
        if engine.is_first_stage() or engine.is_last_stage():
            engine.run_instruction(pipe.LoadMicroBatch(slot))
        engine.run_instruction(pipe.ForwardPass(slot))
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
        engine.run_instruction(pipe.BackwardPass(slot))
        sent = [] if engine.is_first_stage() else self._gradients_of_inputs(unit)
        for held in self._buffers.values():
            held[slot] = None
        engine.grad_layer = None
        return sent

    def _gradients_of_inputs(self, unit: Unit) -> list[torch.Tensor]:
        """Return what the stage before gets, as DeepSpeed's SendGrad sends it."""
        engine = self._engine
        inputs = _as_list(self._buffers["inputs"][unit.microbatch])
        if engine.is_grad_partitioned:  # the others of a tuple get none
            inputs = inputs[:1]
        gradients = [tensor.grad for tensor in inputs if tensor.is_floating_point()]
        missing = [index for index, gradient in enumerate(gradients) if gradient is None]
        if missing:
            raise JobError(
                f"An input of stage {engine.stage_id} got no gradient in {unit}",
                value=missing,
                remedy="Let layers use all floating-point tensors that they are handed.",
            )
        if engine.is_grad_partitioned:
            group = engine.grid.get_slice_parallel_group()
            part = PartitionedTensor(tensor=gradients[0], group=group)
            return [part.to_meta(), part.data()]
        return [gradient for gradient in gradients if gradient is not None]


def not_run(engine: PipelineEngine) -> list[str]:
    """Name what EnvPipe does not run of an engine.

    What waits for the device within a unit would wait for a receive that is posted. It may be set
    after the engine was made, and so may what has room for as many microbatches as 1F1B holds: so
    an engine is looked at again before the first unit.
    """
    checkpoints = engine._config.activation_checkpointing_config
    found = {
        f"an engine of another class ({type(engine).__name__})": (
            type(engine) not in (PipelineEngine, EnvPipeEngine)
        ),
        "a pipeline of one stage": engine.num_stages < 2,
        "activations partitioned and gradients not, or the other way round": (
            engine.is_pipe_partitioned != engine.is_grad_partitioned
        ),
        f"dynamic_shape with {QUEUES_VARIABLE} below 8": (
            engine.dynamic_shape and hardware_capacity(os.environ) is not None
        ),
        FREES_WHILE_TRAINING: frees_while_training(),
        "activation checkpoints that wait for the device (synchronize_checkpoint_boundary)": (
            checkpointing.SYNCHRONIZE or checkpoints.synchronize_checkpoint_boundary
        ),
        "contiguous activation checkpoints (contiguous_memory_optimization)": (
            checkpointing.CONTIGUOUS_CHECKPOINTING or checkpoints.contiguous_memory_optimization
        ),
        "comms_logger, which waits for the device": (
            engine._config.comms_config.comms_logger_enabled
        ),
    }
    return [name for name, used in found.items() if used]


def _as_list(tensors: torch.Tensor | Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
