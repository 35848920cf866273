"""Energy logs: JSON Lines, one object for each GPU and window of iterations.

```json
{"format": "envpipe-energy/1", "node": "n1", "gpu": "NVIDIA A100", "gpu_uid": "GPU-1a2b…",
 "clock_backend": "nvml", "rank": 0, "num_ranks": 8, "stage": 0, "phase": "steady",
 "first_iteration": 40, "last_iteration": 42, "begin_s": 812.5, "duration_s": 3.1,
 "energy_j": 870.2, "energy_uncertainty_j": 1.9, "compute_s": 2.4, "blocking_s": 0.5,
 "idle_s": 0.2,
 "baseline": {"iterations": 9, "time_s": 1.02, "time_uncertainty_s": 0.004, "energy_j": 351.5,
              "metering_uncertainty_j": 0.6}}
```

Instants are on the GPU's time base, which for real GPUs is the node's monotonic clock: they compare
within a node only. The three times add up to the duration: units, waits in receives, and the rest
(optimizer, data, the wait for the slowest stage; all of phase `framework`, which is steps that the
framework ran by itself, of `plan`, which is what lies between other phases, and of `between`, which
is what a node's agent metered outside all training: evaluations, checkpoints, restarts). Steps of a
batch of another size than the full one have phases of their own: `steady m24` with 24 microbatches.
Phase `off` is the framework's own order at clocks that were given back, as an operator asked.
`baseline` is the step that this GPU's steps are compared with, where the job may save.
The older a job, the more windows are added up in a line, and lines are laid end to end: their
instants and iterations are right to such a line (`energy_sums`). A writer may add fields, such as
the name of a run. Ranks that are killed while they write leave torn lines; readers pass over them
and count them.

A node's agent adds notes, which carry no energy. A node whose last `begun` has no `ended` was lost:

```json
{"format": "envpipe-note/1", "node": "n1", "note": "begun", "time": "2026-01-31T12:00:00+00:00"}
{"format": "envpipe-note/1", "node": "n1", "note": "job", "time": "…", "facts": {"model": "GPT"}}
{"format": "envpipe-note/1", "node": "n1", "note": "ended", "time": "…", "exit_code": 0}
```
"""

from __future__ import annotations

import errno
import json
import os
import re
import sys
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envpipe_megatron.core.fields import TEXT, Number, Reader
from envpipe_megatron.files import read_lines

if TYPE_CHECKING:  # guards import this module, and do without SciPy
    from envpipe_megatron.formats.steps import StepEnergy

ENERGY_FORMAT = "envpipe-energy/1"
NOTE_FORMAT = "envpipe-note/1"

#: What a GPU without work says holds its clock back.
IDLE = "idle"
#: What a node's agent notes: it has begun to write, facts of the job, it has ended in order.
BEGUN, JOB, ENDED = "begun", "job", "ended"
#: The phase of steps that the framework runs by itself, before it hands the first one over.
FRAMEWORK = "framework"
#: The phase of what prepares the next one, outside all steps: ranks agree on it.
PLAN = "plan"
#: The phase of what is metered outside all training: evaluations, checkpoints, restarts.
BETWEEN = "between"
#: Phases whose time lies between iterations.
OUTSIDE_STEPS = (BETWEEN, PLAN)
#: The label of a run ends in this if the job may be started again.
_START = re.compile(r"(^| )\d{4}-\d\d-\d\dT\S+$")
#: The phase of a batch of another size than the full one ends in this.
_BATCH = re.compile(r" (m\d+)$")
#: No job has as many s or J. Readers of these, of iterations and ranks, and of stages: squares,
#: microseconds in 64 bits and lists of all stages are possible.
MAX_AMOUNT = 1e12
AMOUNT, INDEX = Number(below=MAX_AMOUNT), Number(whole=True, below=2**31)
STAGE = Number(whole=True, below=10_000)
#: How the time of a window was spent. An iteration whose units were not timed has the shares of the
#: last one whose units were.
SHARES = ("compute_s", "blocking_s", "idle_s")
#: Back ends that change no clock.
KEEP_CLOCKS = ("none", "dry_run")


class Phase(StrEnum):
    """Purpose of an iteration; training goes on in all of them."""

    WARMUP = "warm-up"
    PROFILE = "profile"
    RECONFIGURE = "reconfigure"
    STEADY = "steady"
    BASELINE = "baseline"
    OFF = "off"


def phase_in_batch(phase: str, batch: str) -> str:
    """Return the phase of steps of a smaller batch: `steady m24`, where `batch` is `m24`."""
    return f"{phase} {batch}".strip()


def split_phase(phase: str) -> tuple[str, str]:
    """Undo `phase_in_batch`: return the phase, and its batch, empty if that has full size."""
    found = _BATCH.search(phase)
    return (phase[: found.start()], found[1]) if found else (phase, "")


