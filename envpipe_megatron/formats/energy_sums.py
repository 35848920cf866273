"""Sums over the windows of energy logs: of a phase, of a GPU in a bill, of a job, of a longer line.

Whoever adds energy up does it here: a rank its own windows, for its log and `summary.json`; an
agent and a job of weeks, to write fewer lines; bill, Prometheus and report the lines of all GPUs.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from envpipe_megatron.formats.energy import EnergyNote, EnergyWindow
from envpipe_megatron.formats.steps import ComparedSteps, RunningMean, StepEnergy

#: A log's lines are added up over this share of the time that it has covered, and no longer than
#: this. So much is lost with a process that is killed, or a node that loses its power.
WAITING_SHARE, LONGEST_WAIT_S = 0.01, 600.0
#: Sums are rounded to nanoseconds and nanojoules: digits beyond are noise, and half of a line.
_DIGITS = 9
_NO_TIME_S = (0.0, 0.0, 0.0)
_UNKNOWN_S = (math.nan, math.nan, math.nan)


@dataclass
class EnergySums:
    """Sums over windows; one that a single window makes unknown is nan.

    Args:
        windows: how many were added.
        gpus: keys of the GPUs that they come from.
        variance_j2: of the energy, as if the ends of all windows were read independently: more than
            the truth if windows meet, as their common end cancels.
        duration_s: GPU-seconds.
        shares_s: GPU-seconds of `SHARES`.
        steps: those that were repeated after a restart as often as they ran.
        last: the last window, for the names in it, also one that is only compared; None of a sum
            over sums.
        step_s: mean step times of the windows of one GPU.
        compared: steps of one GPU whose baseline is known.
    """

    windows: int = 0
    gpus: frozenset[Hashable] = frozenset()
    energy_j: float = 0.0
    variance_j2: float = 0.0
    duration_s: float = 0.0
    shares_s: tuple[float, ...] = _NO_TIME_S
    steps: int = 0
    last: EnergyWindow | None = field(default=None, compare=False)
    step_s: RunningMean = field(default_factory=RunningMean, compare=False)
    compared: ComparedSteps = field(default_factory=ComparedSteps, compare=False)

    def add(self, window: EnergyWindow) -> None:
        """Add a window; its steps are compared with its baseline, if it has one."""
        self.last = window
        self.windows += 1
        if window.gpu_key not in self.gpus:
            self.gpus |= {window.gpu_key}
        self.energy_j += window.energy_j
        uncertainty_j = window.energy_uncertainty_j
        self.variance_j2 += math.nan if uncertainty_j is None else uncertainty_j**2
        self.duration_s += window.duration_s
        mine, new = self.shares_s, window.shares_s or _UNKNOWN_S
        self.shares_s = mine[0] + new[0], mine[1] + new[1], mine[2] + new[2]
        if not (count := window.steps):
            return
        if window.baseline is not None:
            measured = window.duration_s, window.energy_j, uncertainty_j
            self.compared.add(window.baseline, count, *measured)
        self.steps += count
        self.step_s.add(window.duration_s / count)

    def __copy__(self) -> EnergySums:
        """Return sums that stay as these are now."""
        return replace(self, step_s=copy.copy(self.step_s), compared=copy.copy(self.compared))

    def window(self, begin_s: float, first_iteration: int | None) -> EnergyWindow:
        """Return the sums of one GPU and phase as a window, from that instant and iteration on."""
        assert self.last is not None
        error_j, shares_s = self.energy_uncertainty_j, self.known_shares_s
        place: dict[str, Any] = {}
        if self.steps:
            first = first_iteration or 0
            place = {"first_iteration": first, "last_iteration": first + self.steps - 1}
        return replace(
            self.last,
            energy_j=round(self.energy_j, _DIGITS),
            energy_uncertainty_j=None if error_j is None else round(error_j, _DIGITS),
            begin_s=begin_s,
            duration_s=round(self.duration_s, _DIGITS),
            shares_s=shares_s and tuple(round(share_s, _DIGITS) for share_s in shares_s),
            **place,
        )

    @property
    def energy_uncertainty_j(self) -> float | None:
        """Standard uncertainty of the energy; None if one window's is not known."""
        return None if math.isnan(self.variance_j2) else math.sqrt(self.variance_j2)

    @property
    def known_shares_s(self) -> tuple[float, ...] | None:
        """GPU-seconds of `SHARES`; None if one window's are not known, or there is no window."""
        return None if not self.windows or math.isnan(self.shares_s[0]) else self.shares_s

    @property
    def step(self) -> StepEnergy:
        """Return the mean step of one GPU that has some."""
        count, error_j = self.steps, self.energy_uncertainty_j
        return StepEnergy(
            count,
            self.duration_s / count,
            self.step_s.uncertainty,
            self.energy_j / count,
            None if error_j is None else error_j / count,
        )

    @property
    def average_power_w(self) -> float:
        """Average power of one GPU while it was metered."""
        return self.energy_j / self.duration_s if self.duration_s else 0.0


