"""Unmodified Megatron-LM beside the patched one, on the GPUs of this machine or on its CPU.

    python benchmarks/megatron_lm/prove.py --stock DIR --patched DIR --output OUT equality ratio

Parts: `equality` of losses and gradient norms; `ratio` of iteration times, with peak memory and
what the units of one order predict of another; `stress` by random orders and delays; `energy` as
both sides print it; `report` of all that is in OUT. Level `units` has arms of its own, and is the
only one for jobs that another order is not proven for; those with Transformer Engine or Apex run
where these are installed. With --ranks-per-gpu 4, one GPU is enough for all but energy and, without
MPS, times (shared_gpu.py); more than --jobs 2 starve each other then, and of eight ranks more than
one job. What is done already is not done again, so a call that ran out of time is simply repeated.
Another --channel than auto has a folder of its own in OUT, and so have ranks that share GPUs. No
clock is ever changed: all runs get a back end that sets nothing and
ENVPIPE_FORBID_CLOCK_CONTROL=1, and none is started without.
"""

from __future__ import annotations

import fnmatch
import importlib.util
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.megatron_lm import equality, ratio, stress
from benchmarks.megatron_lm.models import APEX, ENVPIPE, SIZES, TRANSFORMER_ENGINE
from benchmarks.megatron_lm.running.jobs import Job, Site, State, modified, prepare, prepare_corpus
from benchmarks.megatron_lm.running.pool import Limits, run_jobs
from benchmarks.megatron_lm.running.rest import RESTING
from benchmarks.megatron_lm.running.rounds import Rounds, ratio_columns, ratio_rows, take_turns
from benchmarks.megatron_lm.unit_times import prediction_rows, unit_rows
from benchmarks.outputs import leave, markdown_table, shown
from benchmarks.shared_gpu import partitioned
from envpipe_megatron.core.channel_model import CARRIERS

PARTS = ("equality", "ratio", "stress", "energy", "report")
#: Tables of the report that are evidence, beside ratios.
EVIDENCE = ("equality", "prediction", "memory", "stress", "energy")
ENERGY_RUN, _ENERGY_TARGET_PERCENT = "energy/envpipe", 1.0
#: Kept of the time that a call may take, for logs and report, s.
_FOR_THE_END_S = 15.0
#: Of all packed logs, bytes; an archive that is too large does not come back from some machines.
_MOST_LOG_BYTES, _MOST_OF_A_LOG = 40 * 2**20, 2 * 2**20
_ERROR = re.compile(r"^(?:\[rank\d+\]: *)?((?!.*ChildFailed)[\w.]*(?:Error|Exit)(?::.*)?)$", re.M)


