"""Zero-bubble orders against the scheduler of their authors: a table of docs/evidence/planning.md.

    python benchmarks/schedules/zero_bubble.py --checkout ../zero-bubble-pipeline-parallelism

The checkout is of github.com/sail-sg/zero-bubble-pipeline-parallelism, unmodified. Its scheduler
gets the same times and the same memory as ours, and one timeline, ours, says how long the orders of
both take. Each order is judged by the whole iteration, and as the authors do, by the stage that
takes longest from its first unit to its last: for that, the next iteration must begin before the
last stage has ended this one, which their optimizer step without synchronization allows.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import math
import os
import sys
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.outputs import leave, markdown_line, output_option
from envpipe_megatron.core.kinds import SPLIT, Kind, unit
from envpipe_megatron.core.orders.greedy import shortest
from envpipe_megatron.core.orders.job import OrderJob
from envpipe_megatron.core.schedule import Placement, Schedule
from envpipe_megatron.core.timeline import Timeline

CHECKOUT_VARIABLE = "ZERO_BUBBLE_CHECKOUT"
_SCHEDULER = "megatron.core.pipeline_parallel.zerobubble.scheduler"
#: Forward, input gradient, weight gradient, message, in any unit of time.
_TIMES = ((10, 10, 10, 0), (10, 10, 5, 0.3), (10, 12, 9, 0), (10, 12, 9, 0.5), (10, 11, 7, 0.2))
#: Of what a forward without stored attention scores leaves, 34 parts of which stay to its input
#: gradient, 32 stay to its weight gradient (Qi et al., ICLR'24, table 1).
_HELD, _KEPT = 34, 32
_LONGER = 1e-9
#: Orders that are looked at where the default finds a longer one than theirs.
_MOST_LOOKS = 3000
_COLUMNS = (
    "theirs",
    "measure",
    "jobs",
    "ours shorter",
    "equal",
    "ours longer",
    "longer by at most (%)",
    "bubble, theirs (%)",
    "bubble, ours (%)",
)


@dataclass(frozen=True)
class Case:
    """One job. Memory is in microbatches x chunks, as their schedulers take it; None: no limit."""

    scheduler: str
    num_stages: int
    num_microbatches: int
    times: tuple[float, ...]
    most_held: float | None

    @property
    def chunks(self) -> int:
        """One, or two that lie in a V."""
        return 1 if self.scheduler == "ZB" else 2

    @property
    def work(self) -> float:
        """Time of all units of a stage."""
        return self.num_microbatches * self.chunks * sum(self.times[:3])


@dataclass(frozen=True)
class Outcome:
    """How long an order takes, the stage that takes longest in it, and the most that is held."""

    iteration: float
    longest_stage: float
    peak_held: float


class Rival:
    """The authors' scheduler, from its checkout."""

    def __init__(self, checkout: Path) -> None:
        """Import its modules by themselves: all that is around them wants a GPU.

        They use PuLP to read numbers that are numbers already; where it is missing that is given.
        """
        try:
            importlib.import_module("pulp")
        except ImportError:
            sys.modules["pulp"] = types.ModuleType("pulp")
            sys.modules["pulp"].value = float  # type: ignore[attr-defined]
        parts = _SCHEDULER.split(".")
        for end in range(1, len(parts) + 1):
            package = types.ModuleType(".".join(parts[:end]))
            package.__path__ = [str(checkout.joinpath(*parts[:end]))]
            sys.modules[package.__name__] = package
        names = ("zb", "zbv", "zbv_greedy")
        self._modules = {name: importlib.import_module(f"{_SCHEDULER}.{name}") for name in names}

    def order(self, case: Case) -> tuple[Schedule, dict[tuple[Any, ...], float]]:
        """Its order; and when it says that units end, by stage, kind, microbatch and chunk.

        The latter is empty where it does not say. ValueError: it finds no order.
        """
        with contextlib.redirect_stdout(io.StringIO()):
            return self._one_chunk(case) if case.chunks == 1 else self._in_a_v(case)

    def _one_chunk(self, case: Case) -> tuple[Schedule, dict[tuple[Any, ...], float]]:
        zb, stages = self._modules["zb"], case.num_stages
        forward, gradient, weights, message = map(float, case.times)
        config = zb.GraphConfig(
            mem_f=[float(_HELD)] * stages,
            mem_b=[float(_KEPT - _HELD)] * stages,
            mem_w=[-float(_KEPT)] * stages,
            max_mem=None if case.most_held is None else [_HELD * case.most_held] * stages,
            cost_f=[forward] * stages,
            cost_b=[gradient] * stages,
            cost_w=[weights] * stages,
            cost_comm=message,
            n_stages=stages,
            n_micro=case.num_microbatches,
        )
        graph = zb.Graph.build_graph(stages, case.num_microbatches, config)
        _, _, ends = zb.initial_solution(graph, print_result=False)
        orders = [
            [(SPLIT["FBW".index(n.type.value)], n.microbatch, 0) for n in order]
            for order in zb.create_scheduled_nodes(graph, ends)
        ]
        said = {
            (s, kind, m, 0): ends[graph.get_id(number, s, m)]
            for number, kind in enumerate(SPLIT)
            for s in range(stages)
            for m in range(case.num_microbatches)
        }
        return _schedule(case, orders), said

    def _in_a_v(self, case: Case) -> tuple[Schedule, dict[tuple[Any, ...], float]]:
        stages, microbatches = case.num_stages, case.num_microbatches
        if case.scheduler != "ZB-V":  # as they call it: with times that are all equal
            kind = {"V-Half": "half", "V-Min": "min"}[case.scheduler]
            graph = self._modules["zbv_greedy"].PipelineGraph(
                stages, microbatches, kind, 1000, 1000, 1000, 1
            )
            config = types.SimpleNamespace(max_chunks=2, n_stages=stages)
            orders = [
                [(SPLIT["FBW".index(n.type.value)], n.microbatch, n.chunk) for n in order]
                for order in graph.create_schedule(config)
            ]
            return _schedule(case, orders), {}
        most = None if case.most_held is None else _HELD * case.most_held
        held = (_HELD, _KEPT - _HELD, -_KEPT)
        graph = self._modules["zbv"].PipelineGraph(
            stages, microbatches, *case.times, *held, max_mem=most
        )
        tries = [
            graph.try_v_schedule(fill_b=b, fill_f=f) for b, f in product((True, False), repeat=2)
        ]
        listed, ends, _ = min(tries, key=lambda tried: tried[2])
        orders, said = [], {}
        for s, order in enumerate(listed):
            units = [(SPLIT[cat], m, 1 - c if cat else c) for cat, c, m in order]
            for (kind, m, chunk), (cat, c, _) in zip(units, order, strict=True):
                said[s, kind, m, chunk] = ends[graph.get_id(cat, c, s, m)]
            orders.append(units)
        return _schedule(case, orders), said


