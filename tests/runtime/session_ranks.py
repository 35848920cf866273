"""What the ranks of the session tests run."""

from __future__ import annotations

import pkgutil
import random
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import memory_ranks
import plain_stages
import torch
from waiting_plans import plans_are_waited_for

from envpipe_megatron.core.kinds import WHOLE, Kind, Unit
from envpipe_megatron.gpu.base import GpuError, ReadOnlyGpu
from envpipe_megatron.gpu.emulated.emulated_gpu import EmulatedGpu
from envpipe_megatron.runtime.channel.carrier import StageSpecs, TensorSpec
from envpipe_megatron.runtime.channel.p2p import P2PChannel
from envpipe_megatron.runtime.job import phases
from envpipe_megatron.runtime.job.measuring import measure_p2p_latency_s
from envpipe_megatron.runtime.job.options import JobOptions
from envpipe_megatron.runtime.job.session import Session

MICROBATCHES = 3


def _work(rank: int) -> Any:
    return lambda schedule: plain_stages.PlainWork(schedule, rank)


def _until_steady(rank: int, session: Session) -> None:
    with closing(session), plans_are_waited_for():
        while session.state.phase != "steady":
            session.run_iteration(MICROBATCHES, plain_stages.SPECS, _work(rank))


#: Of one unit at the highest clock, s: changes of clock take little of it.
LONG_UNITS_S = {Kind.FORWARD: 0.1, Kind.BACKWARD: 0.2}


def train_with_reconfiguring(rank: int, root: Path) -> None:
    """EnvPipe's full configuration, from a profile by file."""
    config = JobOptions(
        num_microbatches=MICROBATCHES,
        type="envelope",
        baseline_steps=3,
        profile=root / "profile.csv",
        output=root,
    )
    session, _ = plain_stages.session(rank, config, root, time_at_max_s=LONG_UNITS_S)
    _until_steady(rank, session)


def lose_control(rank: int, root: Path, victim: int, schedule: str) -> Any:
    """The victim's clock control ends in a closed loop; its notes, and what was kept by then."""
    config = JobOptions(
        num_microbatches=MICROBATCHES,
        scheduling=schedule,
        baseline_steps=3,
        output=root,
        fingerprint={},
    )
    session, _ = plain_stages.session(rank, config, root, time_at_max_s=LONG_UNITS_S)
    with (
        closing(session),
        plans_are_waited_for(),
        patch.object(phases, "_TRIED_AFTER", 2),
    ):
        for number in range(40):
            if rank == victim and number == 8:
                session.clock.stop(GpuError("the driver of a test"))
            session.run_iteration(MICROBATCHES, plain_stages.SPECS, _work(rank))
    return session.state.notes


def look_for_the_shortest(rank: int, root: Path) -> Any:
    """A start of a job that may set no clock: its notes, and the phases of its iterations."""
    config = JobOptions(
        num_microbatches=MICROBATCHES,
        baseline_steps=6,
        output=root / "job",
        fingerprint={},
        why_whole="",
    )
    made = partial(plain_stages.session, time_at_max_s=LONG_UNITS_S, seen_as=ReadOnlyGpu)
    session, _ = made(rank, config, root)
    with closing(session), plans_are_waited_for():
        for _ in range(36):
            session.run_iteration(MICROBATCHES, plain_stages.SPECS, _work(rank))
    return session.state.notes, [phase.value for phase, *_ in session.iterations.latest]


#: What a message back takes of the emulated time of who receives it; one forward takes none.
SLOW_MESSAGE_S = 0.006


def slow_down(channel: P2PChannel, gpu: EmulatedGpu) -> None:
    receive = channel.receive

    def slowly(unit: Unit) -> list[torch.Tensor]:
        tensors = receive(unit)
        if unit.kind is Kind.BACKWARD:
            gpu.advance_to(gpu.committed_end_s() + SLOW_MESSAGE_S)
        return tensors

    channel.receive = slowly  # type: ignore[method-assign]


