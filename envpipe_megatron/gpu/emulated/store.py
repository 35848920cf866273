"""The state of emulated GPUs, and its files: one a GPU, shared by every process of the node.

Virtual time in s starts at 0 and advances only when work or waiting is committed. What is
committed is a chain of segments of constant power and clock; from it follow energy, clock and power
at a past instant.

Clock changes: a request made at instant t comes into force at t + change time; until then the old
clock stays. At most one request is pending. A later one replaces it, also its settling time: the
replaced clock never comes into force. So a controller that changes its mind faster than the GPU
settles stays at the old clock.

A writer holds an exclusive `flock` on a lock file, writes the whole state beside the state file and
renames it over. The rename is atomic, so a reader needs no lock and never sees half a state, and a
process that is killed at any point leaves the old state or the new one; its lock dies with it.
Nothing is synced to disk: the state need not survive the machine.
"""

import fcntl
import json
import logging
import os
import re
import socket
import tempfile
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

from envpipe_megatron.gpu.base import EnergyReading, GpuError

logger = logging.getLogger(__name__)

_FORMAT = "envpipe-emulated-gpu/1"

ROOT_VARIABLE = "ENVPIPE_EMULATED_ROOT"
_STATE_NAME = re.compile(r"gpu(0|[1-9][0-9]*)\.json")

Result = TypeVar("Result")


class Segment(NamedTuple):
    """A committed stretch of virtual time; `start_j` was taken before it."""

    start_s: float
    end_s: float
    start_j: float
    power_w: float
    frequency_mhz: int


@dataclass
class EmulatedState:
    """The state of one emulated GPU.

    Mutable, unlike most data here: it is the working copy of one change, read from the file and
    dropped after it is written.

    Attributes:
        clock_mhz: the clock in force at `end_s`.
        requested_mhz: the lock, None for the driver's default.
        pending: clock in MHz that is requested and the instant in s at which it comes into force.
        end_s: the last committed end, at which `energy_j` is the exact cumulative energy.
        segments: the latest `kept_segments` that were committed.
        wall_minus_virtual_s: the anchor, CLOCK_MONOTONIC minus virtual time; None without.
    """

    kept_segments: ClassVar[int] = 64
    preset: str
    clock_mhz: int
    requested_mhz: int | None = None
    pending: tuple[int, float] | None = None
    end_s: float = 0.0
    energy_j: float = 0.0
    segments: list[Segment] = field(default_factory=list)
    wall_minus_virtual_s: float | None = None

    def commit(self, end_s: float, power_w: float) -> None:
        """Append a segment at the present clock up to `end_s`."""
        start_s, start_j = self.end_s, self.energy_j
        if end_s > start_s:
            self.segments.append(Segment(start_s, end_s, start_j, power_w, self.clock_mhz))
            del self.segments[: -self.kept_segments]
        self.end_s, self.energy_j = end_s, start_j + power_w * (end_s - start_s)

    def settle(self) -> None:
        """Let a pending clock whose instant has come take over at `end_s`."""
        if self.pending is not None and self.pending[1] <= self.end_s:
            self.clock_mhz = self.pending[0]
            self.pending = None

    def request(self, requested_mhz: int | None, target_mhz: int, change_s: float) -> None:
        """Note a request, made at the last committed end, for `target_mhz`."""
        self.requested_mhz = requested_mhz
        coming_mhz = self.pending[0] if self.pending else self.clock_mhz
        if target_mhz == self.clock_mhz:
            self.pending = None
        elif target_mhz != coming_mhz:
            self.pending = (target_mhz, self.end_s + change_s)

    def wait_until(self, time_s: float, power_w: float) -> None:
        """Commit waiting up to `time_s`; nothing if that has passed."""
        if self.pending is not None and self.end_s < self.pending[1] < time_s:
            self.commit(self.pending[1], power_w)
        self.settle()
        if self.end_s < time_s:
            self.commit(time_s, power_w)
            self.settle()

    def run_unit(self, cost: Callable[[int], tuple[float, float]]) -> None:
        """Commit a unit from the present end on.

        `cost` gives time in s and power in W of a whole unit at a clock. A clock change that
        settles within the unit splits it: what was done by then ran at the old clock.
        """
        whole_s, power_w = cost(self.clock_mhz)
        left = 1.0
        if self.pending is not None and (settle_s := self.pending[1]) < self.end_s + whole_s:
            left -= (settle_s - self.end_s) / whole_s
            self.commit(settle_s, power_w)
            self.settle()
            whole_s, power_w = cost(self.clock_mhz)
        self.commit(self.end_s + left * whole_s, power_w)
        self.settle()

    def energy_at(self, time_s: float) -> EnergyReading:
        """Return the energy at a past instant; the oldest known if that was before."""
        segment = self.segment_at(time_s)
        if segment is None:
            return EnergyReading(self.energy_j, self.end_s)
        time_s = max(time_s, segment.start_s)
        return EnergyReading(segment.start_j + segment.power_w * (time_s - segment.start_s), time_s)

    def segment_at(self, time_s: float) -> Segment | None:
        """Return the segment that holds an instant, the oldest known before that, None if none."""
        after = bisect_right(self.segments, time_s, key=lambda segment: segment.start_s)
        return self.segments[max(after - 1, 0)] if self.segments else None

    def to_json(self) -> bytes:
        """Return the state as one line of JSON; floats come back bit for bit."""
        return json.dumps({"format": _FORMAT, **vars(self)}).encode()


