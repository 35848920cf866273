"""Iteration time and peak memory of the patched checkout against those of the unmodified one.

All arms are started together on the same GPUs and take turns of some iterations each. A round is
one turn of every arm, in an order that is turned round from one round to the next.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import click
from proof_arms import ENVPIPE, ONE_F_ONE_B, STOCK, Planned
from proof_jobs import Job, Site, joined
from proof_models import (
    GPT_1_3B,
    NO_EVALUATION,
    PP2,
    PP4,
    PP8,
    TINY_ON_CPU,
    Mapping,
    Size,
    base_arguments,
    training,
)
from proof_state import State
from proof_turns import Block
from scipy import stats

PART = "ratio"
ARMS = (STOCK, ONE_F_ONE_B, ENVPIPE)
#: The framework's order before the plan's; within the first turn, which is not counted.
_WARMUP = 3
TARGET = 1.005
LEAST_ITERATION_S = 0.5


@dataclass(frozen=True)
class Rounds:
    """How much is measured.

    Args:
        count: rounds that are wanted in all.
        iterations: of a turn.
        warmup: of each arm's first turn, which is not counted.
    """

    count: int
    iterations: int
    warmup: int


def mapping(num_gpus: int) -> Mapping:
    """A pipeline over all GPUs."""
    return {2: PP2, 4: PP4, 8: PP8}[num_gpus]


def size(site: Site) -> Size:
    """The model."""
    return TINY_ON_CPU if site.cpu else GPT_1_3B


def plans(site: Site) -> list[Planned]:
    """The orders that the jobs run."""
    return [
        Planned(mapping(site.num_gpus), size(site).microbatches, arm)
        for arm in (ONE_F_ONE_B, ENVPIPE)
    ]


def arguments(site: Site, arm: str, train_iterations: int, log_interval: int) -> tuple[str, ...]:
    """Megatron's arguments of the model that is timed."""
    parts = [
        size(site).arguments(mapping(site.num_gpus)),
        mapping(site.num_gpus).arguments,
        size(site).mock_data,
        training(train_iterations, log_interval=log_interval),
        NO_EVALUATION,
        "--bf16",
    ]
    if arm != STOCK:
        planned = Planned(mapping(site.num_gpus), size(site).microbatches, arm)
        parts.append(planned.arguments(_WARMUP))
    return (*base_arguments(site.cpu), *joined(parts))


def jobs(site: Site, state: State, rounds: Rounds, free_iterations: int) -> list[Job]:
    """One job an arm for the rounds that are still missing; none where none is."""
    missing = rounds.count - len(state.rounds)
    if missing <= 0:
        return []
    number = 1 + sum(name.split("/")[0] == PART for name in state.runs) // len(ARMS)
    turns = (rounds.warmup, *[rounds.iterations] * missing)
    # One more: a turn ends where the next iteration would begin.
    iterations = free_iterations + sum(turns) + 1
    return [
        Job(
            name=f"{PART}/start {number}/{arm}",
            arguments=arguments(site, arm, iterations, log_interval=10),
            num_ranks=site.num_gpus,
            iterations=iterations,
            patched=arm != STOCK,
            turns=turns,
            limit_s=3600.0,
        )
        for arm in ARMS
    ]


def order(jobs_made: Sequence[Job]) -> list[str]:
    """Who has each turn."""
    names = [job.name for job in jobs_made]
    if not names:
        return []
    rounds = len(jobs_made[0].turns) - 1
    return names + [name for r in range(rounds) for name in (names, names[::-1])[r % 2]]


class Keeper:
    """Puts blocks together to rounds, and each round into the state as soon as it is whole."""

    def __init__(self, state: State, iterations: int) -> None:
        self._state = state
        self._iterations = iterations
        self._turns: dict[tuple[str, int], dict[str, Block]] = {}

    def __call__(self, run: str, block: Block) -> None:
        """Take in a block; turn 0 is the warm-up."""
        if not run.startswith(f"{PART}/") or block.turn == 0:
            return
        _, start, arm = run.split("/")
        turn = self._turns.setdefault((start, block.turn), {})
        turn[arm] = block
        if len(turn) == len(ARMS):
            times_s = {name: b.time_s / self._iterations for name, b in turn.items()}
            memory = {name: b.memory for name, b in turn.items()}
            self._state.rounds.append(
                {
                    "start": start,
                    "iterations": self._iterations,
                    "iteration_time_s": times_s,
                    "memory": memory,
                }
            )
            self._state.save()
            for name in ARMS[1:]:
                found = ratio(self._state, name)
                click.echo(f"round {len(self._state.rounds)}: {found}")


