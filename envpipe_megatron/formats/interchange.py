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

The artifact of the paper lists the frequencies alone; such a file is taken to be in 1F1B order. The
k-th forward of a stage is that of microbatch k, and so for backwards. Orders that go another way,
chunks and parked clocks have no place in the format.

Zeus evaluates the file as Python. Here it is parsed, and whatever is not such a list of literals is
refused, so that a file from elsewhere cannot run code.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from envpipe_megatron import __version__
from envpipe_megatron.core.fields import MAX_FREQUENCY_MHZ
from envpipe_megatron.core.kinds import WHOLE, Kind, Unit, unit
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.plan import Plan
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.files import read_text, replace_files


class InterchangeError(EnvPipeError):
    """A plan file of Zeus or lowtime that cannot be read, or a plan that it cannot hold."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One entry of a plan file; `kind` is None if the file lists frequencies alone."""

    kind: Kind | None
    frequency_mhz: int


@dataclass(frozen=True)
class FrequencyFile:
    """Contents of a plan file: for each stage, its instructions in the order of execution."""

    stages: tuple[tuple[Instruction, ...], ...]
    source: str

    def schedule(self, num_microbatches: int) -> Schedule:
        """The order of the file, its microbatches numbered by counting.

        InterchangeError: a stage with another number of forwards or backwards. ScheduleError: an
        order that cannot run.
        """
        if any(len(entries) != 2 * num_microbatches for entries in self.stages):
            raise InterchangeError(
                f"{self.source} does not list {num_microbatches} forwards and {num_microbatches} "
                "backwards for each stage",
                value=[len(entries) for entries in self.stages],
                remedy="Give the number of microbatches that the file was made for.",
            )
        usual = builders.one_f_one_b(len(self.stages), num_microbatches)
        if all(entry.kind is None for entries in self.stages for entry in entries):
            return usual
        stages = tuple(self._order(stage, num_microbatches) for stage in range(len(self.stages)))
        name = usual.name if stages == usual.stages else "imported"
        return Schedule(name, num_microbatches, 1, stages)

    def _order(self, stage: int, num_microbatches: int) -> tuple[Unit, ...]:
        next_microbatch = {kind: count() for kind in WHOLE}
        units: list[Unit] = []
        for entry in self.stages[stage]:
            if entry.kind is None:
                raise InterchangeError(
                    f"{self.source}: stage {stage} does not name the instruction of every unit",
                    remedy="Name it for all units of the file, or for none.",
                )
            units.append(unit(entry.kind, next(next_microbatch[entry.kind])))
        forwards = next(next_microbatch[Kind.FORWARD])
        if forwards != num_microbatches:
            raise InterchangeError(
                f"{self.source}: stage {stage} has not as many forwards as backwards",
                value=(forwards, len(units) - forwards),
                remedy="Each microbatch needs both.",
            )
        return tuple(units)

    def frequency_mhz(self, schedule: Schedule) -> NDArray[np.int64]:
        """[num_stages, units_per_stage] the frequencies of a schedule in the same order.

        InterchangeError: another number of stages or units, or another order.
        """
        if len(self.stages) != schedule.num_stages:
            raise InterchangeError(
                f"{self.source} does not have one list for each of {schedule.num_stages} stages",
                value=len(self.stages),
                remedy="Use the file of a pipeline with as many stages.",
            )
        for stage, (entries, order) in enumerate(zip(self.stages, schedule.stages, strict=True)):
            if len(entries) != len(order):
                raise InterchangeError(
                    f"{self.source}: stage {stage} does not list {len(order)} units",
                    value=len(entries),
                    remedy="Give the number of microbatches that the file was made for.",
                )
            for position, (entry, scheduled) in enumerate(zip(entries, order, strict=True)):
                if entry.kind not in (None, scheduled.kind):
                    raise InterchangeError(
                        f"{self.source}: unit {position} of stage {stage} is a {entry.kind}, but "
                        f"the '{schedule.name}' order has {scheduled} there",
                        remedy="Use the order that the file was made for.",
                    )
        rows = [[entry.frequency_mhz for entry in entries] for entries in self.stages]
        return np.array(rows)


def read_freqs(path: Path) -> FrequencyFile:
    """Read a plan file of Zeus or lowtime without running it.

    InterchangeError names file and line of what is not a literal of the right form.
    """
    try:
        text = read_text(path)
        body = ast.parse(text, str(path), mode="eval").body
    except SyntaxError as error:
        raise InterchangeError(
            f"{path}, line {error.lineno}: not one list of literals ({error.msg})",
            remedy="A plan file of Zeus or lowtime is a list of lists, and comments.",
        ) from error
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        raise InterchangeError(f"Plan file {path} is not readable: {error}") from error
    return FrequencyFile(_Parser(path, text.split("\n")).stages(body), str(path))


@dataclass(frozen=True)
class _Parser:
    path: Path
    lines: list[str]

    def stages(self, body: ast.expr) -> tuple[tuple[Instruction, ...], ...]:
        return tuple(
            tuple(self._instruction(entry) for entry in self._items(stage, "a list of one stage"))
            for stage in self._items(body, "a list of stages")
        )

    def _items(self, node: ast.expr, wanted: str) -> list[ast.expr]:
        if not isinstance(node, ast.List | ast.Tuple) or not node.elts:
            raise self._refused(node, wanted)
        return node.elts

    def _instruction(self, node: ast.expr) -> Instruction:
        if isinstance(node, ast.Constant):
            return Instruction(None, self._frequency(node))
        match node:
            case ast.Tuple([ast.Constant(str(name)), frequency]) | ast.List(
                [ast.Constant(str(name)), frequency]
            ):
                if name not in set(WHOLE):
                    raise InterchangeError(
                        f"{self.path}, line {node.lineno}: unknown instruction",
                        value=name,
                        remedy="Known are forward and backward; recomputation belongs to the "
                        "backward.",
                    )
                return Instruction(Kind(name), self._frequency(frequency))
        raise self._refused(node, "an instruction and its frequency, such as ('forward', 1410)")

    def _frequency(self, node: ast.expr) -> int:
        value = node.value if isinstance(node, ast.Constant) else None
        if type(value) is not int or not 0 < value < MAX_FREQUENCY_MHZ:
            raise self._refused(node, "a frequency in whole MHz")
        return value

    def _refused(self, node: ast.expr, wanted: str) -> InterchangeError:
        # Not `ast.unparse`, which a deeply nested expression brings down; columns count bytes.
        line = self.lines[node.lineno - 1].encode()[node.col_offset :].decode(errors="replace")
        return InterchangeError(
            f"{self.path}, line {node.lineno}: not {wanted}",
            value=line if len(line) < 60 else f"{line[:57]}...",
            remedy="A plan file holds literals alone; nothing in it is run.",
        )


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
