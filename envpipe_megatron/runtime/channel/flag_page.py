"""Words of memory that two processes of one machine and the streams of their GPUs share.

They lie in host memory, where a host can look even while its GPU is stuck.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import uuid
import weakref
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_BYTES = mmap.PAGESIZE
#: A cache line a word: each is written by one side.
_WORD_BYTES = 64
#: Of a word's value.
MASK = 0xFFFFFFFF
_FOLDER = Path("/dev/shm")

#: The words, each there for side 0 and side 1. How many messages the side has put into the other's
#: memory, and how many it has taken.
PUT, TAKEN = 0, 2
#: Added to these: the count of the other side that a stream of this side last waited for.
WANTED = 4
#: One more than the stage that the other side calls lost. How often the side has said that it waits
#: for its other neighbour.
LOST, WAITS = 8, 10


def create_page_file() -> Path:
    """Make a file for a page, which `FlagPage` of both sides opens, and which is removed then.

    No other user can open it. Where it cannot be made, neither side will find it.
    """
    path = _FOLDER / f"envpipe-channel-{uuid.uuid4().hex}"
    with suppress(OSError):
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.fchmod(file, 0o600)  # a umask may have left less
            os.write(file, bytes(_BYTES))
        finally:
            os.close(file)
    return path


class FlagPage:
    """One side's view of the words.

    Args:
        path: by `create_page_file`.
        side: 0 or 1.

    Raises:
        OSError: the file is not there, as on another machine, or cannot be locked.
    """

    def __init__(self, path: Path, side: int) -> None:
        self.side = side
        # A lock of the process, not of its children: it shows the other side that we live.
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._file).atexit = False
        fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, side)
        self._memory = mmap.mmap(self._file, _BYTES)
        self._words = np.frombuffer(self._memory, dtype=np.uint32)[:: _WORD_BYTES // 4]
        #: Where the page begins in this process.
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.num_bytes = _BYTES
        #: Where streams find it, once a device has opened it.
        self.device_address = 0

    def own(self, what: int) -> Word:
        """Return a word of this side."""
        return Word(self, what + self.side)

    def others(self, what: int) -> Word:
        """Return a word of the other side."""
        return Word(self, what + 1 - self.side)

    def other_lives(self) -> bool:
        """True if the other side's process does, once it has opened the page."""
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 1 - self.side)
        except OSError:
            return True
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, 1 - self.side)
        return False


@dataclass(frozen=True)
class Word:
    """A number of 32 bits that counts on from 0 after its largest."""

    page: FlagPage
    index: int

    @property
    def offset(self) -> int:
        """Return how many bytes it lies behind the page's address."""
        return self.index * _WORD_BYTES

    @property
    def value(self) -> int:
        """Return the number."""
        return int(self.page._words[self.index])

    def set(self, value: int) -> None:
        """Store it."""
        self.page._words[self.index] = value & MASK

    def has(self, value: int) -> bool:
        """True if it has counted to a value, as streams that wait compare."""
        return (self.value - value) & MASK < 1 << 31
