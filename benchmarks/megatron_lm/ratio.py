"""Iteration time, peak memory and joules of the patched checkout against the unmodified one's.

At level `units` too, where clocks are to change at every unit. The job is a GPT with a stage on
each GPU, or is like another setting of `equality`, in a real size. And how well the iteration of
one order is predicted by the units of the other (`unit_times`).

All arms are started together on the same GPUs and take short turns (`running.rounds`), in an order
that is turned round each time, so that what drifts meets all of them alike. Or one job has all
turns, and EnvPipe rests in half of them (`running.rest`). Where weights are zero, matrix products
take less power, and clocks wander less, in FP8 not at all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import click

from benchmarks.megatron_lm import equality
from benchmarks.megatron_lm.models import (
    ENVPIPE,
    GPT_1_3B,
    IN_PLACE,
    LONG,
    NO_EVALUATION,
    OFF,
    ONE_F_ONE_B,
    ORDER_ARMS,
    SERIAL,
    SIZES,
    SPLIT,
    STOCK,
    TINY,
    TINY_ON_CPU,
    TRANSFORMER_ENGINE,
    UNITS,
    UNMODIFIED,
    WIDE,
    Mapping,
    Planned,
    Size,
    job_arguments,
    planned,
    training,
)
from benchmarks.megatron_lm.running.jobs import Job, Site, State
from benchmarks.megatron_lm.running.rest import RESTING
from benchmarks.megatron_lm.running.rounds import PART, Rounds, measured, next_start
from envpipe_megatron.core.schedule import Schedule

#: What takes turns only where it is named.
_ASKED_FOR = (OFF, SERIAL, SPLIT, IN_PLACE)
#: The framework's order before the plan's; within the first turn, which is not counted. An
#: iteration comes before it, and the plan is taken up in the one behind it.
_WARMUP = 3
LEAST_FIRST_TURN = 1 + _WARMUP + 1
_OF_A_NAME = re.compile(r"(.+)-m(\d+)")
LOG_INTERVAL = 10
#: Without weights that tell tokens apart, each expert gets its share of them by chance.
_ZERO_WEIGHTS = "--init-method-std 0 --moe-router-force-load-balancing"
#: As NVIDIA's performance recipes train. By default the host waits for each microbatch's loss.
_UNCHECKED = "--no-check-for-nan-in-loss-and-grad"
#: As they do, too: with 4 MB of masks a sequence, the first forward of eight stages took 18 ms, the
#: second 4.6.
_WITHOUT_MASKS = "--no-create-attention-mask-in-dataloader"


@dataclass(frozen=True)
class Setting:
    """The model, how it is spread, and the setting of `equality` that it is like.

    With `rests`, EnvPipe rests in half of the turns of its only arm. With `zeros`, weights are.
    `sized` is the size's name, if it was asked for. With `unchecked`, nobody looks for NaN.
    """

    size: Size
    like: equality.Setting
    rests: bool = False
    zeros: bool = False
    sized: str | None = None
    unchecked: bool = False

    @property
    def mapping(self) -> Mapping:
        """How it is spread."""
        return self.like.mapping

    @property
    def name(self) -> str:
        """Such as gpt-pp4-m14, for 14 microbatches."""
        sized = f"-{self.sized}" if self.sized else ""
        how = sized + self.rests * "-resting" + self.zeros * "-zeros"
        how += self.unchecked * "-unchecked"
        return f"{self.like.name}-m{self.size.microbatches}{how}"

    @property
    def features(self) -> tuple[str, ...]:
        """What its job sets beyond size and mapping."""
        more = [_ZERO_WEIGHTS] * self.zeros + [_UNCHECKED] * self.unchecked
        # Only Megatron's own layers take masks from there.
        more += [_WITHOUT_MASKS] * (TRANSFORMER_ENGINE in self.like.needs)
        return (*self.like.features, *more)

    @property
    def arms(self) -> tuple[str, ...]:
        """What turns count to; all others are compared with the first."""
        return (RESTING, *self.like.arms) if self.rests else self.like.arms


def setting(
    site: Site,
    microbatches: int | None = None,
    like: str | None = None,
    only: Collection[str] = (),
    rests: bool = False,
    zeros: bool = False,
    sized: str | None = None,
    unchecked: bool = False,
) -> Setting:
    """A stage on each GPU if none is named; by default about as many microbatches as the model has.

    With `only`, just these arms beside unmodified Megatron: all of them hold memory together. With
    `rests`, one of EnvPipe's, by default level `units`. Raises click.UsageError if no such setting
    fits, or it has no such arm.
    """
    natural = LONG if rests else WIDE  # jobs beside each other share a GPU's memory
    wide = SIZES[sized] if sized else natural
    known = equality.settings(site.num_ranks, site.cpu, wide.hidden)
    fitting = {each.name: each for each in known}
    like = like or f"gpt-pp{site.num_ranks}"
    only = (only or (UNITS,)) if rests else only
    if rests and (len(only) > 1 or set(only) & {*UNMODIFIED, OFF}):
        raise click.UsageError(f"EnvPipe rests in a job of one arm of its own: {', '.join(only)}")
    if like not in fitting:
        raise click.UsageError(f"No setting {like} for {site.num_ranks} GPUs: {', '.join(fitting)}")
    mapping = fitting[like].mapping
    # Megatron wants more than two stages for chunks whose messages do not overlap.
    serial = mapping.chunks > 1 and mapping.pipeline > 2
    offered = (*fitting[like].arms, *[SERIAL] * serial)
    if unknown := set(only) - set(offered):
        raise click.UsageError(f"{like} has no arm {', '.join(unknown)}: {', '.join(offered)}")
    compared = only if rests else (STOCK, *only)
    arms = tuple(a for a in offered if a in compared or not (only or a in _ASKED_FOR))
    like_it = replace(fitting[like], arms=arms)
    size = wide if sized or TRANSFORMER_ENGINE in like_it.needs else GPT_1_3B
    size = TINY_ON_CPU if site.cpu else _on_gpus(site, like_it, size, sized=sized)
    size = replace(size, microbatches=microbatches or size.microbatches)
    return Setting(size.fitting(like_it.mapping), like_it, rests, zeros, sized, unchecked)


def _on_gpus(site: Site, like: equality.Setting, size: Size, *, sized: str | None) -> Size:
    """What fits into 80 GB, as many arms as share a GPU's memory; of a size that is named, more."""
    features = " ".join(like.features)
    layers = size.layers if sized else size.layers // site.ranks_per_gpu
    # Four wide experts have nearly three times the parameters, and FP8 has more copies of them: all
    # layers of a long one need an H200.
    wide_experts = "--num-experts" in features and "--moe-ffn-hidden-size" not in features
    if wide_experts or (size is LONG and "--fp8" in features and not sized):
        layers //= 2
    if "--moe-layer-freq" in features:  # which says of each layer what it is
        layers = TINY.layers
    # In parts, sequences are longer: a unit is then as much work as elsewhere.
    return replace(size, layers=layers, sequence=size.sequence * like.mapping.context)


