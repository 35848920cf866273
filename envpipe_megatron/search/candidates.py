"""Configurations as pipelines: what the simulator and the planner make of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import pairwise
from typing import Any

import numpy as np

from envpipe_megatron.core.arrays import FloatArray
from envpipe_megatron.core.conditions import make_conditions
from envpipe_megatron.core.kinds import Kind
from envpipe_megatron.core.orders.builders import framework_order
from envpipe_megatron.core.plan import Plan
from envpipe_megatron.core.profile import Profile, make_profile
from envpipe_megatron.core.profile_rows import ProfileRow
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.core.sidecar import Sidecar
from envpipe_megatron.core.timeline import Timeline
from envpipe_megatron.policies.objective import LEAST_ENERGY, Objective
from envpipe_megatron.policies.optimal.linear_program import LinearProgramError
from envpipe_megatron.policies.planner import make_frontier, make_plan
from envpipe_megatron.policies.request import BY_MEMORY, PlanRequest
from envpipe_megatron.search.configuration import (
    Configuration,
    Job,
    StageLoad,
    parameter_bytes,
    replica_groups,
    stage_work,
)
from envpipe_megatron.search.layer_profile import LayerProfile

#: Of computing the shares of time in which stages compute, which depend on their times.
_ROUNDS = 2
#: Microbatches for each stage after which an order holds no more than before.
_GROUPS_UNTIL_STEADY = 3


@dataclass(frozen=True)
class Candidate:
    """A configuration of a job, in the framework's own order at the highest clocks at first.

    It takes `bound_s` at least, as far as its cut tells.
    """

    configuration: Configuration
    profile: LayerProfile
    job: Job
    bound_s: float = 0.0

    @cached_property
    def works(self) -> tuple[StageLoad, ...]:
        """Work of each stage; at its power limit a GPU is the faster the more it waits."""
        works = measured = self.measured_works
        for _ in range(_ROUNDS if self.profile.least_rested < 1 else 0):
            share = self.configuration.num_microbatches / self._timeline(works).iteration_time_s
            works = tuple(
                each.busy_for(min(1.0, share * work.time_s))
                for each, work in zip(measured, works, strict=True)
            )
        return works

    @cached_property
    def measured_works(self) -> tuple[StageLoad, ...]:
        """The work of each stage where no GPU ever waits."""
        return tuple(stage_work(self.profile, stage) for stage in self.configuration.stages)

    @cached_property
    def peak_bytes(self) -> FloatArray:
        """[num_stages] the most that a GPU holds, in the framework's own order."""
        return self.peak_bytes_of(None)

    @property
    def _ranks(self) -> list[range]:
        """The ranks of each stage, as Megatron numbers them."""
        ends = np.cumsum([stage.num_gpus for stage in self.configuration.stages]).tolist()
        return [range(first, end) for first, end in pairwise([0, *ends])]

    @cached_property
    def hops_s(self) -> FloatArray:
        """[num_stages - 1] time of a message from each stage to the next, and back."""
        hops, node = [], self.job.gpus_per_node
        for work, ranks in zip(self.measured_works, self._ranks, strict=True):
            crosses = any(rank // node != (rank + len(ranks)) // node for rank in ranks)
            hops.append(float(self.profile.links.message_s(work.message_bytes.max(), crosses)))
        return np.array(hops[:-1])

    @cached_property
    def tails_s(self) -> FloatArray:
        """[num_stages] gradient reduction, the rest of gradients' handling, and optimizer.

        Nothing is taken to be overlapped. With the distributed optimizer the reduction is half of
        an all-reduce, and gathering the weights the other half, by their bytes.
        """
        profile, node, tails = self.profile, self.job.gpus_per_node, []
        each, shared = profile.bytes_per_parameter, self.configuration.distributed_optimizer
        halves = each.gradient, each.weight if shared else each.gradient
        for stage, work, ranks in zip(
            self.configuration.stages, self.measured_works, self._ranks, strict=True
        ):
            crosses = ranks[0] // node != ranks[-1] // node
            tail_s = work.parameters * profile.gradients_s
            parts = work.expert_parameters, work.parameters - work.expert_parameters
            for group, part in zip(replica_groups(stage), parts, strict=True):
                for half in halves:
                    tail_s += 0.5 * profile.links.all_reduce_s(part * half, group, crosses)
                tail_s += part / (group if shared else 1) * profile.optimizer_s
            tails.append(tail_s)
        return np.array(tails)

    @cached_property
    def timeline(self) -> Timeline:
        """One iteration."""
        return self._timeline(self.works)

    def _timeline(self, works: Sequence[StageLoad]) -> Timeline:
        configuration = self.configuration
        schedule = framework_order(
            len(works), configuration.num_microbatches, configuration.num_chunks
        )
        by_kind_s = np.array([[w.forward_s[:, 0], w.backward_s[:, 0]] for w in works])
        stage = np.arange(len(works))[:, None]
        duration_s = by_kind_s[stage, schedule.is_backward.astype(int), schedule.chunks]
        return Timeline(schedule, duration_s, self.hops_s.tolist(), self.tails_s)

    @property
    def iteration_time_s(self) -> float:
        """Time of the framework's own order at the highest clocks, by the simulator."""
        return self.timeline.iteration_time_s

    @property
    def time_shares(self) -> dict[str, float]:
        """Shares of the time of all GPUs in an iteration, by words; messages wait in bubbles."""
        configuration, all_s = self.configuration, self.iteration_time_s
        gpus = np.array([stage.num_gpus for stage in configuration.stages])
        share = gpus / gpus.sum() / all_s
        busy = configuration.num_microbatches * np.array([work.time_s for work in self.works])
        again = configuration.num_microbatches * np.array(
            [work.recomputed_s.sum() for work in self.works]
        )
        tails = float(share @ self.tails_s)
        return {
            "computing": float(share @ (busy - again)),
            "recomputing": float(share @ again),
            "bubbles": max(0.0, 1.0 - float(share @ busy) - tails),
            "reduction": tails,
        }

    @cached_property
    def stage_profile(self) -> Profile:
        """The stages as a profile that the planner takes."""
        chunks, clocks = self.configuration.num_chunks, self.profile.frequency_mhz.tolist()
        rows = [
            (stage * chunks + chunk, kind, ProfileRow(clock, time_s, energy_j))
            for stage, work in enumerate(self.works)
            for kind, times, energies in (
                (Kind.FORWARD, work.forward_s, work.forward_j),
                (Kind.BACKWARD, work.backward_s, work.backward_j),
            )
            for chunk in range(chunks)
            for clock, time_s, energy_j in zip(
                clocks, times[chunk].tolist(), energies[chunk].tolist(), strict=True
            )
        ]
        # A profile of mere noise may have less of two microbatches than of one.
        held = [max(0.0, float(work.held_bytes.mean())) for work in self.works]
        sidecar = Sidecar(
            gpu=self.profile.gpu,
            tensor_parallel=self.configuration.stages[0].sizes.tensor_parallel,
            num_chunks=chunks,
            p2p_latency_s=_known(self.hops_s.tolist()),
            tail_time_s=_known(self.tails_s.tolist()),
            activation_bytes=_known(held),
            free_bytes=self._free_bytes(held) if any(held) else None,
        )
        source = f"{self.profile.source}, {len(self.works)} stages"
        return make_profile(rows, source=source, sidecar=sidecar, listed_chunks=chunks)

    def plan(
        self,
        blocking_power_w: float,
        longest_s: float | None = None,
        objective: Objective = LEAST_ENERGY,
    ) -> Plan:
        """Plan the best order and clocks within a time, by default that of Megatron's own order."""
        factor = 1.0 if longest_s is None else max(1.0, longest_s / self.iteration_time_s)
        asked = partial(self._request, blocking_power_w, factor)
        try:
            plan = make_plan(self.stage_profile, asked(objective=objective)).plan
        except LinearProgramError:  # no order that was found is as fast as hoped
            plan = make_plan(self.stage_profile, asked()).plan
        if (self.peak_bytes_of(plan.schedule) <= self.job.limit_bytes).all():
            return plan
        # Chunks hold unlike amounts, which the planner's limit of microbatches does not see.
        own = {"order": self.timeline.schedule, "max_in_flight": None, "runnable": False}
        return make_plan(self.stage_profile, asked(objective=objective, **own)).plan

    def peak_bytes_of(self, order: Schedule | None) -> FloatArray:
        """Return [num_stages] the most that a GPU holds in an order; None: the framework's own."""
        configuration, peaks = self.configuration, []
        stages = configuration.stages
        if order is None:
            microbatches = min(configuration.num_microbatches, _GROUPS_UNTIL_STEADY * len(stages))
            order = _short_order(len(stages), microbatches, configuration.num_chunks)
        signs = np.where(order.is_backward, -1.0, 1.0)
        for number, (stage, work) in enumerate(zip(stages, self.measured_works, strict=True)):
            shared = configuration.distributed_optimizer
            held = parameter_bytes(self.profile, stage, work, distributed_optimizer=shared)
            in_flight = (signs[number] * work.held_bytes[order.chunks[number]]).cumsum().max()
            peaks.append(float(held) + work.beside_bytes + float(in_flight))
        return np.array(peaks)

    def frontier(self, blocking_power_w: float, num_points: int) -> list[Plan]:
        """Return the plans that no other beats in both time and energy, the fastest first."""
        return make_frontier(self.stage_profile, self._request(blocking_power_w, 1.0), num_points)

    def _request(
        self, blocking_power_w: float, deadline_factor: float, **other: Any
    ) -> PlanRequest:
        conditions = make_conditions(
            self.stage_profile,
            blocking_power_w=blocking_power_w,
            tail_time_s=tuple(self.tails_s.tolist()),
            gpus_per_stage=tuple(stage.num_gpus for stage in self.configuration.stages),
        )
        usual = {
            "num_microbatches": self.configuration.num_microbatches,
            "schedule": "auto",
            "policy": "optimal",
            "num_chunks": self.configuration.num_chunks,
            "max_in_flight": BY_MEMORY if self.stage_profile.sidecar.free_bytes else None,
            "deadline_factor": deadline_factor,
            "conditions": conditions,
            "runnable": True,
        }
        return PlanRequest(**{**usual, **other})

    def _free_bytes(self, held: Sequence[float]) -> tuple[float, ...] | None:
        """Return for each stage what is free beside one microbatch; enough for its own order."""
        if self.job.memory_bytes is None:
            return None
        needed = np.array(self.timeline.schedule.peak_in_flight) - 1
        by_own_order = needed * np.array(held)
        spare = np.maximum(self.job.memory_bytes - self.peak_bytes, 0.0)
        return tuple((by_own_order + spare).tolist())


_short_order = cache(framework_order)


def _known(values: Sequence[float]) -> tuple[float, ...] | None:
    """Return values by stage, or None where the layer profile has nothing but zeros."""
    return tuple(values) if any(values) else None
