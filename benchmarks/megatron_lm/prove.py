"""Unmodified Megatron-LM beside the patched one, on the GPUs of this machine or on its CPU.

    python benchmarks/megatron_lm/prove.py --stock DIR --patched DIR --output OUT equality ratio

Parts: `equality` of losses and gradient norms; `ratio` of iteration times, with peak memory;
`stress` by random orders and delays; `energy` as both sides print it; `faults` that must be
refused; `report` of all that is in OUT. What is done already is not done again, so a call that ran
out of time is simply repeated. No clock is ever changed: all runs get a back end that sets nothing
and ENVPIPE_FORBID_CLOCK_CONTROL=1, and none is started without.
"""

from __future__ import annotations

import fnmatch
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from benchmarks.megatron_lm import (
    part_energy,
    part_equality,
    part_faults,
    part_ratio,
    part_stress,
    proof_checkouts,
    proof_report,
)
from benchmarks.megatron_lm.part_ratio import Keeper, Rounds
from benchmarks.megatron_lm.proof_jobs import Job, Site
from benchmarks.megatron_lm.proof_pool import Limits, run_jobs
from benchmarks.megatron_lm.proof_state import State

PARTS = ("equality", "ratio", "stress", "energy", "faults", "report")
#: Kept of the time that a call may take, for logs and report, s.
_FOR_THE_END_S = 15.0
#: What jobs take to end when their last turn has ended, s.
_FOR_AN_END_S = 20.0


@click.command(help=(__doc__ or "").replace("\n\n    python", "\n\n\b\n    python"))
@click.option("--stock", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--patched", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--output", type=click.Path(path_type=Path), required=True, help="State, report.")
@click.option(
    "--also",
    type=click.Path(path_type=Path, exists=True),
    multiple=True,
    help="Another call's state.",
)
@click.option("--tag", default="core_v0.16.1", show_default=True, help="Of both checkouts.")
@click.option("--gpus", type=int, help="Default: those of this machine; 4 on the CPU.")
@click.option("--cpu", is_flag=True, help="gloo, emulated GPUs, and the smallest sizes.")
@click.option("--budget-s", default=540.0, show_default=True, help="Ends in time by itself.")
@click.option("--jobs", "concurrency", default=6, show_default=True, help="At the same time.")
@click.option("--slots", default=1, show_default=True, help="Jobs of `equality` that compute.")
@click.option("--start-s", default=240.0, show_default=True, help="Until a job's first turn.")
@click.option("--hang-s", default=60.0, show_default=True, help="Without progress, a hang.")
@click.option("--most-failures", default=8, show_default=True, help="Then it starts no more.")
@click.option("--only", help="Names of runs, with wildcards; see --list.")
@click.option("--list", "listed", is_flag=True, help="Runs of the parts, and what is done.")
@click.option("--iterations", type=int, help="Of `equality`. [default: 50; 10 on the CPU]")
@click.option("--corpus", type=click.Path(path_type=Path), help="Made if need be. [in scratch]")
@click.option("--rounds", default=5, show_default=True, help="Of `ratio`, in all calls.")
@click.option("--round-turns", default=5, show_default=True, help="Of an arm in a round.")
@click.option("--turn-iterations", default=10, show_default=True, help="Of a turn of `ratio`.")
@click.option("--warmup-iterations", default=12, show_default=True, help="Of its first turns.")
@click.option("--energy-iterations", default=60, show_default=True)
@click.option("--stress-iterations", default=1000, show_default=True)
@click.option("--stress-delay-ms", default=2.0, show_default=True, help="Of a unit, at most.")
@click.option("--scratch", type=click.Path(path_type=Path), help="Logs, checkpoints. [/tmp]")
@click.argument("parts", nargs=-1, type=click.Choice(PARTS), required=True)
def main(**options: Any) -> None:
    """Run the parts that are named, and leave state, report and logs in a folder."""
    begin_s = time.monotonic()
    cpu, output = options["cpu"], options["output"]
    tag = options["tag"]
    scratch = options["scratch"] or Path(tempfile.gettempdir()) / f"envpipe-proof-{tag}"
    gpus = options["gpus"] or (4 if cpu else _num_gpus())
    corpus = (options["corpus"] or scratch / "corpus").resolve()
    site = Site(options["stock"], options["patched"], scratch.resolve(), cpu, gpus, corpus)
    output.mkdir(parents=True, exist_ok=True)
    state = State(output / f"proof-{tag}.json")
    for other in options["also"]:
        state.take_in(State(other))
    if options["listed"]:
        _Proof(site, state, options, begin_s).show()
        return
    runs = set(options["parts"]) != {"report"}
    if runs:
        state.machine.update(_machine(site, tag, cpu))
        for checkout in (site.stock, site.patched):
            proof_checkouts.prepare(checkout)
    if "equality" in options["parts"] and not proof_checkouts.prepare_corpus(corpus, site.stock):
        site = replace(site, corpus=None)
    try:
        if runs:
            _Proof(site, state, options, begin_s).run()
    finally:
        state.save()
        click.echo(proof_report.write(state, site, output).split("\n## commands")[0])
        if site.scratch.exists():
            proof_report.pack_logs(site, output / "logs.tar.gz")


