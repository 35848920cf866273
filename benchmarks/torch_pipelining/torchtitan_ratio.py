"""Step times of torchtitan with EnvPipe attached against torchtitan's own, and its losses.

    python benchmarks/torch_pipelining/torchtitan_ratio.py --ranks 2 --output OUT -- ARGUMENTS

where `torchtitan` can be imported and ARGUMENTS are its own. A Llama of about 1B is trained by a
pipeline with a stage a rank, by 1F1B, or with two (--chunks), by the interleaved order. Arms:
`own`, torchtitan alone; `units`, its own order, and another clock asked for at every unit; `order`,
EnvPipe's order. They are started together and take short turns, as in benchmarks/megatron_lm. With
--resting, `units` has all turns, and EnvPipe rests in half of them, which tells what it does from
how a job happens to lie. No clock is ever changed.

To find what costs: `again`, torchtitan alone once more, started last; and `observe`, which measures
and has no clocks.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import click

from benchmarks.megatron_lm.models import STOCK
from benchmarks.megatron_lm.ratio import PART, Keeper, Rounds, ratio_rows
from benchmarks.megatron_lm.running.jobs import State, at_free_port, launch_ranks
from benchmarks.megatron_lm.running.rest import RESTING
from benchmarks.megatron_lm.running.turns import Referee
from envpipe_megatron.core.orders import builders
from envpipe_megatron.policies.frequencies import envelope
from unmeasured import another_each_unit, stepped_order, write_unmeasured_plan

_ARM = Path(__file__).with_name("torchtitan_arm.py")
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
    output.mkdir(parents=True, exist_ok=True)
    measured = Rounds(rounds, 1, turn_steps, warmup_steps)
    if resting and set(arms) - {"units"}:
        raise click.UsageError("EnvPipe rests in a job of --arm units alone")
    if resting:
        arms, name = ("units",), f"{name}-{RESTING}"
    arms = arms or _ARMS
    if chunks > 1 and "order" in arms:
        raise click.UsageError("EnvPipe's order is built for one stage a rank: take --arm units")
    state, names = State(output / "state.json"), arms if resting else (STOCK, *arms)
    compared = (RESTING, *names) if resting else names
    keeper = Keeper(state, measured, compared)
    start = f"{PART}/{name} start"
    turns = (warmup_steps, *[turn_steps] * (rounds * measured.turns_of_a_job(compared)))
    runs = [f"{start}/{arm}" for arm in names]
    order = runs + [run for turn in range(len(turns) - 1) for run in (runs, runs[::-1])[turn % 2]]
    referee = Referee(
        output / "turns",
        order,
        goes_on=lambda left: time.monotonic() < deadline_s - 15,
        on_block=keeper,
    )
    control = "emulated" if cpu_shim else "dry_run"
    running: list[subprocess.Popen[bytes]] = []
    try:
        for run, arm in zip(runs, names, strict=True):
            folder = (output / f"{name}-{arm}").resolve()
            folder.mkdir(exist_ok=True)
            job = {
                "run": run,
                "socket": str(referee.path.resolve()),
                "turns": turns,
                "iterations": sum(turns) + 1,
                "folder": str(folder),
                "cpu_shim": cpu_shim,
                "rests": resting,
            }
            (folder / "job.json").write_text(json.dumps(job))
            training = [
                f"--training.steps={sum(turns) + 1}",
                f"--training.seq_len={sequence}",
                f"--training.local_batch_size={microbatch * microbatches}",
                f"--model.flavor={flavor}",
                f"--job.dump_folder={folder}",
                f"--parallelism.pipeline_parallel_degree={ranks}",
                f"--parallelism.pipeline_parallel_schedule={_SCHEDULES[chunks]}",
                f"--parallelism.pipeline_parallel_microbatch_size={microbatch}",
            ]
            own = _of_envpipe(arm, (ranks, microbatches, chunks), folder, control)
            launch = launch_ranks(
                ranks,
                at_free_port(),
                (str(_ARM), str(folder / "job.json"), *own, *training, *arguments),
                {"ENVPIPE_EMULATED_ROOT": str(folder / "gpus")},
            )
            running.append(launch.start(Path.cwd(), folder / "log.txt"))
            referee.expect(run, ranks)
        while any(process.poll() is None for process in running):
            referee.poll(0.1)
            failed = any(process.poll() for process in running)
            if failed or time.monotonic() > deadline_s:
                codes = [process.poll() for process in running]
                raise click.ClickException(f"exits {codes}; see the logs in {output}")
    finally:
        for process in running:
            process.kill()
        referee.close()
        for row in ratio_rows(state):
            click.echo(json.dumps(row))
        for arm in () if resting else arms:
            click.echo(f"{name}, {arm}: losses {_equality(output, name, arm)}")


def _of_envpipe(
    arm: str, size: tuple[int, int, int], folder: Path, control: str
) -> tuple[str, ...]:
    ranks, microbatches, chunks = size
    if arm in (STOCK, "again"):
        return ()
    output = f"--envpipe-output={folder / 'envpipe'}"
    if arm == "observe":
        return ("--envpipe-level=observe", "--envpipe-gpu-control", control, output)
    if arm == "order":
        made = stepped_order(ranks, microbatches, None), envelope
    elif chunks > 1:
        made = builders.interleaved(ranks, microbatches, chunks), another_each_unit
    else:
        made = builders.one_f_one_b(ranks, microbatches), another_each_unit
    schedule, frequencies = made
    profile, plan = write_unmeasured_plan(schedule, folder, frequencies)
    return (
        f"--envpipe-level={'order' if arm == 'order' else 'units'}",
        "--envpipe-type=envelope",
        "--envpipe-reconfigure=default",
        f"--envpipe-scheduling={'ours' if arm == 'order' else '1f1b'}",
        f"--envpipe-baseline-steps={_WARMUP}",
        f"--envpipe-profile={profile}",
        f"--envpipe-plan={plan}",
        "--envpipe-gpu-control",
        control,
        output,
    )


def _equality(output: Path, name: str, arm: str) -> str:
    """How the losses of an arm compare with torchtitan's own, on the last rank."""
    found: list[list[str]] = []
    for each in (STOCK, arm):
        files = sorted((output / f"{name}-{each}").glob("losses-*.json"))
        if not files:
            return "were not kept"
        found.append(json.loads(files[-1].read_text()))
    theirs, ours = found
    different = [
        step for step, pair in enumerate(zip(theirs, ours, strict=False)) if len({*pair}) > 1
    ]
    count = min(map(len, found))
    return f"equal in {count} steps" if not different else f"differ from step {different[0]} on"


if __name__ == "__main__":
    main()
