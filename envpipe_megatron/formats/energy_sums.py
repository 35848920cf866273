"""Sums of an energy log's lines: a job of weeks leaves megabytes of each GPU.

Energies are differences of counter readings, so that sums lose none. Enter at `LineSums` to write
a log, and at `summed` to have what a long one says in few lines.
"""

from __future__ import annotations

import math
import operator
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

from envpipe_megatron.formats.energy import BEGUN, steps_of

#: A log's lines are added up over this share of the time that it has covered, and no longer than
#: this. So much is lost with a process that is killed, or a node that loses its power.
WAITING_SHARE, LONGEST_WAIT_S = 0.01, 600.0
_SUMMED = {
    **dict.fromkeys(("duration_s", "energy_j", "compute_s", "blocking_s", "idle_s"), operator.add),
    "energy_uncertainty_j": math.hypot,
}
_BASELINE = "baseline"
_PLACES = ("begin_s", "first_iteration", "last_iteration")
#: Sums are rounded to nanoseconds and nanojoules: digits beyond are noise, and half of a line.
_DIGITS = 9


class LineSums:
    """Adds up the lines of one GPU over spans of time, by phase and all else that lines say.

    Phases take turns: sums of a span are laid end to end, in time and in iterations, so that their
    `begin_s` and iterations are right to a span. Where an iteration does not follow the last one,
    as after a restart, a new span begins.

    Args:
        write: gets each sum, a line as they are. It may raise OSError: what is left is written
            with the next line.
        share, longest_s: a span ends at the shorter of these; see `WAITING_SHARE`.
    """

    def __init__(
        self,
        write: Callable[[dict[str, Any]], object],
        share: float = WAITING_SHARE,
        longest_s: float = LONGEST_WAIT_S,
    ) -> None:
        self._write = write
        self._share, self._longest_s = share, longest_s
        self._first_s = self._begin_s = math.inf
        self._next_iteration: int | None = None
        #: Of the present span, by all that is not added up.
        self._sums: dict[Hashable, dict[str, Any]] = {}
        #: And what steps of each sum are held against, with how many of them are.
        self._baselines: dict[Hashable, Counter[tuple[Any, ...]]] = {}
        #: Of spans that have ended.
        self._due: deque[dict[str, Any]] = deque()

    def add(self, line: Mapping[str, Any]) -> None:
        """Take the next line; OSError: it is kept, but what is due could not be written."""
        steps, begin_s = steps_of(line), line["begin_s"]
        if steps and line["first_iteration"] != self._next_iteration:
            self._end_span()
        if not self._sums:
            self._begin_s = begin_s
        self._first_s = min(self._first_s, begin_s)
        added = [name for name in _SUMMED if line.get(name) is not None]
        baseline = line.get(_BASELINE)
        if baseline:
            added.append(_BASELINE)
        said = [item for item in line.items() if item[0] not in (*added, *_PLACES)]
        key = steps > 0, bool(baseline), repr(said)
        if baseline:
            self._baselines.setdefault(key, Counter())[tuple(baseline)] += steps
        known = self._sums.setdefault(key, {})
        if not known:
            known.update(line)
        else:
            for name in _SUMMED.keys() & added:
                known[name] = round(_SUMMED[name](known[name], line[name]), _DIGITS)
            if steps:
                known["last_iteration"] += steps
        if steps:
            self._next_iteration = line["last_iteration"] + 1
        end_s = begin_s + line["duration_s"]
        if end_s - self._begin_s >= min(self._share * (end_s - self._first_s), self._longest_s):
            self._end_span()
        self._write_due()

    def flush(self) -> None:
        """Write what there is; OSError as `add`."""
        self._end_span()
        self._write_due()

    def _end_span(self) -> None:
        iteration = None
        for key, line in self._sums.items():
            if len(baselines := self._baselines.get(key, ())) > 1:
                line[_BASELINE] = _mean_baseline(baselines)
            line["begin_s"] = self._begin_s
            self._begin_s += line["duration_s"]
            if steps := steps_of(line):
                first = line["first_iteration"] if iteration is None else iteration
                line["first_iteration"], line["last_iteration"] = first, first + steps - 1
                iteration = first + steps
        self._due.extend(self._sums.values())
        self._sums, self._baselines = {}, {}

    def _write_due(self) -> None:
        while self._due:
            self._write(self._due[0])
            self._due.popleft()


def _mean_baseline(baselines: Mapping[tuple[Any, ...], int]) -> list[Any]:
    """The mean of baselines by the steps that are held against each; their errors are independent.

    Each has its iterations, s and their uncertainty, J and theirs; None where not known.
    """
    shares = [steps / sum(baselines.values()) for steps in baselines.values()]
    iterations, *columns = zip(*baselines, strict=True)
    mean: list[Any] = [sum(iterations)]
    for place, column in enumerate(columns):
        if None in column:
            mean.append(None)
            continue
        parts = [share * own for share, own in zip(shares, column, strict=True)]
        mean.append(math.hypot(*parts) if place % 2 else math.fsum(parts))
    return mean


def summed(entries: Iterable[Mapping[str, Any]], share: float = math.inf) -> list[dict[str, Any]]:
    """Entries of energy logs, with the lines of each GPU added up between its node's starts.

    What bills they make is the same but for the number of lines.

    Args:
        entries: parsed lines and notes.
        share: as for `LineSums`; by default, all lines are of one span.
    """
    made: list[dict[str, Any]] = []
    sums: dict[Hashable, LineSums] = {}
    for entry in entries:
        if entry.get("begin_s") is not None:
            whose = tuple(map(entry.get, ("node", "gpu_uid", "rank", "run")))
            sums.setdefault(whose, LineSums(made.append, share, math.inf)).add(entry)
            continue
        if entry.get("note") == BEGUN:
            for own in sums.values():
                own.flush()
        made.append(dict(entry))
    for own in sums.values():
        own.flush()
    return made
