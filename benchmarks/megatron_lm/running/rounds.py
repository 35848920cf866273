"""Rounds of jobs that take turns, and the ratios of their times.

A round is a block of iterations of each arm, made of several turns. Enter at `take_turns`, which
runs the arms and keeps each round in the state, and at `ratio_rows`, which says what the rounds so
far show.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click
import numpy as np
from scipy.special import stdtrit

from benchmarks.evidence import ratio
from benchmarks.megatron_lm.models import STOCK, UNITS
from benchmarks.megatron_lm.running.jobs import Job, Site, State
from benchmarks.megatron_lm.running.pool import Limits, run_jobs
from benchmarks.megatron_lm.running.rest import RESTING, rests_in
from benchmarks.megatron_lm.running.turns import Block

#: The first part of the names of jobs that take turns.
PART = "ratio"
TARGET, TARGET_OF_UNITS = 1.005, 1.003
#: Share of the rounds at either end that a mean of medians does without.
_CUT = 0.2
LEAST_ITERATION_S = 0.5
#: What jobs take to end when their last turn has ended, s.
_FOR_AN_END_S = 20.0


@dataclass(frozen=True)
class Rounds:
    """How much is measured: rounds in all, turns of each arm in a round, iterations of a turn.

    The warm-up iterations are each arm's first turn, which is not counted.
    """

    count: int
    turns: int
    iterations: int
    warmup: int

    def turns_of_a_job(self, arms: Collection[str]) -> int:
        """In a round: those of its arm, or of all arms where EnvPipe rests in some of them."""
        return self.turns * (len(arms) if RESTING in arms else 1)

    def lengths(self, arms: Collection[str]) -> tuple[int, ...]:
        """Return the iterations of each turn of a job, the warm-up first."""
        return (self.warmup, *[self.iterations] * (self.turns_of_a_job(arms) * self.count))


def next_start(state: State, name: str) -> str:
    """Return what the names of a setting's next jobs begin with."""
    start = f"{PART}/{name} start"
    number = 1 + len({n.split("/")[1] for n in state.runs if n.startswith(f"{start} ")})
    return f"{start} {number}"


def take_turns(
    site: Site, state: State, jobs_made: Sequence[Job], rounds: Rounds, limits: Limits
) -> None:
    """Run the arms of a setting in turns, and keep each round that there is time for."""
    arms = [job.name.split("/")[-1] for job in jobs_made]
    arms += [RESTING] * any(job.rests for job in jobs_made)
    keeper, longest_s = Keeper(state, rounds, arms), 0.0

    def on_block(run: str, block: Block) -> None:
        nonlocal longest_s
        if block.turn:
            longest_s = max(longest_s, block.time_s)
        keeper(run, block)

    def goes_on(left: int) -> bool:
        # A round that is begun should end.
        in_round = len(arms) * rounds.turns
        turns = in_round if left % in_round == 0 else 1
        return limits.left_s > 1.05 * turns * longest_s + _FOR_AN_END_S

    turns = order(jobs_made)
    run_jobs(site, state, jobs_made, limits, order=turns, goes_on=goes_on, on_block=on_block)


def order(jobs_made: Sequence[Job]) -> list[str]:
    """Who has each turn."""
    names = [job.name for job in jobs_made]
    if not names:
        return []
    timed = len(jobs_made[0].turns) - 1
    return names + [name for turn in range(timed) for name in (names, names[::-1])[turn % 2]]


class Keeper:
    """Puts turns together to rounds, and each round into the state as soon as it is whole."""

    def __init__(self, state: State, rounds: Rounds, arms: Sequence[str]) -> None:
        self._state = state
        self._rounds = rounds
        self._arms = arms
        self._turns: dict[tuple[str, int], dict[str, list[Block]]] = {}

    def __call__(self, run: str, block: Block) -> None:
        """Take in a turn; that of number 0 is the warm-up."""
        if not run.startswith(f"{PART}/") or block.turn == 0:
            return
        _, start, arm = run.split("/")
        if RESTING in self._arms and rests_in(block.turn):
            arm = RESTING
        number = (block.turn - 1) // self._rounds.turns_of_a_job(self._arms)
        turns = self._turns.setdefault((start, number), {name: [] for name in self._arms})
        turns[arm].append(block)
        if all(len(blocks) == self._rounds.turns for blocks in turns.values()):
            self._keep(start, turns)

    def _keep(self, start: str, turns: dict[str, list[Block]]) -> None:
        iterations = self._rounds.turns * self._rounds.iterations
        self._state.rounds.append(
            {
                "start": start,
                "setting": start.split()[0],
                "iterations": iterations,
                "turns_s": {arm: [b.time_s for b in blocks] for arm, blocks in turns.items()},
                "iteration_time_s": {
                    arm: sum(b.time_s for b in blocks) / iterations for arm, blocks in turns.items()
                },
                "iteration_median_s": {
                    arm: statistics.fmean(b.median_s for b in blocks)
                    for arm, blocks in turns.items()
                },
            }
        )
        self._state.save()
        for row in ratio_rows(self._state):
            if row["setting"] == start.split()[0]:
                click.echo(f"round {row['rounds']}: {row}")


