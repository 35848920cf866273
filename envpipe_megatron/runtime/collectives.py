"""What the ranks of a job tell each other between iterations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist

from envpipe_megatron.errors import EnvPipeError

T = TypeVar("T")


class CollectivesError(EnvPipeError):
    """A rank of the job is gone or silent."""


class Collectives:
    """Exchanges over a host-side (gloo) group of all ranks of the job.

    Every method raises CollectivesError when a rank is gone, or silent for the group's time-out.

    Args:
        group: holds every rank of the job.
        stage: this rank's pipeline stage.
        num_stages: p.
        pipeline_group: host-side group of this rank's pipeline.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        stage: int,
        num_stages: int,
        pipeline_group: dist.ProcessGroup,
    ) -> None:
        self._group = group
        self._stage = stage
        self._num_stages = num_stages
        self._pipeline_group = pipeline_group
        self.is_planner = dist.get_rank(group) == 0

    def gather_by_stage(self, value: T) -> list[list[T]]:
        """Every rank's value, to every rank: for each stage, those of all its replicas."""
        gathered: list[tuple[int, T] | None] = [None] * dist.get_world_size(self._group)
        with self._names_the_loss():
            dist.all_gather_object(gathered, (self._stage, value), group=self._group)
        by_stage: list[list[T]] = [[] for _ in range(self._num_stages)]
        for item in gathered:
            assert item is not None
            by_stage[item[0]].append(item[1])
        return by_stage

    def from_planner(self, value: T | None) -> T:
        """The planner's value, to every rank; what others pass is ignored."""
        box: list[T | None] = [value]
        with self._names_the_loss():
            dist.broadcast_object_list(box, group=self._group, group_src=0)
        return box[0]  # type: ignore[return-value]  # the planner passed a T

    def agreed(self, make: Callable[[], T]) -> T:
        """What the planner makes, on every rank.

        Raises:
            EnvPipeError: the planner's own error, on every rank; CollectivesError on the others
                where it is of another kind.
        """
        outcome: tuple[T | None, EnvPipeError | None] | None = None
        own: Exception | None = None
        if self.is_planner:
            try:
                outcome = make(), None
            except EnvPipeError as error:
                outcome = None, error
            except Exception as error:  # the others must not wait for what never comes
                own = error
                outcome = (
                    None,
                    CollectivesError(
                        f"The planning rank cannot go on: {type(error).__name__}: {error}"
                    ),
                )
        value, failure = self.from_planner(outcome)
        if own is not None:
            raise own
        if failure is not None:
            raise failure
        return value  # type: ignore[return-value]  # there was no failure, so there is a value

    def everywhere(self, make: Callable[[], T]) -> T:
        """What this rank makes, once every rank has made its own.

        Raises:
            Exception: this rank's own error.
            CollectivesError: that of another rank, so that none goes on without it.
        """
        made: T | None = None
        failure: Exception | None = None
        try:
            made = make()
        except Exception as error:  # of any kind: the others must not wait for this rank
            failure = error
        failures = self.gather_by_stage(None if failure is None else str(failure))
        if failure is not None:
            raise failure
        for stage, replicas in enumerate(failures):
            for text in replicas:
                if text is not None:
                    raise CollectivesError(f"A rank of stage {stage} cannot go on: {text}")
        return made  # type: ignore[return-value]  # there was no failure, so it is a T

    def latest(self, time_s: float) -> float:
        """The latest of the pipeline's times."""
        latest = torch.tensor([time_s], dtype=torch.float64)
        with self._names_the_loss():
            dist.all_reduce(latest, op=dist.ReduceOp.MAX, group=self._pipeline_group)
        return float(latest.item())

    @contextmanager
    def _names_the_loss(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[:1]
            raise CollectivesError(
                f"Stage {self._stage} lost another rank of the job: {' '.join(reason)}",
                remedy="Look at the other ranks' logs for the first error; clocks are reset on the "
                "way out.",
            ) from error


def mean(values: Sequence[float]) -> float:
    """Mean over replicas."""
    return sum(values) / len(values)