@click.command(help=(__doc__ or "").replace("\n\n    python", "\n\n\b\n    python"))
@click.option("--stock", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--patched", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--output", type=click.Path(path_type=Path), required=True, help="State, report.")
@click.option("--tag", default="core_v0.16.1", show_default=True, help="Of both checkouts.")
@click.option("--gpus", type=int, help="Default: those of this machine; 4 on the CPU.")
@click.option("--ranks-per-gpu", default=1, show_default=True, help="See shared_gpu.py.")
@click.option("--cpu", is_flag=True, help="gloo, emulated GPUs, and the smallest sizes.")
@click.option("--channel", type=click.Choice(CARRIERS), default="auto", show_default=True)
@click.option("--budget-s", default=540.0, show_default=True, help="Ends in time by itself.")
@click.option("--jobs", "concurrency", default=3, show_default=True, help="At the same time.")
@click.option("--slots", default=1, show_default=True, help="Jobs of `equality` that compute.")
@click.option("--start-s", default=240.0, show_default=True, help="Until a job's first turn.")
@click.option("--hang-s", default=60.0, show_default=True, help="Without progress, a hang.")
@click.option("--most-failures", default=8, show_default=True, help="Then it starts no more.")
@click.option("--only", multiple=True, help="Names of runs, with wildcards; see --list.")
@click.option("--list", "listed", is_flag=True, help="Runs of the parts, and what is done.")
@click.option("--iterations", type=int, help="Of `equality`. [default: 50; 10 on the CPU]")
@click.option("--corpus", type=click.Path(path_type=Path), help="Made if need be. [in scratch]")
@click.option("--rounds", default=5, show_default=True, help="Of `ratio`, in all calls.")
@click.option("--round-turns", default=5, show_default=True, help="Of an arm in a round.")
@click.option("--turn-iterations", default=10, show_default=True, help="Of a turn of `ratio`.")
@click.option(
    "--warmup-iterations",
    type=click.IntRange(ratio.LEAST_FIRST_TURN),
    default=12,
    show_default=True,
    help="Of its first turns.",
)
@click.option("--microbatches", type=int, help="Of `ratio`. [default: 14; 6 on the CPU]")
@click.option("--like", help="Setting of `equality` that `ratio` measures. [default: gpt-ppN]")
@click.option("--arm", multiple=True, help="Of `ratio`, beside the unmodified. [default: all]")
@click.option("--resting", is_flag=True, help="Of `ratio`: EnvPipe rests, in place of unmodified.")
@click.option("--zero-weights", is_flag=True, help="Of `ratio`: matrix products take less power.")
@click.option("--unchecked", is_flag=True, help="Of `ratio`: no looking for NaN in losses.")
@click.option("--size", type=click.Choice([*SIZES]), help="Of `ratio`. [default: what fits]")
@click.option("--energy-iterations", default=60, show_default=True)
@click.option("--stress-iterations", default=1000, show_default=True)
@click.option("--stress-delay-ms", default=2.0, show_default=True, help="Of a unit, at most.")
@click.option("--scratch", type=click.Path(path_type=Path), help="Logs, checkpoints. [/tmp]")
@click.argument("parts", nargs=-1, type=click.Choice(PARTS), required=True)
def main(**options: Any) -> None:
    """Run the parts that are named, and leave state, report and logs in a folder."""
    begin_s = time.monotonic()
    cpu, tag, channel = options["cpu"], options["tag"], options["channel"]
    sharing = options["ranks_per_gpu"] > 1
    says_nothing = {"energy"} if partitioned(os.environ) else {"ratio", "energy"}
    if sharing and (asked := says_nothing.intersection(options["parts"])):
        raise click.UsageError(f"Ranks that share a GPU say nothing of: {', '.join(asked)}")
    output = options["output"] if channel == "auto" else options["output"] / channel
    output = output / f"ranks-per-gpu-{options['ranks_per_gpu']}" if sharing else output
    scratch = options["scratch"] or Path(tempfile.gettempdir()) / f"envpipe-proof-{tag}"
    gpus = options["gpus"] or (4 if cpu else torch.cuda.device_count())
    corpus = (options["corpus"] or scratch / "corpus").resolve()
    site = Site(
        options["stock"],
        options["patched"],
        scratch.resolve(),
        cpu,
        gpus,
        corpus,
        channel,
        has=frozenset(
            name for name in (TRANSFORMER_ENGINE, APEX) if importlib.util.find_spec(name)
        ),
        ranks_per_gpu=options["ranks_per_gpu"],
    )
    output.mkdir(parents=True, exist_ok=True)
    state = State(output / f"proof-{tag}.json")
    if options["listed"]:
        _Proof(site, state, options, begin_s).show()
        return
    runs = set(options["parts"]) != {"report"}
    if runs:
        state.machine.update(_machine(site, tag, cpu))
        for checkout in (site.stock, site.patched):
            prepare(checkout)
    proof = _Proof(site, state, options, begin_s)
    if proof.needs_corpus() and not prepare_corpus(corpus, site.stock):
        proof = _Proof(replace(site, corpus=None), state, options, begin_s)
    try:
        if runs:
            proof.run()
    finally:
        state.save()
        click.echo(write_report(state, site, output).split("\n## commands")[0])
        if site.scratch.exists():
            _pack_logs(site, output / "logs.tar.gz")