def measured(state: State, name: str, arms: Collection[str] = ()) -> list[dict[str, Any]]:
    """The rounds of a setting so far that these arms had part in."""
    return [
        found
        for found in state.rounds
        if found.get("setting") == name and found["iteration_time_s"].keys() >= set(arms)
    ]


def ratio_rows(state: State) -> list[dict[str, Any]]:
    """For each setting and arm, its iteration time over that of unmodified Megatron.

    Of whole turns, and of the medians of their iterations without the fifth of the rounds at
    either end, which the target is for: now and then a host of a shared machine is held up, in
    whichever arm. Means are geometric; intervals (two-sided) and upper bounds (one-sided) are at
    95 %, by Student's t over the logarithms of the rounds' ratios (Yuen's where rounds are cut).
    """
    rows = []
    for name in dict.fromkeys(found["setting"] for found in state.rounds if "setting" in found):
        arms = dict.fromkeys(arm for found in measured(state, name) for arm in found["turns_s"])
        own = RESTING if RESTING in arms else STOCK
        rows += [
            {"setting": name, **_ratio_row(measured(state, name, [arm]), arm, own)}
            for arm in arms
            if arm != own
        ]
    return rows


def ratio_columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns that evidence has of one of `ratio_rows`."""
    return {
        "job": row["setting"],
        "arm": row["arm"],
        "time": ratio(row["ratio"], row["upper"]),
        "by medians": ratio(row["ratio of medians"], row["upper of medians"]),
        **{name: row[name] for name in ("rounds", "stock (s)", "own (s)")},
    }


def _ratio_row(rounds: Sequence[dict[str, Any]], arm: str, own: str) -> dict[str, Any]:
    ratios, medians = (
        [found[each][arm] / found[each][own] for found in rounds]
        for each in ("iteration_time_s", "iteration_median_s")
    )
    mean, bound = _bounded(ratios, 0.0)
    mean_of_medians, bound_of_medians = _bounded(medians, _CUT)
    target = TARGET_OF_UNITS if arm == UNITS else TARGET
    stock_s, own_s = (
        statistics.median(found["iteration_time_s"][name] for found in rounds)
        for name in (own, arm)
    )
    return {
        "arm": arm,
        "rounds": len(rounds),
        "ratio": mean,
        "of the rounds": ", ".join(f"{value:.4f}" for value in ratios),
        "low": bound(0.025),
        "high": bound(0.975),
        "upper": bound(0.95),
        "ratio of medians": mean_of_medians,
        "medians of the rounds": ", ".join(f"{value:.4f}" for value in medians),
        "upper of medians": bound_of_medians(0.95),
        "stock (s)": stock_s,
        "own (s)": own_s,
        # A job in which EnvPipe rests knows nothing of what idles.
        "target met": None
        if own == RESTING
        else bound_of_medians(0.95) <= target and stock_s >= LEAST_ITERATION_S,
    }


def _bounded(ratios: Sequence[float], share: float) -> tuple[float, Callable[[float], float]]:
    """The geometric mean without a share at either end, and a quantile of what it may be."""
    logarithms, cut = np.sort(np.log(ratios)), int(share * len(ratios))
    kept = logarithms[cut : len(ratios) - cut]
    mean, freedom = kept.mean(), len(kept) - 1
    winsorized = np.clip(logarithms, kept[0], kept[-1])  # Yuen 1974: their variance is its own
    squares = ((winsorized - winsorized.mean()) ** 2).sum()
    error = math.sqrt(squares / (len(kept) * freedom)) if freedom else math.inf
    return math.exp(mean), lambda q: math.exp(mean + stdtrit(max(1, freedom), q) * error)