def tick_number(time_s: float, refresh_s: float) -> int:
    """Return the number of the last refresh at or before an instant; refresh k is at k * period."""
    number = int(time_s / refresh_s)
    # The quotient may round across a whole number: 0.3 / 0.1 is below 3, though 3 * 0.1 >= 0.3.
    while (number + 1) * refresh_s <= time_s:
        number += 1
    while number * refresh_s > time_s:
        number -= 1
    return number


def parse_state(text: bytes) -> EmulatedState:
    """Return the state in a file's content; a ValueError says what is wrong with it."""
    try:
        raw: Any = json.loads(text)
        if raw.pop("format") != _FORMAT:
            raise ValueError("of another format")
        state = EmulatedState(**raw)
        state.pending = state.pending and (state.pending[0], state.pending[1])
        state.segments = [Segment(*segment) for segment in state.segments]
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"it is no {_FORMAT}: {error}") from error
    return state


def default_root() -> Path:
    """Return the folder of this node's GPUs: ENVPIPE_EMULATED_ROOT, or one per machine and user."""
    given = os.environ.get(ROOT_VARIABLE)
    if given:
        return Path(given)
    # The host's name, because the temporary folder may be one that several machines share.
    name = f"envpipe-emulated-{socket.gethostname()}-{os.getuid()}"
    return Path(tempfile.gettempdir()) / name


def list_emulated(root: Path) -> tuple[int, ...]:
    """Return the indices of a folder's emulated GPUs, ascending; none if there is no folder."""
    matches = (_STATE_NAME.fullmatch(path.name) for path in root.glob("gpu*.json"))
    return tuple(sorted(int(match[1]) for match in matches if match))


class StateFile:
    """The state file of one emulated GPU, in the folder of its node."""

    def __init__(self, root: Path, index: int) -> None:
        self.path = root / f"gpu{index}.json"
        self._lock_path = root / f"gpu{index}.lock"
        self._new_path = root / f"gpu{index}.json.new"
        #: A state that could not be written, for this process only.
        self._kept: bytes | None = None

    def read(self) -> EmulatedState:
        """Return the state; GpuError if there is none, or the file is not one."""
        try:
            text = self._kept or self.path.read_bytes()
        except FileNotFoundError as error:
            known = list_emulated(self.path.parent)
            raise GpuError(
                "There is no such emulated GPU",
                value=str(self.path),
                remedy=f"Known in this folder: {', '.join(map(str, known)) or 'none'}. Create it "
                f"with EmulatedGpu.create, or point {ROOT_VARIABLE} at the right folder",
            ) from error
        except OSError as error:
            raise self._broken(f"cannot be read: {error}") from error
        try:
            return parse_state(text)
        except ValueError as error:
            raise self._broken(str(error)) from error

    def change(
        self,
        work: Callable[[EmulatedState], Result],
        *,
        fresh: EmulatedState | None = None,
        keep: bool = False,
    ) -> Result:
        """Have only `work` change the state, and write it when that ends without error.

        Not a context manager: a signal handler may raise between its lines and the block, and what
        its traceback then keeps locked is what the way out, which resets the clock, waits for. In
        one frame Python looks for signals only if `finally` follows or nothing is locked.

        Args:
            fresh: the state of a GPU that is made if there is none.
            keep: whether this object goes on with a state that cannot be written, and logs it.

        Raises GpuError if the state is missing or wrong, or without `keep` cannot be written.
        """
        descriptor = self._open_lock(make=fresh is not None)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            state = self.read() if fresh is None or self.path.exists() else fresh
            result = work(state)
            self._write(state, keep=keep)
            return result
        finally:
            # Closing is not enough: a child that was forked meanwhile keeps file and lock.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def _open_lock(self, *, make: bool) -> int:
        # Opened each time: a lock belongs to the opened file, so threads exclude each other.
        try:
            if make:  # private to the user: other processes trust what is written here
                self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            return os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if not make and not self.path.parent.exists():
                self.read()  # says that there is no such GPU
            raise self._unusable(error) from error

    def _write(self, state: EmulatedState, *, keep: bool) -> None:
        # One name for the new file is enough under the lock, and what a killed writer left of it
        # is overwritten instead of piling up.
        text = state.to_json()
        try:
            self._new_path.write_bytes(text)
            self._new_path.replace(self.path)
            self._kept = None
        except OSError as error:
            unusable = self._unusable(error)
            if not keep:
                raise unusable from error
            if self._kept is None:
                logger.error("Other processes see no work of an emulated GPU: %s", unusable)
            self._kept = text

    def _broken(self, problem: str) -> GpuError:
        return GpuError(
            f"The state of an emulated GPU is unusable: {problem}",
            value=str(self.path),
            remedy="End the jobs that use it and delete the file; the GPU starts afresh",
        )

    def _unusable(self, error: OSError) -> GpuError:
        return GpuError(
            f"Cannot write the state of an emulated GPU: {error}",
            value=str(self.path),
            remedy=f"Make room there; {ROOT_VARIABLE} or a trial's --output names another folder",
        )