class _Proof:
    def __init__(self, site: Site, state: State, options: dict[str, Any], begin_s: float) -> None:
        self._site = site
        self._state = state
        self._options = options
        self._parts = options["parts"]
        self._rounds = Rounds(
            options["rounds"],
            options["round_turns"],
            options["turn_iterations"],
            options["warmup_iterations"],
        )
        self._deadline_s = begin_s + options["budget_s"] - _FOR_THE_END_S

    def needs_corpus(self) -> bool:
        """Making one takes the better part of a minute."""
        jobs = self._jobs("equality")
        return any("{corpus}" in argument for job in jobs for argument in job.arguments)

    def run(self) -> None:
        if "equality" in self._parts and (names := equality.left_out(self._site)):
            click.echo(f"left out, for want of Transformer Engine or Apex: {', '.join(names)}")
        shared = self._jobs("equality")
        slots = self._options["slots"]
        run_jobs(self._site, self._state, shared, self._limits(), slots=slots)
        # Four jobs with contexts on the same GPUs hung in Megatron's own first iteration, though
        # one alone computed; none did that had the GPUs for itself.
        alone = self._limits(concurrency=1)
        run_jobs(self._site, self._state, self._jobs("stress", "energy"), alone)
        arms = self._jobs("ratio")
        limits = self._limits(concurrency=len(arms))
        take_turns(self._site, self._state, arms, self._rounds, limits)

    def show(self) -> None:
        for job in self._jobs(*PARTS):
            run = self._state.runs.get(job.name, {})
            status = run.get("status", "not run")
            old = status == "ok" and not self._state.done(job)
            click.echo(f"{job.name}: {'ok, of another job' if old else status}")

    def _limits(self, concurrency: int | None = None) -> Limits:
        patience = self._site.ranks_per_gpu  # a first iteration then takes most of a minute
        return Limits(
            self._deadline_s,
            patience * self._options["start_s"],
            patience * self._options["hang_s"],
            self._options["most_failures"],
            concurrency or self._options["concurrency"],
            least_s=0.0 if self._site.cpu else 45.0,
        )

    def _jobs(self, *parts: str) -> list[Job]:
        site, options, only = self._site, self._options, self._options["only"]
        iterations = options["iterations"] or (10 if site.cpu else 50)
        delay_s = options["stress_delay_ms"] / 1e3
        of = ("microbatches", "like", "arm", "resting", "zero_weights", "size", "unchecked")
        setting = ratio.setting(site, *(options[name] for name in of))
        makers: dict[str, Callable[[], list[Job]]] = {
            "equality": lambda: equality.jobs(site, iterations),
            "stress": lambda: stress.jobs(site, options["stress_iterations"], delay_s),
            "energy": lambda: energy_jobs(site, options["energy_iterations"]),
            "ratio": lambda: ratio.jobs(site, self._state, setting, self._rounds),
        }
        asked = [part for part in makers if part in parts and part in self._parts]
        # The arms of a ratio take turns: all of them are needed.
        return [
            job
            for part in asked
            for job in makers[part]()
            if not only or part == "ratio" or any(fnmatch.fnmatch(job.name, name) for name in only)
        ]


def energy_jobs(site: Site, iterations: int) -> list[Job]:
    """One job in EnvPipe's order."""
    energy = "" if site.cpu else "--log-energy"  # it asks NVML
    return [ratio.job_of(site, ratio.setting(site), ENERGY_RUN, ENVPIPE, iterations, (), energy)]


def energy_rows(state: State) -> list[dict[str, Any]]:
    """J an iteration and GPU as both print it, over the log intervals of the run but the first.

    None where the run did not end well, or one of both was not printed.
    """
    run = state.runs.get(ENERGY_RUN, {})
    if run.get("status") != "ok":
        return []
    # The first interval holds the start.
    lines = [line for line in run["energies"] if line["iteration"] > ratio.LOG_INTERVAL]
    if not lines or any(line["envpipe_j"] is None for line in lines):
        return []
    megatron_j, envpipe_j = (
        statistics.fmean(line[name] for line in lines) for name in ("megatron_j", "envpipe_j")
    )
    duration_s = sum(line["iteration_ms"] for line in lines) * ratio.LOG_INTERVAL / 1e3
    percent = 100 * (envpipe_j / megatron_j - 1)
    return [
        {
            "Megatron (J)": megatron_j,
            "EnvPipe (J)": envpipe_j,
            "difference (%)": percent,
            "iterations": ratio.LOG_INTERVAL * len(lines),
            "duration (s)": duration_s,
            "target met": abs(percent) <= _ENERGY_TARGET_PERCENT and duration_s >= 20,
        }
    ]


