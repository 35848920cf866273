"""A script that `envpipe launch` starts: a plain pipeline on emulated GPUs, one stage a rank.

Args: a folder that all nodes share, and the iterations to train. Each rank leaves its pid there,
and what it trained as lines of `iterations-<rank>`; a rank that is started again goes on from the
iteration that all ranks had finished.
"""

import json
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import plain_stages
import torch.distributed as dist

from envpipe_megatron.gpu.emulated_store import default_root
from envpipe_megatron.policies.planner import PlanRequest
from envpipe_megatron.runtime.session import SessionConfig
from envpipe_megatron.schedule import Kind

MICROBATCHES = 4
TIMES_S = {Kind.FORWARD: 0.01, Kind.BACKWARD: 0.02}


def leave(signum: int, frame: object) -> None:
    raise SystemExit(128 + signum)


def done_by_all(folder: Path, ranks: int) -> int:
    counts = []
    for rank in range(ranks):
        path = folder / f"iterations-{rank}"
        counts.append(len(path.read_text().splitlines()) if path.exists() else 0)
    return min(counts)


def main() -> None:
    signal.signal(signal.SIGTERM, leave)
    folder, iterations = Path(sys.argv[1]), int(sys.argv[2])
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    start = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    dist.init_process_group("gloo", timeout=plain_stages.timedelta(seconds=20))
    first = done_by_all(folder, ranks)
    dist.barrier()
    lines = folder / f"iterations-{rank}"
    kept = lines.read_text().splitlines(keepends=True)[:first] if lines.exists() else []
    lines.write_text("".join(kept))
    config = SessionConfig(PlanRequest(MICROBATCHES), warmup_iterations=3)
    session, gpu = plain_stages.session(
        rank, config, default_root(), fast=False, time_at_max_s=TIMES_S
    )
    session.describe_job({"tokens_per_iteration": 1000, "model": "plain"})
    (folder / f"pid-{rank}-{start}").write_text(str(os.getpid()))
    try:
        for iteration in range(first, iterations):
            session.begin_step(iteration)
            session.run_iteration(
                MICROBATCHES,
                plain_stages.SPEC,
                lambda schedule: plain_stages.PlainWork(schedule, rank),
            )
            session.end_step()
            with lines.open("a") as file:
                file.write(json.dumps({"iteration": iteration, "start": start}) + "\n")
    finally:
        session.close()
    dist.destroy_process_group()


main()
