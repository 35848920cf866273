"""Orders as tables of torch.distributed.pipelining, in its format `compute_only`.

A row is a rank, a cell one of its units in the order of execution:
`{virtual stage}{F|B|I|W}{microbatch}`, or `(2F1;1B0)OVERLAP_F_B` for a forward and a backward that
run as one. Empty cells are bubbles; they follow from the order and are not written. Virtual stages
count through the whole model, and the table itself says on which ranks they lie. It is what
`_PipelineScheduleRuntime._load_csv` of torch 2.13 reads.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from envpipe_megatron.core.kinds import (
    KIND_BY_LETTER,
    SPLIT,
    Kind,
    ScheduleError,
    Unit,
    marked_grid,
    unit,
)
from envpipe_megatron.core.orders.builders import check_size
from envpipe_megatron.core.schedule import Placement, Schedule
from envpipe_megatron.files import csv_text, read_text

_CELL = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})")
_OVERLAPPED = re.compile(r"\(([^;]*);([^;]*)\)OVERLAP_F_B")


#: The row and column of a unit in a table, from 0, its virtual stage, and the unit.
_Cell = tuple[int, int, int, Unit]


def read_torch_csv(path: Path) -> Schedule:
    """Return the order of a table.

    ScheduleError names the cell that cannot be read or is on another rank than its virtual stage,
    or the units that are missing, repeated, or could never run.
    """
    try:
        text = read_text(path).rstrip(", \t\r\n")  # empty lines at the end are no ranks
        rows = list(csv.reader(io.StringIO(text, newline="")))
    except (OSError, ValueError, csv.Error) as error:
        raise ScheduleError(f"The order {path} is not readable: {error}") from error
    return order_of_rows(rows, path.stem, source=str(path))


def order_of_rows(rows: Sequence[Sequence[str]], name: str, *, source: str) -> Schedule:
    """Read the order of a table's cells, a row for each rank; ScheduleError as `read_torch_csv`."""
    cells = [
        cell
        for rank, row in enumerate(rows)
        for column in range(len(row))
        for cell in _read_cell(rows, rank, column, source)
    ]
    if not cells:
        raise ScheduleError(f"{source} lists no units", remedy="Give a row of units for each rank.")
    num_microbatches = 1 + max(own.microbatch for *_, own in cells)
    num_virtual = 1 + max(virtual_stage for _, _, virtual_stage, _ in cells)
    num_chunks, rest = divmod(num_virtual, len(rows))
    if rest:
        raise ScheduleError(
            f"{source}: virtual stages are not equally many on each of {len(rows)} ranks",
            value=num_virtual,
            remedy="A table has a row for each rank.",
        )
    placement = _placement(rows, cells, source)
    split = any(own.kind in SPLIT[1:] for *_, own in cells)
    stages: list[list[Unit]] = [[] for _ in rows]
    for rank, _, _, own in cells:
        if split and own.kind is Kind.BACKWARD:  # as orders list a whole one among split ones
            stages[rank].append(unit(Kind.INPUT_GRADIENT, own.microbatch, own.chunk, True))
            own = unit(Kind.WEIGHT_GRADIENT, own.microbatch, own.chunk)
        stages[rank].append(own)
    try:
        check_size(len(rows), num_microbatches, num_chunks)
        return Schedule(name, num_microbatches, num_chunks, tuple(map(tuple, stages)), placement)
    except ScheduleError as error:
        raise ScheduleError(f"{source}: {error}") from error


def torch_csv(schedule: Schedule) -> str:
    """Return the table of an order; ScheduleError as `table_rows`."""
    return csv_text(table_rows(schedule))


