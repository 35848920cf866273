"""Random orders under random delays, through Megatron's own training: does anything hang?

`jobs` says what is run, and `install` makes a rank of such a job one of random orders.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import torch

from benchmarks.megatron_lm.models import (
    EXPERTS,
    LEAST,
    LEAST_ON_CPU,
    NO_EVALUATION,
    PP2,
    PP2DP2,
    PP2TP2,
    PP4,
    PP4TP2,
    PP8,
    Mapping,
    job_arguments,
    training,
)
from benchmarks.megatron_lm.running.jobs import Job, Site, State
from envpipe_megatron.core.kinds import SPLIT, Kind, Unit, unit
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.formats.energy import Phase
from envpipe_megatron.policies.problem import order_limits
from envpipe_megatron.runtime.channel.p2p import P2PChannel
from envpipe_megatron.runtime.execution import stage_run
from envpipe_megatron.runtime.execution.stage_run import IterationOrder, PhaseRun
from envpipe_megatron.runtime.job import iterations, session
from envpipe_megatron.runtime.job.parts import PhaseParts

PART = "stress"


@dataclass(frozen=True)
class Setting:
    """A mapping with its number of hardware queues; None leaves the driver's own.

    Jobs with experts check themselves first.
    """

    name: str
    mapping: Mapping
    connections: str | None
    features: str = ""
    splits: bool = False


_SPREAD = f"{EXPERTS} {PP2DP2.expert_parallel}"
SETTINGS = (
    Setting("pp2", PP2, None),
    Setting("pp2-1-connection", PP2, "1"),
    Setting("pp4", PP4, None),
    Setting("pp4-1-connection", PP4, "1"),
    Setting("pp2tp2-1-connection", PP2TP2, "1"),
    Setting("pp2dp2-overlap", PP2DP2, None, PP2DP2.distributed_optimizer()),
    Setting("pp8", PP8, None),
    Setting("pp4tp2-1-connection", PP4TP2, "1"),
    Setting("pp2vp2", replace(PP2, chunks=2), None),
    Setting("pp2-split", PP2, None, splits=True),
    Setting("pp2vp2-split", replace(PP2, chunks=2), None, splits=True),
    Setting("pp4-split", PP4, None, splits=True),
    Setting("pp4vp2-split", replace(PP4, chunks=2), None, splits=True),
    Setting("pp2ep2-experts", PP2DP2, None, _SPREAD),
    Setting("pp2vp2ep2-experts", replace(PP2DP2, chunks=2), None, _SPREAD),
)


def jobs(site: Site, iterations: int, delay_s: float) -> list[Job]:
    """One job a setting; each is one turn."""
    size = LEAST_ON_CPU if site.cpu else LEAST
    parts = (
        size.mock_data,
        training(iterations, log_interval=100),
        f"{NO_EVALUATION} --bf16",
        "--envpipe --envpipe-type baseline --envpipe-gpu-control {control}",
    )
    return [
        Job(
            name=f"{PART}/{setting.name}",
            arguments=job_arguments(
                site.cpu,
                size.fitting(setting.mapping),
                setting.mapping,
                *parts,
                setting.features,
            ),
            num_ranks=setting.mapping.num_ranks,
            iterations=iterations,
            patched=True,
            environment={"CUDA_DEVICE_MAX_CONNECTIONS": setting.connections},
            stress={"seed": 20, "delay_s": delay_s, "splits": setting.splits},
            limit_s=3600.0,
        )
        for setting in SETTINGS
        if setting.mapping.num_ranks <= site.num_ranks
    ]


def rows(state: State) -> list[dict[str, Any]]:
    """How far each run came, and where each rank stood if it did not end well."""
    found = []
    for name, run in state.runs.items():
        if not name.startswith(f"{PART}/"):
            continue
        if run["status"] == "ok":
            done = min((sum(rank["orders"].values()) for rank in run["ranks"]), default=0)
            different = max((rank["different_orders"] for rank in run["ranks"]), default=0)
            waits = sum(rank.get("device_waits", 0) for rank in run["ranks"])
            outcome = (
                f"{done} iterations in {run['wall_s']:.0f} s, {different} different orders, "
                f"{waits} waits for the device inside of units"
            )
        else:
            stood = [f"rank {r}: iteration {i}, {u}" for r, (i, u) in run["stood_at"].items()]
            outcome = f"{run['status']}. {'; '.join(stood)}"
        found.append({"setting": name.split("/")[1], "outcome": outcome})
    return found


#: Of an H200 at its highest clock; where the clock is another, delays are longer by as much.
_CYCLES_PER_S = 1.98e9
#: Units that wait for the whole device.
_WAITS = 0.3
#: Exchanges of neighbouring units that are tried in an order.
_EXCHANGES = 60


def random_extra_forwards(
    source: random.Random, num_stages: int, num_microbatches: int, capacity: int | None
) -> tuple[int, ...]:
    """Extra forwards from none to all that batch and channel allow, rising or falling."""
    limits = order_limits(
        builders.one_f_one_b(num_stages, num_microbatches), channel_capacity=capacity
    )
    kind = source.random()
    if kind < 0.1:
        wanted = [0] * num_stages
    elif kind < 0.3:
        wanted = list(limits.most)
    elif kind < 0.6:
        wanted = [source.randint(0, most) for most in limits.most]
    else:  # each stage has no more than the one before
        wanted = []
        for most in limits.most:
            wanted.append(source.randint(0, min([most, *wanted[-1:]])))
    return limits.fit(wanted)


def random_interleaved(
    source: random.Random, num_stages: int, num_microbatches: int, num_chunks: int
) -> tuple[Schedule, tuple[int, ...]]:
    """An interleaved order of random groups and longer warm-ups, and both as numbers."""
    while True:
        group = source.randint(num_stages, num_microbatches)
        extra: list[int] = []
        for _ in range(num_stages):
            extra.append(source.randint(0, min([2 * num_stages, *extra[-1:]])))
        job = num_stages, num_microbatches, num_chunks, group
        with contextlib.suppress(EnvPipeError):  # stages would wait in circles
            return builders.interleaved(*job, extra_warmup=extra), (group, *extra)


def stirred(source: random.Random, schedule: Schedule) -> Schedule:
    """Exchange neighbouring units of other kinds or chunks where the order can still run.

    Messages are then taken in another order than they are sent, and sums stay the same.
    """
    for _ in range(_EXCHANGES):
        stage = source.randrange(schedule.num_stages)
        order = [*schedule.stages[stage]]
        at = source.randrange(len(order) - 1)
        one, two = order[at : at + 2]
        if (one.kind, one.chunk) != (two.kind, two.chunk):
            order[at : at + 2] = two, one
            stages = (*schedule.stages[:stage], tuple(order), *schedule.stages[stage + 1 :])
            with contextlib.suppress(EnvPipeError):  # one needs the other, or stages would wait
                schedule = replace(schedule, stages=stages)
    return schedule


def randomly_split(source: random.Random, schedule: Schedule) -> Schedule:
    """Split some backwards of an order; their second parts come late, in the backwards' order."""

    def split(order: Sequence[Unit]) -> Iterator[Unit]:
        late: list[Unit] = []
        for own in order:
            if own.kind is Kind.FORWARD:
                yield own
            else:
                first, second = (unit(k, own.microbatch, own.chunk) for k in SPLIT[1:])
                if whole := source.random() < 0.25:
                    yield from late
                    late.clear()
                yield replace(first, combined=whole)
                late.append(second)
                if whole:
                    yield late.pop()
            done = source.choice((0, 0, 1, 2))
            yield from late[:done]
            del late[:done]
        yield from late

    stages = tuple(tuple(split(order)) for order in schedule.stages)
    return replace(schedule, name="random", stages=stages)


