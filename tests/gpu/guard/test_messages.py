"""Messages of ranks and guards, and the folder of sockets and logs."""

import errno
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from lease_helpers import dead

from envpipe_megatron.gpu.guard import messages
from envpipe_megatron.gpu.guard.messages import (
    GuardError,
    ProcessIdentity,
    peer_uid_and_pid,
    receive,
    runtime_folder,
    send,
    wait_readable,
)

MAX_BYTES = messages._MAX_MESSAGE_BYTES


@pytest.fixture
def ends():
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with one, other:
        yield one, other


def test_messages_are_whole_or_not_sent(ends):
    one, other = ends
    longest = {"x": "y" * (MAX_BYTES - len('{"x": ""}'))}
    send(one, longest)
    assert receive(other) == longest
    with pytest.raises(OSError, match="Message too long"):
        send(one, {"x": longest["x"] + "y"})
    send(one, {})
    assert receive(other) == {}
    send(other, {"left": "unread"})
    send(one, {"last": "words"})
    one.close()
    assert receive(other) == {"last": "words"}
    assert receive(other) is None


@pytest.mark.parametrize("nonsense", [b"{", b"3", b"\xff", b"[" * 10_000])
def test_what_is_not_a_message_is_an_error(ends, nonsense):
    one, other = ends
    one.send(nonsense)
    with pytest.raises(GuardError, match="Not a message"):
        receive(other)


@pytest.mark.parametrize("given", ["", "gone", "file", "theirs"])
def test_without_a_runtime_folder_of_the_users_own_it_is_in_tmp(monkeypatch, tmp_path, given):
    (tmp_path / "file").write_text("")
    (tmp_path / "theirs").mkdir()
    if given == "theirs":
        if os.geteuid() != 0:
            pytest.skip("only root can give folders away")
        os.chown(tmp_path / "theirs", 12345, 12345)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / given) if given else "")

    def mkdir(path, mode, exist_ok):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", mkdir)
    with pytest.raises(
        GuardError, match=rf"cannot be made: Read-only.*'/tmp/envpipe-{os.geteuid()}'.*set XDG"
    ):
        runtime_folder()


def test_where_tmp_cannot_be_written_the_runtime_folder_is_in_tmpdir(monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(os, "access", lambda path, mode: path != "/tmp")
    assert runtime_folder() == tmp_path / f"envpipe-{os.geteuid()}"


def test_the_runtime_folder_is_the_users_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = runtime_folder()
    assert (folder, folder.stat().st_mode & 0o777) == (tmp_path / "envpipe", 0o700)
    for mode in (0o701, 0o710, 0o740):
        folder.chmod(mode)
        with pytest.raises(GuardError, match="not only this user's"):
            runtime_folder()
    if os.geteuid() == 0:
        folder.chmod(0o700)
        os.chown(folder, 12345, 12345)
        with pytest.raises(GuardError, match="not only this user's"):
            runtime_folder()
    folder.rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(GuardError, match="not only this user's"):
        runtime_folder()


def test_identity_follows_a_process_and_not_its_number():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    identity = ProcessIdentity.of(process.pid)
    assert identity.is_alive() is True
    another = ProcessIdentity(process.pid, identity.start_ticks + 1, identity.pid_namespace)
    assert another.is_alive() is False
    elsewhere = ProcessIdentity(process.pid, identity.start_ticks, 1)
    assert elsewhere.is_alive() is None
    process.kill()
    wait_readable([os.pidfd_open(process.pid)], 20.0)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert identity.is_alive() is False  # a zombie holds nothing
    process.wait()
    assert identity.is_alive() is False
    assert ProcessIdentity.of(process.pid) is None


def test_a_name_with_brackets_does_not_deceive(tmp_path):
    program = tmp_path / os.fsdecode(b"a) R 1 (\xff")
    program.symlink_to("/bin/sleep")
    process = subprocess.Popen([str(program), "60"])
    while b"a) R 1 (\xff" not in Path(f"/proc/{process.pid}/comm").read_bytes():
        pass
    identity = ProcessIdentity.of(process.pid)
    assert identity.is_alive() is True
    process.kill()
    process.wait()
    assert identity.is_alive() is False


def test_a_process_lives_while_one_of_its_threads_does():
    """As one that hangs in the driver; what it asked for may still come."""
    script = (
        "import ctypes, signal, threading\n"
        "threading.Thread(target=signal.pause, daemon=True).start()\n"
        "ctypes.CDLL(None).pthread_exit(None)"
    )
    child = subprocess.Popen([sys.executable, "-S", "-c", script])
    identity = ProcessIdentity.of(child.pid)
    while child.poll() is None and "\nState:\tZ" not in status_of(child):
        pass
    assert identity.is_alive() is True
    child.kill()
    child.wait()
    assert identity.is_alive() is False


def status_of(process):
    return Path(f"/proc/{process.pid}/status").read_text()


def test_where_proc_hides_others_the_kernel_tells(monkeypatch):
    own, ended = ProcessIdentity.own(), dead()
    monkeypatch.setattr(messages, "_stat_fields", lambda pid: None)
    assert own.is_alive() is True
    assert ended.is_alive() is False

    def kill(pid, number):
        raise PermissionError

    monkeypatch.setattr(os, "kill", kill)
    assert own.is_alive() is True


def test_the_other_end_of_a_socket_is_known():
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with one, other:
        assert peer_uid_and_pid(one) == (os.geteuid(), os.getpid())


def test_what_can_be_read_is_waited_for(ends, monkeypatch):
    one, other = ends
    assert wait_readable([one.fileno()], -1.0) is wait_readable([one.fileno()], 1e-3) is False
    other.send(b"x")
    assert wait_readable([other.fileno(), one.fileno()], 60.0) is True
    waits_ms = []
    poll = SimpleNamespace(register=lambda *_: None, poll=waits_ms.append)
    monkeypatch.setattr(messages.select, "poll", lambda: poll)
    assert wait_readable([], 2.5) is False
    assert waits_ms == [2500.0]
