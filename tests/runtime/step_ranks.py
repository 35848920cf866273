"""What the ranks of the tests of steps, pauses and restarts run."""

import math
import os
import random
import signal
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import plain_stages
from waiting_plans import plans_are_waited_for

from envpipe_megatron.core.kinds import Kind
from envpipe_megatron.core.orders import builders
from envpipe_megatron.gpu.emulated.emulated_gpu import EmulatedGpu
from envpipe_megatron.runtime.execution import executor
from envpipe_megatron.runtime.job.options import JobOptions
from envpipe_megatron.runtime.job.session import Session

REFRESH_S = 0.1
TIMES_S = {Kind.FORWARD: 0.1, Kind.BACKWARD: 0.2}
FINGERPRINT = {"hidden_size": 64, "pipeline": 3, "gpu": "emulated", "lr": None}


class Framework:
    """A training loop around a session, which knows from the exact counter what it must be told.

    Steps begin and end at refreshes of the counter, where it tells the exact energy.
    """

    def __init__(self, rank: int, session: Session, gpu: EmulatedGpu) -> None:
        self.rank, self.session, self.gpu = rank, session, gpu
        #: Of each piece of training, energy and instant at its begin and end.
        self.pieces: list[tuple[float, float, float, float]] = []
        self._begin: tuple[float, float] | None = None
        self._end = 0.0, 0.0

    def idle(self, duration_s: float) -> None:
        """Let emulated time pass, as an optimizer or a checkpoint does, while the meter looks."""
        end_s = self.gpu.committed_end_s() + duration_s
        # A hair behind the refresh, or rounding would now and then be a hair before it.
        end_s = math.ceil(end_s / REFRESH_S - 1e-3) * REFRESH_S + 1e-6
        while self.gpu.committed_end_s() < end_s - 1e-9:
            self.gpu.advance_to(min(end_s, self.gpu.committed_end_s() + REFRESH_S / 2))
            now_s = self.gpu.committed_end_s()
            self.gpu.anchor(executor.time.monotonic() - now_s)  # type: ignore[attr-defined]
            self.session.parts.meter._try_sample()

    def step(
        self,
        iteration: int | None = None,
        optimizer_s: float = 0.03,
        before_unit: Callable[[Any], None] = lambda unit: None,
    ) -> None:
        self.begin(iteration)
        self.iterate(before_unit)
        self.end(optimizer_s)

    def begin(self, iteration: int | None = None) -> None:
        if self._begin is None:
            self._begin = self._now()
        self.session.begin_step(iteration)

    def iterate(self, before_unit: Callable[[Any], None] = lambda unit: None) -> None:
        plain_stages.iterate(self.session, self.rank, 1, before_unit)

    def end(self, optimizer_s: float) -> None:
        executor = self.session.executor  # all meet for the norm of all gradients
        executor._gpu.advance_to(executor._collectives.latest(executor.now_s()))
        self.idle(optimizer_s)
        self.session.end_step()
        self._end = self._now()

    def pause(self) -> None:
        self.session.pause()
        self.take()

    def evaluate(self) -> None:
        """As a framework does by itself."""
        self.pause()
        self.idle(0.3)

    def take(self) -> None:
        """A piece of training ends with its last step."""
        if self._begin is not None:
            self.pieces.append((*self._begin, *self._end))
        self._begin = None

    def lapped(self) -> tuple[float, float]:
        """Energy and time of training since the last call."""
        going_on = self._begin is not None
        self.take()
        energy_j = sum(end_j - begin_j for begin_j, _, end_j, _ in self.pieces)
        duration_s = sum(end_s - begin_s for _, begin_s, _, end_s in self.pieces)
        self.pieces = []
        if going_on:
            self._begin = self._end
        return energy_j, duration_s

    def _now(self) -> tuple[float, float]:
        return self.gpu._file.read().energy_j, self.gpu.committed_end_s()


def framework(
    rank: int, config: JobOptions, root: Path, times: float = 1.0, **options: Any
) -> Framework:
    """One whose units take so many times as long as `TIMES_S`."""
    times_s = {kind: times * time_s for kind, time_s in TIMES_S.items()}
    session, gpu = plain_stages.session(rank, config, root, time_at_max_s=times_s, **options)
    made = Framework(rank, session, gpu)
    made.idle(REFRESH_S)
    return made


def with_few_clocks(gpu: EmulatedGpu) -> EmulatedGpu:
    """A profile of few iterations."""
    gpu.supported_frequencies_mhz = (1410, 1200, 1095)
    return gpu


def config(root: Path, warmup: int = 3, **wishes: Any) -> JobOptions:
    return plain_stages.options(root, baseline_steps=warmup, **wishes)


