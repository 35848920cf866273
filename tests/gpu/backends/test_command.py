"""A site's commands: what they are run with, and every way in which they can fail."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from open_files import MEMORY, open_files
from plain_reader import UUID, PlainReader, assert_reads_through

from envpipe_megatron.gpu.backends import command
from envpipe_megatron.gpu.backends.command import CommandGpu
from envpipe_megatron.gpu.base import (
    GpuError,
)
from envpipe_megatron.gpu.site import SiteConfig

RECORDER = """#!{python} -I
import json, os, sys
record = dict(
    argv=sys.argv[1:], environment=dict(os.environ), cwd=os.getcwd(), stdin=sys.stdin.read(),
    own_session=os.getsid(0) == os.getpid(), descriptors=os.listdir("/proc/self/fd"),
)
with open({log!r}, "a") as file:
    file.write(json.dumps(record) + "\\n")
"""


class Script:
    """A program that records how it was run, then goes on as a test says."""

    def __init__(self, folder):
        self.path = folder / "clock tool; touch injected"
        self.log = folder / "log.jsonl"
        self.write()

    def write(self, then=""):
        text = RECORDER.format(python=sys.executable, log=str(self.log))
        self.path.write_text(text + then)
        self.path.chmod(0o755)

    def records(self):
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def site(self, *arguments, time_limit_s=30.0):
        return SiteConfig(
            path=Path("/etc/site.toml"),
            lock_command=(str(self.path), "lock", *arguments, "{mhz}"),
            reset_command=(str(self.path), "reset", *arguments),
            command_time_limit_s=time_limit_s,
        )

    def gpu(self, *arguments, time_limit_s=30.0):
        return CommandGpu(
            PlainReader(), self.site(*(arguments or ("{uuid}",)), time_limit_s=time_limit_s)
        )


@pytest.fixture
def script(tmp_path):
    return Script(tmp_path)


@pytest.mark.parametrize("old", [False, True])
def test_lock_and_reset_run_the_sites_argv(script, monkeypatch, tmp_path, old):
    """Also where Python was built for an old C library."""
    if old:
        monkeypatch.delattr(os, "memfd_create")
    gpu = script.gpu("--gpu={uuid}", "{index}", "$(touch injected) `id`; {index}{uuid}", "*")
    opened = open_files(*MEMORY, tmp_path)
    gpu.lock_frequency(1380)
    assert open_files(*MEMORY, tmp_path) <= opened
    assert_reads_through(gpu)
    gpu.reset_frequency()
    assert_reads_through(gpu)
    fixed = [f"--gpu={UUID}", "3", f"$(touch injected) `id`; 3{UUID}", "*"]
    assert [record["argv"] for record in script.records()] == [
        ["lock", *fixed, "1380"],
        ["reset", *fixed],
    ]
    assert sorted(path.name for path in script.path.parent.iterdir()) == [
        "clock tool; touch injected",
        "log.jsonl",
    ]
    assert gpu.address.backend == "command"
    assert gpu.address.uid == UUID


def test_a_command_gets_nothing_of_the_jobs_surroundings(script, monkeypatch, tmp_path):
    monkeypatch.setenv("LD_PRELOAD_LIKE", "secret")
    monkeypatch.setenv("ZEUSD_TOKEN", "secret")
    with (tmp_path / "open file").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        script.gpu().lock_frequency(1380)
    (record,) = script.records()
    assert "secret" not in json.dumps(record)
    assert set(record["environment"]) <= {"PATH", "LANG", "LC_CTYPE"}
    assert record["environment"]["PATH"] == "/usr/sbin:/usr/bin:/sbin:/bin"
    assert record["cwd"] == "/"
    assert record["stdin"] == ""
    assert record["own_session"]
    # 0, 1, 2, the log, and the one that lists them.
    assert len(record["descriptors"]) <= 5


@pytest.mark.parametrize(
    "uid",
    [
        "",
        "GPU-1; reboot",
        f"{UUID}\n",
        f"{UUID} --all",
        "../../dev/null",
        "{index}",
        UUID.replace("0123", "０１２３", 1),  # noqa: RUF001 - digits that are not ASCII
    ],
)
def test_only_a_uuid_can_be_put_into_a_command(script, uid):
    with pytest.raises(GpuError, match="UUID"):
        CommandGpu(PlainReader(uid), script.site("{uuid}"))
    assert not script.log.exists()


def test_a_failure_says_status_and_the_end_of_what_was_said(script):
    script.write(
        "print('first', 'noise'*1000, '\\x1b[31mno such GPU\\nask the admin', file=sys.stderr)\n"
        "sys.exit(7)\n"
    )
    gpu = script.gpu()
    with pytest.raises(GpuError) as caught:
        gpu.lock_frequency(1380)
    message = str(caught.value)
    assert "status 7" in message
    assert "no such GPU ask the admin" in message
    assert "\x1b" not in message
    assert "; it said: " in message
    assert 1900 < message.count("noise") * 5 < 2000  # the end of it
    assert "first" not in message
    with pytest.raises(GpuError):
        gpu.reset_frequency()


@pytest.mark.usefixtures("sigchld_ignored")
def test_a_command_whose_failure_nobody_would_learn_of_is_not_run(script):
    with pytest.raises(GpuError, match=r"SIGCHLD is ignored.*clocks reset"):
        script.gpu().reset_frequency()
    assert not script.log.exists()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    script.gpu().reset_frequency()


def test_a_missing_program_and_one_that_cannot_be_run(script):
    gpu = script.gpu()
    script.path.write_text("no interpreter line")
    with pytest.raises(GpuError, match=r"cannot be run.*/etc/site\.toml"):
        gpu.lock_frequency(1380)
    script.path.unlink()
    with pytest.raises(GpuError, match="No such file"):
        gpu.reset_frequency()


def waits_for_ever(script, tmp_path, ignores_sigterm):
    """Make the program one that never ends, nor does its child. A shell, since it starts soon."""
    heard = "" if ignores_sigterm else f"echo > '{tmp_path}/told'; exit"
    script.path.write_text(
        f"#!/bin/sh\ntrap \"{heard}\" TERM\nsleep 1000 &\necho $$ $! > '{tmp_path}/pids'\n"
        "echo still at it >&2\nwait\n"
    )


def is_gone(pid):
    """Return True if a process has ended, also as a zombie that its parent has not asked for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


