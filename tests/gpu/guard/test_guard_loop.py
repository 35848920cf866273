"""A guard in a thread of this process, by what it says to who connects and does to a GPU."""

import os
import queue
import shutil
import signal
import socket
import threading
import time
from types import SimpleNamespace

import pytest

from envpipe_megatron.gpu.base import GpuAddress, GpuError
from envpipe_megatron.gpu.guard import loop as guard_loop
from envpipe_megatron.gpu.guard.lease import Lease, LeaseHeldError, list_leases
from envpipe_megatron.gpu.guard.lease_folder import LEASE_DIR_VARIABLE
from envpipe_megatron.gpu.guard.loop import Guard
from envpipe_megatron.gpu.guard.process_identity import ProcessIdentity
from envpipe_megatron.gpu.guard.protocol import GuardSettings, receive, refused_error, send
from envpipe_megatron.gpu.guard.socket import listen_at

ONE, OTHER = (GpuAddress("emulated", f"/node#{index}") for index in range(2))
DEADLINE_S = 20.0


class Gpu:
    """Says when it is reset, and waits in its driver while it is told to."""

    name = "fake"
    drives_hardware = False

    def __init__(self):
        self.late_request_s = 0.0
        self.resets = queue.SimpleQueue()
        self.num_resets = 0
        self.error = None
        self.driver = threading.Event()
        self.driver.set()

    def reset_frequency(self):
        self.resets.put(None)
        assert self.driver.wait(DEADLINE_S)
        if self.error is not None:
            raise self.error
        self.num_resets += 1

    def await_reset(self):
        self.resets.get(timeout=DEADLINE_S)


class Served:
    """A guard, and its socket."""

    def __init__(self, monkeypatch, folder):
        self.path = folder / "s"
        self.gpus = {ONE: Gpu(), OTHER: Gpu()}
        self.opens = threading.Event()
        self.opens.set()
        self.handlers, self.wakes = {}, []
        self.connections = []
        self.ended = queue.SimpleQueue()
        monkeypatch.setattr(
            guard_loop,
            "signal",
            SimpleNamespace(
                SIGTERM=signal.SIGTERM,
                SIGINT=signal.SIGINT,
                SIGHUP=signal.SIGHUP,
                Signals=signal.Signals,
                signal=self.handlers.__setitem__,
                set_wakeup_fd=lambda fd, **_: self.wakes.append(fd),
            ),
        )

    def start(self, job="job", *, heartbeat_s=1000.0, give_up_s=1000.0, stop_s=0.0, **named):
        self.listener = listen_at(str(self.path))
        settings = GuardSettings(heartbeat_s, give_up_s, stop_s)
        guard = Guard(self.listener, job, settings, open_gpu=self._open, **named)
        self.thread = threading.Thread(target=self._run, args=(guard,))
        self.thread.start()
        while len(self.wakes) == 0 and self.thread.is_alive():
            time.sleep(0.0005)
        return self

    def _run(self, guard):
        try:
            self.ended.put(guard.run())
        except BaseException as error:
            self.ended.put(error)

    def _open(self, address):
        assert self.opens.wait(DEADLINE_S)
        if address.backend == "emulated" and address not in self.gpus:
            raise GpuError("No such GPU", value=address.uid)
        return self.gpus.get(address, Gpu())

    def connect(self):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(DEADLINE_S)
        connection.connect(str(self.path))
        self.connections.append(connection)
        return connection

    def hold(self, address=ONE):
        connection = self.connect()
        ask(connection, address)
        assert receive(connection)["event"] == "held"
        return connection

    def signal(self, number=signal.SIGTERM):
        self.handlers[number](number, None)
        os.write(self.wakes[0], b"\0")

    def status(self):
        """How it ended."""
        status = self.ended.get(timeout=DEADLINE_S)
        self.thread.join()
        assert not self.path.exists() or isinstance(status, BaseException)
        return status


