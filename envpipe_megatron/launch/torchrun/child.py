"""Run a command that gets SIGTERM when its parent dies, however the parent dies.

    python child.py PARENT COMMAND ...

Linux signals a child when its parent ends, if the child has asked for it. Most commands do not ask,
so this program asks and then becomes the command. On other systems it only becomes the command.
"""

import contextlib
import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != int(sys.argv[1]):  # the parent died before this asked
        sys.exit(128 + signal.SIGTERM)
    os.execvp(sys.argv[2], sys.argv[2:])
