"""What each iteration runs: a job's phases, for each size that its batches have.

What units cost does not depend on how many there are, so one profile serves all; but what a step
takes and which clocks are best does. So each number of microbatches has a warm-up, which is its
baseline, a plan, and the loop that corrects that by waits of its own iterations. Its phases wait
while iterations of another number run, but for a profile, whose iterations must follow each other:
that is begun anew. Called by `session`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.formats.energy import Phase
from envpipe_megatron.runtime.channel.messages import StageSpecs
from envpipe_megatron.runtime.execution.executor import StageRecord
from envpipe_megatron.runtime.execution.orders import IterationOrder, PhaseRun
from envpipe_megatron.runtime.job.config import SessionError
from envpipe_megatron.runtime.job.parts import JobParts, PhaseParts
from envpipe_megatron.runtime.job.phases import run_phases
from envpipe_megatron.runtime.job.planning import predicted


@dataclass
class Batch:
    """Where iterations of one number of microbatches stand.

    Args:
        name: empty for the batch of full size, see `phase_in_batch`.
        order: what the next one runs.
    """

    name: str
    num_microbatches: int
    phases: PhaseRun[None]
    order: IterationOrder


class Batches:
    """The phases of each size of batch that has come, and what they run next.

    All ranks turn to the same ones.

    Args:
        describe_job: is told of new notes, and of what a new plan predicts.
    """

    def __init__(self, job: JobParts, describe_job: Callable[[Mapping[str, Any]], None]) -> None:
        self._job = job
        self._describe_job = describe_job
        #: The one whose iterations run now; None before the first.
        self.now: Batch | None = None
        self._waiting: dict[int, Batch] = {}
        #: Whether an iteration, or what phases do behind it, has begun and not ended: no other may
        #: begin. Whoever runs iterations says so too.
        self.unfinished = False

    def next_order(
        self,
        last: StageRecord | None,
        num_microbatches: int,
        specs: StageSpecs,
        own_order: Schedule | None,
        *,
        full_batch: bool,
    ) -> IterationOrder:
        """What the next iteration runs, after the phases got the last one's record.

        Raises SessionError if an earlier iteration failed.
        """
        if self.unfinished:
            raise SessionError(
                "An earlier iteration failed, so messages and phases do not match any more",
                remedy="Close this session and make a new one on every rank.",
            )
        if self.now is not None and last is not None:
            self.unfinished = True  # even if the phases raise
            self._advance(self.now, last)
        left = self.now
        if left is not None and left.num_microbatches == num_microbatches:
            return left.order
        if left is not None:
            self._job.state.several_sizes = True
            # A sweep's iterations must follow each other; a closed loop knows that its do not.
            if self._job.config.closed_loop or left.order.phase is not Phase.PROFILE:
                self._waiting[left.num_microbatches] = left
        self.now = self._waiting.pop(num_microbatches, None)
        if self.now is None:
            name = "" if full_batch else f"m{num_microbatches}"
            phases = run_phases(self._parts(name, num_microbatches, specs, own_order))
            self.now = Batch(name, num_microbatches, phases, next(phases))
        return self.now.order

    def _advance(self, batch: Batch, last: StageRecord) -> None:
        """Let a batch's phases look at its last iteration, and say what the next one runs."""
        job, ended = self._job, batch.order.phase
        begin_s, notes, plan = job.executor.now_s(), job.state.notes, job.state.plan
        if ended not in (Phase.WARMUP, Phase.BASELINE):
            job.energy.settle_baseline(batch.name)
            job.folder.keep_baselines(job.energy.baselines)
        batch.order = batch.phases.send(last)
        if job.state.notes != notes:
            self._describe_job({"notes": [*job.folder.notes, *job.state.notes]})
        if job.state.plan is not plan and not batch.name and job.collectives.is_planner:
            self._describe_job({"predicted": predicted(job.state.plan)})
        if batch.order.phase is not ended:
            job.energy.add_between_phases(job.state.iteration, begin_s)

    def _parts(
        self, name: str, num_microbatches: int, specs: StageSpecs, own_order: Schedule | None
    ) -> PhaseParts:
        job = self._job
        if name:
            job = replace(job, say=_named(name, job.say), print_grid=_named(name, job.print_grid))
        return PhaseParts(
            **vars(job),
            batch=name,
            num_microbatches=num_microbatches,
            specs=specs,
            own_order=own_order,
        )


def _named(name: str, put: Callable[[str], None]) -> Callable[[str], None]:
    """Prints what a batch has a name for."""
    return lambda text: put(f"{name}: {text}")
