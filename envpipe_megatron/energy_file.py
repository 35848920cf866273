"""Energy logs: JSON Lines, one object for each GPU and window of iterations.

```json
{"format": "envpipe-energy/1", "node": "n1", "gpu": "NVIDIA A100", "gpu_uid": "GPU-1a2b…",
 "rank": 0, "stage": 0, "phase": "steady", "first_iteration": 40, "last_iteration": 42,
 "begin_s": 812.5, "duration_s": 3.1, "energy_j": 870.2, "energy_uncertainty_j": 1.9,
 "compute_s": 2.4, "blocking_s": 0.5, "idle_s": 0.2}
```

Instants are on the GPU's time base, which for real GPUs is the node's monotonic clock: they compare
within a node alone. The three times add up to the duration: units, waits in receives, and the rest
(optimizer, data, the wait for the slowest stage; all of phase `framework`, which is steps that the
framework ran by itself, and of `plan`, which is what lies between other phases). A writer may add
fields, such as the name of a run. What many ranks wrote and some were killed while writing may hold
torn lines; readers pass over them and count them.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envpipe_megatron.errors import EnvPipeError

ENERGY_FORMAT = "envpipe-energy/1"
#: Where the time of a window went.
SHARES = ("compute_s", "blocking_s", "idle_s")


class EnergyFileError(EnvPipeError):
    """A file that holds no energy log."""


@dataclass(frozen=True, slots=True)
class EnergyWindow:
    """One line of an energy log.

    Args:
        node: the node's name; empty where the line does not say.
        gpu_uid: names the GPU; empty where the line does not say.
        gpu: the product's name.
        rank: of the job, None where the line does not say.
        stage: of the pipeline, None where the line does not say.
        run: the run of the job, empty where the job has one.
        energy_uncertainty_j: None where it is not known.
        shares_s: seconds of `SHARES`, None where they are not known.
    """

    node: str
    gpu_uid: str
    gpu: str
    rank: int | None
    stage: int | None
    run: str
    phase: str
    energy_j: float
    duration_s: float
    energy_uncertainty_j: float | None
    shares_s: tuple[float, ...] | None

    @property
    def gpu_key(self) -> tuple[str, str]:
        """What tells GPUs apart: node and name, the rank standing in for a name that is missing."""
        return self.node, self.gpu_uid or f"rank {self.rank}"


@dataclass(frozen=True)
class EnergyTotal:
    """The sum of windows.

    Args:
        windows: how many.
        num_gpus: how many different GPUs.
        energy_j: J.
        energy_uncertainty_j: J, as if the ends of all windows were read independently: more than
            the truth where windows meet, whose common end cancels. None if one is not known.
        duration_s: GPU-seconds.
        shares_s: GPU-seconds of `SHARES`; None if one window's are not known.
    """

    windows: int
    num_gpus: int
    energy_j: float
    energy_uncertainty_j: float | None
    duration_s: float
    shares_s: tuple[float, ...] | None

    @property
    def average_power_w(self) -> float:
        """Of one GPU while it was metered."""
        return self.energy_j / self.duration_s if self.duration_s else 0.0


@dataclass(frozen=True)
class EnergyLogs:
    """What was read from energy logs.

    Args:
        windows: each once.
        repeated: lines that were given before.
        unreadable: lines that are torn or not of an energy log, as `file:line`.
    """

    windows: tuple[EnergyWindow, ...]
    repeated: int
    unreadable: tuple[str, ...]

    def total(self) -> EnergyTotal:
        """All windows together: the job."""
        return sum_windows(self.windows)

    def total_by(self, key: Callable[[EnergyWindow], Hashable]) -> dict[Any, EnergyTotal]:
        """Totals of the windows that share a key, in the order in which keys turn up."""
        grouped: dict[Hashable, list[EnergyWindow]] = {}
        for window in self.windows:
            grouped.setdefault(key(window), []).append(window)
        return {value: sum_windows(windows) for value, windows in grouped.items()}


def sum_windows(windows: Sequence[EnergyWindow]) -> EnergyTotal:
    """Add windows up; exactly, so that the order of files does not matter."""
    uncertainties = [w.energy_uncertainty_j for w in windows if w.energy_uncertainty_j is not None]
    shares = [w.shares_s for w in windows if w.shares_s is not None]
    return EnergyTotal(
        windows=len(windows),
        num_gpus=len({w.gpu_key for w in windows}),
        energy_j=math.fsum(w.energy_j for w in windows),
        energy_uncertainty_j=(
            math.hypot(*uncertainties) if len(uncertainties) == len(windows) else None
        ),
        duration_s=math.fsum(w.duration_s for w in windows),
        shares_s=(
            tuple(math.fsum(column) for column in zip(*shares, strict=True))
            if shares and len(shares) == len(windows)
            else None
        ),
    )


def read_energy_logs(paths: Iterable[Path]) -> EnergyLogs:
    """Read energy logs; a line that is there twice, in one file or in two, counts once.

    Raises:
        EnergyFileError: a file without a single readable line.
        OSError: a file that cannot be read.
    """
    windows: dict[bytes, EnergyWindow] = {}
    unreadable: list[str] = []
    repeated = 0
    for path in paths:
        found = 0
        with path.open("rb") as lines:  # a torn line need not be text
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    data = json.loads(line)
                    window = _parse(data)
                except (ValueError, TypeError, KeyError, RecursionError):
                    unreadable.append(f"{path}:{number}")
                    continue
                found += 1
                identity = hashlib.sha256(json.dumps(data, sort_keys=True).encode()).digest()
                repeated += identity in windows
                windows.setdefault(identity, window)
        if not found:
            raise EnergyFileError(
                f"{path} holds no line of an energy log",
                remedy="Give the energy.jsonl files that training under EnvPipe leaves.",
            )
    return EnergyLogs(tuple(windows.values()), repeated, tuple(unreadable))


def append_line(path: Path, entry: dict[str, Any]) -> None:
    """Append one object to JSON Lines; a single write, so that many ranks may share the file.

    A writer that is killed while it writes leaves the start of a line at most (where it crosses a
    page), and the next writer ends that line: it spoils no other. One that began to write before
    that could be seen finds its own line joined to the torn one, and writes it again.

    Raises:
        OSError: the disk is full, or the file cannot be written.
    """
    line = (json.dumps(entry) + "\n").encode()
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        while True:
            whole = line if _ends_a_line(descriptor, os.fstat(descriptor).st_size) else b"\n" + line
            if os.write(descriptor, whole) < len(whole):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            begin = os.lseek(descriptor, 0, os.SEEK_CUR) - len(line)
            if _ends_a_line(descriptor, begin):
                return
    finally:
        os.close(descriptor)


def _ends_a_line(descriptor: int, place: int) -> bool:
    """Whether a line can begin at a place of a file."""
    return place == 0 or os.pread(descriptor, 1, place - 1) == b"\n"


def _parse(data: Any) -> EnergyWindow:
    """A window from its JSON.

    Raises:
        ValueError, TypeError, KeyError: it is something else.
    """
    if not isinstance(data, dict) or data.get("format", ENERGY_FORMAT) != ENERGY_FORMAT:
        raise ValueError
    shares = [data.get(name) for name in SHARES]
    uncertainty_j = data.get("energy_uncertainty_j")
    return EnergyWindow(
        node=_text(data, "node"),
        gpu_uid=_text(data, "gpu_uid"),
        gpu=_text(data, "gpu"),
        rank=_index(data, "rank"),
        stage=_index(data, "stage"),
        run=_text(data, "run"),
        phase=_text(data, "phase"),
        energy_j=_amount(data["energy_j"]),
        duration_s=_amount(data["duration_s"]),
        energy_uncertainty_j=None if uncertainty_j is None else _amount(uncertainty_j),
        shares_s=None if None in shares else tuple(_amount(share) for share in shares),
    )


def _amount(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value < math.inf:
        raise ValueError
    return float(value)


def _text(data: dict[str, Any], name: str) -> str:
    value = data.get(name, "")
    if not isinstance(value, str):
        raise TypeError
    return value


def _index(data: dict[str, Any], name: str) -> int | None:
    value = data.get(name)
    if value is not None and (type(value) is not int or value < 0):
        raise TypeError
    return value
