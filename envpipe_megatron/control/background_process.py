"""Does a piece of work for a rank, and writes what came of it into a file: `background`.

It keeps out of training's way: at low priority, with one thread of linear algebra, without GPUs. It
ends with the rank, which may also kill it.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import signal
import sys
from typing import Any

from envpipe_megatron.child import end_with_parent
from envpipe_megatron.errors import EnvPipeError

_NICE = 10
#: It ends so long after the rank should have ended it, s.
_LATER_S = 60
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def main() -> None:
    """Work, and leave (result, error), one of them None."""
    order = json.loads(sys.argv[1])
    # Batch systems send these to all of a job's processes, and mean its ranks.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    end_with_parent(order["parent"], signal.SIGKILL)
    signal.alarm(math.ceil(order["limit_s"]) + _LATER_S)
    os.nice(_NICE)
    os.environ.update(dict.fromkeys(_ONE_THREAD, "1"), CUDA_VISIBLE_DEVICES="")
    done: tuple[Any, Exception | None]
    try:
        sys.path[:] = pickle.load(sys.stdin.buffer)
        done = pickle.load(sys.stdin.buffer)(), None
    except EnvPipeError as error:
        done = None, error
    except Exception as error:  # whose class may not survive the way
        done = None, RuntimeError(f"{type(error).__name__}: {error}")
    with os.fdopen(order["answer"], "wb") as answer:
        pickle.dump(done, answer)


if __name__ == "__main__":
    main()
