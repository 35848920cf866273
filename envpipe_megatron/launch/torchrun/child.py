"""Runs a command that gets SIGTERM when its parent dies, however that dies.

    python child.py PARENT COMMAND ...

Linux signals the child of a parent that has ended, if the child has asked for it; a command that
knows nothing of it is started by this one, which asks and becomes the command. Elsewhere it only
becomes the command.
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
    if os.getppid() != int(sys.argv[1]):  # it died before it could be asked for
        sys.exit(128 + signal.SIGTERM)
    os.execvp(sys.argv[2], sys.argv[2:])
