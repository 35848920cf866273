"""Iteration time and peak memory of the patched checkout against those of the unmodified one.

All arms are started together on the same GPUs and take short turns, in an order that is turned
round each time, so that what drifts meets all of them alike. A round is a block of iterations of
each arm, made of several turns.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import click
from scipy import stats

from benchmarks.megatron_lm.proof_arms import ENVPIPE, ONE_F_ONE_B, STOCK, Planned
from benchmarks.megatron_lm.proof_jobs import Job, Site, joined
from benchmarks.megatron_lm.proof_models import (
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
from benchmarks.megatron_lm.proof_state import State
from benchmarks.megatron_lm.proof_turns import Block

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
        turns: of each arm in a round.
        iterations: of a turn.
        warmup: of each arm's first turn, which is not counted.
    """

    count: int
    turns: int
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


def jobs(site: Site, state: State, rounds: Rounds) -> list[Job]:
    """One job an arm for the rounds that are still missing; none where none is."""
    missing = rounds.count - len(measured(state, str(size(site))))
    if missing <= 0:
        return []
    number = 1 + sum(name.split("/")[0] == PART for name in state.runs) // len(ARMS)
    turns = (rounds.warmup, *[rounds.iterations] * (rounds.turns * missing))
    # One more: a turn ends where the next iteration would begin.
    iterations = sum(turns) + 1
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
    timed = len(jobs_made[0].turns) - 1
    return names + [name for turn in range(timed) for name in (names, names[::-1])[turn % 2]]


class Keeper:
    """Puts turns together to rounds, and each round into the state as soon as it is whole.

    Args:
        state: gets the rounds.
        rounds: what a round is.
        model: what is trained.
    """

    def __init__(self, state: State, rounds: Rounds, model: str) -> None:
        self._state = state
        self._rounds = rounds
        self._model = model
        self._turns: dict[tuple[str, int], dict[str, list[Block]]] = {}

    def __call__(self, run: str, block: Block) -> None:
        """Take in a turn; that of number 0 is the warm-up."""
        if not run.startswith(f"{PART}/") or block.turn == 0:
            return
        _, start, arm = run.split("/")
        number = (block.turn - 1) // self._rounds.turns
        turns = self._turns.setdefault((start, number), {name: [] for name in ARMS})
        turns[arm].append(block)
        if all(len(blocks) == self._rounds.turns for blocks in turns.values()):
            self._keep(start, turns)

    def _keep(self, start: str, turns: dict[str, list[Block]]) -> None:
        iterations = self._rounds.turns * self._rounds.iterations
        self._state.rounds.append(
            {
                "start": start,
                "model": self._model,
                "iterations": iterations,
                "turns_s": {arm: [b.time_s for b in blocks] for arm, blocks in turns.items()},
                "iteration_time_s": {
                    arm: sum(b.time_s for b in blocks) / iterations for arm, blocks in turns.items()
                },
            }
        )
        self._state.save()
        rounds = measured(self._state, self._model)
        for arm in ARMS[1:]:
            click.echo(f"round {len(rounds)}: {ratio(rounds, arm)}")


def measured(state: State, model: str) -> list[dict[str, Any]]:
    """The rounds of a model so far."""
    return [found for found in state.rounds if found.get("model") == model]


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


def ratio(rounds: Sequence[dict[str, Any]], arm: str) -> Ratio:
    """The ratio over rounds, of which there is one at least."""
    times = [found["iteration_time_s"] for found in rounds]
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
