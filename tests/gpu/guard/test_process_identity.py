"""Who lives and who has ended, whatever number he has and however little may be seen of him."""

import os
import select
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from lease_helpers import dead

from envpipe_megatron.gpu.guard import messages
from envpipe_megatron.gpu.guard.messages import (
    ProcessIdentity,
    peer_uid_and_pid,
    wait_readable,
)


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


def test_what_can_be_read_is_waited_for(monkeypatch):
    one, other = socket.socketpair()
    silent, _ = pair = socket.socketpair()
    with one, other, pair[0], pair[1]:
        descriptors = [silent.fileno(), one.fileno()]
        for time_s in (0.0, -1.0, 1e-3):
            assert wait_readable(descriptors, time_s) is False
        other.send(b"x")
        assert wait_readable(descriptors, 60.0) is True
    waits_ms = []
    poll = SimpleNamespace(register=lambda *_: None, poll=waits_ms.append)
    monkeypatch.setattr(select, "poll", lambda: poll)
    assert wait_readable([], 2.5) is False
    assert waits_ms == [2500.0]
