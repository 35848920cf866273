"""What the ranks of the failure tests run."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import plain_stages

from envpipe_megatron.runtime.job.options import JobOptions

MICROBATCHES = 4


class StageWorkError(Exception):
    """What goes wrong in a forward."""


def fail(fault: str, root: Path) -> None:
    """Go wrong, and note when."""
    (root / "failed_at").write_text(str(time.monotonic()))
    if fault == "raise":
        raise StageWorkError("the forward of a test")
    os.kill(os.getpid(), signal.SIGKILL if fault == "kill" else signal.SIGSTOP)


def train(
    rank: int, root: Path, fault: str, victim: int, unit: str, timeout_s: float
) -> dict[str, Any]:
    """Train until the victim fails in its second step; tell how that looked from here."""
    session, gpu = plain_stages.session(
        rank,
        JobOptions(num_microbatches=MICROBATCHES, type="baseline", baseline_steps=3),
        root,
        timeout_s=timeout_s,
        collectives_timeout_s=timeout_s,
    )
    steps = 0

    def before_unit(running: Any) -> None:
        if rank == victim and steps == 1 and str(running) == unit:
            fail(fault, root)

    try:
        while True:
            session.run_iteration(
                MICROBATCHES,
                plain_stages.SPECS,
                lambda schedule: plain_stages.PlainWork(schedule, rank, before_unit),
            )
            steps += 1
    except Exception as error:
        after_s = time.monotonic() - float((root / "failed_at").read_text())
        locked_mhz = gpu.requested_frequency_mhz
        if isinstance(error, StageWorkError):
            session.close()
            os._exit(1)  # as a script ends that does not catch it
        return {
            "error": type(error).__name__,
            "text": str(error),
            "after_s": after_s,
            "locked_mhz": locked_mhz,
            "steps": steps,
        }
    finally:
        session.close()
