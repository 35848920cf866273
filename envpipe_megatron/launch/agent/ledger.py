"""Writes the energy log of one node, from the ledger of each of its GPUs.

A ledger bills its GPU without a gap, also where a rank ends early. The log is written by the node's
agent only.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any

from envpipe_megatron.formats.energy import (
    AMOUNT,
    BEGUN,
    BETWEEN,
    IDLE,
    NOTE_FORMAT,
    OUTSIDE_STEPS,
    EnergyWindow,
    append_line,
    parse_window,
)
from envpipe_megatron.formats.energy_sums import EnergySums, LineSums
from envpipe_megatron.gpu.base import ClockState, Gpu
from envpipe_megatron.runtime.energy.meter import MOST_POWER_W, CounterAt, WindowEnergy

logger = logging.getLogger(__name__)

#: Without a window for this long, and for some steps, the counter is read: an evaluation, say. A
#: step's window is written when the next step ends, and a rank may be a step behind.
_LONGEST_GAP_S, _STEPS_OF_A_GAP = 300.0, 5
#: Shorter gaps between windows are what rounding left, and get no line.
_LEAST_GAP_S = 1e-6
#: Instants of readings are known to some milliseconds: two close ones may seem to fall by less.
_JITTER_J = 50.0
#: How far in the future a window may end, for what rounding does.
_SOON_S = 5.0
#: A rank looks at its clock twice a second; a look this long ago says nothing of now.
_STALE_LOOK_S = 3.0


class NodeLog:
    """`energy-<node>.jsonl`, appended to; an earlier start's lines stay, and its bill goes on.

    One that is deleted or renamed meanwhile is written on under no name, or its new one. Where
    another agent writes it, the node is `<node>.2` or the next: that of another live job, or of a
    machine that died, whose locks NFS keeps for 90 s.

    Attributes:
        node: the node's name in this log and the bill.
        grown: called after each line.
        identity: tells this file from another of a node of the same name, by its first line.
        earlier_bytes: what earlier starts have written.

    Raises OSError if it cannot be written.
    """

    def __init__(self, folder: Path, node: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.grown: Callable[[], None] = lambda: None
        #: Why it took no line; None since the last that it took.
        self._failure: str | None = None
        #: Notes that found no room yet.
        self._notes: tuple[dict[str, Any], ...] = ()
        for number in count(1):
            self.node = node if number == 1 else f"{node}.{number}"
            self.path = log_path(folder, self.node)
            self._lock = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(self._lock)
                logger.warning("Another agent writes %s: its node is not this one", self.path)
                continue
            except OSError:  # a file system without locks
                pass
            break
        try:
            self.earlier_bytes = self.size
            self.note(BEGUN)
            with self._file.open("rb") as file:
                self.identity = sha256(file.readline()).hexdigest()
        except OSError:
            os.close(self._lock)
            raise

    @property
    def size(self) -> int:
        """Return the bytes that are written."""
        return self._file.stat().st_size

    def append(self, *lines: dict[str, Any]) -> None:
        """Append lines with the node's name, or raise OSError: the disk is full, say.

        Notes that found no room come first; other lines are the caller's to bring again.
        """
        try:
            for line in (*self._notes, *lines):
                append_line(self._file, {**line, "node": self.node})
                self._notes = self._notes[1:]
        except OSError as error:
            error.filename = str(self.path)
            raise
        self._failure = None
        self.grown()

    def attempt(self, write: Callable[..., None], *arguments: Any, **named: Any) -> None:
        """Do what appends lines, and say once while it lasts why it fails.

        The next line that can be written has the energy.
        """
        try:
            write(*arguments, **named)
        except Exception as error:
            if repr(error) != self._failure:
                logger.exception("The node's energy log cannot take a line")
            self._failure = repr(error)

    def note(self, note: str, **fields: Any) -> None:
        """Append a note; see `formats.energy`.

        Each has the time, so that none is one of an earlier start given twice.
        """
        now = datetime.now(UTC).isoformat()
        self._notes = *self._notes, {"format": NOTE_FORMAT, "note": note, "time": now, **fields}
        self.append()

    def read(self, offset: int, most_bytes: int) -> bytes:
        """Return whole lines from an offset on; none if there are none yet.

        A first line of more bytes is read as well: zeros that a loss of power left, say.
        """
        with self._file.open("rb") as file:
            file.seek(offset)
            data = file.read(most_bytes)
            if b"\n" not in data:
                data += file.readline()
        return data[: data.rfind(b"\n") + 1]

    @property
    def _file(self) -> Path:
        """Return the file that was opened, even if renamed: the job's bill needs all of it."""
        return Path(f"/proc/self/fd/{self._lock}") if self._lock >= 0 else self.path

    def close(self) -> None:
        """Let others write it; safe to call twice."""
        lock, self._lock = self._lock, -1  # the number may be another file's by then
        with contextlib.suppress(OSError):
            os.close(lock)


