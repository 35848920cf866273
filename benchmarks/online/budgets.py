"""Jobs whose power budget changes while they train, beside the best plans that are known offline.

Run from the checkout:

    python benchmarks/online/budgets.py changes trouble    # some 40 minutes on two cores
    python benchmarks/online/budgets.py signal --stages 4  # of 8, an A40 has no optimum below 71 %

GPUs are those of `online.py`, stages alike. Plans come a window of iterations after they are asked
for. `changes` sets budgets in mid-training, changes and lifts them; `signal` has another one each
60 s of the job for an hour, anything from 70 to 100 %; `trouble` turns a job off and on again, and
has a replica become 10 % slower, under 80 %. A budget is kept from the first window of four
iterations on that takes no more than 1 % above it; the optimum is the fastest plan within it, made
offline from times and powers without errors in the order of least energy, and one clock for all
units in Megatron's order.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.outputs import leave, make_console, make_table, output_option
from emulated_job import EmulatedJob
from emulated_pipelines import Conditions, Iteration, Pipelines
from envpipe_megatron.core.conditions import known_conditions
from envpipe_megatron.core.plan import Plan, one_clock_plans
from envpipe_megatron.formats.energy import Phase
from envpipe_megatron.formats.wishes import read_power_budget
from envpipe_megatron.gpu.presets import load_preset
from envpipe_megatron.policies.objective import Goal, Objective
from envpipe_megatron.policies.optimal.linear_program import LinearProgramError
from envpipe_megatron.policies.planner import make_plan
from envpipe_megatron.runtime.execution.stage_run import constant_order
from envpipe_megatron.runtime.job.options import JobOptions
from job_runs import exact_profile, scripted, slower

PARTS = ("changes", "signal", "trouble")
_OPTIONS = JobOptions(num_microbatches=24, baseline_steps=3)
_FORWARD_S = 0.03
#: Iterations before the first budget, and of each; so many at the end of these are steady.
_BEFORE, _EACH, _STEADY = 60, 40, 20
#: In percent of what a GPU takes at the highest clocks, in turn.
_BUDGETS, _TROUBLED = (80, 95, 70, 90), 80
_WINDOW, _KEPT = 4, 1.01
_SIGNAL_S, _SIGNAL_CHANGES, _SIGNAL = 60.0, 60, (70, 100)
#: Budgets between which the optimum of the signal's is interpolated, in percent.
_GRID = (70, 74, 78, 82, 86, 90, 100)


class Offline:
    """The best plans of a pipeline; times are multiples of the framework's own iteration."""

    def __init__(self, gpu: str, stages: int, ill: Mapping[int, Conditions]) -> None:
        profile = self._profile = exact_profile(load_preset(gpu), [_FORWARD_S] * stages, ill)
        request = replace(_OPTIONS.request(), conditions=known_conditions(profile))
        self._usual = make_plan(profile, replace(request, deadline_factor=1.0)).plan
        self._request = replace(request, schedule="1f1b", order=self._usual.schedule)
        self.own, self.order = self._usual.baseline.cost, self._usual.baseline.schedule

    def time(self, percent: float) -> float:
        """Of the fastest plan within a budget; NaN for one below the end of the frontier."""
        cap_w = percent / 100 * self.own.mean_power_w
        if self._usual.cost.mean_power_w <= cap_w:
            return 1.0
        asked = replace(self._request, objective=Objective(Goal.TIME, power_cap_w=cap_w))
        own_s = self.own.iteration_time_s
        try:
            return make_plan(self._profile, asked).plan.cost.iteration_time_s / own_s
        except LinearProgramError:
            return math.nan

    def within(self, time: float) -> Plan:
        """The plan of least energy in a time."""
        return make_plan(self._profile, replace(self._request, deadline_factor=time)).plan

    def one_clock(self, percent: float) -> float:
        """Of the highest clock of all units that keeps a budget."""
        cap_w = percent / 100 * self.own.mean_power_w
        costs = (plan.cost for plan in one_clock_plans(self._usual.baseline))
        time_s = next(cost.iteration_time_s for cost in costs if cost.mean_power_w <= cap_w)
        return time_s / self.own.iteration_time_s


