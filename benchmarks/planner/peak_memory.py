"""The most memory that a process has held."""

from __future__ import annotations

import re
import resource
import sys
from pathlib import Path


def peak_mib() -> float:
    """The most memory that this process has held so far, MiB; it never falls."""
    status = Path("/proc/self/status")
    if status.exists():  # Linux hands ru_maxrss on through fork and exec, so it tells the parent's
        peak_kib = re.search(r"VmHWM:\s+(\d+) kB", status.read_text())
        if peak_kib:
            return int(peak_kib[1]) / 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1 << 20 if sys.platform == "darwin" else 1 << 10)  # bytes there, KiB elsewhere
