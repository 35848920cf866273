"""What never comes ends the job: soon, on every stage, and without garbage."""

import ctypes
import gc
import multiprocessing
import os
import random
import signal
import stat
import subprocess
import sys
import threading
import weakref
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from on_request import examples
from taking_turns import KilledError

from envpipe_megatron.core.kinds import Kind, unit
from envpipe_megatron.core.orders import builders
from envpipe_megatron.runtime.channel import puts
from envpipe_megatron.runtime.channel.carrier import ChannelError, Peers
from envpipe_megatron.runtime.channel.cuda_device import CudaDevice
from envpipe_megatron.runtime.channel.flag_page import (
    LOST,
    PUT,
    FlagPage,
    create_page_file,
)
from envpipe_megatron.runtime.channel.p2p import P2PChannel
from envpipe_megatron.runtime.execution.executor import wait_for

ORDER, ORDER_OF_TWO = builders.one_f_one_b(4, 6), builders.one_f_one_b(2, 6)
FORK = multiprocessing.get_context("fork")
PEERS = Peers(0, 1, 11, Kind.BACKWARD)
FORWARD, UNIT = unit(Kind.FORWARD, 0), unit(Kind.BACKWARD, 0)


@pytest.mark.parametrize("seed", range(examples(80)))
def test_wherever_a_stage_is_lost_no_stage_hangs_or_computes_from_garbage(pipeline, seed):
    rng = random.Random(seed)
    stages = rng.randint(2, 4)
    order = builders.one_f_one_b(stages, rng.randint(stages, 6))
    made = pipeline(stages, seed=seed, one_queue=rng.random() < 0.5)
    lost = rng.randrange(stages)
    ends = rng.choice([made.turns.dies_after, made.turns.stops_after])
    ends[lost] = rng.randrange(250)
    syncs = rng.choice([0.0, 0.2])  # of the device, which hold the host until its process is ended
    outcomes = made.train([order, order], syncs=syncs)
    for stage, outcome in enumerate(outcomes):
        ended = ChannelError | None if syncs == 0 and stage != lost else ChannelError | KilledError
        assert outcome is None or isinstance(outcome, ended)
        # What a unit would have sent that never ran is not said to be there.
        sent = sum(int(order.cross_successor[place % 1000]) >= 0 for place in made.ran[stage])
        assert sum(word.index // 2 == PUT for word in made.devices[stage].written) <= sent
        if isinstance(outcome, ChannelError) and "making memory" not in str(outcome):
            assert made.devices[stage].abandoned


def named(outcomes: list[BaseException | None], lost: int, why: str) -> bool:
    """Return True if every other stage says who is lost, and one beside it why."""
    reasons = set()
    for stage, outcome in enumerate(outcomes):
        if stage == lost:
            continue
        near = stage + 1 if lost > stage else stage - 1
        said = f"Stage {stage} lost its neighbour, stage {near} (rank {10 + near}), while waiting "
        assert isinstance(outcome, ChannelError)
        assert str(outcome).startswith(said)
        reasons.add(str(outcome).removeprefix(said).partition(". ")[0])
    own, told = f"for its messages: {why}", f"for the pipeline: it says that stage {lost} is lost"
    return own in reasons and reasons <= {own, told}


@pytest.mark.parametrize("seed", range(examples(5)))
@pytest.mark.parametrize("lost", range(4))
@pytest.mark.parametrize("dies", [True, False])
def test_every_stage_names_the_stage_that_has_ended_or_gives_no_sign(pipeline, dies, lost, seed):
    """Its neighbours alone: the others wait for stages that say that they wait, too."""
    made = pipeline(4, seed=seed, timeout_s=30)
    (made.turns.dies_after if dies else made.turns.stops_after)[lost] = 100
    why, soon_s = ("its process has ended", 1) if dies else ("no sign of it for 30 s", 32)
    assert named(made.train([ORDER, ORDER]), lost, why)
    assert soon_s - 2 < made.turns.now_s <= soon_s  # a look or two


def test_a_stage_that_is_slow_is_not_lost(pipeline):
    """Nor one whose neighbour needs it later than the time-out, counted from a sign of it."""
    made = pipeline(2, timeout_s=30)

    def host(stage: int) -> None:
        for _ in range(6):
            made.turns.sleep(29 * stage)
            made.step(stage, ORDER_OF_TWO, 0, 0.0)

    made.turns.patience_s = 1000
    assert made.turns.run(lambda: host(0), lambda: host(1)) == [None, None]
    assert made.turns.now_s >= 6 * 29


def test_a_known_loss_ends_whatever_is_asked_for(pipeline):
    made = pipeline(2)
    channel = made.channels[0]

    def host() -> None:
        made.pages[0].own(LOST).set(8)
        give, take = partial(channel.send, FORWARD, []), partial(channel.receive, UNIT)
        for call in (channel.end_step, give, take):
            with pytest.raises(ChannelError, match="it says that stage 7 is lost"):
                call()

    assert made.turns.run(host, lambda: None) == [None, None]


def test_a_stage_that_is_lost_while_memory_is_made_is_named(pipeline):
    made = pipeline(2)

    def host() -> None:
        made.channels[0].begin_step(ORDER_OF_TWO, made.specs)

    error, _ = made.turns.run(host, lambda: None)
    with pytest.raises(ChannelError, match=r"stage 1 .* making memory for messages"):
        raise error


class Watched:
    """A device and a neighbour who is lost when a test says so, looked after by threads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(puts, "_LOOKS_EVERY_S", 0.001)
        self.found: Any = None
        self.page, self.waits = self, False
        self.calls: list[str] = []
        self.expected: list[float | None] = []
        self.told = threading.Event()
        self.side = puts.PutSide(self, timedelta(seconds=1), 1)  # type: ignore[arg-type]
        self.side.carriers = [self, self]  # type: ignore[list-item]
        self.side.watch()

    def trouble(self, now_s: float, timeout_s: float) -> Any:
        return self.found

    def say_lost(self, stage: int) -> None:
        self.calls.append(f"tell {stage}")

    def abandon(self) -> None:
        self.calls.append("abandon")
        self.told.set()

    def close(self) -> None:
        self.calls.append("close")

    def expect_again(self, within_s: float | None) -> None:
        self.expected.append(within_s)

    def bind_thread(self) -> None:
        """As `Device`'s."""


def test_a_host_that_waits_for_the_device_hears_of_a_loss(monkeypatch):
    """It would wait for ever: the streams are never let go."""
    watched = Watched(monkeypatch)
    lost = ChannelError("of a test")

    def never() -> bool:
        watched.found = lost, 5
        assert watched.told.wait(20)
        return False

    channel = P2PChannel([0, 1], 0, {}, side=watched.side)
    with pytest.raises(ChannelError, match="of a test"):
        wait_for(never, channel.check)
    assert watched.calls == ["tell 5", "tell 5", "abandon"]


@pytest.mark.parametrize("waits", [False, True])
def test_a_process_that_ends_waits_for_no_stream_that_stands(monkeypatch, waits):
    """As where all ranks are told to end in the middle of a step, and nobody is lost."""
    watched = Watched(monkeypatch)
    watched.waits = waits
    watched.side._leave()
    assert watched.calls == ["abandon"] * waits
    assert watched.expected[-1] is None  # what still runs at exit may take as long as it likes
    watched.waits = False
    watched.found = ChannelError("of a test"), 5  # its thread ends
    assert watched.told.wait(20)


def test_a_loss_that_the_host_finds_keeps_its_short_time(monkeypatch):
    """The thread that has just looked does not give the process the whole time-out again."""
    monkeypatch.setattr(puts.PutSide, "watch", lambda side: None)
    watched = Watched(monkeypatch)
    look, before = watched.side.loss, iter([None])
    watched.found = ChannelError("of a test"), 5

    def look_just_before_the_host() -> ChannelError | None:
        found = look()
        return next(before, found)

    monkeypatch.setattr(watched.side, "loss", look_just_before_the_host)
    watched.side._keep_looking()
    assert watched.calls[-1] == "abandon"
    assert watched.expected == []


def be_held_in_a_launch(errors: Path) -> None:
    """Look for a while, and then keep Python's lock; say so where the test reads it."""
    puts.GRACE_S, puts._LOOKS_EVERY_S = 0.8, 0.015
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
    device, looks = CudaDevice.__new__(CudaDevice), threading.Semaphore(0)
    page = SimpleNamespace(
        waits=True, trouble=lambda *times_s: looks.release(), say_it_waits=lambda: None
    )
    side = puts.PutSide(device, timedelta(seconds=0.2), 1)
    side.carriers = [SimpleNamespace(page=page)]  # type: ignore[list-item]
    side.watch()
    for _ in range(100):
        looks.acquire()
    os.write(2, b"alive\n")
    ctypes.PyDLL(None).pause()  # keeps Python's lock


def test_a_process_that_is_held_with_pythons_lock_is_ended(tmp_path):
    """As by a launch into a queue that is full; it lives as long as its thread can look."""
    held = FORK.Process(target=be_held_in_a_launch, args=(tmp_path / "errors",))
    held.start()
    held.join(60)
    held.kill()
    assert held.exitcode == 1
    alive, timed_out, *stack = (tmp_path / "errors").read_text().splitlines()
    assert alive == "alive"
    assert "Timeout" in timed_out
    assert any("be_held_in_a_launch" in line for line in stack)  # where it was held


FORKS = """
import os, sys, threading, time
from datetime import timedelta
from envpipe_megatron.runtime.channel import puts
from envpipe_megatron.runtime.channel.cuda_device import CudaDevice
device = CudaDevice.__new__(CudaDevice)
class Page:
    waits = False
    def trouble(self, *times_s): ...
class Carrier:
    page = Page()
side = puts.PutSide(device, timedelta(minutes=9), 1)
side.carriers = [Carrier()]
side.watch()
device.expect_again(600)
held, over = threading.Event(), threading.Event()
def hold():  # as the thread that looks does now and then
    with side._looking:
        held.set()
        over.wait()
threading.Thread(target=hold, daemon=True).start()
held.wait()
child = os.fork()
if child == 0:
    sys.exit(3)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
parent = os.getpid()
device.expect_again(2)  # before that, a busy machine forks
if os.fork() == 0:
    while os.getppid() == parent:
        time.sleep(0.01)
    time.sleep(0.2)  # what ends the parent is not the child's
    print("the child lives", flush=True)
    os._exit(0)
threading.Event().wait()
"""


def test_a_forked_child_ends_as_python_does_and_only_the_parent_is_ended_in_time():
    forks = subprocess.run(
        [sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=120
    )
    assert (forks.returncode, forks.stdout) == (1, "3\nthe child lives\n")
    assert "Timeout" in forks.stderr


def test_a_side_that_is_closed_leaves_no_thread_and_no_time_behind(monkeypatch):
    before = set(threading.enumerate())
    watched = Watched(monkeypatch)
    new = set(threading.enumerate()) - before
    (thread,) = (each for each in new if each.name == "envpipe-channel")
    watched.side.close()
    thread.join(20)
    assert not thread.is_alive()
    assert watched.calls == ["close", "close"]
    assert watched.expected[-1] is None
    side = weakref.ref(watched.side)
    del watched.side
    gc.collect()
    assert side() is None  # nothing is left for Python's end


def say_put(path: Path, is_open: Any) -> None:
    page = FlagPage(path, 1, PEERS)
    page.own(PUT).set(2**32 + 7)
    is_open.set()
    signal.pause()


@pytest.mark.parametrize("umask", [0, 0o777])
def test_a_page_is_its_users_from_the_first_moment(monkeypatch, umask):
    seen = []

    def fchmod(file: int, mode: int) -> None:
        seen.append(stat.S_IMODE(os.fstat(file).st_mode) & 0o077)
        change(file, mode)

    change, before = os.fchmod, os.umask(umask)
    monkeypatch.setattr(os, "fchmod", fchmod)
    try:
        path = create_page_file()
    finally:
        os.umask(before)
    assert seen == [0]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    FlagPage(path, 0, PEERS)
    path.unlink()


def test_a_page_shows_what_another_process_says_and_whether_it_lives():
    path = create_page_file()
    try:
        page = FlagPage(path, 0, PEERS)
        assert not page.other_lives()
        is_open = FORK.Event()
        child = FORK.Process(target=say_put, args=(path, is_open))
        child.start()
        try:
            assert is_open.wait(20)
            assert (page.other_lives(), page.other_lives()) == (True, True)
            with pytest.raises(OSError, match="temporarily unavailable"):
                FlagPage(path, 1, PEERS)
            assert page.others(PUT).value == 7
            assert page.own(PUT).value == page.own(LOST).value == 0
        finally:
            child.kill()
            child.join()
        assert not page.other_lives()
        word = page.others(PUT)
        assert [word.has(value) for value in (6, 7, 8, 2**32 + 7, 2**32 + 8)] == [
            True, True, False, True, False
        ]  # fmt: skip
        word.set(2**32 - 1)
        assert (word.has(2**32 - 1), word.has(2**32)) == (True, False)
        word.set(0)
        assert (word.has(2**32 - 1), word.has(2**32)) == (True, True)
    finally:
        path.unlink()
    with pytest.raises(FileNotFoundError):
        FlagPage(path, 1, PEERS)