@pytest.fixture
def guard(monkeypatch, tmp_path):
    monkeypatch.setenv(LEASE_DIR_VARIABLE, str(tmp_path / "leases"))
    made = Served(monkeypatch, tmp_path)
    yield made
    for connection in made.connections:
        connection.close()
    made.opens.set()
    for gpu in made.gpus.values():
        gpu.error = None
        gpu.driver.set()
    if made.thread.is_alive():
        made.signal()
        made.thread.join(DEADLINE_S)
    assert not made.thread.is_alive()


def ask(connection, address):
    send(connection, {"op": "hold", "backend": address.backend, "uid": address.uid})


def release(connection):
    send(connection, {"op": "release"})
    while (message := receive(connection)) in ({"event": "was_reset"}, {"event": "stop"}):
        pass
    return message


def in_child(do):
    """Do something in a child that then waits to be killed; return its number when it is done."""
    done, told = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            do()
            os.write(told, b".")
            signal.pause()
        finally:
            os._exit(1)
    os.close(told)
    assert os.read(done, 1) == b"."
    os.close(done)
    return child


def held_by_a_child(guard):
    """A child that holds a GPU, and its connection, which outlives it."""
    ours, theirs = socket.socketpair()

    def hold_and_share():
        socket.send_fds(theirs, [b"."], [guard.hold().fileno()])

    with ours, theirs:
        child = in_child(hold_and_share)
        _, (shared,), _, _ = socket.recv_fds(ours, 1, 1)
    return child, shared


def end(child):
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def leases():
    return sorted((record.address.uid, record.live) for record in list_leases())


# --- answers -------------------------------------------------------------------------------------


def test_a_hold_from_its_request_to_its_release(guard):
    guard.start("job \x1b", heartbeat_s=500.0)
    connection = guard.connect()
    send(connection, {"op": "beat"})
    assert receive(connection) == {"event": "beat"}
    ask(connection, ONE)
    assert receive(connection) == {
        "event": "held",
        "job": "job ?",
        "guard_pid": os.getpid(),
        "heartbeat_s": 500.0,
    }
    (record,) = list_leases()
    assert (record.address, record.job, record.live) == (ONE, "job ?", True)
    assert record.rank == ProcessIdentity.of(os.getpid())
    send(connection, {"op": "beat"})
    assert receive(connection) == {"event": "beat"}
    assert guard.gpus[ONE].num_resets == 0
    assert release(connection) == {"event": "released", "undone": True}
    assert receive(connection) is None
    assert (guard.gpus[ONE].num_resets, leases()) == (1, [])
    assert guard.status() == 0


def test_a_lease_that_cannot_be_deleted_is_told_and_seen_in_the_status(guard, tmp_path):
    guard.start()
    connection = guard.hold()
    shutil.rmtree(tmp_path / "leases")
    assert release(connection) == {"event": "released", "undone": False}
    assert guard.status() == 1


def test_one_lease_that_stays_is_seen_in_the_status_whatever_comes_after(guard, monkeypatch):
    guard.start()
    one, other = guard.hold(ONE), guard.hold(OTHER)
    undo = Lease.release

    def fail(lease):
        monkeypatch.setattr(Lease, "release", undo)
        lease.abandon()
        raise GpuError("the disk is full")

    monkeypatch.setattr(Lease, "release", fail)
    assert release(one) == {"event": "released", "undone": False}
    assert release(other) == {"event": "released", "undone": True}
    assert guard.status() == 1


def test_a_gpu_that_cannot_be_opened_is_refused_and_keeps_nobody(guard):
    guard.start()
    connection = guard.connect()
    ask(connection, GpuAddress("emulated", "/node#7"))
    assert receive(connection) == {
        "event": "refused",
        "error": "GpuError",
        "what": "No such GPU (got '/node#7')",
        "remedy": "",
    }
    assert receive(connection) is None
    assert leases() == []
    assert guard.status() == 0