def _machine(site: Site, tag: str, cpu: bool) -> dict[str, Any]:
    found = {
        "tag": tag,
        "channel": site.channel,
        "ranks on a GPU": site.ranks_per_gpu,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "changed files": modified(site.stock, site.patched),
        "cpus": os.cpu_count(),
    }
    if not cpu and shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv"]
        asked = subprocess.run(query, capture_output=True, text=True)
        found["gpus"] = asked.stdout.strip().splitlines()[1:]
    return found


def report(state: State, site: Site) -> dict[str, Any]:
    """All that was found: for each part its rows, and the command of each run."""
    failed = {name: run for name, run in state.runs.items() if run["status"] != "ok"}
    errors = {name: _ERROR.search(run["log"]) for name, run in failed.items()}
    return {
        "machine": state.machine,
        "equality": equality.rows(state, site.cpu),
        "ratio": ratio_rows(state),
        "prediction": ratio.rows_of_units(state, prediction_rows),
        "times of units": ratio.rows_of_units(state, unit_rows),
        "memory": ratio.memory_rows(state),
        "stress": stress.rows(state),
        "energy": energy_rows(state),
        "not well": [
            {"run": name, "status": run["status"], "first error": error[1][:200] if error else ""}
            for (name, run), error in zip(failed.items(), errors.values(), strict=True)
        ],
        "rounds": state.rounds,
        "commands": {name: run["command"] for name, run in sorted(state.runs.items())},
    }


def write_report(state: State, site: Site, output: Path) -> str:
    """Write report.md, report.json and rows of evidence; the Markdown."""
    found = report(state, site)
    tables = {name: found[name] for name in EVIDENCE}
    for row in found["ratio"]:
        name = RESTING if RESTING in row["setting"] else "ratio"
        tables.setdefault(name, []).append(ratio_columns(row))
    product, *_ = state.machine.get("gpus", [""])[0].split(",")
    basis, gpus = ("CPU", "") if site.cpu else ("GPUs", f"{site.num_gpus} {product}")
    leave(output, basis, tables, gpus=gpus.strip())
    lines = [f"# {state.machine.get('tag', '')}", ""]
    lines += [f"{name}: {value}  " for name, value in state.machine.items()]
    for title, rows in found.items():
        if rows and title not in ("machine", "rounds", "commands"):
            table = markdown_table([*rows[0]], (map(shown, row.values()) for row in rows))
            lines += ["", f"## {title}", "", table]
    lines += ["", "## commands", ""]
    lines += [f"- {name}: `{command}`" for name, command in found["commands"].items()]
    text = "\n".join(lines) + "\n"
    (output / "report.md").write_text(text)
    (output / "report.json").write_text(json.dumps(found, indent=1) + "\n")
    return text


def _pack_logs(site: Site, archive: Path) -> None:
    """Put logs, stacks and EnvPipe's small files of all jobs into one archive, newest first."""
    patterns = ("*/log.txt", "*/stacks-*.txt", "*/envpipe/*.json*")
    files = [f for pattern in patterns for f in site.scratch.glob(pattern) if f.stat().st_size]
    files.sort(key=lambda file: -file.stat().st_mtime)
    room = _MOST_LOG_BYTES
    with tarfile.open(archive, "w:gz") as packed:
        for file in files:
            size = file.stat().st_size
            if size <= min(room, _MOST_OF_A_LOG):
                packed.add(file, file.relative_to(site.scratch))
                room -= size


if __name__ == "__main__":
    main()
