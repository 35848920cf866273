"""A guard that runs out of memory in its next turn after SIGUSR1."""

import os
import signal

from envpipe_megatron.gpu.guard import process as guard
from envpipe_megatron.gpu.guard.loop import Guard

told = False
turn, run = Guard._turn, Guard.run


def tell(*_):
    global told
    told = True


def failing_turn(self):
    turn(self)
    if told:
        raise MemoryError


def run_and_say_so(self):
    signal.signal(signal.SIGUSR1, tell)
    ready = int(os.environ["GUARD_READY_FD"])
    os.write(ready, b"ready")
    os.close(ready)
    return run(self)


Guard._turn, Guard.run = failing_turn, run_and_say_so
guard.main()
