"""What the ranks of the tests of control by an operator run."""

import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import controlled_ranks
import step_ranks
from waiting_plans import ask, asked_often, plans_are_waited_for

from envpipe_megatron.gpu.base import Gpu, GpuError, ReadOnlyGpu
from envpipe_megatron.gpu.emulated.emulated_gpu import EmulatedGpu
from envpipe_megatron.gpu.guard.lease import list_leases
from envpipe_megatron.gpu.guard.messages import AGENT_VARIABLE


def train_asked(
    rank: int,
    root: Path,
    steps: int,
    options: Mapping[str, Any],
    asks: Mapping[int, str | None],
    pauses: Sequence[int] = (),
    lost: tuple[int, int] | None = None,
) -> dict[str, Any]:
    """Train, and ask before these steps; after some there is an evaluation.

    Args:
        options: `reads_only` and `guarded` are of the GPU.
        lost: the rank, and the step before which its clock control ends.

    Returns:
        of each step its phase, the lock behind it and its units; locks in evaluations, and live
        leases; what the session says in the end.
    """
    said: list[str] = []
    options = dict(options)
    reads_only, guarded = (options.pop(name, False) for name in ("reads_only", "guarded"))
    root.mkdir(exist_ok=True)
    if guarded:
        controlled_ranks.use_guards_of(root, "asked")

    def seen(gpu: EmulatedGpu) -> Gpu:
        few = step_ranks.with_few_clocks(gpu)
        return ReadOnlyGpu(few) if reads_only else few

    with (
        asked_often(),
        plans_are_waited_for(),
        patch.dict(os.environ, {AGENT_VARIABLE: ""} if guarded else {}),
    ):
        wanted = replace(step_ranks.config(root / "output", **options), fingerprint={"of": "test"})
        made = step_ranks.framework(rank, wanted, root, seen_as=seen, say=said.append)
        session, ran, paused = made.session, [], []
        with closing(session):
            for number in range(steps):
                if number in asks:
                    ask(session, asks[number])
                if (rank, number) == lost:
                    session.clock.stop(GpuError("the driver of a test"))
                made.step()
                phase = session.state.phase.value
                ran.append((phase, made.gpu.requested_frequency_mhz, session.executed))
                if number in pauses:
                    made.evaluate()
                    leases = sum(record.live for record in list_leases()) if guarded else 0
                    paused.append((made.gpu.requested_frequency_mhz, leases))
    return {
        "ran": ran,
        "paused": paused,
        "said": said,
        "notes": session.state.notes,
        "wishes": session.state.wishes,
        "summary": session.summary(),
        "after": made.gpu.requested_frequency_mhz,
    }
