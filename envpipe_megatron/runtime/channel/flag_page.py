"""Words of memory that two processes of one machine and the streams of their GPUs share.

They lie in host memory, where a host can look even while its GPU is stuck: so they show, too,
whether the other side is lost.
"""

from __future__ import annotations

import ctypes
import fcntl
import math
import mmap
import os
import uuid
import weakref
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from envpipe_megatron.runtime.channel.carrier import ChannelError, Peers

_BYTES = mmap.PAGESIZE
#: A cache line a word: each is written by one side.
_WORD_BYTES = 64
#: The bits of a word that are its value.
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
#: A neighbour that has said within this time that it waits for another is not to blame, until the
#: time-out has passed twice.
_NEWS_S = 1.0


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
    """One side's view of the words, by which it knows whether the other is lost.

    Args:
        path: by `create_page_file`.
        side: 0 or 1.
        peers: whom it is between.

    Attributes:
        waits: whether a stream of this rank waits for the neighbour, as was seen last.

    Raises:
        OSError: the file is not there, as on another machine, or cannot be locked.
    """

    def __init__(self, path: Path, side: int, peers: Peers) -> None:
        self.side, self.peers = side, peers
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
        self.waits = False
        #: All counts while a stream waits, and since when they are so.
        self._heard: tuple[list[int], float] = [], 0.0
        #: How often the neighbour has said that it waits for another, and when it last did.
        self._news = 0, -math.inf

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

    def trouble(self, now_s: float, timeout_s: float) -> tuple[ChannelError, int] | None:
        """Return the loss of the neighbour, and the stage that is lost; None if there is none."""
        lost = self.own(LOST).value
        if lost:
            text = f"it says that stage {lost - 1} is lost"
            if lost - 1 == self.peers.stage:
                text = "it has given this stage up"
            return self.peers.lost("waiting for the pipeline", text), lost - 1
        wanted = {self.others(word): self.own(word + WANTED).value for word in (PUT, TAKEN)}
        self.waits = not all(word.has(count) for word, count in wanted.items())
        counts = [*wanted.values(), *(word.value for word in wanted)]
        if not self.waits or counts != self._heard[0]:
            self._heard = counts, now_s
            return None
        doing = "waiting for its messages"
        if not self.other_lives():
            return self.peers.lost(doing, "its process has ended"), self.peers.neighbour
        news = self.others(WAITS).value
        if news != self._news[0]:
            self._news = news, now_s
        patience = 2 if now_s - self._news[1] < _NEWS_S else 1
        if now_s - self._heard[1] > patience * timeout_s:
            silent = f"no sign of it for {timeout_s:.0f} s"
            return self.peers.lost(doing, silent), self.peers.neighbour
        return None

    def say_it_waits(self) -> None:
        """Tell the other side that this one waits for another neighbour."""
        self.own(WAITS).set(self.own(WAITS).value + 1)

    def say_lost(self, stage: int) -> None:
        """Tell the other side that a stage is lost."""
        self.others(LOST).set(stage + 1)


@dataclass(frozen=True)
class Word:
    """A number of 32 bits that counts on from 0 after its largest."""

    page: FlagPage
    index: int

    @property
    def offset(self) -> int:
        """Return how many bytes it lies after the page's address."""
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
