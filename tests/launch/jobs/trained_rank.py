"""A script that `envpipe launch` starts: a plain pipeline on emulated GPUs, one stage a rank.

Args: a folder that all nodes share, and the iterations to train. Each rank leaves there what it
trained as lines of `iterations-<rank>`; one that is started again goes on from the iteration that
all ranks had finished. A `profile.csv` and `plan.json` there are the plan that it runs after the
warm-up. Whoever listens at the datagram socket `events` there hears of each rank's start and of
every iteration, with the clock that is locked.
"""

import contextlib
import json
import os
import signal
import socket
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "helpers"))
import plain_stages
import torch.distributed as dist
from plain_job import MICROBATCHES, PRESET, TIMES_S, WARMUP_ITERATIONS

from envpipe_megatron.gpu.emulated.store import default_root
from envpipe_megatron.runtime.job.options import JobOptions

#: Of every wait for another rank.
TIMEOUT_S = 20.0


def leave(signum: int, frame: object) -> None:
    raise SystemExit(128 + signum)


def done_by_all(folder: Path, ranks: int) -> int:
    counts = []
    for rank in range(ranks):
        path = folder / f"iterations-{rank}"
        counts.append(len(path.read_text().splitlines()) if path.exists() else 0)
    return min(counts)


def configured(folder: Path) -> JobOptions:
    plan = folder / "plan.json"
    given = {"plan": plan, "profile": folder / "profile.csv"} if plan.exists() else {}
    return JobOptions(
        num_microbatches=MICROBATCHES, type="baseline", baseline_steps=WARMUP_ITERATIONS, **given
    )


class Teller:
    """Tells the test, if one listens, and waits for nobody."""

    def __init__(self, folder: Path, **common: object) -> None:
        self._common = common
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        with contextlib.suppress(OSError):
            self._socket.connect(str(folder / "events"))

    def tell(self, **event: object) -> None:
        with contextlib.suppress(OSError):  # its queue is full: later events say the same
            self._socket.send(json.dumps({**self._common, **event}).encode())


def main() -> None:
    signal.signal(signal.SIGTERM, leave)
    folder, iterations = Path(sys.argv[1]), int(sys.argv[2])
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    teller = Teller(folder, rank=rank, pid=os.getpid())
    teller.tell(event="started")
    dist.init_process_group("gloo", timeout=plain_stages.timedelta(seconds=TIMEOUT_S))
    first = done_by_all(folder, ranks)
    dist.barrier()
    lines = folder / f"iterations-{rank}"
    kept = lines.read_text().splitlines(keepends=True)[:first] if lines.exists() else []
    lines.write_text("".join(kept))
    session, gpu = plain_stages.session(
        rank,
        configured(folder),
        default_root(),
        preset=PRESET,
        fast=False,
        gpu_index=int(os.environ["LOCAL_RANK"]),
        time_at_max_s=TIMES_S,
        timeout_s=TIMEOUT_S,
    )
    session.describe_job({"tokens_per_iteration": 1000, "model": "plain"})
    try:
        for iteration in range(first, iterations):
            session.begin_step(iteration)
            session.run_iteration(
                MICROBATCHES,
                plain_stages.SPECS,
                lambda schedule: plain_stages.PlainWork(schedule, rank),
            )
            session.end_step()
            with lines.open("a") as file:
                file.write(json.dumps({"iteration": iteration, "pid": os.getpid()}) + "\n")
            teller.tell(
                event="trained", iteration=iteration, locked_mhz=gpu.requested_frequency_mhz
            )
    finally:
        session.close()
    dist.destroy_process_group()


main()
