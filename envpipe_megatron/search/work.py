"""Times, energies and bytes of a configuration's stages, by the measures of their pieces."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from envpipe_megatron.core.arrays import FloatArray
from envpipe_megatron.core.kinds import Kind
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.search.configuration import Configuration, StageLayout
from envpipe_megatron.search.layer_profile import LayerProfile, Sizes

#: Microbatches for each stage after which an order holds no more than before.
_GROUPS_UNTIL_STEADY = 3


@dataclass(frozen=True)
class StageLoad:
    """One stage, on one of its GPUs; arrays by chunk have one row for each virtual stage.

    Args:
        forward_s, backward_s: [num_chunks, num_frequencies]; what is computed again counts as
            backward.
        forward_j, backward_j: the same shape; zeros where no joule was measured.
        recomputed_s: [num_chunks] of it at the highest clock.
        held_bytes: [num_chunks] for each microbatch of a chunk in flight.
        beside_bytes: held at the peak besides: workspace, and one layer that is computed again.
        parameters, expert_parameters: that the GPU holds, and the experts' among them.
        message_bytes: [num_chunks] the output of each chunk.
        rested: [num_frequencies] times where the GPU rests half of the time, of those without.
    """

    forward_s: FloatArray
    backward_s: FloatArray
    forward_j: FloatArray
    backward_j: FloatArray
    recomputed_s: FloatArray
    held_bytes: FloatArray
    beside_bytes: float
    parameters: float
    expert_parameters: float
    message_bytes: FloatArray
    rested: FloatArray

    @property
    def time_s(self) -> float:
        """One microbatch through all chunks, forward and backward, at the highest clock."""
        return float(self.forward_s[:, 0].sum() + self.backward_s[:, 0].sum())

    def busy_for(self, share: float) -> StageLoad:
        """Return the same where the GPU computes for this share of the time.

        Layers that each rest gain twice as much at that share; a pipeline's rests are few and long.
        """
        factor = 1.0 - (1.0 - share) * (1.0 - self.rested)
        return replace(
            self,
            forward_s=self.forward_s * factor,
            backward_s=self.backward_s * factor,
            recomputed_s=self.recomputed_s * factor[0],
        )


def stage_work(profile: LayerProfile, stage: StageLayout) -> StageLoad:
    """Return the work of a stage; EnvPipeError for sizes that were not measured."""
    pieces = profile.sums(stage.sizes)
    first, end = np.array(stage.chunks).T
    own = np.array(stage.pieces)
    forward_j, forward_s = (sums[end] - sums[first] for sums in pieces.by_clock[Kind.FORWARD])
    backward_j, backward_s = (sums[end] - sums[first] for sums in pieces.by_clock[Kind.BACKWARD])
    plain_s = (forward_s + backward_s).sum(axis=0)
    held_bytes = pieces.kept_bytes[end] - pieces.kept_bytes[first]
    held_bytes += pieces.input_bytes[first] - pieces.freed_bytes[end]
    again_s, working_bytes = np.zeros_like(forward_s), 0.0
    name, count = stage.recomputed
    if name is not None:
        way = pieces.ways[name]
        until = way.until(first, end, count)
        again_j, again_s = (sums[until] - sums[first] for sums in pieces.by_clock[name])
        backward_j, backward_s = backward_j + again_j, backward_s + again_s
        held_bytes -= way.saved_bytes[until] - way.saved_bytes[first]
        again = zip(first.tolist(), until.tolist(), strict=True)
        working_bytes = max(way.working_bytes[a:b].max(initial=0.0) for a, b in again)
    parameters = float((pieces.parameters[end] - pieces.parameters[first]).sum())
    workspaces = pieces.forward_bytes[own].max(), pieces.backward_bytes[own].max()
    return StageLoad(
        forward_s,
        backward_s,
        forward_j,
        backward_j,
        again_s[:, 0],
        held_bytes,
        float(workspace_bytes(profile, *workspaces, working_bytes, parameters)),
        parameters,
        float((pieces.expert_parameters[end] - pieces.expert_parameters[first]).sum()),
        pieces.sent_bytes[end],
        1.0 - (pieces.saved_s[end] - pieces.saved_s[first]).sum(axis=0) / plain_s,
    )


def workspace_bytes(
    profile: LayerProfile,
    forward_bytes: FloatArray | float,
    backward_bytes: FloatArray | float,
    working_bytes: FloatArray | float,
    parameters: FloatArray | float,
) -> FloatArray:
    """Return the bytes held at the peak beside weights and activations, of one stage or many.

    The workspaces are the largest of a stage's pieces, and `working_bytes` the largest of a way's
    `working_bytes` of those that are recomputed.
    """
    least = profile.bytes_per_parameter.least_workspace * np.asarray(parameters)
    if profile.workspaces_add:
        return np.maximum(np.add(forward_bytes, backward_bytes), least) + working_bytes
    largest = np.maximum(np.maximum(forward_bytes, backward_bytes), working_bytes)
    return np.maximum(largest, least)


def replica_groups(sizes: Sizes, data_parallel: int) -> tuple[int, int]:
    """Return how many GPUs hold the same parameters: of experts', and of others.

    Context parallel ranks are among them (Megatron's process groups).
    """
    replicas = data_parallel * sizes.context_parallel
    return max(1, replicas // sizes.expert_parallel), replicas


def parameter_bytes(
    profile: LayerProfile,
    groups: tuple[int, int],
    parameters: FloatArray | float,
    expert_parameters: FloatArray | float,
    *,
    distributed_optimizer: bool,
) -> FloatArray:
    """Return the bytes that a GPU holds for weights, gradients and its share of optimizer state."""
    each = profile.bytes_per_parameter
    of_experts, of_others = (
        each.weight + each.gradient + each.optimizer / (group if distributed_optimizer else 1)
        for group in groups
    )
    others = np.subtract(parameters, expert_parameters)
    return of_experts * np.asarray(expert_parameters) + of_others * others


def stage_peak_bytes(
    profile: LayerProfile,
    configuration: Configuration,
    stage: int,
    work: StageLoad,
    order: Schedule | None = None,
) -> float:
    """Return the most that a GPU of one stage holds, in an order or in the framework's own."""
    stages = configuration.stages
    if order is None:
        microbatches = min(configuration.num_microbatches, _GROUPS_UNTIL_STEADY * len(stages))
        order = _short_order(len(stages), microbatches, configuration.num_chunks)
    for_parameters = parameter_bytes(
        profile,
        replica_groups(stages[stage].sizes, stages[stage].data_parallel),
        work.parameters,
        work.expert_parameters,
        distributed_optimizer=configuration.distributed_optimizer,
    )
    sign = np.where(order.is_backward[stage], -1.0, 1.0)
    in_flight = (sign * work.held_bytes[order.chunks[stage]]).cumsum().max()
    return float(for_parameters) + work.beside_bytes + float(in_flight)


_short_order = cache(builders.framework_order)