def is_one_sided(channel: P2PChannel) -> bool:
    """Whether no receive is ever posted, so that a unit may wait for the whole device."""
    return channel.about == "one-sided copies"


def random_orders(
    seed: int, told: Callable[[Sequence[int], P2PChannel], None], *, splits: bool = False
) -> Callable[[PhaseParts], Any]:
    """Make what replaces a session's phases: a new order each iteration, on all ranks.

    Where receives are posted, the kernel that delays is loaded before the first one: its loading
    beside a posted receive would hang. Each order and the channel are told.
    """

    def run_phases(job: PhaseParts) -> PhaseRun[None]:
        if torch.cuda.is_available() and not is_one_sided(job.channel):
            torch.cuda._sleep(1)  # type: ignore[no-untyped-call]  # torch's
            torch.cuda.synchronize()
        source = random.Random(seed)
        clocks = sorted(job.gpu.supported_frequencies_mhz)
        while True:
            if job.options.num_chunks > 1:
                schedule, extra = random_interleaved(
                    source, job.num_stages, job.num_microbatches, job.options.num_chunks
                )
                schedule = stirred(source, schedule)
            else:
                extra = random_extra_forwards(
                    source, job.num_stages, job.num_microbatches, job.channel.capacity
                )
                schedule = builders.envpipe(job.num_stages, job.num_microbatches, extra)
            if splits:
                schedule = randomly_split(source, schedule)
            told(extra, job.channel)
            forward_mhz, backward_mhz = source.choice(clocks), source.choice(clocks)
            clocks_mhz = np.where(schedule.is_backward, backward_mhz, forward_mhz)
            yield IterationOrder(Phase.STEADY, schedule, schedule.pair_clocks(clocks_mhz))

    return run_phases