def table_rows(schedule: Schedule) -> list[list[str]]:
    """Return the cells of an order's table, a row for each rank.

    ScheduleError for forwards only, and where torch would take the wrong microbatch's loss: it
    numbers losses as its last virtual stage comes to them.
    """
    ranks, last = schedule.num_stages, schedule.num_chunks - 1
    if schedule.forward_only:
        raise ScheduleError("Forwards only are no order of torch's", value=schedule.name)
    order = schedule.stages[_rank(last * ranks + ranks - 1, ranks, schedule.placement)]
    numbered = [u.microbatch for u in order if u.kind is Kind.FORWARD and u.chunk == last]
    if numbered != sorted(numbered):
        raise ScheduleError(
            "The last virtual stage runs its forwards out of turn, and torch would take other "
            "microbatches' losses",
            value=numbered,
            remedy="Order the forwards there by microbatch.",
        )
    return [list(_row(schedule, rank)) for rank in range(ranks)]


def _row(schedule: Schedule, rank: int) -> Iterator[str]:
    order, ranks = schedule.stages[rank], schedule.num_stages
    parts: list[str] = []
    for at, own in enumerate(order):
        if own.combined and own.kind is Kind.INPUT_GRADIENT:
            continue  # its weights' gradient after it is written for both
        whole = own.kind is Kind.WEIGHT_GRADIENT and order[at - 1].combined
        letter = Kind.BACKWARD.letter if whole else own.kind.letter
        first = own.chunk * ranks
        # The way from places along a chunk to ranks is also the way back.
        virtual_stage = first + _rank(first + rank, ranks, schedule.placement)
        parts.append(f"{virtual_stage}{letter}{own.microbatch}")
        if not own.combined:
            yield parts[0] if len(parts) == 1 else f"({';'.join(parts)})OVERLAP_F_B"
            parts = []


def _read_cell(
    rows: Sequence[Sequence[str]], rank: int, column: int, source: str
) -> Iterator[_Cell]:
    """Read the units of a cell: none, one, or a forward and a backward that run as one."""
    text = rows[rank][column].strip()
    overlapped = _OVERLAPPED.fullmatch(text)
    parts = overlapped.groups() if overlapped else (text,) * bool(text)
    matches = [match for part in parts if (match := _CELL.fullmatch(part.strip()))]
    letters = "".join(match[2] for match in matches)
    if len(matches) < len(parts) or (overlapped and letters != "FB"):
        raise _wrong(
            rows,
            rank,
            column,
            f"{source}: not a unit",
            value=text,
            remedy="Write the virtual stage, F, B, I or W, and the microbatch, as in 2F0; a "
            "forward and a backward as one are (2F1;1B0)OVERLAP_F_B. Of torch's formats this is "
            "compute_only, without SEND, RECV and UNSHARD.",
        )
    for at, match in enumerate(matches, start=1):
        kind, virtual_stage = KIND_BY_LETTER[match[2]], int(match[1])
        own = unit(kind, int(match[3]), virtual_stage // len(rows), at < len(matches))
        yield rank, column, virtual_stage, own


def _placement(rows: Sequence[Sequence[str]], cells: Sequence[_Cell], source: str) -> Placement:
    """Say where the virtual stages lie."""
    astray = {
        placement: [cell for cell in cells if _rank(cell[2], len(rows), placement) != cell[0]]
        for placement in (Placement.LOOPED, Placement.V)
    }
    nearest = min(astray, key=lambda placement: len(astray[placement]))
    for rank, column, virtual_stage, _ in astray[nearest]:
        looped, v = (_rank(virtual_stage, len(rows), placement) for placement in astray)
        raise _wrong(
            rows,
            rank,
            column,
            f"{source}: virtual stage {virtual_stage} is on the wrong rank",
            value=rank,
            remedy=f"With {len(rows)} ranks it belongs on rank {looped}, in a V on rank {v}.",
        )
    return nearest


def _wrong(
    rows: Sequence[Sequence[str]], rank: int, column: int, what: str, *, value: object, remedy: str
) -> ScheduleError:
    """Return the error for a cell, which is named by line and column, and marked."""
    grid = marked_grid(rows, [(rank, column)], str.strip)
    where = f"line {rank + 1}, column {column + 1}"
    return ScheduleError(f"{what} in {where}", value=value, remedy=f"{remedy}\n{grid}")


def _rank(virtual_stage: int, ranks: int, placement: Placement) -> int:
    chunk, along = divmod(virtual_stage, ranks)
    return ranks - 1 - along if placement is Placement.V and chunk % 2 else along