def job_of(
    site: Site,
    of: Setting,
    name: str,
    arm: str,
    iterations: int,
    turns: tuple[int, ...],
    energy: str = "",
) -> Job:
    """An arm of a setting, for so many iterations in turns."""
    plan = planned(of.mapping, of.size, arm)
    return Job(
        name=name,
        arguments=job_arguments(
            site.cpu,
            of.size,
            of.mapping,
            of.size.mock_data,
            training(iterations, log_interval=LOG_INTERVAL),
            *of.features,
            NO_EVALUATION,
            plan.arguments(_WARMUP) if plan else "",
            "--no-overlap-p2p-communication" * (arm == SERIAL),
            energy,
            needs=of.like.needs,
        ),
        num_ranks=of.mapping.num_ranks,
        iterations=iterations,
        patched=arm not in UNMODIFIED,
        turns=turns,
        environment=of.like.environment,
        plan=plan,
        rests=of.rests,
        limit_s=3600.0,
    )


def jobs(site: Site, state: State, of: Setting, rounds: Rounds) -> list[Job]:
    """One job an arm for the rounds that are still missing; none where none is."""
    missing = rounds.count - len(measured(state, of.name, of.arms))
    if missing <= 0:
        return []
    start, turns = next_start(state, of.name), replace(rounds, count=missing).lengths(of.arms)
    # One more: a turn ends where the next iteration would begin.
    iterations = sum(turns) + 1
    return [job_of(site, of, f"{start}/{arm}", arm, iterations, turns) for arm in of.like.arms]


def memory_rows(state: State) -> list[dict[str, Any]]:
    """Peak memory of each stage in bytes, from each setting's last start that ended well.

    `predicted` is what the package said of EnvPipe's order before it ran; the others were measured
    in the forward-backward function at the end of each arm's last turn.
    """
    both = {STOCK, ENVPIPE}  # one job's last turn may be one in which EnvPipe rests
    last = {start.split()[0]: runs for start, runs in _starts(state).items() if runs.keys() >= both}
    return [
        {"setting": name, **_memory_row(number, stage, runs)}
        for name, runs in last.items()
        for number, stage in enumerate((runs[ENVPIPE].get("summary") or {}).get("memory") or [])
    ]


def _starts(state: State) -> dict[str, dict[str, dict[str, Any]]]:
    """The runs of each start whose arms all ended well, by arm."""
    starts: dict[str, dict[str, dict[str, Any]]] = {}
    for name, run in state.runs.items():
        part, start, *arm = name.split("/")
        if part == PART:
            starts.setdefault(start, {})[arm[0]] = run
    return {
        start: runs
        for start, runs in starts.items()
        if all(run["status"] == "ok" for run in runs.values())
    }


Rows = list[dict[str, Any]]


def rows_of_units(
    state: State, make: Callable[[dict[str, Any], dict[str, Schedule]], Rows]
) -> Rows:
    """What `unit_times` makes of each start whose arms all ended well."""
    rows, known = [], {s.name: s.mapping for s in equality.settings(10**6, cpu=False)}
    for start, runs in _starts(state).items():
        [(setting, microbatches)] = _OF_A_NAME.findall(start)
        times = {arm: run["times"] for arm, run in runs.items() if run.get("times")}
        if ONE_F_ONE_B in times and ENVPIPE in times:
            spread, count = known[setting], int(microbatches)
            schedules = {arm: Planned(spread, count, arm).schedule for arm in times}
            rows += [{"start": start, **row} for row in make(times, schedules)]
    return rows


def _memory_row(
    number: int, stage: dict[str, Any], runs: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    predicted = stage["predicted_peak_bytes"]
    peaks = {arm: run["ranks"][number]["forward_backward_bytes"] for arm, run in runs.items()}
    return {
        "stage": number,
        "in flight, 1F1B": stage["baseline_in_flight"],
        "in flight": stage["in_flight"],
        **{arm: peaks.get(arm) for arm in (*ORDER_ARMS, UNITS)},
        "predicted": predicted,
        "error (%)": 100 * (predicted / peaks[ENVPIPE] - 1),
    }