@pytest.mark.parametrize("ignores_sigterm", [False, True])
def test_a_command_that_hangs_is_stopped_with_its_children(script, tmp_path, ignores_sigterm):
    waits_for_ever(script, tmp_path, ignores_sigterm)
    gpu = script.gpu(time_limit_s=1.0)
    with pytest.raises(GpuError, match=r"limit of 1 s and was stopped; it said: still at it"):
        gpu.lock_frequency(1380)
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2
    # Asked to end before it is ended, so that sudo can hand that on.
    assert (tmp_path / "told").exists() is not ignores_sigterm
    give_up_s = time.monotonic() + 20
    while not all(is_gone(pid) for pid in pids):
        assert time.monotonic() < give_up_s
        time.sleep(0.01)


def test_a_command_that_may_not_be_stopped_is_left_and_said(script, tmp_path, monkeypatch):
    # As a user meets it whose sudo runs as root.
    def not_permitted(group, number):
        raise PermissionError

    waits_for_ever(script, tmp_path, ignores_sigterm=False)
    gpu = script.gpu(time_limit_s=1.0)
    kill = os.killpg
    monkeypatch.setattr(os, "killpg", not_permitted)
    monkeypatch.setattr(command, "_STOP_S", 0.1)
    try:
        with pytest.raises(GpuError, match="could not be stopped: it may still act"):
            gpu.lock_frequency(1380)
    finally:
        pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        kill(pids[0], signal.SIGKILL)


def test_a_guard_waits_at_least_as_long_as_a_command_may_run(script):
    assert script.gpu(time_limit_s=7.0).late_request_s == 9.0  # a second for each signal


def test_a_site_without_commands(script):
    with pytest.raises(GpuError, match="no commands"):
        CommandGpu(PlainReader(), SiteConfig())
