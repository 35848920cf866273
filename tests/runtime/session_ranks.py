"""What the ranks of the session tests run."""

import pkgutil
import random
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import Any
from unittest.mock import DEFAULT, Mock, patch

import memory_ranks
import plain_stages
from plain_stages import MICROBATCHES, iterate, options
from waiting_plans import plans_are_waited_for

from envpipe_megatron.core.kinds import WHOLE, Kind, Unit
from envpipe_megatron.gpu.base import GpuError, ReadOnlyGpu
from envpipe_megatron.runtime.channel.collectives import HostGroup
from envpipe_megatron.runtime.job import phases
from envpipe_megatron.runtime.job.options import JobOptions
from envpipe_megatron.runtime.job.session import Session


def _until_steady(rank: int, session: Session) -> None:
    with closing(session), plans_are_waited_for():
        while session.state.phase != "steady":
            iterate(session, rank)


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


def lose_control(rank: int, root: Path, victim: int, asked: Mapping[str, Any]) -> Any:
    """The victim's clock control ends while clocks are chosen; its notes."""
    config = JobOptions(
        num_microbatches=MICROBATCHES, baseline_steps=3, output=root, fingerprint={}, **asked
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
            iterate(session, rank)
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
        iterate(session, rank, 36)
    return session.state.notes, [phase.value for phase, *_ in session.iterations.latest]


#: What a message takes in emulated time.
SLOW_MESSAGE_S = 0.003


def slowed_down(hosts: HostGroup) -> AbstractContextManager[Any]:
    """Have inputs come later than they were sent; later jobs of the process have the same hosts."""
    receive = hosts.receive
    return patch.object(hosts, "receive", lambda *of: receive(*of) + SLOW_MESSAGE_S)


def measure_a_job(rank: int, root: Path, tail_s: tuple[float, ...]) -> Any:
    """Profile a job whose stages work on after their last unit; what its profile came to.

    Messages take emulated time, too.

    Args:
        tail_s: for each stage, how long; the next iteration waits for the slowest of them.
    """
    config = options(root, baseline_steps=2, profile_steps=3, window_s=0.0)
    session, gpu = plain_stages.session(rank, config, root, time_at_max_s=LONG_UNITS_S)
    gpu.supported_frequencies_mhz = gpu.supported_frequencies_mhz[::10]  # a short sweep
    with closing(session), slowed_down(session.parts.collectives.pipeline):
        while session.state.phase != "steady":
            iterate(session, rank)
            gpu.advance_to(gpu.committed_end_s() + tail_s[rank])
    return session.state.profile


@dataclass(frozen=True)
class Fault:
    """A call that raises.

    Args:
        target: a function or a class's method, below `envpipe_megatron`.
        victim: the rank; None for all.
        error: what is raised.
        call: the number of the first call that raises.
    """

    target: str
    victim: int | None = 0
    error: type[BaseException] = ZeroDivisionError
    call: int = 1

    def on(self, rank: int) -> AbstractContextManager[Any]:
        """While it lasts, the call raises on its victim."""
        if self.victim not in (None, rank):
            return nullcontext()
        target = f"envpipe_megatron.{self.target}"
        ends = chain(repeat(DEFAULT, self.call - 1), repeat(self.error("of a test")))
        return patch(target, Mock(wraps=pkgutil.resolve_name(target), side_effect=ends))


def train_with_faults(
    rank: int,
    root: Path,
    request: dict[str, Any],
    faults: tuple[Fault, ...] = (),
    capacities: tuple[int, ...] = (10**9,) * 3,
    profile_file: Path | None = None,
) -> memory_ranks.Told:
    """Train into the steady phase; the job can be started again."""
    with ExitStack() as stack:
        for fault in faults:
            stack.enter_context(fault.on(rank))
        return memory_ranks.train(
            rank,
            root,
            capacities,
            5,
            request,
            profile_file,
            fingerprint={"hidden_size": 64},
        )


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
    by_chance = random.Random(rank)

    def jitter(unit: Unit) -> None:
        time.sleep(by_chance.expovariate(1 / 0.0005))

    records = []
    try:
        for _ in range(steps):
            iterate(session, rank, 1, jitter, microbatches)
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
