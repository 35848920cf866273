"""The main loop of a guard: who is connected, what ended, and what follows from it.

What it does when is said in `guard`.
"""

import contextlib
import logging
import os
import selectors
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from envpipe_megatron.gpu.base import GpuAddress
from envpipe_megatron.gpu.guard.holding import Holding, Phase
from envpipe_megatron.gpu.guard.lease import LeaseHeldError, OpenGpu
from envpipe_megatron.gpu.guard.lease_record import lease_name, printable
from envpipe_megatron.gpu.guard.process_identity import (
    ProcessIdentity,
    open_peer_pidfd,
    peer_uid_and_pid,
)
from envpipe_megatron.gpu.guard.protocol import (
    GuardError,
    GuardProtocolError,
    GuardSettings,
    Message,
    receive,
    refusal,
    send,
)
from envpipe_megatron.gpu.guard.socket import close_unless_wanted
from envpipe_megatron.gpu.opening import open_gpu

_LOG = logging.getLogger(__name__)

_FIRST_RANK_S = 30.0
_POLL_S = 0.25  # for ranks whose end the kernel does not announce
_LAST_RESET_S = 2.0
_DISTRESS_S = 10.0
_RESERVE_BYTES = 1 << 20


@dataclass(eq=False)
class _Peer:
    """A connection: at first nothing but that, then that of a rank and its GPU."""

    connection: socket.socket
    rank: ProcessIdentity | None
    pidfd: int | None
    heard_s: float
    wants: GpuAddress | None = None
    holding: Holding | None = None
    connected: bool = True
    released: bool = False


