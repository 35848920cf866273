"""What a job's logs take on disk: a session of plain tensors on emulated GPUs, without sleeps."""

from __future__ import annotations

from pathlib import Path

MICROBATCHES = 8
#: Steady iterations after which files are looked at, and after which again.
SETTLED, MEASURED = 10, 100
#: A job that is not steady by then never will be.
_MAX_PHASES = 200


def leave_logs(rank: int, root: Path) -> tuple[dict[str, int], float]:
    """Train on every rank of a pipeline, with emulated GPUs in `root`; logs go to `root/run`.

    Returns the bytes by which all ranks' log files grow in `MEASURED` steady iterations, and the
    time of one, s.
    """
    import plain_stages  # type: ignore[import-not-found]  # of tests/
    import torch.distributed as dist

    from envpipe_megatron.core.kinds import Kind
    from envpipe_megatron.formats.energy import Phase
    from envpipe_megatron.policies.request import PlanRequest
    from envpipe_megatron.runtime.job.session import SessionConfig
    from envpipe_megatron.runtime.profiling.profiler import ProfilerSettings

    output = root / "run"
    session, _ = plain_stages.session(
        rank,
        SessionConfig(
            PlanRequest(MICROBATCHES, "envpipe", "envelope"),
            warmup_iterations=1,
            profiler=ProfilerSettings(1, 1, 1, min_window_s=0.0),
            output_dir=output,
        ),
        root,
        time_at_max_s={Kind.FORWARD: 0.05, Kind.BACKWARD: 0.1},
    )

    def train(iterations: int) -> None:
        for _ in range(iterations):
            session.begin_step()
            session.run_iteration(
                MICROBATCHES,
                plain_stages.SPECS,
                lambda schedule: plain_stages.PlainWork(schedule, rank),
            )
            session.end_step()

    try:
        for _ in range(_MAX_PHASES):
            if session.state.phase is Phase.STEADY:
                break
            train(1)
        train(SETTLED)
        dist.barrier()
        before = _sizes(output)
        train(MEASURED)
        dist.barrier()
        after = _sizes(output)
        _, iteration_time_s, _ = session.iterations[-1]
    finally:
        session.close()
    grown = {name: size - before.get(name, 0) for name, size in after.items()}
    return {name: size for name, size in grown.items() if size}, iteration_time_s


def _sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()}