def test_one_rank_holds_a_gpu(guard):
    guard.start()
    first, second = guard.hold(), guard.connect()
    ask(second, ONE)
    error = refused_error(receive(second))
    assert type(error) is LeaseHeldError
    assert error.what == "Another rank of this job holds the GPU /node#0"
    assert error.remedy == "Give each rank a GPU of its own"
    assert (error.job, error.pid, error.uid) == ("job", os.getpid(), os.geteuid())
    assert receive(second) is None
    release(first)
    assert guard.status() == 0


def test_who_asks_for_a_gpu_that_is_being_brought_back_waits(guard):
    guard.start()
    gpu = guard.gpus[ONE]
    gpu.driver.clear()
    first, second = guard.hold(), guard.connect()
    send(first, {"op": "release"})
    gpu.await_reset()
    ask(second, ONE)
    send(second, {"op": "beat"})
    assert receive(second) == {"event": "beat"}  # the hold was read and is not answered
    gpu.driver.set()
    assert receive(first) == {"event": "released", "undone": True}
    assert receive(second)["event"] == "held"
    release(second)
    assert guard.status() == 0


def test_the_predecessor_that_was_just_killed_is_no_obstacle(guard, monkeypatch):
    """Though its connection, which a child of it may keep, and the kernel say nothing."""
    monkeypatch.setattr(guard_loop, "open_peer_pidfd", lambda connection: None)
    monkeypatch.setattr(guard_loop, "_POLL_S", 1000.0)
    guard.start()
    child, shared = held_by_a_child(guard)
    end(child)
    assert leases() == [(ONE.uid, True)]
    release(guard.hold())
    assert guard.status() == 0
    os.close(shared)


def test_a_connection_holds_one_gpu(guard):
    guard.start()
    connection = guard.hold()
    ask(connection, OTHER)
    assert receive(connection) is None
    guard.gpus[ONE].await_reset()  # its rank has hung up
    assert leases() == [(ONE.uid, True)]


@pytest.mark.parametrize("message", [{"op": "release"}, {"op": "lock"}, {}])
def test_what_cannot_be_done_ends_the_connection(guard, message):
    guard.start()
    held, connection = guard.hold(), guard.connect()
    send(connection, message)
    assert receive(connection) is None
    release(held)
    assert guard.status() == 0


@pytest.mark.parametrize(
    "nonsense",
    [
        pytest.param(b"\xff", id="bytes"),
        pytest.param(b"x" * 20_000, id="long"),
        pytest.param(b"[" * 16_000, id="deep"),
        b"[]",
    ],
)
def test_nonsense_is_not_obeyed(guard, nonsense):
    guard.start()
    held, connection = guard.hold(), guard.connect()
    connection.send(nonsense)
    assert receive(connection) is None
    send(held, {"op": "beat"})
    assert receive(held) == {"event": "beat"}
    assert guard.gpus[ONE].num_resets == 0
    release(held)
    assert guard.status() == 0


def test_a_hold_that_names_no_gpu_is_refused(guard):
    guard.start()
    connection = guard.connect()
    send(connection, {"op": "hold"})
    assert "Not the UUID of a GPU (got 'None')" in receive(connection)["what"]
    assert guard.status() == 0


def test_another_user_is_refused(guard, monkeypatch):
    known = guard_loop.peer_uid_and_pid
    monkeypatch.setattr(guard_loop, "peer_uid_and_pid", lambda connection: (12345, os.getpid()))
    guard.start()
    connection = guard.connect()
    assert receive(connection) == {
        "event": "refused",
        "error": "GuardError",
        "what": "This guard serves another user (got 'uid 12345')",
        "remedy": "",
    }
    assert receive(connection) is None
    monkeypatch.setattr(guard_loop, "peer_uid_and_pid", known)
    release(guard.hold())
    assert guard.status() == 0


