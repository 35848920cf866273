"""A guard that runs out of memory in its next turn after SIGUSR1."""

import signal

from envpipe_megatron.gpu.guard import process

fails = False
note, pause_s = process._noted_signals, process._pause_s


def fail(*_):
    global fails
    fails = True


def note_and_fail():
    signal.signal(signal.SIGUSR1, fail)  # before the rank is told that it is guarded
    return note()


def failing_pause_s(waited_s):
    if fails:
        raise MemoryError
    return pause_s(waited_s)


process._noted_signals, process._pause_s = note_and_fail, failing_pause_s
process.main()