#: All phases, in the order in which a job comes to them.
PHASES = (
    FRAMEWORK,
    Phase.WARMUP.value,
    Phase.PROFILE.value,
    PLAN,
    Phase.RECONFIGURE.value,
    Phase.STEADY.value,
    Phase.OFF.value,
    BETWEEN,
)


#: Logs of more bytes are large; of these, lines are added up over this share of the time before.
_LARGE_BYTES, _SHARE_OF_LARGE = 16_000_000, 0.05


@dataclass(frozen=True, slots=True)
class EnergyWindow:
    """One line of an energy log; None or an empty text if the line does not say.

    Args:
        gpu_uid: names the GPU; `gpu` is the product's name.
        rank: of the job.
        run: the run of the job, empty if the job has only one.
        shares_s: seconds of `SHARES`.
        begin_s: on the time base of the GPU.
        num_ranks: of its start of the job.
        baseline: the step that its steps are compared with.
        clock_backend: what changed the GPU's clock; see `KEEP_CLOCKS`.
    """

    node: str
    gpu_uid: str
    gpu: str
    rank: int | None
    stage: int | None
    run: str
    phase: str
    first_iteration: int | None
    last_iteration: int | None
    energy_j: float
    duration_s: float
    energy_uncertainty_j: float | None
    shares_s: tuple[float, ...] | None
    begin_s: float | None = None
    num_ranks: int | None = None
    baseline: StepEnergy | None = None
    clock_backend: str = ""

    @property
    def gpu_key(self) -> tuple[str, str]:
        """A key that identifies a GPU: node and name, or node and rank if the name is missing."""
        return self.node, self.gpu_uid or f"rank {self.rank}"

    @property
    def member(self) -> Hashable:
        """A key for a member of the job: its rank, whose GPU may be another one after a restart."""
        return self.gpu_key if self.rank is None else self.rank

    @property
    def started(self) -> str:
        """When its start of the job began (ISO 8601, UTC), to the minute; empty if not known."""
        found = _START.search(self.run)
        return f"{found[0].strip()[:16].replace('T', ' ')} UTC" if found else ""

    @property
    def steps(self) -> int:
        """Number of its steps; 0 if it has none, or does not say."""
        first, last = self.first_iteration, self.last_iteration
        if self.phase in OUTSIDE_STEPS or first is None or last is None:
            return 0
        return max(0, last - first + 1)

    def line(self) -> dict[str, Any]:
        """Return the JSON object of the window's line, without what is not known."""
        said: dict[str, Any] = {"format": ENERGY_FORMAT}
        said |= {name: getattr(self, name) for name in _READERS}
        said |= zip(SHARES, self.shares_s or (None,) * len(SHARES), strict=True)
        if self.baseline is not None:
            said["baseline"] = vars(self.baseline)
        return {name: value for name, value in said.items() if value not in (None, "")}


@dataclass(frozen=True, slots=True)
class EnergyNote:
    """A note of a node's agent: `BEGUN`, `JOB` or `ENDED`, with the whole object as `fields`."""

    node: str
    note: str
    fields: Mapping[str, Any]

    def line(self) -> dict[str, Any]:
        """Return it as the JSON object of a line."""
        return dict(self.fields)


@dataclass(frozen=True)
class EnergyLogs:
    """Contents of energy logs.

    Args:
        lines: windows and notes in the order in which they were read, each once.
        repeated: lines that were given before.
        unreadable: lines that are torn or not of an energy log, as `file:line`.
        foreign: files with lines none of which can be read, which are not among `unreadable`.
    """

    lines: tuple[EnergyWindow | EnergyNote, ...]
    repeated: int
    unreadable: tuple[str, ...]
    foreign: tuple[Path, ...] = ()

    @property
    def windows(self) -> tuple[EnergyWindow, ...]:
        """The lines that carry energy."""
        return tuple(line for line in self.lines if isinstance(line, EnergyWindow))


def name_of_run(run: str) -> str:
    """Return a run's name without the instant of its start, which tells restarts apart."""
    return _START.sub("", run)


