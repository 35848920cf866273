"""The guard: a small process that outlives its ranks and brings their GPUs' clocks back.

One a node and job, started by the node's agent or by whichever rank comes first, with the rights of
its starter and no others. It cannot lock a clock. It can reset those GPUs alone that a rank of its
own user holds through it, and, where its starter gave a list, that are on the list.

A rank is watched in three ways, because each misses something: its socket ends with it, unless a
child that it forked keeps it open; the kernel says when the process has ended, unless the guard
cannot see it; and it sends heartbeats, unless it is stopped or stuck. What follows:

- The rank has ended: reset now, once more after the GPU's `late_request_s` (a request may still be
  under way), then delete the lease. Resets that fail are tried again, further and further apart.
- Its socket has ended and it lives: reset; the lease stays until it ends, for it may still lock.
- It is silent: reset, again and again, and tell it so that it forgets what it thinks is set.
- It releases: reset, delete the lease, tell it.
- SIGTERM, SIGINT, SIGHUP (a batch system ends everything): tell all ranks to stop, reset all, wait
  a bounded time for them to release or end, reset again, leave the leases of those that live.
- An error of its own: reset all, best effort, and die. Ranks that live notice and clean up.

It ends when no rank is left; with a list of GPUs, when its starter is gone too. Exit status: 0 when
every lease is gone, 1 when some had to stay, 2 after an error of its own.
"""

import argparse
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from envpipe_megatron.gpu.base import GpuAddress
from envpipe_megatron.gpu.guard.loop import Guard
from envpipe_megatron.gpu.guard.process_identity import open_pidfd
from envpipe_megatron.gpu.guard.protocol import GuardSettings
from envpipe_megatron.gpu.guard.socket import listen_at

_LOG = logging.getLogger(__name__)

_MAX_REASON_BYTES = 1000


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run a guard: `python -m envpipe_megatron.gpu.guard.process --socket P --job J --log FILE`.

    Exits with the guard's status; see the module.
    """
    parser = argparse.ArgumentParser(description="Brings GPU clocks back when ranks end.")
    defaults = GuardSettings()
    parser.add_argument("--socket", required=True, help="where to listen, in a folder of one's own")
    parser.add_argument("--job", required=True, help="name of the job, for leases")
    parser.add_argument("--log", required=True, help="file to log to")
    parser.add_argument(
        "--gpu",
        nargs=2,
        action="append",
        metavar=("BACKEND", "UID"),
        help="a GPU that may be held; given once or more, no others may, and the guard stays until "
        "its starter has ended",
    )
    parser.add_argument("--heartbeat-s", type=float, default=defaults.heartbeat_s)
    parser.add_argument("--give-up-s", type=float, default=defaults.give_up_s)
    parser.add_argument("--stop-s", type=float, default=defaults.stop_s)
    parser.add_argument("--ready-fd", type=int, help="detach, and say here 'ready' or why not")
    given = parser.parse_args(argv)
    # What batch systems send to all of a job's processes to have its ranks write a checkpoint.
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    starter_pidfd = open_pidfd(os.getppid()) if given.gpu else None
    if given.ready_fd is not None and os.fork() > 0:
        # The rank reaps this process at once, so that no zombie stays, and launchers that kill
        # whole trees of processes do not find the guard among the rank's descendants.
        os._exit(0)
    try:
        os.umask(0o077)
        _redirect(given.log)
        listener = listen_at(given.socket)
        settings = GuardSettings(given.heartbeat_s, given.give_up_s, given.stop_s)
        allowed = [GpuAddress(*pair) for pair in given.gpu] if given.gpu else None
        guard = Guard(listener, given.job, settings, allowed=allowed, starter_pidfd=starter_pidfd)
    except Exception as error:
        if given.ready_fd is not None:
            os.write(given.ready_fd, f"{error}".encode()[:_MAX_REASON_BYTES])
        raise
    if given.ready_fd is not None:
        os.write(given.ready_fd, b"ready")
        os.close(given.ready_fd)
    try:
        status = guard.run()
    except BaseException:
        with contextlib.suppress(Exception):
            _LOG.exception("the guard has failed")
        status = 2
    # Not sys.exit: threads that hang in the driver must not keep the process.
    os._exit(status)


def _redirect(log: str) -> None:
    """Leave the starter's terminal and files alone; log to a file."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
    written = os.open(log, flags, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (written, 1), (written, 2)):
        os.dup2(source, target)
    os.close(nothing)
    os.close(written)
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s"
    )


if __name__ == "__main__":
    main()
