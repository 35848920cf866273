"""DeepSpeed's PipelineEngine, whose training steps are executed from a schedule.

Units run what DeepSpeed's own instructions run: to load a microbatch, a forward or a backward, what
is sent after them, to reduce gradients and to step. Their order, and how messages are carried, are
EnvPipe's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.runtime.pipe import p2p
from deepspeed.runtime.pipe import schedule as pipe
from deepspeed.runtime.pipe.engine import TRAIN_BATCH_TIMER, PipelineEngine

from envpipe_megatron.core.channel_model import QUEUES_VARIABLE, hardware_capacity
from envpipe_megatron.core.kinds import Kind, Unit
from envpipe_megatron.integrations.hooking import BETWEEN_STEPS, paused, replaced
from envpipe_megatron.integrations.leveled import LeveledJob
from envpipe_megatron.integrations.levels import (
    FREES_WHILE_TRAINING,
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
    #: Whether messages may have grown since memory was made for them.
    _reshaped = False

    def take_job(self, job: LeveledJob, *, prints: bool) -> None:
        """Have its session execute training steps; `prints`: print energy where DeepSpeed does."""
        self.job, self._prints = job, prints
        self._own_steps = self._own_steps_left = 2 if self.device.type == "cuda" else 1

    @property
    def _only_measures(self) -> bool:
        return self.job.closed or self.job.level is Level.OBSERVE

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
        self._reshaped = True
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
            if self._reshaped:
                self.session.make_room(self._specs)
                self._reshaped = False
            self.session.run_iteration(self.micro_batches, self._specs, lambda _: _Units(self))
        except MemoryFullError as error:  # on all ranks, and no unit has run
            self._leave_to_deepspeed(str(error))
            super()._exec_schedule(pipe_schedule)
            return
        self._exec_reduce_tied_grads()
        self._exec_reduce_grads()
        self._exec_optimizer_step()

    def _check_again(self) -> None:
        """Leave all steps to DeepSpeed, on all ranks, if one set what EnvPipe does not run."""
        first = self.session.parts.collectives.first(", ".join(not_run(self)) or None)
        if first is not None:
            self._leave_to_deepspeed(first[1])

    def _leave_to_deepspeed(self, why: str) -> None:
        """Leave this step and all later ones to DeepSpeed, and only measure."""
        self.job.lower([Limit("DeepSpeed's own schedule", Level.OBSERVE, why)])

    def _learned_specs(self) -> StageSpecs:
        """Return what messages carry, from the buffers that DeepSpeed has received them in."""
        buffers = {Kind.FORWARD: self.pipe_recv_buf, Kind.BACKWARD: self.grad_layer}
        self._takes_tuple = isinstance(self.pipe_recv_buf, tuple)
        receives = {
            kind: TensorSpec.of(_as_list(buffer))
            for kind, buffer in buffers.items()
            if buffer is not None and len(buffer)
        }
        # Those of this pipeline: parts of partitioned activations may differ in size.
        by_stage = self.session.parts.collectives.in_pipeline(receives)
        receivers = (Kind.FORWARD, self.stage_id + 1), (Kind.BACKWARD, self.stage_id - 1)
        sends = {
            kind: replace(by_stage[stage][kind], device=self.device)
            for kind, stage in receivers
            if 0 <= stage < len(by_stage) and kind in by_stage[stage]
        }
        return StageSpecs(receives, sends, vary=self.dynamic_shape)

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
            if engine.has_attention_mask or engine.has_bool_tensors:  # sent as fp16
                inputs[-1] = inputs[-1].bool()
            self._buffers["inputs"][slot] = tuple(inputs) if engine._takes_tuple else inputs[0]
        if engine.is_first_stage() or engine.is_last_stage():
            engine._exec_load_micro_batch(slot)
        engine._exec_forward_pass(slot)
        if engine.is_last_stage():
            self._losses[slot] = engine.loss
            return []
        return self._sent(engine._exec_send_activations, slot)

    def backward(self, unit: Unit, gradients: list[torch.Tensor] | None) -> list[torch.Tensor]:
        """Run a backward; what the microbatch held is let go."""
        engine, slot = self._engine, unit.microbatch
        if gradients is None:
            engine.loss = self._losses.pop(slot)
        else:
            outputs = self._buffers["outputs"][slot]
            engine.grad_layer = gradients if isinstance(outputs, tuple) else gradients[0]
        engine._exec_backward_pass(slot)
        sent = [] if engine.is_first_stage() else self._sent(engine._exec_send_grads, slot)
        for held in self._buffers.values():
            held[slot] = None
        engine.grad_layer = None
        return sent

    def _sent(self, send: Callable[[int], None], slot: int) -> list[torch.Tensor]:
        """Return what DeepSpeed sends of a microbatch, except for shapes."""
        sent: list[torch.Tensor] = []
        with (
            replaced(p2p, send=lambda tensor, stage: sent.append(tensor)),
            replaced(self._engine, dynamic_shape=False),
        ):
            send(slot)
        return sent


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
        "a stage whose outputs need no gradient": engine.grad_layer == [],
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
