"""The plan files of Zeus and lowtime: `freqs_pipeline_NNNNN.py`.

Perseus (Chung et al., SOSP'24) writes one for each plan of its frontier, and Zeus's pipeline
frequency server evaluates it as Python. It holds one expression, for each stage its instructions in
the order of execution with frequencies in MHz; the artifact of the paper has only the frequencies,
of 1F1B's order. The k-th forward of a stage is that of microbatch k, and so for backwards:

    [
    [('forward', 1410), ('forward', 1260), ('backward', 1410), ('backward', 1260)],
    [('forward', 1410), ('backward', 1410), ('forward', 1410), ('backward', 1410)],
    ]
    # total cost with P2P: 567.8

Only literals are read here, so that a file from elsewhere cannot run code.
"""

from __future__ import annotations

import ast
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from envpipe_megatron import __version__
from envpipe_megatron.core.arrays import IntArray
from envpipe_megatron.core.fields import MAX_FREQUENCY_MHZ
from envpipe_megatron.core.kinds import WHOLE, Kind, unit
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.plan import Plan
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.files import read_text, replace_files


def read_freqs(path: Path, num_microbatches: int) -> tuple[Schedule, IntArray]:
    """Read a plan file of Zeus or lowtime without running it.

    Returns the order and [num_stages, units_per_stage] the frequencies. EnvPipeError for what
    is no literal of that form, ScheduleError for an order that lacks units or cannot run.
    """
    try:
        listed = ast.literal_eval(read_text(path))
        stages = [[_read_entry(entry) for entry in entries] for entries in listed]
    except (OSError, TypeError, ValueError, SyntaxError, RecursionError, MemoryError) as error:
        raise EnvPipeError(
            f"Plan file {path} is not readable as literals, and nothing else in it is run: {error}",
            remedy="A plan file is a list of lists, of ('forward', MHz) or MHz, and comments.",
        ) from error
    if not stages or any(len(entries) != 2 * num_microbatches for entries in stages):
        raise EnvPipeError(
            f"{path} does not list {num_microbatches} forwards and {num_microbatches} backwards "
            "for each stage",
            value=list(map(len, stages)),
            remedy="Give the number of microbatches that the file was made for.",
        )
    frequency_mhz = np.array([[clock for _, clock in entries] for entries in stages])
    schedule = builders.one_f_one_b(len(stages), num_microbatches)
    kinds = [[kind for kind, _ in entries] for entries in stages]
    if any(kind for of_stage in kinds for kind in of_stage):
        numbers = [{kind: count() for kind in (*WHOLE, None)} for _ in stages]
        orders = tuple(
            tuple(unit(kind or Kind.FORWARD, next(number[kind])) for kind in of_stage)
            for of_stage, number in zip(kinds, numbers, strict=True)
        )
        if orders != schedule.stages:
            schedule = Schedule("imported", num_microbatches, 1, orders)
    return schedule, frequency_mhz


def _read_entry(entry: Any) -> tuple[Kind | None, int]:
    """Return a kind's name or None, and a frequency, MHz; ValueError for what is no such entry."""
    name, clock = (None, entry) if isinstance(entry, int) else entry
    if name not in (*WHOLE, None) or type(clock) is not int or not 0 < clock < MAX_FREQUENCY_MHZ:
        raise ValueError(f"not forward or backward with a frequency in whole MHz: {entry!r:.60}")
    return name and Kind(name), clock


def write_freqs(plan: Plan, path: Path) -> None:
    """Write a plan as Zeus's server reads it, in the plan's own order.

    No text of the plan's own goes into the file, for Zeus would run it. EnvPipeError: a plan
    that the format has no words for, or a name that Zeus refuses.
    """
    schedule = plan.schedule
    counted = (
        [u.microbatch for u in order if u.kind is kind]
        for order in schedule.stages
        for kind in WHOLE
    )
    for wrong, what in (
        (path.suffix != ".py", "files that are not called .py"),
        (schedule.num_chunks > 1, "chunks"),
        (schedule.forward_only or schedule.split, "order without whole backwards"),
        (plan.park_mhz is not None and plan.park_mhz.any(), "clocks that are parked in a wait"),
        (any(each != sorted(each) for each in counted), "microbatches out of ascending order"),
    ):
        if wrong:
            raise EnvPipeError(
                f"Zeus takes no {what}",
                value=f"{schedule.name}, {path}",
                remedy="Plan whole forwards and backwards in ascending order, without chunks and "
                "parking, and name the file as lowtime does: freqs_pipeline_00000.py.",
            )
    clocks = plan.frequency_mhz.tolist()
    lines = [
        str([(u.kind.value, mhz) for u, mhz in zip(order, of_stage, strict=True)]) + ","
        for order, of_stage in zip(schedule.stages, clocks, strict=True)
    ]
    ends = (
        f"# envpipe {__version__}",
        f"# iteration time: {plan.cost.iteration_time_s}",
        f"# total cost with P2P: {plan.cost.energy_j}",
    )
    replace_files({path: ["\n".join(["[", *lines, "]", *ends]), "\n"]})