@cache
def offline(gpu: str, stages: int, *, slow: bool = False) -> Offline:
    """Made once; `slow`: all of its GPUs are, as in `scripted`."""
    return Offline(gpu, stages, dict.fromkeys(range(stages), slower(1.1)) if slow else {})


class Job:
    """An emulated job under budgets."""

    def __init__(self, gpu: str, stages: int, replicas: int, **emulated: Any) -> None:
        self.pipelines = Pipelines(
            load_preset(gpu), [_FORWARD_S] * stages, replicas, backward_ratio=2.0, **emulated
        )
        self._gpus = stages * replicas
        self._job = EmulatedJob(self.pipelines, _OPTIONS, late=(1,))
        self._own, self._order = offline(gpu, stages).own, offline(gpu, stages).order
        self._top_mhz = load_preset(gpu).max_frequency_mhz
        self._own_w = self._own.mean_power_w / stages
        self._job.run(_BEFORE)

    def run(self, percent: float | None, iterations: int) -> list[Iteration]:
        """Run under a budget."""
        assert self._job.planner is not None
        given = None if percent is None else f"{percent}%"
        self._job.planner.state.wishes = read_power_budget(given)
        return self._job.run(iterations)

    def off(self, iterations: int) -> None:
        """Run the framework's order at the highest clocks, of which the loop hears nothing."""
        order = constant_order(Phase.OFF, self._order, self._top_mhz)
        for _ in range(iterations):
            self.pipelines.run([order] * len(self.pipelines.gpus))

    def power(self, ran: Sequence[Iteration]) -> float:
        """Mean power, in percent of what GPUs take at the highest clocks."""
        energy_j, time_s = sum(each.energy_j for each in ran), sum(each.time_s for each in ran)
        return 100 * energy_j / time_s / self._gpus / self._own_w

    def time(self, ran: Sequence[Iteration]) -> float:
        """Mean time of an iteration, as a multiple of the framework's own."""
        return float(np.mean([each.time_s for each in ran])) / self._own.iteration_time_s

    def kept(self, ran: Sequence[Iteration], percent: float) -> tuple[int, float]:
        """Iterations until a budget is kept, and the most that a window takes more then, %."""
        windows = [self.power(ran[at : at + _WINDOW]) for at in range(len(ran) - _WINDOW + 1)]
        first = next(at for at, power in enumerate(windows) if power <= _KEPT * percent)
        return first, 100 * (max(windows[first:]) / percent - 1)

    def row(self, ran: Sequence[Iteration], percent: float, best: float) -> dict[str, Any]:
        """Columns that all tables have."""
        until, most = self.kept(ran, percent)
        return {
            "most above then (%)": most,
            "until kept (iterations)": until,
            "power in the end (%)": self.power(ran[-_STEADY:]),
            "longer in the end (%)": 100 * (self.time(ran[-_STEADY:]) - 1),
            "optimum (%)": 100 * (best - 1),
            "lost against it (%)": 100 * (self.time(ran[-_STEADY:]) / best - 1),
            "lost in all (%)": 100 * (self.time(ran[until:]) / best - 1),
        }

    def close(self) -> None:
        """End it."""
        self._job.close()


