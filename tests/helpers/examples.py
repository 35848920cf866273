"""How many examples of a property are tried each time, and on request."""

import os


def examples(count: int) -> int:
    """All of them with ENVPIPE_CORE_FULL=1, and half of them else."""
    return count if os.environ.get("ENVPIPE_CORE_FULL", "") not in ("", "0") else (count + 1) // 2
