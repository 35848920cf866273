"""Executes megatron-core's training iterations from a schedule.

`ForwardBackward` has the signature of megatron-core's forward-backward functions (0.16 to 0.19)
and does what they do around the units (gathering parameters, synchronising gradients, finalising,
timers, deallocation). The units run by megatron-core's own `forward_step` and `backward_step`; the
schedule says which comes when.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.schedules import (
    clear_embedding_activation_buffer,
    finish_embedding_wgrad_compute,
    get_forward_backward_func,
    get_tensor_shapes,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config

from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.integrations.device import current_device
from envpipe_megatron.integrations.megatron import split_backward
from envpipe_megatron.integrations.megatron.self_check import SelfCheck
from envpipe_megatron.integrations.megatron.work import MegatronWork, listed
from envpipe_megatron.runtime.channel.carrier import StageSpecs, TensorSpec
from envpipe_megatron.runtime.execution.stage_run import Rehearsal
from envpipe_megatron.runtime.job.session import Session

#: Arguments that a call may leave out, with Megatron's defaults, and those that it may not.
_DEFAULTS = {
    **dict.fromkeys(("decoder_seq_length", "first_val_step", "adjust_tensor_shapes_fn")),
    **dict.fromkeys(("p2p_communicator", "pg_collection")),
    **dict.fromkeys(("forward_only", "collect_non_loss_data", "force_all_reduce"), False),
}
_NEEDED = (
    *("forward_step_func", "data_iterator", "model", "num_microbatches", "seq_length"),
    "micro_batch_size",
)
#: Makes the groups that its schedules run with by default; a function of their own since 0.19.
_default_groups: Callable[[], ProcessGroupCollection] = getattr(
    schedules, "_build_default_pg_collection", ProcessGroupCollection.use_mpu_process_groups
)


class ForwardBackward:
    """Replaces the function that `get_forward_backward_func` returns.

    Args:
        session: executes iterations, one per call.
        framework_iterations: training iterations that megatron-core's own function makes first. On
            GPUs some are needed: a kernel that is loaded while a receive spins can hang both.
        framework_function: that function; by default what `get_forward_backward_func` gives.
        check: runs one of the iterations after these both ways, unless the job needs no such check.
        seq_length: the most of any iteration. Megatron-Bridge's fine-tuning gives each its own, and
            each replica's.
    """

    def __init__(
        self,
        session: Session,
        framework_iterations: int | None = None,
        framework_function: Callable[..., list[Any]] | None = None,
        check: SelfCheck | None = None,
        seq_length: int = 0,
    ) -> None:
        self._session = session
        self._longest = seq_length
        self._check = check
        self._framework_function = framework_function
        if framework_iterations is None:
            framework_iterations = 2 if torch.cuda.is_available() else int(check is not None)
        self._framework_iterations_left = framework_iterations
        #: Why megatron-core's own function makes all iterations; not known before the first.
        self._against: str | None = None
        self._has_checked_call = False
        #: The model whose backwards can be split; it is prepared once, if it is to be.
        self._put_off_in: list[torch.nn.Module] = []

    def __call__(self, **arguments: Any) -> list[Any]:
        """Run all forwards and backwards of one training iteration.

        Arguments and result are those of megatron-core's function: on the last stage what the loss
        function reduced, one entry per microbatch. If the first call has what EnvPipe does not run,
        all go to that function, and `end_step` returns why; so does a later one that has arguments
        of another version. Raises MemoryFullError as `Session` does.
        """
        given, arguments = arguments, {**_DEFAULTS, **arguments}
        groups = arguments["pg_collection"] or _default_groups()
        if not self._has_checked_call:  # before the framework's own iterations, too
            self._has_checked_call = True
            found = self._session.parts.collectives.first(self._why_not(arguments, groups))
            self._against = found and found[1]
            if self._session.may_split and not self._against:
                self._session.parts.memory.waiting_bytes = split_backward.waiting_bytes(arguments)
        own = self._framework_function or get_forward_backward_func()
        left = self._framework_iterations_left
        if arguments["collect_non_loss_data"] or self._against or left or _unknown(arguments):
            self._framework_iterations_left -= left > 0
            losses: list[Any] = own(**given)
            return losses
        if self._check is not None and not self._check.done:
            return self._check(arguments, _specs(arguments, groups), own, self._interpret)
        return self._interpret(arguments)

    def _interpret(
        self, arguments: dict[str, Any], rehearsal: Rehearsal | None = None
    ) -> list[Any]:
        """Run an iteration by the interpreter: of the job's phases, or to check an order."""
        chunks = listed(arguments["model"])
        iterators = listed(arguments["data_iterator"])
        config = get_model_config(chunks[0])
        groups = arguments["pg_collection"] or _default_groups()
        specs = _specs(arguments, groups)
        works: list[MegatronWork] = []

        def make_work(schedule: Schedule) -> MegatronWork:
            # Not before: without memory for messages, Megatron's own function starts it.
            if config.timers is not None:
                config.timers("forward-backward", log_level=1).start(
                    barrier=config.barrier_with_L1_time
                )
            if schedule.split and self._put_off_in != chunks:
                split_backward.put_off_in(chunks)
                self._put_off_in = chunks
            step, checked = arguments["forward_step_func"], specs if rehearsal else None
            works.append(MegatronWork(schedule, step, iterators, chunks, config, groups, checked))
            return works[0]

        embedding_module = None
        if config.finalize_model_grads_func is not None:
            last_stage = groups.pp.rank() == groups.pp.size() - 1
            embedding_module = clear_embedding_activation_buffer(config, chunks, last_stage)
        if rehearsal is None:
            longest = _specs(arguments, groups, at_least=self._longest)
            count = arguments["num_microbatches"]
            self._session.run_iteration(count, specs, make_work, longest=longest)
        else:
            order, tried = rehearsal.order, rehearsal.of
            self._session.rehearse(
                order, specs, lambda schedule: tried(work := make_work(schedule), work.drop)
            )
        (work,) = works
        broken_off = rehearsal is not None and rehearsal.error is not None
        work.finish_grads(broken_off=broken_off)
        if config.finalize_model_grads_func is not None:
            if broken_off and embedding_module is not None:
                embedding_module.grad_output_buffer.clear()  # not as many as there are inputs
            else:
                finish_embedding_wgrad_compute(config, embedding_module, work.last_stage, groups.tp)
            config.finalize_model_grads_func(
                chunks,
                work.num_tokens if config.calculate_per_token_loss else None,
                pg_collection=groups,
                force_all_reduce=arguments["force_all_reduce"],
            )
        if config.timers is not None:
            config.timers("forward-backward").stop()
        return work.losses

    def end_step(self, *, skipped: bool) -> str | None:
        """End a step: the optimizer has stepped, or has skipped.

        If it skipped, and nothing else has run yet, megatron-core's own function runs once more:
        optimizer state, and so its memory, is allocated at the first step that is not skipped.

        Returns:
            why the job is to go on at a lower level, on all ranks alike; None if it need not.
        """
        if skipped and not self._session.executed:
            self._framework_iterations_left += 1
        if self._against is not None or self._check is None or self._check.failed is None:
            return self._against
        return f"its self-check: {self._check.failed}"

    def _why_not(self, arguments: dict[str, Any], groups: ProcessGroupCollection) -> str | None:
        """Return why the interpreter does not run this rank's call; None if it does."""
        config = get_model_config(listed(arguments["model"])[0])
        ranks, joined = dist.get_process_group_ranks(groups.pp), self._session.parts.channel.ranks
        given = {arguments[name] is not None for name in ("p2p_communicator", "pg_collection")}
        unknown = _unknown(arguments)
        against = {
            f"arguments of another version: {unknown}": bool(unknown),
            f"a call for a pipeline of ranks {ranks}, not {joined}": ranks != joined,
            "p2p_communicator and pg_collection apart": len(given) > 1,
            "shapes of messages that a function adjusts (ModelOpt)": (
                arguments["adjust_tensor_shapes_fn"] is not None
            ),
            "a model without pipeline_dtype": config.pipeline_dtype is None,
            "overlap_moe_expert_parallel_comm": config.overlap_moe_expert_parallel_comm,
            # From 0.18 on; megatron-core's own function resets the stash as it begins.
            "moe_paged_stash": getattr(config, "moe_paged_stash", False),
            "fine_grained_activation_offloading": config.fine_grained_activation_offloading,
            "num_microbatches_with_partial_activation_checkpoints": (
                config.num_microbatches_with_partial_activation_checkpoints is not None
            ),
            f"cuda_graph_impl '{config.cuda_graph_impl}'": config.cuda_graph_impl != "none",
        }
        found = [name for name, holds in against.items() if holds]
        return f"the interpreter does not run {'; '.join(found)}" if found else None


def _unknown(arguments: dict[str, Any]) -> str:
    """Return the names of arguments that the interpreter would drop; empty if there are none."""
    return ", ".join(sorted(arguments.keys() - {*_DEFAULTS, *_NEEDED}))


def _specs(
    arguments: dict[str, Any], groups: ProcessGroupCollection, at_least: int = 0
) -> StageSpecs:
    """Return what stages send each other, by Megatron's rule; where lengths vary, the longest.

    Args:
        at_least: tokens of the longest sequence, if it is longer than the configured one.
    """
    config = get_model_config(listed(arguments["model"])[0])
    longest = copy.copy(config)
    longest.variable_seq_lengths = False  # else Megatron returns no shape
    shapes = get_tensor_shapes(
        seq_length=max(arguments["decoder_seq_length"] or arguments["seq_length"], at_least),
        micro_batch_size=arguments["micro_batch_size"],
        decoder_seq_length=None,
        config=longest,
        tp_group=groups.tp,
        cp_group=groups.cp,
    )
    dtypes = (config.pipeline_dtype,) * len(shapes)
    spec = TensorSpec(tuple(map(tuple, shapes)), dtypes, current_device())
    return replace(StageSpecs.alike(spec), vary=config.variable_seq_lengths)
