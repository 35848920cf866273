"""The closed loop beside a sweep, and after faults, on emulated GPUs.

Run from the checkout, some 30 minutes on two cores:

    python benchmarks/online/online.py
    python benchmarks/online/online.py --stages 4 --replicas 1     # some 8 minutes

GPUs are emulated by presets that were fitted to measurements; a forward takes 30 ms at the highest
clock, a backward 60 ms. On uneven pipelines the last stage takes a quarter longer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks.online.runs import FAULTS, best_saving, restarts, run_job, scripted
from benchmarks.outputs import leave, make_console, make_table, output_option
from envpipe_megatron.gpu.emulated.presets import load_preset
from envpipe_megatron.policies.request import PlanRequest
from envpipe_megatron.runtime.job.config import SessionConfig

PRESETS = ("a100-sxm", "a40")
MICROBATCHES = 24
FORWARD_S = 0.03
_OPTIMAL = PlanRequest(MICROBATCHES, schedule="auto", policy="optimal")
_BALANCED = PlanRequest(MICROBATCHES, schedule="envpipe", policy="envelope", reconfigure="balanced")
#: How a job comes to its plan.
WAYS = {
    "closed loop": SessionConfig(_OPTIMAL, closed_loop=True),
    "sweep, optimal": SessionConfig(_OPTIMAL),
    "sweep, balanced": SessionConfig(_BALANCED),
}
#: A sweep takes so long, and the loop is steady before.
_ITERATIONS = 200
_STEADY = 20
#: Faults begin and end in these iterations of the whole; jobs have so many to find out.
_FAULT, _OVER, _ALL, _FOUND_OUT = 60, 260, 320, 10

#: Shares of units that have a hiccup, on so many replicas and in so many iterations.
_HICCUPS, _MANY, _NOISY = (0.0, 0.01, 0.05), 16, 160


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
                best = best_saving(preset, forward_s, _OPTIMAL)
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
                            "iterations until steady": steady,
                            "lost until steady (iterations)": ran.lost(0, steady),
                            "worst after the profile (%)": 100
                            * ran.slower(ran.profiled, _ITERATIONS),
                            "saved in steady (%)": 100 * ran.saved(steady, steady + _STEADY),
                            "best (%)": 100 * best,
                        }


def fault_rows() -> Iterator[dict[str, Any]]:
    """What a closed loop does about faults of a long job."""
    preset, forward_s = load_preset("a100-sxm"), forward_times_s(4, even=True)
    for kind, words in FAULTS.items():
        number = 4 if kind == "replica" else 1
        faults = scripted(kind, _FAULT, _OVER, 4, number)
        during = range(_FAULT + _FOUND_OUT, _OVER)
        best = best_saving(
            preset, forward_s, _OPTIMAL, replicas=number, faults=faults, iterations=during
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
        said = next((text for at, text in ran.said if _FAULT <= at < _OVER), "")
        yield {
            "fault": kind,
            "worst after ten iterations (%)": 100 * ran.slower(_FAULT + _FOUND_OUT, _OVER),
            "worst ten after its end (%)": 100 * ran.slower(_OVER + _FOUND_OUT, _ALL),
            "saved before (%)": 100 * ran.saved(_FAULT - _STEADY, _FAULT),
            "saved during (%)": 100 * ran.saved(during.start, during.stop),
            "best during (%)": 100 * best,
            "saved after (%)": 100 * ran.saved(_OVER + _FOUND_OUT, _ALL),
            "what it is": words,
            "what was said": said or "nothing",
        }


def noise_rows() -> Iterator[dict[str, Any]]:
    """What hiccups of 10 ms do to the savings of many replicas."""
    preset, forward_s = load_preset("a100-sxm"), forward_times_s(4, even=True)
    for share in _HICCUPS:
        ran = run_job(
            WAYS["closed loop"],
            preset,
            forward_s,
            iterations=_NOISY,
            replicas=_MANY,
            hiccups=share,
        )
        yield {
            "hiccups (% of units)": 100 * share,
            "replicas": _MANY,
            "saved in steady (%)": 100 * ran.saved(_FAULT, _NOISY),
            "mean iteration, longer (%)": 100 * ran.longer(_FAULT, _NOISY),
        }


@click.command()
@click.option("--stages", multiple=True, type=int, default=(4, 8), show_default=True)
@click.option("--replicas", multiple=True, type=int, default=(1, 4), show_default=True)
@output_option("online")
def main(stages: tuple[int, ...], replicas: tuple[int, ...], output: Path) -> None:
    """Run all configurations and faults, and print tables."""
    console = make_console()
    for name, made in (
        ("costs", cost_rows(stages, replicas)),
        ("faults", fault_rows()),
        ("noise", noise_rows()),
    ):
        rows = list(made)
        leave(output, {name: rows})
        console.print(
            make_table(name, rows, [column for column in rows[0] if "what" not in column])
        )
        for row in rows if name == "faults" else ():
            console.print(f"{row['fault']}: {row['what it is']}; {row['what was said']}")


if __name__ == "__main__":
    main()