def test_only_gpus_on_the_list_are_held(guard):
    starter, told = os.pipe()
    guard.start(allowed=[OTHER], starter_pidfd=starter)
    connection = guard.connect()
    ask(connection, ONE)
    answer = receive(connection)
    assert (answer["error"], answer["what"]) == (
        "GuardError",
        "The GPU is not on the list that this guard was started with (got 'emulated /node#0')",
    )
    assert answer["remedy"] == "Start the guard with this GPU, or use those on its list"
    for _ in range(2):
        release(guard.hold(OTHER))
    os.close(told)  # its starter has ended
    assert guard.status() == 0


def test_a_guard_waits_for_its_starter_and_for_the_ranks_that_are_there(guard):
    starter, told = os.pipe()
    guard.start(allowed=[ONE], starter_pidfd=starter)
    connection = guard.hold()
    os.close(told)
    with pytest.raises(queue.Empty):
        guard.ended.get(timeout=0.01)
    release(connection)
    assert guard.status() == 0


def test_a_guard_to_whom_nobody_comes_ends(guard, monkeypatch):
    monkeypatch.setattr(guard_loop, "_FIRST_RANK_S", 0.0)
    assert guard.start().status() == 0


def test_a_guard_waits_for_its_first_rank_whoever_else_looks_in(guard):
    guard.start()
    guard.connect().close()
    release(guard.hold())
    assert guard.status() == 0


def test_who_has_ended_before_he_is_looked_at_is_let_go(guard, monkeypatch):
    known = guard_loop.open_peer_pidfd

    def gone(connection):
        monkeypatch.setattr(guard_loop, "open_peer_pidfd", known)
        raise ProcessLookupError

    monkeypatch.setattr(guard_loop, "open_peer_pidfd", gone)
    guard.start()
    assert receive(guard.connect()) is None
    release(guard.hold())
    assert guard.status() == 0


# --- ends ----------------------------------------------------------------------------------------


def test_a_rank_that_was_killed_is_reset_again_after_its_late_requests(guard):
    gpu = guard.gpus[ONE]
    gpu.late_request_s = 0.01
    guard.start()
    child, shared = held_by_a_child(guard)
    end(child)
    assert guard.status() == 0
    assert (gpu.num_resets, leases()) == (2, [])
    os.close(shared)


def test_a_rank_whose_end_the_kernel_does_not_announce_is_looked_for(guard, monkeypatch):
    monkeypatch.setattr(guard_loop, "open_peer_pidfd", lambda connection: None)
    monkeypatch.setattr(guard_loop, "_POLL_S", 0.001)
    guard.start()
    child, shared = held_by_a_child(guard)
    end(child)
    assert guard.status() == 0
    assert leases() == []
    os.close(shared)


def test_a_rank_that_the_guard_cannot_see_has_ended_with_its_connection(guard, monkeypatch):
    """As one in another PID namespace."""
    gpu = guard.gpus[ONE]
    gpu.late_request_s = 0.01
    monkeypatch.setattr(guard_loop, "peer_uid_and_pid", lambda connection: (os.geteuid(), 0))
    guard.start()
    connection = guard.hold()
    assert [record.rank for record in list_leases()] == [None]
    connection.close()
    assert guard.status() == 0
    assert (gpu.num_resets, leases()) == (2, [])


def test_a_rank_that_hangs_up_and_lives_may_still_lock(guard):
    guard.start()
    guard.hold().close()
    guard.gpus[ONE].await_reset()
    assert leases() == [(ONE.uid, True)]
    connection = guard.connect()
    ask(connection, ONE)
    assert receive(connection)["error"] == "LeaseHeldError"


@pytest.mark.parametrize("killed", [False, True])
def test_who_goes_before_he_was_answered_was_promised_nothing(guard, killed):
    def ask_and_be_read():
        connection = guard.connect()
        ask(connection, ONE)
        send(connection, {"op": "beat"})
        assert receive(connection) == {"event": "beat"}
        return connection

    guard.opens.clear()
    guard.start()
    if killed:
        end(in_child(ask_and_be_read))
    else:
        ask_and_be_read().close()
        other = guard.connect()
        send(other, {"op": "beat"})
        assert receive(other) == {"event": "beat"}  # so the end of the first has been seen
        other.close()
    guard.opens.set()
    assert guard.status() == 0
    assert leases() == []