def measure_a_job(rank: int, root: Path, tail_s: tuple[float, ...]) -> Any:
    """Profile a job whose stages work on after their last unit; what its profile came to.

    Messages back take emulated time, too.

    Args:
        tail_s: for each stage, how long; the next iteration waits for the slowest of them.
    """
    config = JobOptions(
        num_microbatches=MICROBATCHES,
        type="envelope",
        reconfigure="default",
        baseline_steps=1,
        profile_steps=3,
        window_s=0.0,
        output=root,
    )
    session, gpu = plain_stages.session(rank, config, root, time_at_max_s=LONG_UNITS_S)
    gpu.supported_frequencies_mhz = gpu.supported_frequencies_mhz[::10]  # a short sweep
    slow_down(session._channel, gpu)
    try:
        while session.state.phase != "steady":
            session.run_iteration(MICROBATCHES, plain_stages.SPECS, _work(rank))
            gpu.advance_to(gpu.committed_end_s() + tail_s[rank])
    finally:
        session.close()
    return session.state.profile


class _RealTime:
    """An executor that lets messages be waited for and time be real, without a GPU."""

    def now_s(self) -> float:
        return time.monotonic()

    def wait_for_messages(self) -> None:
        pass


def hops(rank: int, rounds: int, shape: tuple[int, ...], seed: int) -> list[float]:
    """Latencies as the ranks see them, who come to each measurement at random times."""
    rng = random.Random(10 * seed + rank)
    channel = plain_stages.channel(10.0)
    specs = StageSpecs.alike(TensorSpec.of_one_type((shape,), torch.float32, torch.device("cpu")))
    found = []
    for _ in range(rounds):
        time.sleep(rng.expovariate(1 / 0.005))
        executor: Any = _RealTime()
        found.append(measure_p2p_latency_s(rank, 3, channel, specs, executor))
    return found


@dataclass(frozen=True)
class Fault:
    """A call that raises.

    Args:
        target: `module:function` or `module:Class.method`, below `envpipe_megatron`.
        victim: the rank; None for all.
        error: what is raised.
        call: the number of the first call that raises.
    """

    target: str
    victim: int | None = 0
    error: type[BaseException] = ZeroDivisionError
    call: int = 1

    @contextmanager
    def on(self, rank: int) -> Iterator[None]:
        """While it lasts, the call raises on its victim."""
        if self.victim not in (None, rank):
            yield
            return
        path, name = self.target.rsplit("." if "." in self.target.split(":")[1] else ":", 1)
        owner = pkgutil.resolve_name(f"envpipe_megatron.{path}")
        original = getattr(owner, name)
        calls = 0

        def failing(*arguments: Any, **named: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls >= self.call:
                raise self.error("of a test")
            return original(*arguments, **named)

        with patch.object(owner, name, failing):
            yield


def train_with_faults(
    rank: int,
    root: Path,
    request: dict[str, Any],
    faults: tuple[Fault, ...] = (),
    capacities: tuple[int, ...] = (10**9,) * 3,
    profile_file: Path | None = None,
) -> memory_ranks.Told:
    """Train into the steady phase; the job can be started again."""
    with _all(faults, rank):
        return memory_ranks.train(
            rank,
            root,
            capacities,
            5,
            request,
            profile_file,
            fingerprint={"hidden_size": 64},
        )


@contextmanager
def _all(faults: tuple[Fault, ...], rank: int) -> Iterator[None]:
    if not faults:
        yield
        return
    with faults[0].on(rank), _all(faults[1:], rank):
        yield


def run_plan(
    rank: int,
    root: Path,
    preset: str,
    microbatches: int,
    chunks: int,
    times_s: list[tuple[float, float]],
    steps: int,
) -> list[dict[str, Any]]:
    """One warm-up iteration, then those of the plan, while the host adds its own jitter."""
    config = JobOptions(
        num_microbatches=microbatches,
        type="baseline",
        num_chunks=chunks,
        baseline_steps=1,
        profile=root / "profile.csv",
        plan=root / "plan.json",
        output=root / "output",
        why_whole="",
    )
    session, _ = plain_stages.session(
        rank,
        config,
        root,
        preset=preset,
        time_at_max_s=dict(zip(WHOLE, times_s[rank], strict=True)),
    )
    jitter = random.Random(rank)
    records = []
    try:
        for _ in range(steps):
            session.run_iteration(
                microbatches,
                plain_stages.SPECS,
                lambda schedule: plain_stages.PlainWork(
                    schedule, rank, lambda unit: time.sleep(jitter.expovariate(1 / 0.0005))
                ),
            )
            record = session.iterations.last_record
            records.append(
                {
                    "iteration_time_s": record.iteration_time_s,
                    "start_s": record.start_s.tolist(),
                    "end_s": record.end_s.tolist(),
                    "receive_wait_s": record.receive_wait_s.tolist(),
                }
            )
    finally:
        session.close()
    return records
