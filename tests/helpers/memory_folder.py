"""A folder in memory, for the files of emulated GPUs.

Their state is renamed into place at every unit, which a disk takes milliseconds for.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_IN_MEMORY = "/dev/shm"


@contextmanager
def memory_folder() -> Iterator[Path]:
    """A folder that is removed in the end; on disk where there is no memory to write to."""
    place = _IN_MEMORY if os.access(_IN_MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=place) as folder:
        yield Path(folder)
