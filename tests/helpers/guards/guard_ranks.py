"""Ranks without torch that hold a GPU and ask for random clocks, forked by a small server.

Starting Python anew for each of hundreds of ranks would take minutes.
"""

import contextlib
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import time

from envpipe_megatron.gpu.backends import nvml  # noqa: F401
from envpipe_megatron.gpu.base import GpuAddress, GpuError
from envpipe_megatron.gpu.clock.page import DUE, ClockPage
from envpipe_megatron.gpu.emulated import emulated_gpu  # noqa: F401
from envpipe_megatron.gpu.guard import hold as hold_module
from envpipe_megatron.gpu.guard.hold import hold_gpu
from envpipe_megatron.gpu.registry import open_gpu


class RankServer:
    """Forks ranks on request. Its environment is that of the moment in which it starts."""

    def __init__(self) -> None:
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()]
            )

    def start(self, **what) -> "Rank":
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            socket.send_fds(self._connection, [json.dumps(what).encode()], [theirs.fileno()])
        return Rank(int(self._connection.recv(100)), ours, GpuAddress(*what["address"]))

    def close(self) -> None:
        self._connection.close()
        self._process.wait()


class Rank:
    """A rank, as the test that asked for it sees it."""

    def __init__(self, pid: int, connection: socket.socket, address: GpuAddress) -> None:
        self.pid = pid
        self.address = address
        #: The guard's pidfd, when it holds the GPU.
        self.guard = -1
        self.said: list[list] = []
        self._connection = connection
        self._pidfd = os.pidfd_open(pid)

    def hear(self, *words: str, timeout_s: float = 120.0) -> list:
        """Return the first message that begins with one of some words and was not returned yet."""
        end_s = time.monotonic() + timeout_s
        while True:
            for message in self.said:
                if message[0] in words:
                    self.said.remove(message)
                    if message[0] == "held" and self.guard < 0:
                        self.guard_pid = message[1]
                        with contextlib.suppress(ProcessLookupError):
                            self.guard = os.pidfd_open(message[1])
                    return message
            self._connection.settimeout(max(0.001, end_s - time.monotonic()))
            data = self._connection.recv(10_000)
            if not data:
                raise EOFError(f"rank {self.pid} has ended, not said {words}, but {self.said}")
            self.said.append(json.loads(data))

    def tell(self, word: str) -> None:
        self._connection.send(json.dumps(word).encode())

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        with contextlib.suppress(ProcessLookupError):  # it may have ended by itself
            signal.pidfd_send_signal(self._pidfd, number)

    def kill_guard(self, number: signal.Signals = signal.SIGKILL) -> None:
        with contextlib.suppress(ProcessLookupError):  # it may have ended by itself
            signal.pidfd_send_signal(self.guard, number)

    def wait_for_guard(self) -> None:
        """Wait until its guard has ended."""
        assert select.select([self.guard], [], [], 120.0)[0], "the guard has not ended"

    def wait(self, timeout_s: float = 120.0) -> None:
        if not select.select([self._pidfd], [], [], timeout_s)[0]:
            raise TimeoutError(f"rank {self.pid} has not ended")

    def close(self) -> None:
        """Kill it where it still runs. Nothing the second time."""
        if self._pidfd >= 0:
            self.kill(signal.SIGKILL)
            self.wait()
            for pidfd in {self._pidfd, self.guard} - {-1}:
                os.close(pidfd)
            self._connection.close()
            self._pidfd = -1


def serve(requests: socket.socket) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ranks leave no zombies
    while True:
        data, descriptors, _, _ = socket.recv_fds(requests, 10_000, 1)
        if not data:
            return
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            requests.close()
            status = 1
            try:
                run(socket.socket(fileno=descriptors[0]), **json.loads(data))
                status = 0
            finally:
                os._exit(status)
        os.close(descriptors[0])
        requests.send(str(pid).encode())


def run(
    parent: socket.socket,
    *,
    address: list[str],
    job: str,
    seed: int,
    settings: dict[str, float],
    polite: bool = True,
    steady: bool = False,
    with_child: bool = False,
    guard: list[str] | None = None,
    delay_s: float = 0.0,
) -> None:
    """One rank: hold, ask for random clocks until something happens, release if it can.

    Args:
        polite: on SIGTERM or an exception release, as a framework that cleans up does.
        steady: ask for one clock and keep it.
        with_child: fork a child first that has all open files and outlives the rank.
        guard: what is started as its guard, as arguments of Python's.
        delay_s: how long after `ask` a clock is due.
    """
    if guard is not None:
        hold_module._GUARD = tuple(guard)
    hold_module.job_key = lambda: job
    hold_module.HEARTBEAT_S, hold_module.GIVE_UP_S = settings["heartbeat_s"], settings["give_up_s"]
    randomness = random.Random(seed)

    def say(*message: object) -> None:
        parent.send(json.dumps(message).encode())

    def terminated(*_: object) -> None:
        raise SystemExit(1)

    def lock(delay_s: float = 0.0) -> None:
        if (number := page.ask(randomness.choice(clocks_mhz), delay_s)) is not None:
            page.count(DUE, number)

    def is_served() -> bool:
        number = page.ask(0)
        while not page.is_over and not page.is_answered(number):
            time.sleep(0.0005)
        return not page.is_over

    where = GpuAddress(*address)

    def fail(why: str) -> None:
        fail_page(why)
        say("lost")

    page = ClockPage.create()
    fail_page, page.fail = page.fail, fail
    try:
        hold = hold_gpu(where, page)
    except GpuError as error:
        say("refused", type(error).__name__, str(error))
        return
    clocks_mhz = open_gpu(where).supported_frequencies_mhz
    if with_child and os.fork() == 0:
        hold.release()  # which is its parent's
        say("child", os.getpid())
        test_is_gone = select.poll()
        test_is_gone.register(parent, 0)  # nothing but its end: what is said is for the rank
        test_is_gone.poll()
        os._exit(0)
    if polite:
        signal.signal(signal.SIGTERM, terminated)
    clean = polite
    try:
        lock()
        is_served()
        say("held", hold.guard_pid)
        while True:
            wait_s = None if steady else randomness.uniform(0, 0.001)
            if select.select([parent], [], [], wait_s)[0]:
                word = json.loads(parent.recv(100) or b'"finish"')
                if word == "raise":
                    raise RuntimeError("a training step that fails")
                if word == "ask":
                    lock(delay_s)
                    say("asked")
                if word == "go on":
                    lock()
                    say("set" if is_served() else "unset")
                if word == "finish":
                    break
            elif not steady:
                lock()
        clean = True
    finally:
        if clean:
            hold.release()


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