def log_path(folder: Path, node: str) -> Path:
    """Return the path of a node's log."""
    name = re.sub(r"[^\w.-]", "_", node)
    return folder / f"energy-{name}.jsonl"


class GpuLedger:
    """Lays the windows of a GPU's ranks end to end.

    A rank meters its GPU and says where the counter was at both ends of each window. What lies
    between two windows is billed as phase `between`, and so is what lies after the last one, up to
    a reading of the counter here. So all lines of a GPU add up to the difference of two readings of
    its counter: when its rank first said hello and when the last one ended. What a counter that
    went back had counted since the last line is lost. As the job grows old, windows are added up
    (`LineSums`); what is said of the GPU here has them at once.

    Args:
        gpu: only read; GpuError if it does not tell the time.
        labels: as for `know`.
        write: gets each line; OSError is raised on, and it gets the line again with the next one.

    Attributes:
        of_gpu: a window of nothing, with the GPU's names.
        last: the last window; None before the first.
        trained: sums of what was training.
        throttled_s: for how long the clock was held back, by reason, as far as looks show.
    """

    def __init__(
        self, gpu: Gpu, labels: Mapping[str, Any], write: Callable[[dict[str, Any]], object]
    ) -> None:
        self.gpu = gpu
        self.know(labels)
        self._sums = LineSums(lambda window: write(window.line()))
        self._failing = False
        #: Of the windows so far; None before the first.
        self._longest_step_s: float | None = None
        self._last_iteration: int | None = 0
        self.last: EnergyWindow | None = None
        self.trained = EnergySums()
        self.throttled_s: defaultdict[str, float] = defaultdict(float)
        #: The rank's last look at the clock, and when it came.
        self._look: tuple[float, ClockState] | None = None
        gpu.time_s()
        #: Where the last line ended, None as long as that is not known; and J that were billed.
        self._billed: tuple[CounterAt | None, float] = self.read(), 0.0

    def know(self, labels: Mapping[str, Any]) -> None:
        """Bill a rank from here on; an error of `parse_window` if one of its labels is none."""
        self.of_gpu = parse_window({**labels, "energy_j": 0, "duration_s": 0})

    @property
    def energy_j(self) -> float:
        """Return the energy that was billed, J."""
        return self._billed[1]

    def read(self) -> CounterAt | None:
        """Read the counter, which may take 0.1 s; None if it cannot be read."""
        try:
            reading = self.gpu.read_energy()
            off_s = reading.time_uncertainty_s
            off_j = off_s * self.gpu.power_w if off_s else 0.0
        except Exception as error:  # a driver may fail in any way
            if not self._failing:  # logged once while it lasts
                logger.error("The energy counter of %s cannot be read: %s", self.gpu.name, error)
            self._failing = True
            return None
        self._failing = False
        return CounterAt(reading.time_s, reading.energy_j, off_j)

    def look(self, seen: Mapping[str, Any]) -> None:
        """Keep the rank's last look at its clock: a `ClockState`, else TypeError or KeyError."""
        reasons = tuple(seen["throttle_reasons"])
        state = ClockState(**{**seen, "throttle_reasons": reasons})
        now_s = time.monotonic()
        if self._look is not None and now_s - self._look[0] <= _STALE_LOOK_S:
            for reason in set(reasons) - {IDLE}:
                self.throttled_s[reason] += now_s - self._look[0]
        self._look = now_s, state

    def clock(self) -> ClockState:
        """Return the clock as its rank saw it lately, else as it is now; a GpuError if it cannot.

        Only the rank knows what it requested of a real GPU.
        """
        if self._look is not None and time.monotonic() - self._look[0] <= _STALE_LOOK_S:
            return self._look[1]
        return self.gpu.clock_state()

    def take(self, line: Mapping[str, Any]) -> None:
        """Bill a rank's window, a line of `EnergyLog` with the counter's readings.

        One that is none raises ValueError, TypeError, KeyError or OverflowError, and changes
        nothing; OSError: it is billed, and will be written with the next line.
        """
        window = parse_window(line)
        begin_s = AMOUNT(window.begin_s)
        end_s = begin_s + window.duration_s
        begin, end = (
            CounterAt(time_s, *map(AMOUNT, line[name]))
            for name, time_s in (("begin_counter", begin_s), ("end_counter", end_s))
        )
        if end_s > self.gpu.time_s() + _SOON_S:
            raise ValueError(f"A window that ends at {end_s} s, which is still to come")
        if count := window.steps:
            self._longest_step_s = max(self._longest_step_s or 0.0, window.duration_s / count)
        self._bill_gap(begin)
        until = self._billed[0] or begin
        if end_s <= until.time_s:
            return  # billed already, as part of a long gap
        if until.time_s > begin_s + _LEAST_GAP_S:  # all of its steps, in a part of their time
            window = replace(window, baseline=None)
        if window.shares_s:
            share = min(1.0, (end_s - until.time_s) / window.duration_s)
            compute_s, blocking_s, _ = (share * part_s for part_s in window.shares_s)
            idle_s = max(0.0, end_s - until.time_s - compute_s - blocking_s)
            window = replace(window, shares_s=(compute_s, blocking_s, idle_s))
        self._bill(window, end)
        self._last_iteration = window.last_iteration

    def is_behind(self) -> bool:
        """Say whether no window has come for so long that the counter should be read and billed."""
        until = self._billed[0]
        if until is None or self._longest_step_s is None:
            return until is None
        longest_s = max(_LONGEST_GAP_S, _STEPS_OF_A_GAP * self._longest_step_s)
        return self.gpu.time_s() - until.time_s > longest_s

    def bill_up_to(self, end: CounterAt | None) -> None:
        """Bill as `between` what no window had up to a reading, if there is one, and write all.

        Errors as in `take`.
        """
        if end is not None:
            self._bill_gap(end)
        self._sums.flush()

    def _bill_gap(self, end: CounterAt) -> None:
        until = self._billed[0]
        if until is None:
            self._billed = end, 0.0
        elif end.time_s > until.time_s + _LEAST_GAP_S:
            between = replace(
                self.of_gpu,
                phase=BETWEEN,
                first_iteration=self._last_iteration,
                last_iteration=self._last_iteration,
                shares_s=(0.0, 0.0, end.time_s - until.time_s),
            )
            self._bill(between, end)

    def _bill(self, window: EnergyWindow, end: CounterAt) -> None:
        """Bill from the end of the last line to a reading."""
        until, billed_j = self._billed
        assert until is not None
        counted_j = end.energy_j - until.energy_j
        if -_JITTER_J < counted_j < 0:
            return  # the next line has it
        if not 0 <= counted_j <= _JITTER_J + MOST_POWER_W * (end.time_s - until.time_s):
            logger.error(
                "The energy counter of %s went back or leapt, as where a driver is reloaded: what "
                "it had counted after %.1f s is lost",
                self.gpu.name,
                until.time_s,
            )
            self._billed = end, billed_j
            return
        energy = WindowEnergy(until, end)
        self.last = replace(
            window,
            begin_s=until.time_s,
            duration_s=end.time_s - until.time_s,
            energy_j=energy.energy_j,
            energy_uncertainty_j=energy.uncertainty_j,
        )
        self._billed = end, billed_j + energy.energy_j
        if window.phase not in OUTSIDE_STEPS and window.shares_s:
            self.trained.add(self.last)
        self._sums.add(self.last)
