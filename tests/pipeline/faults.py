"""What the ranks of the failure tests run."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import plain_stages

MICROBATCHES = 4


class StageWorkError(Exception):
    """A failure in a forward."""


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
        plain_stages.options(num_microbatches=MICROBATCHES, type="baseline", baseline_steps=3),
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
            plain_stages.iterate(session, rank, 1, before_unit, MICROBATCHES)
            steps += 1
    except Exception as error:
        after_s = time.monotonic() - float((root / "failed_at").read_text())
        locked_mhz, closes_s = gpu.requested_frequency_mhz, time.monotonic()
        session.close()
        if isinstance(error, StageWorkError):
            os._exit(1)  # as a script ends that does not catch it
        return {
            "error": type(error).__name__,
            "text": str(error),
            "after_s": after_s,
            "closing_s": time.monotonic() - closes_s,
            "locked_mhz": locked_mhz,
            "steps": steps,
        }