@click.command()
@click.option(
    "--checkout",
    type=click.Path(file_okay=False, path_type=Path),
    default=lambda: os.environ.get(CHECKOUT_VARIABLE),
    help=f"The authors' checkout; else the variable {CHECKOUT_VARIABLE} says where it is.",
)
@click.option("--stages", default="4,8,16", show_default=True, help="Numbers of stages.")
@output_option("zero_bubble")
def main(checkout: Path | None, stages: str, output: Path) -> None:
    """Compare the orders over a grid of jobs and print the table."""
    if checkout is None or not Path(checkout).joinpath(*_SCHEDULER.split(".")).is_dir():
        click.echo(f"Skipped: no scheduler of the authors' at --checkout ({checkout}).")
        return
    rival = Rival(Path(checkout))
    rows = [row for case in cases(map(int, stages.split(","))) for row in compare(rival, case)]
    leave(output, {"zero_bubble": rows})
    click.echo(table(rows))


def cases(stages: Iterator[int]) -> Iterator[Case]:
    """Jobs of p to 8 p microbatches with the memory of 1F1B's first stage, up to all there is."""
    for p, rounds, times in product(stages, (1, 2, 4, 8), _TIMES):
        for scheduler, chunks in (("ZB", 1), ("ZB-V", 2)):
            for most in (p, 1.5 * p, 2 * p):
                yield Case(scheduler, p, rounds * p, times, chunks * most)
        yield Case("ZB", p, rounds * p, times, None)  # theirs in a V knows no job without a limit
        for scheduler in ("V-Half", "V-Min"):
            yield Case(scheduler, p, rounds * p, times, None)


