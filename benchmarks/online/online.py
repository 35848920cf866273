"""The closed loop beside a sweep, after faults and failures, with chunks, and over a long time.

Run from the checkout:

    python benchmarks/online/online.py                             # some 30 minutes on two cores
    python benchmarks/online/online.py --stages 4 --replicas 1     # some 8 minutes
    python benchmarks/online/online.py chunks --gpu a40
    python benchmarks/online/online.py work                        # some 8 minutes
    python benchmarks/online/online.py long

GPUs are emulated by presets that were fitted to measurements; a forward takes 30 ms at the highest
clock, a backward 60 ms, in two parts 60.6 ms. On uneven pipelines the last stage takes a quarter
longer. `work` has the work of a step vary by a factor for all of it, or for each microbatch, as
with sequences of all lengths; all GPUs are well, or one becomes 5 % slower. `chunks` is what is
saved with virtual stages, on Megatron's own order and on any: four stages of 120 ms a forward,
alike or not, each split evenly. `long` tells whether a job grows, in memory, files and threads:
there a GPU becomes 5 % slower and recovers again and again, so that plans are made, run, kept in
the output folder, and dropped.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

from benchmarks.outputs import leave, make_console, make_table, output_option
from benchmarks.processes import memory_mib
from emulated_job import EmulatedJob
from emulated_pipelines import Conditions, Pipelines
from envpipe_megatron.core.profile_rows import MEASURED_SPLIT
from envpipe_megatron.formats.energy import Phase
from envpipe_megatron.gpu.presets import load_preset
from envpipe_megatron.policies.objective import Goal
from envpipe_megatron.runtime.job.options import JobOptions
from job_runs import FAULTS, best_saving, restarts, run_job, scripted, slower

PARTS = ("costs", "faults", "trouble", "noise", "work", "chunks", "long")
PRESETS = ("a100-sxm", "a40")
MICROBATCHES = 24
FORWARD_S = 0.03
_OPTIMAL = JobOptions(num_microbatches=MICROBATCHES, baseline_steps=3)
_SHORTEST = replace(_OPTIMAL, objective=Goal.TIME)
#: How a job comes to its plan.
WAYS = {
    "closed loop": _OPTIMAL,
    "closed loop, split": replace(_OPTIMAL, why_whole=""),
    "order only": replace(_SHORTEST, why_whole=""),
    "sweep, optimal": replace(_OPTIMAL, sweep=True),
    "sweep, balanced": JobOptions(num_microbatches=MICROBATCHES, type="envelope", baseline_steps=3),
}
#: A sweep takes so long, and the loop is steady before.
_ITERATIONS = 200
_STEADY = 20
#: Faults begin and end in these iterations of the whole; jobs have so many to find out.
_FAULT, _OVER, _ALL, _FOUND_OUT = 60, 260, 320, 10
#: So many times the first plan of `trouble` is looked for in vain.
_LATE = 40

#: Shares of units that have a hiccup, on so many replicas and in so many iterations.
_HICCUPS, _MANY, _NOISY = (0.0, 0.01, 0.05), 16, 160

#: Of `work`: standard deviations of the logarithm of the work of a step and of a microbatch; when a
#: GPU becomes slower, from when that counts, and iterations.
_VARIES = ((0.0, 0.0), (0.04, 0.0), (0.08, 0.0), (0.15, 0.0), (0.0, 0.08), (0.0, 0.15))
_SLOWER, _VARIES_STEADY, _VARIES_ITERATIONS = 100, 120, 420

#: Of `chunks`: iterations, the first that counts as steady, and shares of the longest forward, s.
_CHUNKS_ITERATIONS, _CHUNKS_STEADY, _CHUNKS_FORWARD_S = 110, 70, 0.12
_CHUNKED = {"even": (1.0, 1.0, 1.0, 1.0), "uneven": (1.0, 1.05, 1.0, 1.15)}
#: Of `long`: the GPU's state changes after so many iterations.
CONFIG = JobOptions(num_microbatches=8, baseline_steps=3)
STAGES, _CHANGES_EVERY = 4, 250


def forward_times_s(stages: int, *, even: bool) -> list[float]:
    """Of each stage."""
    return [FORWARD_S] * (stages - 1) + [FORWARD_S * (1 if even else 1.25)]


def cost_rows(stages: Sequence[int], replicas: Sequence[int]) -> Iterator[dict[str, Any]]:
    """What each way costs until it is steady, and what it saves then."""
    for name in PRESETS:
        preset = load_preset(name)
        for count in stages:
            for even in (True, False):
                forward_s = forward_times_s(count, even=even)
                best = {
                    splits: best_saving(preset, forward_s, replace(_OPTIMAL.request(), split=split))
                    for splits, split in ((False, None), (True, MEASURED_SPLIT))
                }
                for number in replicas:
                    for way, config in WAYS.items():
                        ran = run_job(
                            config, preset, forward_s, iterations=_ITERATIONS, replicas=number
                        )
                        steady = min(ran.steady, _ITERATIONS - _STEADY)  # a sweep may go on
                        yield {
                            "GPU": name,
                            "stages": count,
                            "even": even,
                            "replicas": number,
                            "way": way,
                            "lost until steady (iterations)": ran.lost(0, steady),
                            "iterations until steady": steady,
                            "worst after the profile (%)": 100
                            * ran.slower(ran.profiled, _ITERATIONS),
                            "saved in steady (%)": 100 * ran.saved(steady, steady + _STEADY),
                            "less time (%)": -100 * ran.longer(steady, steady + _STEADY),
                            "best (%)": 100 * best[not config.why_whole],
                        }


def fault_rows() -> Iterator[dict[str, Any]]:
    """What a closed loop does about faults of a long job."""
    preset, forward_s = load_preset("a100-sxm"), forward_times_s(4, even=True)
    for kind, words in FAULTS.items():
        number = 4 if kind == "replica" else 1
        faults = scripted(kind, _FAULT, _OVER, 4, number)
        during = range(_FAULT + _FOUND_OUT, _OVER)
        best = best_saving(
            preset, forward_s, _OPTIMAL.request(), replicas=number, faults=faults, iterations=during
        )
        ran = run_job(
            WAYS["closed loop"],
            preset,
            forward_s,
            iterations=_ALL,
            replicas=number,
            faults=faults,
            starts_again=restarts(kind, _FAULT, _OVER),
        )
        said = (text for at, text in ran.said if _FAULT <= at < _OVER)
        yield {
            "fault": kind,
            "what it is": words,
            "worst after ten iterations (%)": 100 * ran.slower(_FAULT + _FOUND_OUT, _OVER),
            "worst ten after its end (%)": 100 * ran.slower(_OVER + _FOUND_OUT, _ALL),
            "saved before (%)": 100 * ran.saved(_FAULT - _STEADY, _FAULT),
            "saved during (%)": 100 * ran.saved(during.start, during.stop),
            "best during (%)": 100 * best,
            "saved after (%)": 100 * ran.saved(_OVER + _FOUND_OUT, _ALL),
            "what was said": next(said, "nothing"),
        }


def trouble_rows() -> Iterator[dict[str, Any]]:
    """What a closed loop does about what goes wrong with itself."""
    preset, forward_s = load_preset("a100-sxm"), forward_times_s(4, even=False)
    run = partial(run_job, WAYS["closed loop"], preset, forward_s, iterations=_ALL)
    calm = run()
    usual = [text for _, text in calm.said]

    def partial_at(iteration: int) -> dict[str, Any]:
        ill = {(0, 1): Conditions(partial=True)}
        return {"faults": lambda at: ill if at == iteration else {}}

    troubles: dict[str, dict[str, Any]] = {
        "none": {},
        "the first plan is late": {"late": (_LATE, 0)},
        "a look of the probe does not run whole": partial_at(
            [each.phase for each in calm.job].index(Phase.PROFILE)
        ),
        "a look at the highest clock does not": partial_at(calm.looks_at_top[0]),
        "the first plan finds no memory": {"rooms": (False, True)},
        "no plan of another order does": {"rooms": (False,)},
    }
    for name, trouble in troubles.items():
        ran = run(**trouble) if trouble else calm
        yield {
            "trouble": name,
            "saved in the end (%)": 100 * ran.saved(_ALL - _STEADY, _ALL),
            "worst after the profile (%)": 100 * ran.slower(ran.profiled, _ALL),
            "lost in all (iterations)": ran.lost(0, _ALL),
            "what was said": next((text for _, text in ran.said if text not in usual), "nothing"),
        }


def noise_rows() -> Iterator[dict[str, Any]]:
    """What hiccups of 10 ms do to the savings of many replicas."""
    preset, forward_s = load_preset("a100-sxm"), forward_times_s(4, even=True)
    for share in _HICCUPS:
        noise: dict[str, Any] = {"emulated": {"hiccups": share}, "replicas": _MANY}
        ran = run_job(WAYS["closed loop"], preset, forward_s, iterations=_NOISY, **noise)
        yield {
            "hiccups (% of units)": f"{share:.0%}",
            "replicas": _MANY,
            "saved in steady (%)": 100 * ran.saved(_FAULT, _NOISY),
            "mean iteration, longer (%)": 100 * ran.longer(_FAULT, _NOISY),
        }


def work_rows() -> Iterator[dict[str, Any]]:
    """What a closed loop does where steps, or microbatches, differ in their work."""
    preset, steady = load_preset("a100-sxm"), (_VARIES_STEADY, _VARIES_ITERATIONS)
    for even in (True, False):
        for work in _VARIES:
            for slow in (False, True):
                ran = run_job(
                    WAYS["closed loop"],
                    preset,
                    forward_times_s(4, even=even),
                    iterations=_VARIES_ITERATIONS,
                    faults=scripted("slow", _SLOWER, _VARIES_ITERATIONS if slow else 0, 4),
                    emulated={"work": work},
                )
                yield {
                    "even": even,
                    "a step's work": f"{work[0]:.0%}",
                    "a microbatch's": f"{work[1]:.0%}",
                    "a GPU becomes 5 % slower": slow,
                    "saved in steady (%)": 100 * ran.saved(*steady),
                    "mean iteration, longer (%)": 100 * ran.longer(*steady),
                    "lost before (iterations)": ran.lost(0, _SLOWER),
                }


def chunk_rows(gpu: str) -> Iterator[dict[str, Any]]:
    """One for each number of chunks, kind of stages, and order that may be planned."""
    steady = _CHUNKS_STEADY, _CHUNKS_ITERATIONS
    for name, shares in _CHUNKED.items():
        one_chunk_s = 0.0
        for chunks in (1, 2, 4):
            own = "1f1b" if chunks == 1 else "interleaved"
            forward_s = [_CHUNKS_FORWARD_S * share / chunks for share in shares]
            for schedule, splits in ((own, False), ("auto", False), ("auto", True)):
                config = replace(
                    _OPTIMAL,
                    scheduling=schedule,
                    num_chunks=chunks,
                    why_whole="" if splits else "whole",
                )
                ran = run_job(config, load_preset(gpu), forward_s, iterations=_CHUNKS_ITERATIONS)
                own_s = ran.own[-1].time_s
                one_chunk_s = one_chunk_s or own_s
                yield {
                    "stages": name,
                    "chunks": chunks,
                    "planned": f"{schedule}, split" if splits else schedule,
                    "own order, time against 1F1B (%)": 100 * (own_s / one_chunk_s - 1),
                    "saved (%)": 100 * ran.saved(*steady),
                    "longer (%)": 100 * ran.longer(*steady),
                    "lost, in iterations": ran.lost(0, _CHUNKS_ITERATIONS),
                }


def footprints(iterations: int, every: int) -> Iterator[dict[str, Any]]:
    """What the process and the job's folder hold, each time that so many iterations have run."""
    pipelines = Pipelines(
        load_preset("a100-sxm"),
        [0.03] * STAGES,
        faults=lambda at: {(0, 1): slower(1.05)} if at // _CHANGES_EVERY % 2 else {},
    )
    with (
        TemporaryDirectory() as folder,
        EmulatedJob(pipelines, replace(CONFIG, output=Path(folder))) as job,
    ):
        while pipelines.begun < iterations:
            job.run(every)
            said = [text for _, text in job.said]
            answered = sum("planning again" in text or "highest clocks" in text for text in said)
            pipelines.iterations.clear()  # these two are the benchmark's own
            job.said.clear()
            gc.collect()
            kept = list(Path(folder).iterdir())
            yield {
                "iterations": pipelines.begun,
                "changes that were answered": answered,
                "memory (MiB)": memory_mib("VmRSS"),
                "objects": len(gc.get_objects()),
                "open files": len(list(Path("/proc/self/fd").iterdir())),
                "threads": threading.active_count(),
                "files in the folder": len(kept),
                "their size (KiB)": sum(file.stat().st_size for file in kept) / 1024,
            }


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(PARTS), metavar="[PART]...")
@click.option("--stages", multiple=True, type=int, default=(4, 8), show_default=True)
@click.option("--replicas", multiple=True, type=int, default=(1, 4), show_default=True)
@click.option("--gpu", default="a100-sxm", show_default=True, help="A preset, of `chunks`.")
@click.option("--iterations", default=10_000, show_default=True, help="Of `long`.")
@output_option("online")
def main(
    names: tuple[str, ...],
    stages: tuple[int, ...],
    replicas: tuple[int, ...],
    gpu: str,
    iterations: int,
    output: Path,
) -> None:
    """Run parts, by default the first four, and print tables."""
    console = make_console()
    parts: dict[str, Iterator[dict[str, Any]]] = {
        "costs": cost_rows(stages, replicas),
        "faults": fault_rows(),
        "trouble": trouble_rows(),
        "noise": noise_rows(),
        "work": work_rows(),
        "chunks": chunk_rows(gpu),
        "long": footprints(iterations, every=min(2_000, iterations)),
    }
    found: dict[str, list[dict[str, Any]]] = {}
    for name in names or PARTS[:4]:
        rows = found[name] = list(parts[name])
        leave(output, "emulated", found)
        texts = [column for column in rows[0] if "what" in column]
        console.print(make_table(name, rows, [column for column in rows[0] if column not in texts]))
        for row in rows if texts else ():
            console.print("; ".join(row[column] for column in (next(iter(row)), *texts)))


if __name__ == "__main__":
    main()