def test_who_releases_and_hangs_up_at_once_is_done_with(guard):
    gpu = guard.gpus[ONE]
    gpu.late_request_s = 1000.0
    guard.start()
    connection = guard.hold()
    send(connection, {"op": "release"})
    connection.close()
    assert guard.status() == 0
    assert (gpu.num_resets, leases()) == (1, [])


def test_a_silent_rank_is_reset_and_told_again_and_again(guard):
    guard.start(heartbeat_s=0.01)
    connection = guard.hold()
    for _ in range(3):
        assert receive(connection) == {"event": "was_reset"}
    assert leases() == [(ONE.uid, True)]
    assert release(connection) == {"event": "released", "undone": True}
    assert guard.status() == 0


@pytest.mark.parametrize("told_to_stop", [False, True])
def test_who_comes_in_the_last_moment_is_served_unless_the_job_ends(
    guard, monkeypatch, told_to_stop
):
    close, late = guard_loop.close_unless_wanted, []

    def close_late(listener, inode, *, anyway):
        if not late:
            late.append(guard.connect())
        return close(listener, inode, anyway=anyway)

    monkeypatch.setattr(guard_loop, "close_unless_wanted", close_late)
    guard.start()
    if told_to_stop:
        guard.signal()
    else:
        release(guard.hold())
        while not late:
            time.sleep(0.0005)
        ask(late[0], OTHER)
        assert receive(late[0])["event"] == "held"
        assert release(late[0]) == {"event": "released", "undone": True}
    assert guard.status() == 0
    assert receive(late[0]) is None


def test_silence_is_counted_from_the_last_word(guard, monkeypatch):
    now_s = 1000.0
    clock = SimpleNamespace(monotonic=lambda: now_s)
    monkeypatch.setattr(guard_loop, "time", clock)
    guard.start(heartbeat_s=5.0)
    rank, other = guard.hold(), guard.connect()
    resets = guard.gpus[ONE].resets

    def at(time_s, speaker=other):
        nonlocal now_s
        now_s = time_s
        for _ in range(2):  # the second is answered when all that was due is under way
            send(speaker, {"op": "beat"})
            assert receive(speaker) == {"event": "beat"}

    at(1004.9)
    assert resets.empty()
    at(1005.0)
    guard.gpus[ONE].await_reset()
    assert receive(rank) == {"event": "was_reset"}
    at(1009.9)
    assert resets.empty()
    at(1010.0)
    guard.gpus[ONE].await_reset()
    assert receive(rank) == {"event": "was_reset"}
    at(1012.0, rank)
    at(1016.9)
    assert resets.empty()
    at(1017.0)
    guard.gpus[ONE].await_reset()


def test_who_asks_after_one_that_left_before_his_answer_waits(guard):
    guard.opens.clear()
    guard.start()
    first, second = guard.connect(), guard.connect()
    ask(first, ONE)
    first.close()
    for connection in (second, guard.connect()):
        send(connection, {"op": "beat"})
        assert receive(connection) == {"event": "beat"}
    ask(second, ONE)
    send(second, {"op": "beat"})
    assert receive(second) == {"event": "beat"}
    guard.opens.set()
    assert receive(second)["event"] == "held"
    assert guard.gpus[ONE].num_resets == 1
    release(second)
    for connection in guard.connections:
        connection.close()
    assert guard.status() == 0


