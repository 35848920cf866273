"""What a rank does with each answer, silence or nonsense of its guard, which is played here."""

import os
import queue
import select
import socket
import threading
import time
from types import SimpleNamespace

import pytest
from fake_gpu import FakeGpu

from envpipe_megatron.gpu.base import GpuAddress
from envpipe_megatron.gpu.guard import client as guard_client
from envpipe_megatron.gpu.guard.client import GuardEvent, hold_gpu
from envpipe_megatron.gpu.guard.lease import Lease, LeaseHeldError, list_leases
from envpipe_megatron.gpu.guard.lease_folder import LEASE_DIR_VARIABLE
from envpipe_megatron.gpu.guard.process_identity import ProcessIdentity
from envpipe_megatron.gpu.guard.protocol import (
    GuardError,
    GuardSettings,
    job_key,
    receive,
    refusal,
    send,
)

ADDRESS = GpuAddress("emulated", "/node#0")
DEADLINE_S = 20.0


class Played:
    """The guard's ends of the connections that ranks make."""

    def __init__(self, monkeypatch):
        self.answers = []
        self.asked = []
        self.events = queue.SimpleQueue()
        self.gpu = FakeGpu()
        self.ends = []
        self.connections = []
        monkeypatch.setattr(guard_client, "connect_to_guard", self._connect)

    def _connect(self, job, settings, log, until_s):
        self.asked.append((job, settings, log, until_s))
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.ends.append(ours)
        self.connections.append(theirs)
        answer = self.answers.pop(0)
        if answer is None:
            ours.close()
        elif answer != "silence":
            send(ours, answer)
        return theirs

    def hold(self, heartbeat_s=1000.0, guard_pid=None, on_event=None, **named):
        self.answers.append(
            {
                "event": "held",
                "job": "a job",
                "guard_pid": guard_pid or os.getpid(),
                "heartbeat_s": heartbeat_s,
            }
        )
        hold = hold_gpu(
            ADDRESS,
            "job",
            on_event=on_event or self.events.put,
            open_gpu=lambda address: self.gpu,
            **named,
        )
        assert self.hear() == {"op": "hold", "backend": "emulated", "uid": "/node#0"}
        return hold

    def hear(self):
        self.ends[-1].settimeout(DEADLINE_S)
        return receive(self.ends[-1])

    def say(self, **message):
        send(self.ends[-1], message)

    def event(self):
        return self.events.get(timeout=DEADLINE_S)


@pytest.fixture
def guard(monkeypatch, tmp_path):
    monkeypatch.setenv(LEASE_DIR_VARIABLE, str(tmp_path / "leases"))
    played = Played(monkeypatch)
    yield played
    for end in played.ends:
        end.close()
    for thread in threading.enumerate():
        if thread.name == "envpipe-guard":
            thread.join(DEADLINE_S)
            assert not thread.is_alive()


def released(guard, hold, undone=True):
    """Release a hold, whose guard confirms it."""
    failed = queue.SimpleQueue()

    def release():
        try:
            hold.release()
            failed.put(None)
        except GuardError as error:
            failed.put(error)

    threading.Thread(target=release).start()
    while (message := guard.hear()) != {"op": "release"}:
        assert message == {"op": "beat"}
    guard.say(event="released", undone=undone)
    return failed.get(timeout=DEADLINE_S)


# --- asking --------------------------------------------------------------------------------------


def test_a_hold_says_what_the_guard_said_and_is_over_when_it_is_released(guard):
    hold = guard.hold(guard_pid=77)
    assert (hold.address, hold.job, hold.guard_pid) == (ADDRESS, "a job", 77)
    assert released(guard, hold) is None
    assert guard.hear() is None  # nothing else was said
    assert guard.events.empty()
    assert guard.gpu.history == []
    hold.release()  # nobody is there, and nothing is awaited


