"""The plan files of Zeus and lowtime: `freqs_pipeline_NNNNN.py`.

Perseus (Chung et al., SOSP'24) writes one such file for each plan of its frontier, NNNNN counting
from the slowest plan on, and Zeus's pipeline frequency server hands the frequencies to the ranks
(ml-energy/zeus, `examples/pipeline_frequency_optimizer/run_optimization.py` and
`zeus/optimizer/pipeline_frequency/server/scheduler.py`). A file holds one Python expression, for
each stage a list of its instructions in the order of execution, with frequencies in MHz; comments
follow:

    [
    [('forward', 1410), ('forward', 1260), ('backward', 1410), ('backward', 1260)],
    [('forward', 1410), ('backward', 1410), ('forward', 1410), ('backward', 1410)],
    ]
    # total cost with P2P: 567.8

The artifact of the paper lists only the frequencies; such a file is taken to be in 1F1B order. The
k-th forward of a stage is that of microbatch k, and so for backwards. Orders that go another way,
chunks and parked clocks have no place in the format.

Zeus evaluates the file as Python. Here only literals are read, so that a file from elsewhere cannot
run code.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from envpipe_megatron import __version__
from envpipe_megatron.core.arrays import IntArray
from envpipe_megatron.core.fields import MAX_FREQUENCY_MHZ
from envpipe_megatron.core.kinds import WHOLE, Kind, Unit, unit
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.plan import Plan
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.files import read_text, replace_files


class InterchangeError(EnvPipeError):
    """A plan file of Zeus or lowtime that cannot be read, or a plan that it cannot hold."""


def read_freqs(path: Path, num_microbatches: int) -> tuple[Schedule, IntArray]:
    """Read a plan file of Zeus or lowtime without running it.

    Returns the order, its microbatches numbered by counting, and [num_stages, units_per_stage] the
    frequencies. InterchangeError says what is not a literal of the right form, or which stage has
    another number of units. ScheduleError: an order that cannot run.
    """
    try:
        listed = ast.literal_eval(read_text(path))
    except (OSError, TypeError, ValueError, SyntaxError, RecursionError, MemoryError) as error:
        raise InterchangeError(
            f"Plan file {path} is not readable as literals, and nothing else in it is run: {error}",
            remedy="A plan file of Zeus or lowtime is a list of lists, and comments.",
        ) from error
    if not isinstance(listed, list | tuple) or not listed:
        raise InterchangeError(f"{path} is not a list of stages", value=_short(listed))
    stages = [_read_stage(path, stage, entries) for stage, entries in enumerate(listed)]
    if any(len(entries) != 2 * num_microbatches for entries in stages):
        raise InterchangeError(
            f"{path} does not list {num_microbatches} forwards and {num_microbatches} backwards "
            "for each stage",
            value=list(map(len, stages)),
            remedy="Give the number of microbatches that the file was made for.",
        )
    schedule = builders.one_f_one_b(len(stages), num_microbatches)
    if any(kind for entries in stages for kind, _ in entries):
        orders = tuple(_order(path, stage, entries) for stage, entries in enumerate(stages))
        if orders != schedule.stages:
            schedule = Schedule("imported", num_microbatches, 1, orders)
    return schedule, np.array([[clock for _, clock in entries] for entries in stages])


def _read_stage(path: Path, stage: int, entries: Any) -> list[tuple[Kind | None, int]]:
    """Read each entry's kind, None if the file lists frequencies only, and its frequency, MHz."""
    read: list[tuple[Kind | None, int]] = []
    for entry in entries if isinstance(entries, list | tuple) else ():
        named = isinstance(entry, list | tuple) and len(entry) == 2 and entry[0] in WHOLE
        name, clock = entry if named else (None, entry)
        if type(clock) is not int or not 0 < clock < MAX_FREQUENCY_MHZ:
            raise InterchangeError(
                f"{path}: unit {len(read)} of stage {stage} is not forward or backward with a "
                "frequency in whole MHz, such as ('forward', 1410)",
                value=_short(entry),
            )
        read.append((name and Kind(name), clock))
    if not read:
        raise InterchangeError(f"{path}: stage {stage} lists no units", value=_short(entries))
    return read


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else f"{text[:57]}..."


def _order(path: Path, stage: int, entries: Sequence[tuple[Kind | None, int]]) -> tuple[Unit, ...]:
    next_microbatch = {kind: count() for kind in WHOLE}
    units: list[Unit] = []
    for kind, _ in entries:
        if kind is None:
            raise InterchangeError(
                f"{path}: stage {stage} does not name the instruction of every unit",
                remedy="Name it for all units of the file, or for none.",
            )
        units.append(unit(kind, next(next_microbatch[kind])))
    forwards = next(next_microbatch[Kind.FORWARD])
    if 2 * forwards != len(units):
        raise InterchangeError(
            f"{path}: stage {stage} has not as many forwards as backwards",
            value=(forwards, len(units) - forwards),
            remedy="Each microbatch needs both.",
        )
    return tuple(units)


def write_freqs(plan: Plan, path: Path) -> None:
    """Write a plan as Zeus's server reads it, in the plan's own order.

    No text of the plan's own goes into the file, for Zeus would run it. InterchangeError: a plan
    that the format has no words for, or a name that Zeus refuses.
    """
    _check_writable(plan, path)
    lines = [
        "[",
        *(f"{_entries(plan, stage)}," for stage in range(plan.schedule.num_stages)),
        "]",
        f"# envpipe {__version__}",
        f"# iteration time: {plan.cost.iteration_time_s}",
        f"# total cost with P2P: {plan.cost.energy_j}",
    ]
    replace_files({path: ["\n".join(lines), "\n"]})


def _entries(plan: Plan, stage: int) -> list[tuple[str, int]]:
    order, clocks = plan.schedule.stages[stage], plan.frequency_mhz[stage].tolist()
    return [(u.kind.value, clock) for u, clock in zip(order, clocks, strict=True)]


def _check_writable(plan: Plan, path: Path) -> None:
    if path.suffix != ".py":
        raise InterchangeError(
            "Zeus refuses a plan file that is not called .py",
            value=str(path),
            remedy="Call it as lowtime does: freqs_pipeline_00000.py.",
        )
    if plan.schedule.num_chunks > 1 or plan.schedule.forward_only or plan.schedule.split:
        raise InterchangeError(
            "Plan files of Zeus hold whole forwards and backwards without chunks",
            value=plan.schedule.name,
        )
    if plan.park_mhz is not None and plan.park_mhz.any():
        raise InterchangeError(
            "Plan files of Zeus have no place for clocks that are parked in a wait",
            remedy="Plan without parking.",
        )
    for stage, order in enumerate(plan.schedule.stages):
        if not all(_ascending(order, kind) for kind in WHOLE):
            raise InterchangeError(
                "Plan files of Zeus number microbatches by counting, so a stage must run them in "
                f"ascending order, and stage {stage} of '{plan.schedule.name}' does not",
            )


def _ascending(order: Sequence[Unit], kind: Kind) -> bool:
    microbatches = [u.microbatch for u in order if u.kind is kind]
    return microbatches == sorted(microbatches)