# --- being told to stop --------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_ranks_are_told_to_stop_and_reset_at_once(guard, number):
    guard.start(stop_s=1000.0)
    holding, idle = guard.hold(), guard.connect()
    send(idle, {"op": "beat"})
    assert receive(idle) == {"event": "beat"}
    guard.signal(number)
    assert receive(holding) == {"event": "stop"}
    assert receive(holding) == {"event": "was_reset"}
    assert receive(idle) == {"event": "stop"}
    assert receive(idle) is None  # it holds nothing
    guard.signal(signal.SIGTERM)  # the second time changes nothing
    late = guard.connect()
    ask(late, OTHER)
    answer = receive(late)
    assert answer["what"] == "The guard is ending: its job was told to stop"
    assert release(holding) == {"event": "released", "undone": True}
    assert receive(holding) is None
    assert guard.status() == 0
    assert guard.gpus[ONE].num_resets == 2


def test_who_is_just_being_served_is_told_to_stop_after_his_answer(guard):
    guard.opens.clear()
    guard.start(stop_s=1000.0)
    connection = guard.connect()
    ask(connection, ONE)
    send(connection, {"op": "beat"})
    assert receive(connection) == {"event": "beat"}
    guard.signal()
    assert receive(connection) == {"event": "stop"}
    guard.opens.set()
    assert receive(connection)["event"] == "held"
    assert receive(connection) == {"event": "stop"}
    assert release(connection) == {"event": "released", "undone": True}
    assert guard.status() == 0


def test_a_guard_that_is_told_to_stop_does_not_wait_for_its_starter(guard):
    starter, _ = pipe = os.pipe()
    guard.start(allowed=[ONE], starter_pidfd=starter)
    guard.signal()
    assert guard.status() == 0
    for descriptor in pipe:
        os.close(descriptor)


def test_ranks_that_do_not_stop_in_time_keep_their_leases_and_lose_the_guard(guard):
    guard.start(stop_s=0.1)
    one, other = guard.hold(ONE), guard.hold(OTHER)
    guard.signal()
    for connection in (one, other):
        while (message := receive(connection)) is not None:
            assert message["event"] in ("stop", "was_reset")
    assert guard.status() == 1
    assert leases() == [(ONE.uid, False), (OTHER.uid, False)]
    # At once, and once more at the end: they may have locked since.
    assert [gpu.num_resets for gpu in guard.gpus.values()] == [2, 2]


def test_a_driver_that_hangs_does_not_keep_a_guard_that_must_stop(guard, monkeypatch):
    monkeypatch.setattr(guard_loop, "_LAST_RESET_S", 0.01)
    guard.start()
    guard.gpus[ONE].driver.clear()
    guard.hold()
    guard.signal()
    assert guard.status() == 1
    assert leases() == [(ONE.uid, False)]


# --- errors of its own ---------------------------------------------------------------------------


def test_an_error_of_its_own_resets_all(guard, monkeypatch):
    def fail(connection):
        raise MemoryError

    guard.start()
    connection = guard.hold(ONE)
    guard.hold(OTHER)
    guard.gpus[ONE].error = GpuError("the driver is busy")
    monkeypatch.setattr(guard_loop, "receive", fail)
    send(connection, {"op": "beat"})
    assert type(guard.status()) is MemoryError
    assert guard.gpus[OTHER].num_resets == 1
    guard.gpus[ONE].await_reset()
    assert leases() == [(ONE.uid, True), (OTHER.uid, True)]


def test_resets_that_hang_do_not_keep_a_guard_that_has_failed(guard, monkeypatch):
    def fail(connection):
        raise MemoryError

    monkeypatch.setattr(guard_loop, "_DISTRESS_S", 0.01)
    guard.start()
    connection = guard.hold()
    guard.gpus[ONE].driver.clear()
    monkeypatch.setattr(guard_loop, "receive", fail)
    send(connection, {"op": "beat"})
    assert type(guard.status()) is MemoryError


def test_a_rank_that_does_not_read_any_more_harms_nobody(guard, caplog):
    guard.start()
    reader, deaf = guard.hold(), guard.connect()
    while "could not send beat" not in caplog.text:
        send(deaf, {"op": "beat"})
    assert release(reader) == {"event": "released", "undone": True}
    deaf.close()
    assert guard.status() == 0
