"""What the ranks of the emulation tests run: sessions over plain tensors, sleeps jumped over."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import plain_stages

from envpipe_megatron.core.kinds import WHOLE
from envpipe_megatron.policies.request import PlanRequest
from envpipe_megatron.runtime.job.session import SessionConfig
from envpipe_megatron.runtime.profiling.profiler import ProfilerSettings


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
    config = SessionConfig(
        PlanRequest(microbatches, num_chunks=chunks),
        warmup_iterations=1,
        profile_file=root / "profile.csv",
        plan_file=root / "plan.json",
        output_dir=root / "output",
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
            record = session.last_record
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


def profile(rank: int, root: Path, preset: str, times_s: tuple[float, float]) -> Any:
    """The profile that a session measures, and the phases it went through."""
    config = SessionConfig(
        PlanRequest(3, "envpipe", "envelope"),
        warmup_iterations=1,
        profiler=ProfilerSettings(1, 3, 3, min_window_s=0.0),
        output_dir=root,
    )
    session, gpu = plain_stages.session(
        rank, config, root, preset=preset, time_at_max_s=dict(zip(WHOLE, times_s, strict=True))
    )
    try:
        while session.state.phase != "steady":
            session.run_iteration(
                3,
                plain_stages.SPECS,
                lambda schedule: plain_stages.PlainWork(schedule, rank),
            )
    finally:
        session.close()
    return session.state.profile, gpu.preset