class DelayedWork:
    """A stage's units, each told as it begins, with random delays of host and device around them.

    Some delays are far longer than the others. With `wait_for_device`, which waits for all that a
    device holds, it is called at the begin of some units, between delays and work of others, or at
    their end.
    """

    def __init__(
        self,
        work: Any,
        source: random.Random,
        delay_s: float,
        starts: Callable[[Unit], None],
        wait_for_device: Callable[[], None] | None,
    ) -> None:
        self._work = work
        self._source = source
        self._delay_s = delay_s
        self._starts = starts
        self._wait_for_device = wait_for_device

    def forward(self, unit: Unit, inputs: Any) -> Any:
        """Run a forward."""
        return self._run(unit, self._work.forward, inputs)

    def backward(self, unit: Unit, gradients: Any) -> Any:
        """Run a backward."""
        return self._run(unit, self._work.backward, gradients)

    def weight_gradient(self, unit: Unit) -> None:
        """Run the second part of a backward."""
        self._run(unit, lambda own, _: self._work.weight_gradient(own), None)

    def sent(self, unit: Unit) -> None:
        """Pass on that the output is in the channel."""
        self._work.sent(unit)

    def _run(self, unit: Unit, run: Callable[[Unit, Any], Any], data: Any) -> Any:
        self._starts(unit)
        waits = self._wait_for_device is not None and self._source.random() < _WAITS
        place = self._source.choice(("begin", "work", "end")) if waits else None
        self._wait_at(place == "begin")
        self._delay()
        self._wait_at(place == "work")
        result = run(unit, data)
        self._delay_device()
        self._wait_at(place == "end")
        return result

    def _wait_at(self, here: bool) -> None:
        if here and self._wait_for_device is not None:
            self._wait_for_device()

    def _delay(self) -> None:
        if self._source.random() < 0.15:
            time.sleep(self._time_s())
        self._delay_device()

    def _delay_device(self) -> None:
        if self._source.random() < 0.25:
            if torch.cuda.is_available():
                torch.cuda._sleep(int(self._time_s() * _CYCLES_PER_S))  # type: ignore[no-untyped-call]
            else:
                time.sleep(self._time_s())

    def _time_s(self) -> float:
        longest = self._delay_s * (5.0 if self._source.random() < 0.03 else 1.0)
        return self._source.random() * longest


def install(
    settings: dict[str, Any],
    rank: int,
    at: Callable[[int, str], None],
    iteration: Callable[[], int],
    on_device_wait: Callable[[], None],
) -> None:
    """Let sessions of this process run random orders with delays, by `Job.stress`.

    With one-sided copies some units wait for the whole device, and tell so.
    """
    source = random.Random(f"{settings['seed']}, rank {rank}")
    order, waits = "", False

    def told(extra: Sequence[int], channel: P2PChannel) -> None:
        nonlocal order, waits
        order, waits = " ".join(map(str, extra)), is_one_sided(channel)

    def starts(unit: Unit) -> None:
        at(iteration(), f"{unit} of [{order}]")

    def wait_for_device() -> None:
        torch.cuda.synchronize()
        on_device_wait()

    def delayed(work: Any) -> DelayedWork:
        waiting = wait_for_device if waits else None
        return DelayedWork(work, source, settings["delay_s"], starts, waiting)

    inner = stage_run.execute

    def execute(work: Any, *how: Any) -> None:
        inner(delayed(work), *how)

    # Until the process ends.
    orders = random_orders(settings["seed"], told, splits=settings["splits"])
    mock.patch.object(iterations, "run_phases", orders).start()
    mock.patch.object(session, "execute", execute).start()
