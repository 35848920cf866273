"""What this process holds open, by name: other threads of a worker open and close files too."""

import contextlib
import gc
from collections import Counter
from pathlib import Path

MEMORY = ("/memfd:", "/dev/shm")
"""Names of the files that `child.open_memory` makes."""


def open_files(*names: str | Path) -> Counter[str]:
    """Count the files with one of `names` in theirs; those nobody refers to any more are closed."""
    gc.collect()
    targets = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            targets.append(str(descriptor.readlink()))
    return Counter(target for target in targets if any(str(name) in target for name in names))
