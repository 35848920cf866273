"""Random orders under random delays, through Megatron's own training: does anything hang?

`jobs` says what is run, and `install` makes a rank of such a job one of random orders.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from benchmarks.megatron_lm.jobs import Job, Site, State
from benchmarks.megatron_lm.models import (
    LEAST,
    LEAST_ON_CPU,
    NO_EVALUATION,
    PP2DP2,
    PP2TP2,
    PP4,
    Mapping,
    job_arguments,
    training,
)
from envpipe_megatron.core import builders
from envpipe_megatron.core.schedule import Schedule, Unit
from envpipe_megatron.formats.energy import Phase
from envpipe_megatron.policies.limits import order_limits
from envpipe_megatron.runtime.execution import interpreter
from envpipe_megatron.runtime.execution.orders import PhaseRun, constant_order
from envpipe_megatron.runtime.job import session
from envpipe_megatron.runtime.job.parts import PhaseParts

PART = "stress"


@dataclass(frozen=True)
class Setting:
    """A mapping with its number of hardware queues; None leaves the driver's own.

    With `loads_all`, CUDA loads all kernels at its start, so that one may be first used beside a
    posted receive.
    """

    name: str
    mapping: Mapping
    connections: str | None
    features: str = ""
    loads_all: bool = False


SETTINGS = (
    Setting("pp4", PP4, None),
    Setting("pp4-1-connection", PP4, "1"),
    Setting("pp2tp2-1-connection", PP2TP2, "1"),
    Setting("pp2dp2-overlap", PP2DP2, None, PP2DP2.distributed_optimizer()),
    Setting("pp4-all-kernels-loaded", PP4, None, loads_all=True),
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
            arguments=job_arguments(site.cpu, size, setting.mapping, *parts, setting.features),
            num_ranks=setting.mapping.num_ranks,
            iterations=iterations,
            patched=True,
            environment={
                "CUDA_DEVICE_MAX_CONNECTIONS": setting.connections,
                "CUDA_MODULE_LOADING": "EAGER" if setting.loads_all else None,
            },
            stress={"seed": 20, "delay_s": delay_s, "load_first": not setting.loads_all},
            limit_s=3600.0,
        )
        for setting in SETTINGS
        if setting.mapping.num_ranks <= site.num_gpus
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
            outcome = f"{done} iterations in {run['wall_s']:.0f} s, {different} different orders"
        else:
            stood = [f"rank {r}: iteration {i}, {u}" for r, (i, u) in run["stood_at"].items()]
            outcome = f"{run['status']}. {'; '.join(stood)}"
        found.append({"setting": name.split("/")[1], "outcome": outcome})
    return found


#: Of an H200 at its highest clock; where the clock is another, delays are longer by as much.
_CYCLES_PER_S = 1.98e9


def random_extra_forwards(
    source: random.Random, num_stages: int, num_microbatches: int, capacity: int | None
) -> tuple[int, ...]:
    """Extra forwards from none to all that batch and channel allow, rising or falling."""
    limits = order_limits(num_stages, num_microbatches, channel_capacity=capacity)
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


def random_orders(
    seed: int, told: Callable[[Sequence[int]], None], *, load_first: bool
) -> Callable[[PhaseParts], Any]:
    """Make what replaces a session's phases: a new order each iteration, on all ranks.

    With `load_first`, the kernel that delays is loaded before the first receive is posted: where
    kernels are loaded at first use, its loading beside a posted receive would hang.
    """

    def run_phases(job: PhaseParts) -> PhaseRun[None]:
        if load_first and torch.cuda.is_available():
            torch.cuda._sleep(1)  # type: ignore[no-untyped-call]  # torch's
            torch.cuda.synchronize()
        source = random.Random(seed)
        clocks = sorted(job.gpu.supported_frequencies_mhz)
        while True:
            extra = random_extra_forwards(
                source, job.num_stages, job.num_microbatches, job.channel.capacity
            )
            told(extra)
            schedule = builders.envpipe(job.num_stages, job.num_microbatches, extra)
            forward_mhz, backward_mhz = source.choice(clocks), source.choice(clocks)
            yield constant_order(Phase.STEADY, schedule, forward_mhz, backward_mhz)

    return run_phases


class DelayedWork:
    """A stage's units with random delays of host and device around them, some far longer."""

    def __init__(
        self, work: Any, source: random.Random, delay_s: float, starts: Callable[[Unit], None]
    ) -> None:
        self._work = work
        self._source = source
        self._delay_s = delay_s
        self._starts = starts

    def forward(self, unit: Unit, inputs: Any) -> Any:
        """Run a forward after its delays."""
        self._starts(unit)
        self._delay()
        return self._work.forward(unit, inputs)

    def backward(self, unit: Unit, gradients: Any) -> Any:
        """Run a backward between delays."""
        self._starts(unit)
        self._delay()
        result = self._work.backward(unit, gradients)
        self._delay_device()
        return result

    def sent(self, unit: Unit) -> None:
        """Pass on that the output is in the channel."""
        self._work.sent(unit)

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
) -> None:
    """Let sessions of this process run random orders with delays, by `Job.stress`."""
    inner = interpreter.execute
    source = random.Random(f"{settings['seed']}, rank {rank}")
    order = ""

    def told(extra: Sequence[int]) -> None:
        nonlocal order
        order = " ".join(map(str, extra))

    def starts(unit: Unit) -> None:
        at(iteration(), f"{unit} of [{order}]")

    def execute(schedule: Schedule, stage: int, work: Any, *args: Any) -> Any:
        delayed = DelayedWork(work, source, settings["delay_s"], starts)
        return inner(schedule, stage, delayed, *args)

    # Until the process ends.
    orders = random_orders(settings["seed"], told, load_first=settings["load_first"])
    mock.patch.object(session, "run_phases", orders).start()
    mock.patch.object(session, "execute", execute).start()
