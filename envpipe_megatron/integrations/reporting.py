"""The bill at a job's end."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from dataclasses import asdict

from envpipe_megatron import __version__
from envpipe_megatron.files import replace_files
from envpipe_megatron.formats.account import Tariff, account_lines
from envpipe_megatron.formats.bill import Bill
from envpipe_megatron.formats.energy import Phase, read_step, split_phase
from envpipe_megatron.formats.energy_sums import total_of
from envpipe_megatron.formats.steps import StepEnergy
from envpipe_megatron.runtime.job.session import Session

logger = logging.getLogger(__name__)

SUMMARY_FORMAT = "envpipe-summary/1"


def end_of_job(session: Session, tokens: object, energy_price: float | None = None) -> list[str]:
    """Return the bill of a closed session: lines for the log, on the planning rank only.

    Every rank calls it. It is written to `summary.json` too; if that fails, an error is logged.
    `tokens` are those of an iteration, if they are known; `energy_price` is that of a kWh, in place
    of the environment's.
    """
    own, collectives = session.summary(), session.parts.collectives
    by_stage = collectives.all_to_planner((own, session.energy.sums()))
    if not collectives.is_planner:
        return []
    only_measures = session.options.only_measures()
    ranks, sums = zip(*(rank for replicas in by_stage for rank in replicas), strict=True)
    bill = Bill()
    for of_rank in sums:
        bill.add_sums(of_rank.values())
    bill.facts = {"tokens_per_iteration": tokens, "power": ranks[0]["power"]}
    memory = session.parts.memory.stages
    summary = {
        "format": SUMMARY_FORMAT,
        "created_by": f"envpipe {__version__}",
        "only_measures": only_measures,
        "tokens_per_iteration": tokens,
        "baseline": own["baseline"],
        "job": bill.comparison_facts(),
        "memory": None if memory is None else [asdict(stage) for stage in memory],
        "ranks": ranks,
    }
    if session.parts.folder.path is not None:
        path = session.parts.folder.path / "summary.json"
        try:
            replace_files({path: [json.dumps(summary, indent=1), "\n"]})
        except OSError as error:
            logger.error("%s could not be written: %s", path, error)
    tariff = Tariff.of_environment(os.environ, energy_price)
    lines = list(account_lines(bill, tariff, bill.comparisons(), " in training"))
    lines += _step_line("the latest baseline", read_step(own["baseline"]))
    # By energy logs: a lap may be of two phases.
    for phase in dict.fromkeys(phase for _, _, phase, _ in bill.phases):
        lines += _step_line(phase, bill.steps(phase))
    steady = total_of(
        own
        for (_, _, phase, _), own in bill.phases.items()
        if split_phase(phase)[0] == Phase.STEADY
    )
    whole_iterations = len(session.executed) == 1
    if only_measures and not whole_iterations and steady.duration_s:
        share = 100 * (1 - steady.shares_s[0] / steady.duration_s)
        lines.append(
            f"in {share:.1f} % of the steady steps' time no forward or backward ran on a GPU"
        )
    lines += dict.fromkeys(note for rank in ranks for note in rank["notes"])
    followed = (rank["clocks"]["followed"] for rank in ranks)
    lines += sorted({each["warning"] for each in followed if each and each["warning"]})
    return lines


def _step_line(phase: str, step: StepEnergy | None) -> Iterator[str]:
    """Yield a line, unless nothing was metered; the framework's first step may be unseen."""
    if step is not None and step.power_w is not None:
        yield (
            f"{phase}: {step.iterations} iterations, {step.time_s:.4f} s and "
            f"{step.energy_j:.1f} J each on an average GPU ({step.power_w:.1f} W)"
        )
