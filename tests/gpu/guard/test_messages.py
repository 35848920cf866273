"""Messages of ranks and guards, and the folder of sockets and logs."""

import errno
import os
import socket
import tempfile
from pathlib import Path

import pytest

from envpipe_megatron.gpu.guard import messages
from envpipe_megatron.gpu.guard.messages import (
    GuardError,
    receive,
    runtime_folder,
    send,
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

    def mkdir(path, mode):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", mkdir)
    with pytest.raises(
        GuardError, match=rf"cannot be made: Read-only.*'/tmp/envpipe-{os.geteuid()}'.*Set XDG"
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
        with pytest.raises(GuardError, match="not this user's alone"):
            runtime_folder()
    if os.geteuid() == 0:
        folder.chmod(0o700)
        os.chown(folder, 12345, 12345)
        with pytest.raises(GuardError, match=r"not this user's alone.*drwx------, uid 12345"):
            runtime_folder()
    folder.rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(GuardError, match="not this user's alone"):
        runtime_folder()