def read_energy_logs(
    paths: Iterable[Path], take: Callable[[EnergyWindow | EnergyNote], object] | None = None
) -> EnergyLogs:
    """Read energy logs; a line that is there twice, in one file or in two, counts once.

    Args:
        paths: a file may be empty, as that of a node that never got so far.
        take: gets each line, and none is kept in what is returned. Without it all are kept; where
            files are large, lines of each GPU are added up as they are read, see `energy_sums`.
    """
    from envpipe_megatron.formats.energy_sums import LogSums  # which imports this module

    paths = list(paths)
    lines: list[EnergyWindow | EnergyNote] = []
    sums = None
    if take is None:
        take = lines.append
        if sum(path.stat().st_size for path in paths) > _LARGE_BYTES:
            sums = LogSums(lines.append, _SHARE_OF_LARGE)
            take = sums.add
    seen: set[int] = set()  # digests
    count, unreadable, foreign = 0, list[str](), list[Path]()

    def add(line: bytes) -> None:
        read, before = parse_line(line), len(seen)
        seen.add(hash(line.strip()))
        if len(seen) > before:
            take(read)

    for path in paths:
        found, torn = read_lines([path], add)
        count += len(found)
        if torn and not found:
            foreign.append(path)
        else:
            unreadable += torn
    if sums is not None:
        sums.flush()
    return EnergyLogs(tuple(lines), count - len(seen), tuple(unreadable), tuple(foreign))


def parse_line(line: bytes) -> EnergyWindow | EnergyNote:
    """Read one line of an energy log; ValueError if it is torn or something else."""
    try:
        data = json.loads(line)
        if isinstance(data, dict) and data.get("format") == NOTE_FORMAT:
            json.dumps(data, ensure_ascii=False).encode()  # what facts say is printed, too
            return EnergyNote(read_text(data.get("node")), read_text(data.get("note")), data)
        return parse_window(data)
    except (TypeError, KeyError, OverflowError, RecursionError) as error:
        raise ValueError("Not a line of an energy log") from error


def append_line(path: Path, entry: dict[str, Any]) -> None:
    """Append one object to JSON Lines; a single write, so that many ranks may share the file.

    A writer that is killed while it writes, or finds the disk full (OSError), leaves the start of a
    line at most, and the next writer ends that line: it spoils no other. One that began to write
    before that could be seen finds its own line joined to the torn one, and writes it again.
    """
    line = (json.dumps(entry) + "\n").encode()
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        while True:
            whole = line if _ends_a_line(descriptor, os.fstat(descriptor).st_size) else b"\n" + line
            lacking = len(whole) - os.write(descriptor, whole)
            if lacking > 1:  # only its end is the next writer's to add
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            begin = os.lseek(descriptor, 0, os.SEEK_CUR) + lacking - len(line)
            if _ends_a_line(descriptor, begin):
                return
    except OSError as error:
        error.filename = str(path)  # a failed write does not name it
        raise
    finally:
        os.close(descriptor)


def _ends_a_line(descriptor: int, place: int) -> bool:
    return place == 0 or os.pread(descriptor, 1, place - 1) == b"\n"


def parse_window(data: Any) -> EnergyWindow:
    """Return a window from its JSON; raises one of the errors that `parse_line` catches."""
    if not isinstance(data, dict) or data.get("format", ENERGY_FORMAT) != ENERGY_FORMAT:
        raise ValueError
    shares_s = [data.get(name) for name in SHARES]
    return EnergyWindow(
        **{name: read(data.get(name)) for name, read in _READERS.items()},
        shares_s=None if None in shares_s else tuple(map(AMOUNT, shares_s)),
        baseline=read_step(data.get("baseline")),
    )


def read_step(said: Any) -> StepEnergy | None:
    """Return a step of a baseline, by the names that `StepEnergy` has; None if it is none."""
    from envpipe_megatron.formats.steps import StepEnergy

    try:
        names = [each.name for each in fields(StepEnergy)]
        read = {name: None if said[name] is None else AMOUNT(said[name]) for name in names}
    except (TypeError, KeyError, ValueError):  # of another version
        return None
    if not (read["iterations"] and read["time_s"]):
        return None
    return StepEnergy(**read | {"iterations": int(read["iterations"])})  # type: ignore[arg-type]


def read_text(value: Any) -> str:
    """Return a text of a line, empty if the line does not say; ValueError if it is none.

    That is also a part of a character, which cannot be printed or written.
    """
    text = TEXT("" if value is None else value)
    text.encode()
    return sys.intern(text)  # lines of a log have the same few


def _optional(read: Number) -> Reader[Any]:
    return lambda value: None if value is None else read(value)


#: What a line says under the name that a window has for it.
_READERS: Mapping[str, Reader[Any]] = {
    **dict.fromkeys(("node", "gpu", "gpu_uid", "clock_backend", "run"), read_text),
    **dict.fromkeys(("rank", "num_ranks"), _optional(INDEX)),
    "stage": _optional(STAGE),
    "phase": read_text,
    **dict.fromkeys(("first_iteration", "last_iteration"), _optional(INDEX)),
    "begin_s": _optional(AMOUNT),
    **dict.fromkeys(("duration_s", "energy_j"), AMOUNT),
    "energy_uncertainty_j": _optional(AMOUNT),
}
