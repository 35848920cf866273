"""What a job's plans predicted, and while which iterations they ran."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

from envpipe_megatron.formats.energy import Phase
from envpipe_megatron.report.facts import ReportFacts
from envpipe_megatron.report.run_folder import RunFolder


class Prediction(NamedTuple):
    """Of an iteration on all GPUs, for those from `begin` up to `end`, not included, if it ended.

    `said` is what the job said when it began.
    """

    begin: int
    end: int | None
    time_s: float
    energy_j: float
    said: str


def predictions_of(folder: RunFolder, facts: ReportFacts) -> list[Prediction]:
    """Of batches of full size, in their order; by the last plan where no closed loop told of any.

    While the loop is back in the framework's order nothing is predicted.
    """
    steps, plan = facts.steady or facts.baseline, folder.plan
    if steps is None or not folder.num_stages:
        return []
    pipelines = steps.num_gpus / folder.num_stages
    told = _of_latest_starts([entry for entry in folder.loop if not entry.get("batch")])
    if told:
        return list(_predictions(told, pipelines))
    if plan is None:
        return []
    joules = pipelines * plan.cost.energy_j
    return [Prediction(0, None, plan.cost.iteration_time_s, joules, "the plan of the job")]


def _of_latest_starts(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """In the order of iterations: a start that begins at an earlier one replaces what came before.

    The runs of starts end with their instants, so that they sort.
    """
    kept: list[dict[str, Any]] = []
    for entry in sorted(entries, key=lambda one: (str(one.get("run", "")), one["iteration"])):
        while kept and kept[-1]["iteration"] > entry["iteration"]:
            kept.pop()
        kept.append(entry)
    return kept


def _predictions(told: list[dict[str, Any]], pipelines: float) -> Iterator[Prediction]:
    cost: tuple[float, float] | None = None
    for now, after in pairwise([*told, None]):
        assert now is not None
        if now["time_s"] is not None:
            cost = now["time_s"], pipelines * now["energy_j"]
        end = None if after is None else after["iteration"]
        if cost is not None and now["phase"] != Phase.BASELINE:
            yield Prediction(now["iteration"], end, *cost, now["note"])
        if after is not None and after.get("run") != now.get("run"):
            cost = None