def test_a_guard_is_asked_for_with_what_the_rank_was_given(guard, tmp_path):
    settings, begin_s = GuardSettings(heartbeat_s=3.0), time.monotonic()
    released(guard, guard.hold(settings=settings, log=tmp_path / "log", timeout_s=1000.0))
    ((job, given, log, until_s),) = guard.asked
    assert (job, given, log) == ("job", settings, tmp_path / "log")
    assert begin_s + 1000.0 <= until_s <= time.monotonic() + 1000.0


def test_a_rank_belongs_to_the_job_that_its_launcher_named(guard):
    guard.answers.append(refusal(GuardError("No")))
    with pytest.raises(GuardError, match=r"^No$"):
        hold_gpu(ADDRESS, on_event=print)
    assert guard.asked[0][:3] == (job_key(), GuardSettings(), None)
    assert guard.connections[0].fileno() < 0


def test_a_guard_that_ended_in_this_moment_is_followed_by_another(guard, monkeypatch):
    slept = []
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=slept.append)
    monkeypatch.setattr(guard_client, "time", clock)
    guard.answers += [None, None]
    hold = guard.hold()
    assert (len(guard.asked), len(slept)) == (3, 2)
    assert [connection.fileno() < 0 for connection in guard.connections] == [True, True, False]
    released(guard, hold)


def test_guards_that_end_again_and_again_are_not_asked_for_ever(guard):
    guard.answers += [None] * 2
    with pytest.raises(GuardError, match=r"ended again and again.*job.*See its log"):
        hold_gpu(ADDRESS, "job", on_event=print, timeout_s=-1.0)
    assert len(guard.asked) == 1


def test_a_guard_that_does_not_answer_is_not_awaited_for_ever(guard):
    guard.answers.append("silence")
    with pytest.raises(GuardError, match=r"did not answer in time.*/node#0.*driver may hang"):
        hold_gpu(ADDRESS, "job", on_event=print, timeout_s=0.001)
    assert guard.connections[0].fileno() < 0


def test_a_refusal_keeps_its_name(guard):
    guard.answers.append(
        refusal(LeaseHeldError("Another job holds it", job="other", pid=5, uid=0, remedy="Wait"))
    )
    with pytest.raises(LeaseHeldError, match=r"Another job holds it.*job other, guard 5"):
        hold_gpu(ADDRESS, "job", on_event=print)
    assert guard.connections[0].fileno() < 0


# --- while it is held ----------------------------------------------------------------------------


def test_what_the_guard_says_reaches_the_callback(guard):
    hold = guard.hold()
    guard.say(event="was_reset")
    guard.say(event="beat")
    guard.say(event="stop")
    assert [guard.event(), guard.event()] == [GuardEvent.WAS_RESET, GuardEvent.STOP]
    released(guard, hold)
    assert guard.events.empty()


def test_a_reset_after_the_release_is_no_news(guard):
    hold = guard.hold()
    with pytest.raises(GuardError, match="did not confirm in time"):
        hold.release(timeout_s=0.001)
    guard.say(event="was_reset")
    assert released(guard, hold) is None
    assert guard.events.empty()


def test_a_lease_that_could_not_be_undone_is_said(guard):
    error = released(guard, guard.hold(), undone=False)
    assert str(error) == (
        "The guard could not undo its lease (got '/node#0'). See its log; `envpipe clocks reset` "
        "tries again"
    )


def test_a_release_in_the_callback_waits_for_its_confirmation(guard):
    answers = queue.SimpleQueue()

    def on_event(event):
        try:
            hold.release(timeout_s=DEADLINE_S)
        except GuardError as error:
            answers.put(error)
        answers.put(event)

    hold = guard.hold(on_event=on_event)
    guard.say(event="stop")
    assert guard.hear() == {"op": "release"}
    assert answers.empty()
    guard.say(event="released", undone=True)
    assert answers.get(timeout=DEADLINE_S) is GuardEvent.STOP


def test_a_release_in_the_callback_does_not_wait_for_ever(guard):
    answers = queue.SimpleQueue()

    def on_event(event):
        with pytest.raises(GuardError, match="did not confirm in time"):
            hold.release(timeout_s=0.001)
        answers.put(event)

    hold = guard.hold(on_event=on_event)
    guard.say(event="stop")
    assert answers.get(timeout=DEADLINE_S) is GuardEvent.STOP
    assert released(guard, hold) is None