def bill_random_steps(rank: int, root: Path) -> Any:
    """Train with random optimizers, gaps, evaluations, checkpoints and laps.

    Returns:
        each lap and what the exact counter says of it; the log's total, and what it should be.
    """
    rng = random.Random(0)  # the same on every rank
    made = framework(rank, config(root), root)
    session = made.session
    laps = []
    expected_j = expected_s = 0.0
    try:
        for iteration in range(24):
            made.step(7 + iteration, rng.uniform(0, 0.4))
            made.idle(rng.choice([0.0, 0.0, 0.07]))
            if rng.random() < 0.3:
                lap = session.energy.lap()
                job = session.energy.gather(lap)
                truth = made.lapped()
                expected_j += truth[0]
                expected_s += truth[1]
                laps.append((lap, job, truth))
            if rng.random() < 0.2:
                made.evaluate()
            elif rng.random() < 0.2:
                made.pause()
                made.idle(rng.uniform(0, 2))
                if rng.random() < 0.5:
                    session.end_step()  # one too many changes nothing
                    session.pause()
        rest = made.lapped()
        laps.append((session.energy.lap(), None, rest))
    finally:
        session.close()
    totals = session.energy.log.totals
    billed = sum(t.energy_j for t in totals.values()), sum(t.duration_s for t in totals.values())
    return laps, billed, (expected_j + rest[0], expected_s + rest[1]), session.energy.sums()


def fail_and_close(rank: int, root: Path, victim: int) -> Any:
    """One rank raises in the middle of an iteration, and all close, twice."""
    made = framework(rank, config(root, type="baseline"), root, timeout_s=2.0)
    session = made.session

    def before_unit(unit: Any) -> None:
        if rank == victim and str(unit) == "B1":
            raise ValueError("the unit of a test")

    made.step()
    made.step()
    truth = made.lapped()
    errors = []
    for _ in range(2):
        try:
            made.step(before_unit=before_unit)
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
    session.close()
    session.close()
    return errors, truth, session.energy.sums(), session.summary()


def start_job(
    rank: int,
    root: Path,
    steps: int,
    first: int = 0,
    killed: tuple[int, int, str] | None = None,
    reconfigure: str = "balanced",
) -> Any:
    """Start a job, or start it again.

    Args:
        steps: to train; one that is killed trains until then.
        first: the framework's number of the first.
        killed: rank, step of this start, and unit before which it kills itself.

    Returns:
        phase of each step, what was said, and the session's profile, plan, baseline and summary.
    """
    said: list[str] = []
    made = framework(
        rank,
        replace(
            config(root / "output", warmup=4, reconfigure=reconfigure),
            fingerprint=FINGERPRINT,
        ),
        root,
        seen_as=with_few_clocks,
        say=said.append,
    )
    session = made.session
    phases = []
    with closing(session), plans_are_waited_for():
        for count in range(steps):

            def before_unit(unit: Any, count: int = count) -> None:
                if killed == (rank, count, str(unit)):
                    os.kill(os.getpid(), signal.SIGKILL)

            made.step(first + count, before_unit=before_unit)
            phases.append(session.state.phase.value)
    state = session.state
    plan = state.plan.to_json() if state.plan else None
    csv = state.profile.to_csv() if state.profile else None
    return {
        "phases": phases,
        "said": said,
        "profile": csv,
        "plan": plan,
        "baseline": session.energy.baselines.get(""),
        "summary": session.summary(),
        "logged_j": sum(t.energy_j for t in session.energy.log.totals.values()),
    }


FULL = 4


def train_kept(
    rank: int,
    root: Path,
    counts: Sequence[int],
    options: dict[str, Any],
    files: dict[str, Any] | None = None,
    times: float = 1.0,
) -> dict[str, Any]:
    """Train a framework that runs units in its own order, of so many microbatches in each step.

    Units take `times` as long as `TIMES_S`.

    Returns:
        for each step its phase and its units' clocks, what its log line compares it with, what was
        said, and what is known in the end.
    """
    said: list[str] = []
    wishes = {"type": "optimal", "scheduling": "1f1b", "sweep": True, **options}
    wanted = replace(
        config(root / "output", **wishes),
        num_microbatches=FULL,
        fingerprint=FINGERPRINT,
        **(files or {}),
    )
    made = framework(rank, wanted, root, times, seen_as=with_few_clocks, say=said.append)
    session = made.session
    steps, reports = [], []
    with closing(session), plans_are_waited_for():
        for count in counts:
            made.begin()
            order = builders.one_f_one_b(3, count)
            run = session.open_iteration(order, plain_stages.SPECS)
            while run.next_unit is not None:
                run.begin_unit()
                run.end_unit()
            made.end(0.3)
            steps.append((session.state.phase.value, tuple(run.frequencies_mhz)))
            reports.append(session.energy.gather(session.energy.lap()))
    return {
        "steps": steps,
        "reports": reports,
        "said": said,
        "profile": session.state.profile,
        "baselines": dict(session.energy.baselines),
        "sums": session.energy.sums(),
        "summary": session.summary(),
    }