@dataclass(frozen=True)
class Ratio:
    """Iteration time of an arm over that of unmodified Megatron.

    Args:
        arm: that is compared.
        ratios: of each round.
        mean: their geometric mean.
        interval: two-sided 95 % interval, by Student's t over the rounds' logarithms.
        upper: one-sided 95 % bound, likewise.
        iteration_time_s: median over rounds, unmodified and this arm.
    """

    arm: str
    ratios: tuple[float, ...]
    mean: float
    interval: tuple[float, float]
    upper: float
    iteration_time_s: tuple[float, float]

    def __str__(self) -> str:
        low, high = self.interval
        stock_s, own_s = self.iteration_time_s
        return (
            f"{self.arm} {self.ratios[-1]:.4f}, mean {self.mean:.4f}, 95 % "
            f"{low:.4f}-{high:.4f}, upper bound {self.upper:.4f} "
            f"({stock_s:.4f} s -> {own_s:.4f} s)"
        )


def ratio(state: State, arm: str) -> Ratio:
    """The ratio over all rounds so far, of which there is one at least."""
    times = [r["iteration_time_s"] for r in state.rounds]
    ratios = [t[arm] / t[STOCK] for t in times]
    logarithms = [math.log(value) for value in ratios]
    mean, error, freedom = statistics.fmean(logarithms), math.inf, len(ratios) - 1
    if freedom:
        error = statistics.stdev(logarithms) / math.sqrt(len(ratios))

    def bound(quantile: float) -> float:
        if not freedom:
            return math.inf if quantile > 0.5 else 0.0
        return math.exp(mean + float(stats.t.ppf(quantile, freedom)) * error)

    return Ratio(
        arm,
        tuple(ratios),
        math.exp(mean),
        (bound(0.025), bound(0.975)),
        bound(0.95),
        (
            statistics.median(t[STOCK] for t in times),
            statistics.median(t[arm] for t in times),
        ),
    )


@dataclass(frozen=True)
class StageMemory:
    """Peak memory of a stage while units run, in bytes.

    Args:
        stage: which.
        in_flight: microbatches held at most, in 1F1B and in EnvPipe's order.
        stock: of unmodified Megatron.
        one_f_one_b: of the patched one's 1F1B, at the end of its last turn; likewise `envpipe`.
        predicted: for EnvPipe's order, by the package before it ran.
        measured: by the package, in the first iteration of that order.
    """

    stage: int
    in_flight: tuple[int, int]
    stock: int
    one_f_one_b: int
    envpipe: int
    predicted: float
    measured: int

    @property
    def error(self) -> float:
        """Of the prediction against the peak at the end of the last turn, relative."""
        return self.predicted / self.envpipe - 1


def memories(state: State) -> list[StageMemory]:
    """Peak memory of each stage, from the last start whose arms all ended well."""
    starts = sorted({name.split("/")[1] for name in state.runs if name.startswith(f"{PART}/")})
    for start in reversed(starts):
        runs = [state.runs.get(f"{PART}/{start}/{arm}", {}) for arm in ARMS]
        if all(run.get("status") == "ok" for run in runs):
            return _memories(*runs)
    return []


def _memories(
    stock: dict[str, Any], one_f_one_b: dict[str, Any], envpipe: dict[str, Any]
) -> list[StageMemory]:
    found = []
    stages = (envpipe.get("summary") or {}).get("memory") or []
    for number, stage in enumerate(stages):
        more = stage["in_flight"] - stage["baseline_in_flight"]
        peaks = [
            run["ranks"][number]["forward_backward_bytes"] for run in (stock, one_f_one_b, envpipe)
        ]
        found.append(
            StageMemory(
                stage=number,
                in_flight=(stage["baseline_in_flight"], stage["in_flight"]),
                stock=peaks[0],
                one_f_one_b=peaks[1],
                envpipe=peaks[2],
                predicted=stage["baseline_peak_bytes"] + more * stage["activation_bytes"],
                measured=stage["measured_peak_bytes"],
            )
        )
    return found
