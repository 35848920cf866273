"""Sums of an energy log's lines: a job of weeks leaves megabytes of each GPU, and no joule less."""

from __future__ import annotations

import math
import operator
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from envpipe_megatron.formats.energy import STEP, num_steps

#: A log's lines are added up over this share of the time that it has covered, and no longer than
#: this. So much is lost with a process that is killed, or a node that loses its power.
WAITING_SHARE, LONGEST_WAIT_S = 0.01, 600.0
_SUMMED = {
    **dict.fromkeys(("duration_s", "energy_j", "compute_s", "blocking_s", "idle_s"), operator.add),
    "energy_uncertainty_j": math.hypot,
}
#: What lines of one sum may differ in besides.
_OTHER = ("begin_s", "first_iteration", "last_iteration", "baseline")
#: Sums are rounded to nanoseconds and nanojoules: digits beyond are noise, and half of a line.
_DIGITS = 9


def steps_of(line: Mapping[str, Any]) -> int:
    """How many steps a line has, as its JSON; 0 if it does not say."""
    return num_steps(*map(line.get, ("phase", "first_iteration", "last_iteration")))


class LineSums:
    """Adds up the lines of one GPU over spans of time, by phase and all else that lines say.

    Phases take turns: the sums of a span are laid end to end, in time and in iterations, so that
    what they say of both is right to a span. Where an iteration does not follow the last one, as
    after a restart, a new span begins.

    Args:
        write: gets each sum as a line. It may raise OSError: what is left comes with the next line.
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
        self._sums: dict[Hashable, dict[str, Any]] = {}
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
        said = [item for item in line.items() if item[0] not in (*added, *_OTHER)]
        key = steps > 0, line.get("baseline") is None, repr(said)
        if (known := self._sums.get(key)) is None:
            self._sums[key] = dict(line)
        else:
            if known.get("baseline") != line.get("baseline"):
                known["baseline"] = _mean(known, line)
            for name in added:
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
        for line in self._sums.values():
            line["begin_s"] = self._begin_s
            self._begin_s += line["duration_s"]
            if steps := steps_of(line):
                first = line["first_iteration"] if iteration is None else iteration
                line["first_iteration"], line["last_iteration"] = first, first + steps - 1
                iteration = first + steps
        self._due.extend(self._sums.values())
        self._sums = {}

    def _write_due(self) -> None:
        while self._due:
            self._write(self._due[0])
            self._due.popleft()


def _mean(known: Mapping[str, Any], line: Mapping[str, Any]) -> dict[str, Any]:
    """The baseline of two lines' steps, with its errors taken for common ones, as most are."""
    steps, more = steps_of(known), steps_of(line)
    own, other = known["baseline"], line["baseline"]
    means = {
        name: None if None in (a, b) else round((steps * a + more * b) / (steps + more), _DIGITS)
        for name, a, b in ((name, own[name], other[name]) for name in STEP)
    }
    return means | {"iterations": max(own["iterations"], other["iterations"])}


class LogSums:
    """Adds up the lines of all GPUs of energy logs, between the notes of their nodes' agents.

    `write` gets sums and notes, by which a bill is the same but for the number of lines. `share` is
    as for `LineSums`; by default, all lines are of one span.
    """

    def __init__(self, write: Callable[[dict[str, Any]], object], share: float = math.inf) -> None:
        self._write, self._share = write, share
        self._gpus: dict[Hashable, LineSums] = {}

    def add(self, entry: dict[str, Any]) -> None:
        """Take the next line or note."""
        if entry.get("begin_s") is not None:
            whose = tuple(map(entry.get, ("node", "gpu_uid", "rank", "run")))
            if whose not in self._gpus:
                self._gpus[whose] = LineSums(self._write, self._share, math.inf)
            self._gpus[whose].add(entry)
            return
        self.flush()  # what a note says may be of the lines behind it only
        self._write(entry)

    def flush(self) -> None:
        """Write what there is."""
        for sums in self._gpus.values():
            sums.flush()
