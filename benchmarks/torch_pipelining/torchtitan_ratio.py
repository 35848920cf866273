"""Step times of torchtitan with EnvPipe attached against torchtitan's own, and its losses.

    python benchmarks/torch_pipelining/torchtitan_ratio.py --ranks 2 --output OUT -- ARGUMENTS

where `torchtitan` can be imported and ARGUMENTS are its own, with whole paths. A Llama of about 1B
is trained by a pipeline with a stage a rank, by 1F1B, or with two (--chunks), by the interleaved
order. Arms:
`own`, torchtitan alone; `units`, its own order, and another clock asked for at every unit; `order`,
EnvPipe's order. They are started together and take short turns, as in benchmarks/megatron_lm. With
--resting, `units` has all turns, and EnvPipe rests in half of them, which tells what it does from
how a job happens to lie. No clock is ever changed.

To find what costs: `again`, torchtitan alone once more, started last; and `observe`, which measures
and has no clocks.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks.megatron_lm.models import ENVPIPE, STOCK, UNITS, Mapping, Planned
from benchmarks.megatron_lm.running.jobs import Job, Site, State
from benchmarks.megatron_lm.running.pool import Limits
from benchmarks.megatron_lm.running.rest import RESTING
from benchmarks.megatron_lm.running.rounds import (
    Rounds,
    next_start,
    ratio_columns,
    ratio_rows,
    take_turns,
)
from benchmarks.outputs import leave
from benchmarks.torch_pipelining.torchtitan_arm import SHIM_VARIABLE

_ARM = "benchmarks/torch_pipelining/torchtitan_arm.py"
_WARMUP = 3  # of EnvPipe's own, within the first turn
#: Torchtitan's own, by how many stages a rank has.
_SCHEDULES = {1: "1F1B", 2: "Interleaved1F1B"}
_ARMS = ("units", "order")
_PARTS = ("observe", "again")


@click.command(help=(__doc__ or "").replace("\n\n    python", "\n\n\b\n    python"))
@click.option("--ranks", default=2, show_default=True)
@click.option(
    "--chunks",
    type=click.IntRange(1, 2),
    default=1,
    show_default=True,
    help="Stages of a rank.",
)
@click.option("--microbatches", default=8, show_default=True)
@click.option("--microbatch", default=3, show_default=True, help="Sequences of one.")
@click.option("--sequence", default=2048, show_default=True, help="Tokens of a sequence.")
@click.option("--flavor", type=click.Choice(["1B", "tiny"]), default="1B", show_default=True)
@click.option("--arm", "arms", multiple=True, type=click.Choice(_ARMS + _PARTS))
@click.option("--resting", is_flag=True, help="EnvPipe rests, in place of torchtitan alone.")
@click.option("--rounds", default=6, show_default=True)
@click.option("--turn-steps", default=10, show_default=True)
@click.option("--warmup-steps", default=12, show_default=True, help="Of each arm's first turn.")
@click.option("--limit-s", default=280.0, show_default=True, help="Ends in time by itself.")
@click.option("--name", default="torchtitan", show_default=True, help="Of this setting.")
@click.option("--output", type=click.Path(path_type=Path), required=True)
@click.option("--cpu-shim", default="", help="Module that lets torchtitan run on CPUs, for a try.")
@click.argument("arguments", nargs=-1)
def main(
    ranks: int,
    chunks: int,
    microbatches: int,
    microbatch: int,
    sequence: int,
    flavor: str,
    arms: Sequence[str],
    resting: bool,
    rounds: int,
    turn_steps: int,
    warmup_steps: int,
    limit_s: float,
    name: str,
    output: Path,
    cpu_shim: str,
    arguments: Sequence[str],
) -> None:
    """Start the arms, and print what they took."""
    deadline_s = time.monotonic() + limit_s
    if resting and set(arms) - {"units"}:
        raise click.UsageError("EnvPipe rests in a job of --arm units only")
    if resting:
        arms, name = ("units",), f"{name}-{RESTING}"
    arms = arms or _ARMS
    if chunks > 1 and "order" in arms:
        raise click.UsageError("EnvPipe's order is built for one stage a rank: take --arm units")
    site = Site(Path(), Path(), output.resolve(), bool(cpu_shim), ranks)
    state, names = State(output / "state.json"), arms if resting else (STOCK, *arms)
    measured = Rounds(rounds, 1, turn_steps, warmup_steps)
    turns = measured.lengths((RESTING, *names) if resting else names)
    training = (
        f"--training.steps={sum(turns) + 1}",
        f"--training.seq_len={sequence}",
        f"--training.local_batch_size={microbatch * microbatches}",
        f"--model.flavor={flavor}",
        "--job.dump_folder={folder}",
        f"--parallelism.pipeline_parallel_degree={ranks}",
        f"--parallelism.pipeline_parallel_schedule={_SCHEDULES[chunks]}",
        f"--parallelism.pipeline_parallel_microbatch_size={microbatch}",
        *(argument.replace("{", "{{").replace("}", "}}") for argument in arguments),
    )
    start = next_start(state, name)
    jobs = []
    for arm in names:
        plan = _planned(arm, Mapping(ranks, chunks=chunks), microbatches)
        job = Job(
            name=f"{start}/{arm}",
            arguments=(*_of_envpipe(arm, plan), *training),
            num_ranks=ranks,
            iterations=sum(turns) + 1,
            patched=False,
            turns=turns,
            environment={SHIM_VARIABLE: cpu_shim},
            plan=plan,
            rests=resting,
            limit_s=limit_s,
            entry=_ARM,
        )
        jobs.append(job)
    # The first that fails ends all: the others would wait for it.
    limits = Limits(deadline_s, limit_s, limit_s, 1, len(jobs), least_s=0.0)
    take_turns(site, state, jobs, measured, limits)
    found = ratio_rows(state)
    for row in found:
        click.echo(json.dumps(row))
    basis, gpus = ("CPU", "") if cpu_shim else ("GPUs", str(ranks))
    table = f"torchtitan {RESTING}" if resting else "torchtitan"
    leave(output, basis, {table: map(ratio_columns, found)}, gpus=gpus)
    runs = {arm: state.runs[job.name] for arm, job in zip(names, jobs, strict=True)}
    for arm in () if resting else arms:
        click.echo(f"{name}, {arm}: losses {_equality(runs[STOCK], runs[arm])}")
    if failed := {arm: run["status"] for arm, run in runs.items() if run["status"] != "ok"}:
        raise click.ClickException(f"{failed}; see the logs in {output}")


def _planned(arm: str, mapping: Mapping, microbatches: int) -> Planned | None:
    known = {"units": UNITS, "order": ENVPIPE}.get(arm)
    return None if known is None else Planned(mapping, microbatches, known)


def _of_envpipe(arm: str, plan: Planned | None) -> tuple[str, ...]:
    """Return EnvPipe's options of an arm, which torchtitan takes without Megatron's switch."""
    if arm == "observe":
        output = "--envpipe-output={folder}/envpipe"
        return ("--envpipe-level=observe", "--envpipe-gpu-control", "{control}", output)
    return () if plan is None else tuple(plan.arguments(_WARMUP).split()[1:])


def _equality(theirs: dict[str, Any], ours: dict[str, Any]) -> str:
    """Say how the losses of an arm compare with torchtitan's own, on the last rank."""
    if not (theirs["ranks"] and ours["ranks"]):
        return "were not kept"
    pairs = list(zip(theirs["ranks"][-1]["losses"], ours["ranks"][-1]["losses"], strict=False))
    different = [step for step, pair in enumerate(pairs) if len({*pair}) > 1]
    return (
        f"equal in {len(pairs)} steps" if not different else f"differ from step {different[0]} on"
    )


if __name__ == "__main__":
    main()
