"""What the ranks of the tests of batches of several sizes run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import plain_stages
import step_ranks
from waiting_plans import plans_are_waited_for

from envpipe_megatron.core.orders import builders
from envpipe_megatron.integrations.reporting import IntervalReport

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

    Units take `times` as long as `step_ranks.TIMES_S`.

    Returns:
        for each step its phase and its units' clocks, what its log line compares it with, what was
        said, and what is known in the end.
    """
    said: list[str] = []
    wishes = {"schedule": "1f1b", "policy": "optimal", **options}
    config = replace(
        step_ranks.config(root / "output", **wishes),
        fingerprint=step_ranks.FINGERPRINT,
        **(files or {}),
    )
    session, gpu = plain_stages.session(
        rank,
        config,
        root,
        time_at_max_s={kind: times * time_s for kind, time_s in step_ranks.TIMES_S.items()},
        seen_as=step_ranks.with_few_clocks,
        say=said.append,
    )
    framework = step_ranks.Framework(rank, session, gpu)
    steps, reports = [], []
    with ExitStack() as last:
        last.callback(session.close)
        last.enter_context(plans_are_waited_for())
        for count in counts:
            framework.begin()
            order = builders.one_f_one_b(3, count)
            run = session.open_iteration(order, plain_stages.SPECS, full_batch=count == FULL)
            while run.next_unit is not None:
                run.begin_unit()
                run.end_unit()
            framework.end(0.3)
            steps.append((session.state.phase.value, tuple(run.frequencies_mhz)))
            reports.append(IntervalReport.gather(session))
    return {
        "steps": steps,
        "reports": reports,
        "said": said,
        "profile": session.state.profile,
        "baselines": dict(session._energy.baselines),
        "summary": session.summary(),
    }