# --- silence -------------------------------------------------------------------------------------


class Clock:
    """Time that passes while a rank waits for its guard, who hears `hears` beats of it."""

    def __init__(self, monkeypatch, hears):
        self.now_s, self.hears, self.beats_s = 0.0, hears, []
        self.told = threading.Event()
        monkeypatch.setattr(guard_client, "time", self)
        monkeypatch.setattr(guard_client, "wait_readable", self.wait_readable)
        monkeypatch.setattr(guard_client, "send", self.send)

    def monotonic(self):
        return self.now_s

    def wait_readable(self, descriptors, wait_s):
        assert wait_s >= 0.0
        if select.select(descriptors, [], [], 0.0)[0]:
            return True
        self.now_s += wait_s
        return False

    def send(self, connection, message):
        if message["op"] == "beat":
            self.beats_s.append(self.now_s)
            self.hears(self)
        send(connection, message)


def test_a_guard_that_answers_no_beat_for_a_heartbeat_is_lost(guard, monkeypatch):
    clock = Clock(monkeypatch, lambda clock: None)
    hold = guard.hold(heartbeat_s=6.0)
    assert guard.event() is GuardEvent.LOST
    assert clock.beats_s == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    hold.release()
    assert guard.gpu.history == [None]


def test_an_answer_now_and_then_is_enough(guard, monkeypatch):
    """Whatever it says; and its silence counts anew from then on."""

    def hears(clock):
        if len(clock.beats_s) in (6, 12):
            guard.say(event="beat")

    clock = Clock(monkeypatch, hears)
    guard.hold(heartbeat_s=6.0)
    assert guard.event() is GuardEvent.LOST
    assert len(clock.beats_s) == 12 + 7


def test_a_guard_that_does_not_even_read_is_a_silent_one(guard, monkeypatch):
    def full(clock):
        raise BlockingIOError

    clock = Clock(monkeypatch, full)
    guard.hold(heartbeat_s=6.0)
    assert guard.event() is GuardEvent.LOST
    assert len(clock.beats_s) == 7


def test_a_connection_that_is_broken_is_a_lost_guard_at_once(guard, monkeypatch):
    def broken(clock):
        raise BrokenPipeError

    clock = Clock(monkeypatch, broken)
    guard.hold(heartbeat_s=6.0)
    assert guard.event() is GuardEvent.LOST
    assert clock.beats_s == [1.0]


# --- in place of a guard that is gone ------------------------------------------------------------


def test_nonsense_is_a_lost_guard(guard):
    hold = guard.hold()
    guard.ends[-1].send(b"nonsense")
    assert guard.event() is GuardEvent.LOST
    hold.release()
    assert guard.gpu.history == [None]


def test_a_guard_that_may_only_hang_is_told_of_the_end(guard):
    guard.hold()
    guard.ends[-1].send(b"nonsense")
    assert guard.hear() == {"op": "release"}
    assert guard.hear() is None


def test_another_jobs_gpu_is_not_reset_by_who_stands_in(guard):
    guard.hold()
    lease = Lease.take(
        ADDRESS, "another", rank=ProcessIdentity.of(os.getpid()), open_gpu=lambda _: guard.gpu
    )
    guard.ends[-1].close()
    assert guard.event() is GuardEvent.LOST
    for thread in threading.enumerate():
        if thread.name == "envpipe-guard":
            thread.join(DEADLINE_S)
    assert guard.gpu.history == []
    assert [record.job for record in list_leases()] == ["another"]
    lease.release()


def test_a_release_in_the_callback_of_a_lost_guard_waits_for_nothing(guard):
    answers = queue.SimpleQueue()

    def on_event(event):
        hold.release()
        answers.put((event, list(guard.gpu.history)))

    hold = guard.hold(on_event=on_event)
    guard.ends[-1].close()
    assert answers.get(timeout=DEADLINE_S) == (GuardEvent.LOST, [])
    hold.release()
    assert guard.gpu.history == [None]
