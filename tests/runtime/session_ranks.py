"""What the ranks of the session tests run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import plain_stages

from envpipe_megatron.policies.planner import PlanRequest
from envpipe_megatron.runtime.profiler import ProfilerSettings
from envpipe_megatron.runtime.session import SessionConfig

MICROBATCHES = 3
QUICK = ProfilerSettings(1, 1, 1, min_window_s=0.0)


def _work(rank: int, fail_in: str = "") -> Any:
    def before_unit(unit: Any) -> None:
        if str(unit) == fail_in:
            raise ValueError("the forward of a test")

    return lambda schedule: plain_stages.PlainWork(schedule, rank, before_unit)


def train_with_a_failing_meter(rank: int, root: Path, victim: int, fails_at: int) -> Any:
    """Train to the steady phase, or for many steps; the victim's counter fails at a reading."""
    config = SessionConfig(
        PlanRequest(MICROBATCHES, "envpipe", "envelope", "balanced"),
        profiler=QUICK,
        output_dir=root / "made" / "by the session",
    )
    session, gpu = plain_stages.session(rank, config, root)
    readings = 0
    read_energy = gpu.read_energy

    def failing() -> Any:
        nonlocal readings
        readings += 1
        if rank == victim and readings > fails_at:
            raise OSError("the counter of a test")
        return read_energy()

    gpu.read_energy = failing  # type: ignore[method-assign]
    try:
        for _ in range(80):
            session.run_iteration(MICROBATCHES, plain_stages.SPEC, _work(rank))
            if session.state.phase == "steady":
                break
        return session.state.phase.value, session.state.notes, session.state.plan is None
    finally:
        session.close()


def use_again_after_a_failure(rank: int, root: Path) -> list[str]:
    """Each rank fails by itself in its first unit; then tries once more."""
    session, _ = plain_stages.session(rank, SessionConfig(PlanRequest(MICROBATCHES)), root)
    errors = []
    try:
        for _ in range(2):
            try:
                # The first stage fails at once; the others, when it is gone from their view.
                session.run_iteration(MICROBATCHES, plain_stages.SPEC, _work(rank, "F0"))
            except Exception as error:
                errors.append(f"{type(error).__name__}: {error}")
    finally:
        session.close()
    return errors


def plan_of_other_clocks(rank: int, root: Path) -> str:
    """A profile with a clock that the emulated A100 does not have."""
    config = SessionConfig(
        PlanRequest(MICROBATCHES, "1f1b", "uniform"), profile_file=root / "profile.csv"
    )
    session, _ = plain_stages.session(rank, config, root)
    try:
        for _ in range(5):
            session.run_iteration(MICROBATCHES, plain_stages.SPEC, _work(rank))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        session.close()
    return "nothing was refused"