def change_rows(
    gpus: Sequence[str], stages: Sequence[int], replicas: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """What a job does about budgets that are set, changed, and lifted."""
    for place in ((gpu, count, number) for gpu in gpus for count in stages for number in replicas):
        job, best = Job(*place), offline(*place[:2])
        names = dict(zip(("GPU", "stages", "replicas"), place, strict=True))
        for percent in _BUDGETS:
            ran = job.run(percent, _EACH)
            row = job.row(ran, percent, best.time(percent))
            one = 100 * (best.one_clock(percent) - 1)
            yield {**names, "budget (%)": percent, **row, "one clock, longer (%)": one}
        ran = job.run(None, _EACH)
        yield {**names, "budget (%)": 100, **job.row(ran, 100, 1.0), "one clock, longer (%)": 0.0}
        job.close()


def signal_rows(gpus: Sequence[str], stages: Sequence[int]) -> Iterator[dict[str, Any]]:
    """What a job does about another budget each minute."""
    for gpu, count in ((gpu, count) for gpu in gpus for count in stages):
        job, best, chance = Job(gpu, count, 1), offline(gpu, count), random.Random(count)
        optimum = [best.time(percent) for percent in _GRID]
        untils, mosts, times, bests, ones = [], [], [], [], []
        for _ in range(_SIGNAL_CHANGES):
            percent = round(chance.uniform(*_SIGNAL), 1)
            wanted = float(np.interp(percent, _GRID, optimum))
            ran = job.run(percent, round(_SIGNAL_S / best.own.iteration_time_s / wanted))
            until, most = job.kept(ran, percent)
            untils.append(until)
            mosts.append(most)
            times.append(job.time(ran) * len(ran))
            bests.append(wanted * len(ran))
            ones.append(best.one_clock(percent) * len(ran))
        yield {
            "GPU": gpu,
            "stages": count,
            "changes": len(untils),
            "until kept, mean (iterations)": float(np.mean(untils)),
            "until kept, most": max(untils),
            "most above then (%)": max(mosts),
            "lost in all (%)": 100 * (sum(times) / sum(bests) - 1),
            "one clock lost (%)": 100 * (sum(ones) / sum(bests) - 1),
        }
        job.close()


def trouble_rows(gpus: Sequence[str], stages: Sequence[int]) -> Iterator[dict[str, Any]]:
    """What a job under a budget does when it is on again, and when a replica becomes slower."""
    for gpu, count in ((gpu, count) for gpu in gpus for count in stages):
        names, best = {"GPU": gpu, "stages": count}, offline(gpu, count)
        job = Job(gpu, count, 1)
        job.run(_TROUBLED, _EACH)
        job.off(_STEADY)
        row = job.row(job.run(_TROUBLED, _EACH), _TROUBLED, best.time(_TROUBLED))
        yield {**names, "what": "on again", "replicas": 1, **row}
        job.close()
        first = _BEFORE + _EACH
        faults = scripted("replica", first, first + 2 * _EACH, count, 4)
        job = Job(gpu, count, 4, faults=faults)
        job.run(_TROUBLED, _EACH)
        while_slow = best_with_slow_replica(gpu, count, 4, _TROUBLED)
        for what, iterations, time in (
            ("a replica is 10 % slower", 2 * _EACH, while_slow),
            ("it is not any more", _EACH, best.time(_TROUBLED)),
        ):
            row = job.row(job.run(_TROUBLED, iterations), _TROUBLED, time)
            yield {**names, "what": what, "replicas": 4, **row}
        job.close()


def best_with_slow_replica(gpu: str, stages: int, replicas: int, percent: float) -> float:
    """Of the fastest plans within a budget where all replicas take as long as a slow one."""
    fast, slow = offline(gpu, stages), offline(gpu, stages, slow=True)
    low, high = slow.own.iteration_time_s / fast.own.iteration_time_s, 1.5
    allowed_w = replicas * percent / 100 * fast.own.mean_power_w
    for _ in range(10):
        time = (low + high) / 2
        own_s = time * fast.own.iteration_time_s
        plans = [fast.within(time)] * (replicas - 1)
        plans.append(slow.within(own_s / slow.own.iteration_time_s))
        takes_w = sum(plan.cost.energy_j for plan in plans) / own_s
        low, high = (low, time) if takes_w <= allowed_w else (time, high)
    return high


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(PARTS), metavar="[PART]...")
@click.option("--gpu", multiple=True, default=("a100-sxm", "a40"), show_default=True)
@click.option("--stages", multiple=True, type=int, default=(4, 8), show_default=True)
@click.option("--replicas", multiple=True, type=int, default=(1, 4), show_default=True)
@output_option("budgets")
def main(
    names: tuple[str, ...],
    gpu: tuple[str, ...],
    stages: tuple[int, ...],
    replicas: tuple[int, ...],
    output: Path,
) -> None:
    """Run parts, by default `changes`, and print tables."""
    parts = {
        "changes": lambda: change_rows(gpu, stages, replicas),
        "signal": lambda: signal_rows(gpu, stages),
        "trouble": lambda: trouble_rows(gpu, stages),
    }
    found: dict[str, list[dict[str, Any]]] = {}
    for name in names or PARTS[:1]:
        rows = found[f"budget {name}"] = list(parts[name]())
        leave(output, "emulated", found)
        make_console().print(make_table(name, rows, list(rows[0])))


if __name__ == "__main__":
    main()
