"""A guard that runs out of memory in its next turn after SIGUSR1."""

import signal

from envpipe_megatron.gpu.guard import process
from envpipe_megatron.gpu.guard.process import Guard

fails = False
note, hear = process._noted_signals, Guard._hear


def fail(*_):
    global fails
    fails = True


def note_and_fail():
    signal.signal(signal.SIGUSR1, fail)  # before the rank is told that it is guarded
    return note()


def failing_hear(self):
    if fails:
        raise MemoryError
    return hear(self)


process._noted_signals, Guard._hear = note_and_fail, failing_hear
process.main()
