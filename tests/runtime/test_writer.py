"""Files are written beside training: by one thread, in order, again after an error."""

import os
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from kept_job import job_folder, profiled

from envpipe_megatron.runtime import writer as writer_module
from envpipe_megatron.runtime.writer import Writer

LONG_S = 20.0


class Disk:
    """One whose calls of `write` hang until there is `room`, or fail."""

    def __init__(self) -> None:
        self.room, self.asked = threading.Event(), threading.Semaphore(0)
        self.fails: set[str] = set()
        self.written: list[str] = []

    def write(self, name: str) -> Callable[[], None]:
        def call() -> None:
            self.asked.release()
            assert self.room.wait(LONG_S)
            if name in self.fails:
                raise PermissionError(13, "Permission denied", name)
            self.written.append(name)

        return call


@pytest.fixture
def disk() -> Iterator[Disk]:
    made = Disk()
    yield made
    made.room.set()


def test_a_file_that_cannot_be_written_holds_up_no_other_and_keeps_its_order(disk, caplog):
    writer = Writer()
    disk.room.set()
    disk.fails = {"plan 1"}
    writer.put("log", lambda: {}["no such fact"])
    for key, name in (("plan", "plan 1"), ("plan", "plan 2"), ("log", "line 1")):
        writer.put(key, disk.write(name))
    assert all(disk.asked.acquire(timeout=LONG_S) for _ in range(2))
    writer.put("log", disk.write("line 2"))
    writer.close()
    assert disk.written == ["line 1", "line 2"]
    assert caplog.text.count("plan 1 could not be written, and is tried again") == 1
    assert "A file could not be written" in caplog.text, "of what is no error of the disk"
    assert "not complete" in caplog.text
    disk.fails = set()
    writer.put("plan", disk.write("plan 3"))
    writer.close()
    assert disk.written[2:] == ["plan 1", "plan 2", "plan 3"]


def test_a_failure_that_names_no_file_is_said_of_what_was_to_be_written(caplog):
    """As of a working folder that is gone."""
    writer, failures = Writer(), [FileNotFoundError(2, "No such file or directory")]

    def write() -> None:
        if failures:
            raise failures.pop()

    writer.put("profile.csv", write)
    writer.close()
    assert "profile.csv could not be written" in caplog.text


def test_what_failed_is_tried_again_though_nothing_follows(disk, monkeypatch):
    monkeypatch.setattr(writer_module, "_AGAIN_S", 0.01)
    writer, written = Writer(), threading.Event()
    disk.fails = {"plan"}
    disk.room.set()
    writer.put("plan", disk.write("plan"))
    writer.put("plan", written.set)
    assert all(disk.asked.acquire(timeout=LONG_S) for _ in range(3))
    disk.fails = set()
    assert written.wait(LONG_S)
    writer.close()


def test_the_end_waits_for_a_disk_that_hangs_once_and_not_for_long(disk, monkeypatch, caplog):
    monkeypatch.setattr(writer_module, "_JOIN_S", 0.01)
    writer = Writer()
    writer.put("log", disk.write("line"))
    for _ in range(3):
        writer.close()
    assert caplog.text.count("their disk does not answer") == 1


def test_of_lines_that_a_slow_disk_keeps_waiting_no_more_than_a_limit_are_kept(disk, caplog):
    """A job of weeks would fill the node's memory."""
    writer = Writer()
    for number in range(5):
        writer.put("log", disk.write(f"line {number}"), most=3)
        writer.put("plan", disk.write(f"plan {number}"))
    assert [record.message for record in caplog.records] == [
        "A disk is slow: of log, what follows is left out until it writes"
    ]
    disk.room.set()
    writer.close()
    writer.put("log", disk.write("line 5"), most=3)
    writer.close()
    lines = [name for name in disk.written if name.startswith("line")]
    assert lines == ["line 0", "line 1", "line 2", "line 5"]
    assert disk.written.count("plan 4") == 1


def test_lines_that_come_as_python_ends_are_written(disk, monkeypatch):
    """It starts no thread by then, in version 3.12."""
    writer = Writer()
    disk.room.set()
    writer.put("log", disk.write("line 1"))
    writer.close()

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    writer.put("log", disk.write("line 2"))
    writer.close()
    assert disk.written == ["line 1", "line 2"]


def test_training_waits_for_no_file_of_its_folder(tmp_path, monkeypatch):
    """Neither a plan, which is made safe on the disk, nor a line, whatever becomes of the disk."""
    goes_on, asked = threading.Event(), threading.Event()
    fsync = os.fsync

    def hang(descriptor: int) -> None:
        asked.set()
        assert goes_on.wait(LONG_S)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", hang)
    folder = job_folder(tmp_path)
    begin_s = time.monotonic()
    for number in range(50):
        folder.keep_profile(profiled())
        folder.keep(one_clock_mhz=number)
        folder.append("loop", {"number": number})
    assert asked.wait(LONG_S)
    assert time.monotonic() - begin_s < LONG_S / 2
    goes_on.set()
    folder.close()
    assert job_folder(tmp_path).found.one_clock_mhz == 49
    assert len((tmp_path / "loop.jsonl").read_text().splitlines()) == 50