class Guard:
    """The guard's main loop.

    Args:
        listener: the socket, listening.
        job: the job's name, for leases.
        settings: how patient to be.
        allowed: the only GPUs that may be held; None allows any.
        starter_pidfd: with `allowed`: stay until this process has ended.
        open_gpu: opens a GPU by its address.
    """

    def __init__(
        self,
        listener: socket.socket,
        job: str,
        settings: GuardSettings,
        *,
        allowed: Collection[GpuAddress] | None = None,
        starter_pidfd: int | None = None,
        open_gpu: OpenGpu = open_gpu,
    ) -> None:
        self._listener = listener
        self._inode = Path(listener.getsockname()).stat().st_ino
        self._job = printable(job)
        self._settings = settings
        self._allowed = allowed
        self._open_gpu = open_gpu
        self._peers: list[_Peer] = []
        self._holdings: list[Holding] = []
        self._all_undone = True
        self._stop_at_s: float | None = None
        self._no_rank_until_s: float | None = time.monotonic() + _FIRST_RANK_S
        self._staying = starter_pidfd is not None
        self._posted: deque[Callable[[float], None]] = deque()
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = socket.socketpair()
        for end in (self._wake_reader, self._wake_writer, listener):
            end.setblocking(False)
        self._watch(listener, self._accept)
        self._watch(self._wake_reader, self._woken)
        if starter_pidfd is not None:
            self._watch(starter_pidfd, partial(self._starter_ended, starter_pidfd))
        # Given back when memory runs out, so that what brings the clocks back has some.
        self._reserve: bytearray | None = bytearray(_RESERVE_BYTES)

    def run(self) -> int:
        """Guard until nothing is left to guard; return the exit status.

        Raises:
            BaseException: whatever went wrong, after the GPUs were reset as well as possible.
        """
        # In the midst of anything: only noted here, done by the loop, which the signal wakes.
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(
                number, lambda number, _: self._posted.append(partial(self._stop, number))
            )
        signal.set_wakeup_fd(self._wake_writer.fileno(), warn_on_full_buffer=False)
        try:
            while True:
                self._turn()
                if self._nothing_left() and close_unless_wanted(
                    self._listener, self._inode, anyway=self._stop_at_s is not None
                ):
                    return 0 if self._all_undone else 1
        except BaseException:
            self._reset_in_distress()
            raise

    # --- the loop -------------------------------------------------------------------------------

    def _turn(self) -> None:
        for key, _ in self._selector.select(self._wait_s()):
            key.data(time.monotonic())
        while self._posted:
            self._posted.popleft()(time.monotonic())
        now_s = time.monotonic()
        for holding in list(self._holdings):
            holding.on_time(now_s)
        for peer in list(self._peers):
            self._look_after(peer, now_s)
        if self._stop_at_s is not None and now_s >= self._stop_at_s:
            self._end_what_remains()

    def _wait_s(self) -> float | None:
        if self._posted:
            return 0.0
        times_s = [holding.next_instant_s() for holding in self._holdings]
        now_s = time.monotonic()
        for peer in self._peers:
            if peer.pidfd is None and peer.rank is not None:
                times_s.append(now_s + _POLL_S)
            if self._heartbeat_counts(peer):
                times_s.append(peer.heard_s + self._settings.heartbeat_s)
        times_s.append(self._stop_at_s)
        if not (self._peers or self._staying):
            times_s.append(self._no_rank_until_s)
        due_s = min((time_s for time_s in times_s if time_s is not None), default=None)
        return None if due_s is None else max(0.0, due_s - now_s)

    def _look_after(self, peer: _Peer, now_s: float) -> None:
        if peer.rank is not None and peer.rank.is_alive() is False:
            self._ended(peer, now_s)
        elif (
            peer.holding is not None
            and self._heartbeat_counts(peer)
            and now_s >= peer.heard_s + self._settings.heartbeat_s
        ):
            _LOG.warning("%s is silent", peer.rank)
            peer.heard_s = now_s  # and again after as long: it may be in the midst of a request
            peer.holding.reset()

    @staticmethod
    def _heartbeat_counts(peer: _Peer) -> bool:
        held = peer.holding is not None and peer.holding.phase is Phase.HELD
        return peer.connected and held

    def _nothing_left(self) -> bool:
        if self._peers or self._holdings:
            return False
        if self._stop_at_s is not None:
            return True
        waiting = self._no_rank_until_s is not None and time.monotonic() < self._no_rank_until_s
        return not self._staying and not waiting

    # --- what comes in --------------------------------------------------------------------------

    def _accept(self, now_s: float) -> None:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return
        connection.setblocking(False)
        uid, pid = peer_uid_and_pid(connection)
        if uid != os.geteuid():
            _LOG.warning("refused uid %d, pid %d", uid, pid)
            error = GuardError("This guard serves another user", value=f"uid {uid}")
            self._send(connection, refusal(error))
            connection.close()
            return
        rank = ProcessIdentity.of(pid) if pid else None
        try:
            pidfd = open_peer_pidfd(connection) if pid else None
        except ProcessLookupError:
            connection.close()
            return
        peer = _Peer(connection, rank, pidfd, now_s)
        self._peers.append(peer)
        self._watch(connection, partial(self._read, peer))
        if pidfd is not None:
            self._watch(pidfd, partial(self._ended, peer))

    def _read(self, peer: _Peer, now_s: float) -> None:
        if not peer.connected:
            return
        try:
            message = receive(peer.connection)
        except BlockingIOError:
            return
        except (GuardProtocolError, OSError) as error:
            _LOG.error("%s: %s", peer.rank, error)
            message = None
        if message is None:
            self._disconnected(peer, now_s)
            return
        peer.heard_s = now_s
        operation = message.get("op")
        if operation == "beat":
            self._send(peer.connection, {"event": "beat"})
        elif operation == "hold" and peer.wants is None:
            peer.wants = GpuAddress(str(message.get("backend")), str(message.get("uid")))
            self._hold(peer, now_s)
        elif operation == "release" and peer.holding is not None:
            peer.released = True
            peer.holding.end(now_s, late=False)
        else:
            _LOG.error("%s: nothing that can be done: %s", peer.rank, operation)
            self._disconnected(peer, now_s)

    def _hold(self, peer: _Peer, now_s: float) -> None:
        assert peer.wants is not None, "asked before"
        address = peer.wants
        self._no_rank_until_s = None
        try:
            if self._stop_at_s is not None:
                raise GuardError("The guard is ending: its job was told to stop")
            if self._allowed is not None and address not in self._allowed:
                raise GuardError(
                    "The GPU is not on the list that this guard was started with",
                    value=f"{address.backend} {address.uid}",
                    remedy="Start the guard with this GPU, or use those on its list",
                )
            before = self._holder_of(lease_name(address))
            if before is not None:
                if not self._is_ending(before, now_s):
                    raise LeaseHeldError(
                        f"Another rank of this job holds the GPU {address.uid}",
                        job=self._job,
                        pid=os.getpid(),
                        uid=os.geteuid(),
                        remedy="Give each rank a GPU of its own",
                    )
                return  # asked again when that is over
            holding = Holding(
                address, self._job, peer.rank, self._settings, self._open_gpu, self._post
            )
        except Exception as error:  # out of threads or memory as well: this rank does without
            self._refuse(peer, error)
            return
        holding.on_answer = partial(self._answer, peer)
        holding.on_was_reset = partial(self._was_reset, peer)
        holding.on_over = partial(self._over, peer, holding)
        peer.holding = holding
        self._holdings.append(holding)

    def _holder_of(self, name: str) -> Holding | None:
        return next((h for h in self._holdings if lease_name(h.address) == name), None)

    def _is_ending(self, holding: Holding, now_s: float) -> bool:
        if holding.rank is not None and holding.rank.is_alive() is False:
            # Its end is known here before the kernel's announcement was read.
            for peer in [p for p in self._peers if p.holding is holding]:
                self._ended(peer, now_s)
        return holding.ends

    def _disconnected(self, peer: _Peer, now_s: float) -> None:
        self._unwatch(peer.connection)
        peer.connection.close()
        peer.connected = False
        holding = peer.holding
        promised_nothing = holding is None or holding.phase is Phase.TAKING or peer.released
        if promised_nothing or peer.rank is None:
            self._ended(peer, now_s)
        elif holding is not None and holding.phase is Phase.HELD:
            _LOG.warning("%s has hung up", peer.rank)
            holding.reset()

    def _ended(self, peer: _Peer, now_s: float) -> None:
        if peer not in self._peers:
            return
        self._peers.remove(peer)
        if peer.connected:
            self._unwatch(peer.connection)
            peer.connection.close()
            peer.connected = False
        if peer.pidfd is not None:
            self._unwatch(peer.pidfd)
            os.close(peer.pidfd)
        if peer.holding is not None and not peer.released:
            _LOG.warning("%s has ended without a release", peer.rank)
            peer.holding.end(now_s, late=True)

    def _starter_ended(self, pidfd: int, _: float) -> None:
        self._unwatch(pidfd)
        os.close(pidfd)
        self._staying = False

    def _stop(self, number: int, now_s: float) -> None:
        if self._stop_at_s is not None:
            return
        _LOG.warning("told to stop by %s", signal.Signals(number).name)
        self._stop_at_s = now_s + self._settings.stop_s
        for peer in list(self._peers):
            if peer.connected:
                self._send(peer.connection, {"event": "stop"})
            if peer.holding is None:
                self._ended(peer, now_s)
            elif peer.holding.phase is Phase.HELD:
                peer.holding.reset()

    def _end_what_remains(self) -> None:
        _LOG.error("ranks remain that have neither released nor ended")
        self._await([holding.reset_in_distress() for holding in self._holdings], _LAST_RESET_S)
        for holding in list(self._holdings):
            holding.leave()
        now_s = time.monotonic()
        for peer in list(self._peers):
            self._ended(peer, now_s)

    # --- what holdings say ----------------------------------------------------------------------

    def _post(self, todo: Callable[[float], None]) -> None:
        self._posted.append(todo)
        with contextlib.suppress(BlockingIOError):  # full: it wakes already
            self._wake_writer.send(b"\0")

    def _woken(self, _: float) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_reader.recv(4096)

    def _answer(self, peer: _Peer, error: BaseException | None) -> None:
        if error is not None:
            self._refuse(peer, error)
        elif peer.connected:
            held = {
                "event": "held",
                "job": self._job,
                "guard_pid": os.getpid(),
                "heartbeat_s": self._settings.heartbeat_s,
            }
            self._send(peer.connection, held)
            if self._stop_at_s is not None:
                self._send(peer.connection, {"event": "stop"})

    def _refuse(self, peer: _Peer, error: BaseException) -> None:
        if peer.connected:
            self._send(peer.connection, refusal(error))
        peer.holding = None
        self._ended(peer, time.monotonic())

    def _was_reset(self, peer: _Peer) -> None:
        if peer.connected:
            self._send(peer.connection, {"event": "was_reset"})

    def _over(self, peer: _Peer, holding: Holding) -> None:
        self._holdings.remove(holding)
        self._all_undone = self._all_undone and holding.undone
        if peer.released and peer.connected:
            self._send(peer.connection, {"event": "released", "undone": holding.undone})
        if peer.holding is holding:
            peer.holding = None
            self._ended(peer, time.monotonic())
        for waiting in list(self._peers):
            if waiting.wants is not None and waiting.holding is None:
                self._hold(waiting, time.monotonic())

    # --- small things ---------------------------------------------------------------------------

    def _send(self, connection: socket.socket, message: Message) -> None:
        try:
            send(connection, message)
        except OSError as error:
            # A rank that does not read is told nothing; its end is noticed all the same.
            _LOG.warning("could not send %s: %s", message["event"], error)

    def _watch(self, source: socket.socket | int, act: Callable[[float], None]) -> None:
        self._selector.register(source, selectors.EVENT_READ, act)

    def _unwatch(self, source: socket.socket | int) -> None:
        self._selector.unregister(source)

    def _reset_in_distress(self) -> None:
        self._reserve = None
        events = []
        for holding in self._holdings:
            with contextlib.suppress(Exception):  # the next one all the same
                events.append(holding.reset_in_distress())
        self._await(events, _DISTRESS_S)

    @staticmethod
    def _await(events: Sequence[threading.Event], timeout_s: float) -> None:
        until_s = time.monotonic() + timeout_s
        for event in events:
            event.wait(max(0.0, until_s - time.monotonic()))