def total_of(sums: Iterable[EnergySums]) -> EnergySums:
    """Add sums up; in any order, they are the same to the last bit."""
    sums = [EnergySums(), *sums]
    return EnergySums(
        windows=sum(own.windows for own in sums),
        gpus=frozenset().union(*(own.gpus for own in sums)),
        energy_j=math.fsum(own.energy_j for own in sums),
        variance_j2=math.fsum(own.variance_j2 for own in sums),
        duration_s=math.fsum(own.duration_s for own in sums),
        shares_s=tuple(
            map(math.fsum, zip(_NO_TIME_S, *(own.shares_s for own in sums), strict=True))
        ),
        steps=sum(own.steps for own in sums),
    )


class LineSums:
    """Adds up the windows of one GPU over spans of time, by phase and all else that lines say.

    Phases take turns: the sums of a span are laid end to end, in time and in iterations, so that
    what they say of both is right to a span. Where an iteration does not follow the last one, as
    after a restart, a new span begins.

    Args:
        write: gets each sum as a window. It may raise OSError: what is left comes with the next.
        share, longest_s: a span ends at the shorter of these; see `WAITING_SHARE`.
    """

    def __init__(
        self,
        write: Callable[[EnergyWindow], object],
        share: float = WAITING_SHARE,
        longest_s: float = LONGEST_WAIT_S,
    ) -> None:
        self._write = write
        self._share, self._longest_s = share, longest_s
        self._first_s = self._begin_s = math.inf
        self._next_iteration: int | None = None
        self._sums: dict[Hashable, EnergySums] = {}
        #: The first iteration of the span.
        self._first: int | None = None
        #: Of spans that have ended.
        self._due: deque[EnergyWindow] = deque()

    def add(self, window: EnergyWindow) -> None:
        """Take the next window; OSError: it is kept, but what is due could not be written."""
        begin_s = window.begin_s or 0.0
        if window.steps and window.first_iteration != self._next_iteration:
            self._end_span()
        if not self._sums:
            self._begin_s, self._first = begin_s, None
        self._first_s = min(self._first_s, begin_s)
        self._sums.setdefault(_labels(window), EnergySums()).add(window)
        if window.steps and window.last_iteration is not None:
            self._first = window.first_iteration if self._first is None else self._first
            self._next_iteration = window.last_iteration + 1
        end_s = begin_s + window.duration_s
        if end_s - self._begin_s >= min(self._share * (end_s - self._first_s), self._longest_s):
            self._end_span()
        self._write_due()

    def flush(self) -> None:
        """Write what there is; OSError as `add`."""
        self._end_span()
        self._write_due()

    def _end_span(self) -> None:
        for sums in self._sums.values():
            self._due.append(sums.window(self._begin_s, self._first))
            self._begin_s += self._due[-1].duration_s
            if self._first is not None:
                self._first += sums.steps
        self._sums = {}

    def _write_due(self) -> None:
        while self._due:
            self._write(self._due[0])
            self._due.popleft()


def _labels(window: EnergyWindow) -> Hashable:
    """Return a key that windows of one sum have in common."""
    return (
        window.node, window.gpu_uid, window.gpu, window.rank, window.stage, window.run,
        window.phase, window.num_ranks, window.clock_backend, window.steps > 0,
        window.baseline, window.energy_uncertainty_j is None, window.shares_s is None,
    )  # fmt: skip


class LogSums:
    """Adds up the windows of all GPUs of energy logs, between the notes of their nodes' agents.

    `write` gets sums and notes, which give the same bill except for the number of windows. `share`
    is as for `LineSums`; by default, all are of one span.
    """

    def __init__(
        self, write: Callable[[EnergyWindow | EnergyNote], object], share: float = math.inf
    ) -> None:
        self._write, self._share = write, share
        self._gpus: dict[Hashable, LineSums] = {}

    def add(self, entry: EnergyWindow | EnergyNote) -> None:
        """Take the next window or note."""
        if isinstance(entry, EnergyWindow) and entry.begin_s is not None:
            whose = entry.node, entry.gpu_uid, entry.rank, entry.run
            if whose not in self._gpus:
                self._gpus[whose] = LineSums(self._write, self._share, math.inf)
            self._gpus[whose].add(entry)
            return
        self.flush()  # what a note says may be of the windows after it only
        self._write(entry)

    def flush(self) -> None:
        """Write what there is."""
        for sums in self._gpus.values():
            sums.flush()
