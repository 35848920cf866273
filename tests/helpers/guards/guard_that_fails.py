"""A guard that runs out of memory in its next turn after SIGUSR1."""

import signal

from envpipe_megatron.gpu.guard import process
from envpipe_megatron.gpu.guard.process import Guard

fails = False
watch, look = Guard._watch, Guard._was_told_to_stop


def fail(*_):
    global fails
    fails = True


def watch_and_fail(self):
    signal.signal(signal.SIGUSR1, fail)
    return watch(self)


def failing_look(self):
    if fails:
        raise MemoryError
    return look(self)


Guard._watch, Guard._was_told_to_stop = watch_and_fail, failing_look
process.main()