def compare(rival: Rival, case: Case) -> Iterator[dict[str, Any]]:
    """A row for each of the two measures; none where the rival finds no order in the memory."""
    try:
        order, said = rival.order(case)
    except (ValueError, AssertionError):
        return
    theirs, ends = _judged(case, order)
    wrong = [key for key, end in said.items() if not math.isclose(end, ends[key], rel_tol=1e-9)]
    if wrong:
        raise click.ClickException(f"{case}: {len(wrong)} units do not end when the rival says.")
    most = case.most_held
    if case.scheduler in ("V-Half", "V-Min"):
        most = theirs.peak_held
    for measure, tails in (
        ("iteration", [0.0] * case.num_stages),
        ("longest_stage", _way_in(case)[::-1]),
    ):
        job = _job(case, most, tails)
        for looks in (None, _MOST_LOOKS):
            ours = _judged(case, shortest(job, looks=looks))[0]
            values = [getattr(outcome, measure) for outcome in (theirs, ours)]
            if values[1] <= values[0] * (1 + _LONGER):
                break
        if most is not None and ours.peak_held > most + 1e-6:
            raise click.ClickException(f"{case}: ours holds {ours.peak_held:g}.")
        yield {
            "scheduler": case.scheduler,
            "stages": case.num_stages,
            "microbatches": case.num_microbatches,
            "times": " ".join(f"{time:g}" for time in case.times),
            "most_held": "" if most is None else most,
            "measure": measure,
            "floor": job.floor_s - (0.0 if measure == "iteration" else max(tails)),
            "work": case.work,
            "theirs": values[0],
            "ours": values[1],
            "theirs_held": theirs.peak_held,
            "ours_held": ours.peak_held,
        }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """By scheduler and measure: how often ours is shorter, and the mean bubble of both."""
    lines = [
        markdown_line(_COLUMNS),
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for scheduler, measure in dict.fromkeys((r["scheduler"], r["measure"]) for r in rows):
        own = [r for r in rows if (r["scheduler"], r["measure"]) == (scheduler, measure)]
        change = np.array([r["ours"] / r["theirs"] - 1 for r in own])
        longer, shorter = int((change > _LONGER).sum()), int((change < -_LONGER).sum())
        bubbles = [
            f"{100 * np.mean([1 - r['work'] / r[whose] for r in own]):.2f}"
            for whose in ("theirs", "ours")
        ]
        counts = map(str, (len(own), shorter, len(own) - shorter - longer, longer))
        most = f"{100 * max(0.0, change.max()):.2f}"
        lines.append(markdown_line([scheduler, measure.replace("_", " "), *counts, most, *bubbles]))
    return "\n".join(lines)


def _job(case: Case, most: float | None, tails: Sequence[float]) -> OrderJob:
    shape = (case.num_stages, case.chunks, case.num_microbatches)
    return OrderJob(
        {kind: np.full(shape, float(t)) for kind, t in zip(SPLIT, case.times, strict=False)},
        case.times[3],
        Placement.LOOPED if case.chunks == 1 else Placement.V,
        None if most is None else [most] * case.num_stages,
        weight_share=_KEPT / _HELD,
        tail_s=tails,
    )


def _way_in(case: Case) -> list[float]:
    """When each stage can begin."""
    forward, *_, message = case.times
    return [stage * (forward + message) for stage in range(case.num_stages)]


def _schedule(case: Case, orders: Sequence[Sequence[tuple[Kind, int, int]]]) -> Schedule:
    stages = tuple(tuple(unit(*own) for own in order) for order in orders)
    placement = Placement.LOOPED if case.chunks == 1 else Placement.V
    return Schedule(case.scheduler, case.num_microbatches, case.chunks, stages, placement)


def _judged(case: Case, schedule: Schedule) -> tuple[Outcome, dict[tuple[Any, ...], float]]:
    """What the timeline says of an order; and the end of each unit."""
    time_of = dict(zip(SPLIT, case.times, strict=False))
    change_of = dict(zip(SPLIT, (1, _KEPT / _HELD - 1, -_KEPT / _HELD), strict=True))
    timeline = Timeline(
        schedule,
        [[time_of[own.kind] for own in order] for order in schedule.stages],
        case.times[3],
    )
    spans = timeline.end_s[:, -1] - timeline.start_s[:, 0]
    held = [np.cumsum([change_of[own.kind] for own in order]).max() for order in schedule.stages]
    outcome = Outcome(timeline.iteration_time_s, float(spans.max()), float(max(held)))
    ends = {
        (stage, own.kind, own.microbatch, own.chunk): float(timeline.end_s[stage, at])
        for stage, order in enumerate(schedule.stages)
        for at, own in enumerate(order)
    }
    return outcome, ends


if __name__ == "__main__":
    main()