class _Proof:
    """The parts of one call."""

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

    def run(self) -> None:
        """Every part, one after the other."""
        for plan in (*part_equality.plans(self._site), *part_ratio.plans(self._site)):
            plan.write(self._site)
        shared = self._jobs("faults", "equality")
        self._share(shared)
        self._share(part_equality.repeats(self._state, shared, self._site.cpu))
        # Four jobs with contexts on the same GPUs hung in Megatron's own first iteration, though
        # one alone computed; none did that had the GPUs for itself.
        alone = self._limits(concurrency=1)
        run_jobs(self._site, self._state, self._jobs("stress", "energy"), alone)
        self._take_turns(self._jobs("ratio"))

    def show(self) -> None:
        """What there is, and how it ended."""
        for job in self._jobs(*PARTS):
            run = self._state.runs.get(job.name, {})
            status = run.get("status", "not run")
            old = status == "ok" and not self._state.done(job)
            click.echo(f"{job.name}: {'ok, of another job' if old else status}")

    def _share(self, jobs: Sequence[Job]) -> None:
        slots = self._options["slots"]
        run_jobs(self._site, self._state, jobs, self._limits(), slots=slots)

    def _take_turns(self, jobs: Sequence[Job]) -> None:
        longest_s = 0.0

        def on_block(run: str, block: Any) -> None:
            nonlocal longest_s
            if block.turn:
                longest_s = max(longest_s, block.time_s)
            keeper(run, block)

        def goes_on(left: int) -> bool:
            # A round that is begun should end.
            in_round = len(part_ratio.ARMS) * self._rounds.turns
            turns = in_round if left % in_round == 0 else 1
            return self._limits().left_s > 1.05 * turns * longest_s + _FOR_AN_END_S

        keeper = Keeper(self._state, self._rounds, str(part_ratio.size(self._site)))
        order = part_ratio.order(jobs)
        limits = self._limits(concurrency=len(jobs))
        run_jobs(
            self._site, self._state, jobs, limits, order=order, goes_on=goes_on, on_block=on_block
        )

    def _limits(self, concurrency: int | None = None) -> Limits:
        return Limits(
            self._deadline_s,
            self._options["start_s"],
            self._options["hang_s"],
            self._options["most_failures"],
            concurrency or self._options["concurrency"],
            least_s=0.0 if self._site.cpu else 45.0,
        )

    def _jobs(self, *parts: str) -> list[Job]:
        """Of these parts, those that are asked for."""
        site, options, only = self._site, self._options, self._options["only"]
        iterations = options["iterations"] or (10 if site.cpu else 50)
        delay_s = options["stress_delay_ms"] / 1e3
        makers: dict[str, Callable[[], list[Job]]] = {
            "faults": lambda: part_faults.jobs(site),
            "equality": lambda: part_equality.jobs(site, iterations),
            "stress": lambda: part_stress.jobs(site, options["stress_iterations"], delay_s),
            "energy": lambda: part_energy.jobs(site, options["energy_iterations"]),
            "ratio": lambda: part_ratio.jobs(site, self._state, self._rounds),
        }
        asked = [part for part in makers if part in parts and part in self._parts]
        # The arms of a ratio take turns: all of them are needed.
        return [
            job
            for part in asked
            for job in makers[part]()
            if only is None or part == "ratio" or fnmatch.fnmatch(job.name, only)
        ]


def _num_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _machine(site: Site, tag: str, cpu: bool) -> dict[str, Any]:
    import torch

    found = {
        "tag": tag,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "changed files": proof_checkouts.modified(site.stock, site.patched),
        "cpus": os.cpu_count(),
    }
    if not cpu and shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv"]
        asked = subprocess.run(query, capture_output=True, text=True)
        found["gpus"] = asked.stdout.strip().splitlines()[1:]
    return found


if __name__ == "__main__":
    main()
