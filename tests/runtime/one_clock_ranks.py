"""What the ranks of the tests of one clock for a whole job run."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import plain_stages

from envpipe_megatron.core.kinds import Kind
from envpipe_megatron.core.orders import builders
from envpipe_megatron.runtime.job.options import JobOptions, Level

#: Of an iteration of each stage at the highest clock.
UNSEEN_S = (1.0, 1.2, 0.8)


def train_unseen(rank: int, root: Path, allowed_percent: float) -> Any:
    """Train a framework that runs whole iterations of which no unit is seen."""
    config = JobOptions(
        num_microbatches=1,
        type="uniform",
        baseline_steps=2,
        profile_steps=1,
        level=Level.UNIFORM,
        max_slowdown=allowed_percent,
    )
    session, gpu = plain_stages.session(
        rank, config, root, time_at_max_s={Kind.FORWARD: UNSEEN_S[rank]}
    )
    requested: dict[str, set[int | None]] = {"warm-up": set(), "profile": set(), "steady": set()}
    timed: list[bool] = []
    with contextlib.closing(session):
        while len(timed) < 12:
            session.begin_step()
            run = session.open_iteration(
                builders.whole_iteration(len(UNSEEN_S)), plain_stages.SPECS
            )
            run.begin_unit()
            run.end_unit()
            session.end_step()
            requested[session.state.phase.value].add(gpu.requested_frequency_mhz)
            if requested["steady"]:
                timed.append(run.order.times_units)
        return {
            "notes": session.state.notes,
            "requested": requested,
            "executed": session.executed,
            "timed": timed,
            "iterations": [time_s for _, time_s, _ in session.iterations.latest],
        }
