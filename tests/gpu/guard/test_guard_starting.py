"""How a rank finds its job's guard or starts one, and a guard's socket from making to deletion."""

import errno
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import envpipe_megatron
from envpipe_megatron.gpu.guard import socket as guard_socket
from envpipe_megatron.gpu.guard import starting as guard_starting
from envpipe_megatron.gpu.guard.lease import LeaseHeldError
from envpipe_megatron.gpu.guard.protocol import (
    MAX_MESSAGE_BYTES,
    SOCKET_VARIABLE,
    GuardError,
    GuardSettings,
    check_socket_path,
    job_key,
    receive,
    refusal,
    refused_error,
    runtime_folder,
    send,
    socket_path,
)
from envpipe_megatron.gpu.guard.socket import StartLock, close_unless_wanted, listen_at
from envpipe_megatron.gpu.guard.starting import connect_to_guard

ROOT = Path(envpipe_megatron.__file__).resolve().parents[1]


def open_files():
    return set(Path("/proc/self/fd").iterdir())


@pytest.fixture(autouse=True)
def no_file_stays_open():
    before = open_files()
    yield
    assert open_files() <= before


@pytest.fixture(autouse=True)
def runtime(tmp_path, monkeypatch):
    monkeypatch.delenv(SOCKET_VARIABLE, raising=False)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "envpipe"


def listens(path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        return probe.connect_ex(str(path)) == 0


# --- starting ------------------------------------------------------------------------------------


class Started:
    """Stands in for the process of a guard."""

    def __init__(self, monkeypatch, says=b"ready", listens_at=None):
        self.says, self.listens_at = says, listens_at
        self.calls, self.listener, self.kept = [], None, -1
        monkeypatch.setattr(guard_starting.subprocess, "Popen", self)

    def __call__(self, command, **how):
        self.command, self.how = command, how
        said = int(command[command.index("--ready-fd") + 1])
        assert how["pass_fds"] == (said,)
        if self.listens_at:
            self.listener = listen_at(str(self.listens_at))
        if self.says is None:
            self.kept = os.dup(said)
        else:
            os.write(said, self.says)
        return SimpleNamespace(
            kill=lambda: self.calls.append("kill"), wait=lambda: self.calls.append("wait")
        )

    def close(self):
        if self.listener is not None:
            self.listener.close()
        if self.kept >= 0:
            os.close(self.kept)


def soon():
    return time.monotonic() + 60.0


@pytest.mark.parametrize("python_path", [None, "mine"])
def test_a_guard_is_started_with_all_that_it_needs_and_nothing_of_its_rank(
    monkeypatch, runtime, tmp_path, python_path
):
    if python_path:
        monkeypatch.setenv("PYTHONPATH", python_path)
    started = Started(monkeypatch, listens_at=socket_path("a job"))
    monkeypatch.chdir(tmp_path)
    connect_to_guard("a job", GuardSettings(1.0, 2.0, 3.0), Path("log"), soon()).close()
    said = started.command[started.command.index("--ready-fd") + 1]
    assert started.command == [
        *(sys.executable, "-P", "-m", "envpipe_megatron.gpu.guard.process"),
        *("--socket", str(socket_path("a job")), "--job", "a job", "--log", str(tmp_path / "log")),
        *("--ready-fd", said, "--heartbeat-s", "1.0", "--give-up-s", "2.0", "--stop-s", "3.0"),
    ]
    paths = f"{ROOT}:{python_path}" if python_path else str(ROOT)
    assert started.how["env"] == {**os.environ, "PYTHONPATH": paths}
    assert started.how["start_new_session"] is True
    assert {started.how[stream] for stream in ("stdin", "stdout", "stderr")} == {subprocess.DEVNULL}
    assert started.calls == ["wait"]
    started.close()


def test_its_log_is_beside_its_socket(monkeypatch, runtime):
    started = Started(monkeypatch, listens_at=socket_path("job"))
    connect_to_guard("job", GuardSettings(), None, soon()).close()
    log = Path(started.command[started.command.index("--log") + 1])
    assert log == socket_path("job").with_suffix(".log")
    started.close()


@pytest.mark.parametrize(
    ("says", "said"), [(b"no such driver", "no such driver"), (b"", "it was killed")]
)
def test_a_guard_that_could_not_start_says_why(monkeypatch, tmp_path, says, said):
    started = Started(monkeypatch, says)
    with pytest.raises(GuardError) as caught:
        connect_to_guard("job", GuardSettings(), tmp_path / "log", soon())
    assert str(caught.value) == (
        f"The guard could not start: {said} (got '{tmp_path}/log'). No clock is locked without a "
        "guard"
    )
    assert started.calls == ["wait"]


def test_a_guard_that_is_not_ready_in_time_is_killed(monkeypatch):
    started = Started(monkeypatch, None)
    with pytest.raises(GuardError, match=r"did not start in time.*overloaded"):
        connect_to_guard("job", GuardSettings(), None, time.monotonic() + 0.01)
    assert started.calls == ["kill", "wait"]
    started.close()


def test_a_guard_that_listens_nowhere_is_not_started_for_ever(monkeypatch):
    started = Started(monkeypatch)
    with pytest.raises(GuardError, match="did not start in time"):
        connect_to_guard("job", GuardSettings(), None, time.monotonic())
    assert started.calls == ["wait"]


def test_no_process_for_a_guard(monkeypatch):
    def full(command, **how):
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(guard_starting.subprocess, "Popen", full)
    with pytest.raises(GuardError, match=r"could not be started: .*temporarily unavailable"):
        connect_to_guard("job", GuardSettings(), None, soon())


def test_who_waited_for_the_start_of_another_rank_starts_none(monkeypatch):
    started, acquire, listeners = Started(monkeypatch), StartLock.acquire, []

    def late(lock, until_s):
        listeners.append(listen_at(str(socket_path("job"))))
        return acquire(lock, until_s)

    monkeypatch.setattr(StartLock, "acquire", late)
    connect_to_guard("job", GuardSettings(), None, soon()).close()
    assert len(listeners) == 1
    assert not hasattr(started, "command")
    listeners[0].close()


def test_a_start_that_others_keep_from_us(monkeypatch, runtime):
    monkeypatch.setattr(StartLock, "acquire", lambda lock, until_s: False)
    with pytest.raises(GuardError, match=r"did not start in time.*envpipe/"):
        connect_to_guard("job", GuardSettings(), None, soon())
    monkeypatch.undo()


def test_a_folder_in_which_no_guard_can_be_started(monkeypatch, runtime):
    def acquire(lock, until_s):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(StartLock, "acquire", acquire)
    with pytest.raises(GuardError, match=r"cannot be started: .*No space left.*envpipe/"):
        connect_to_guard("job", GuardSettings(), None, soon())


def test_a_guard_that_cannot_be_reached(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(SOCKET_VARIABLE, str(tmp_path / "file" / "s"))
    with pytest.raises(GuardError, match=f"cannot be reached: .*Not a directory.*{tmp_path}/file"):
        connect_to_guard("job", GuardSettings(), None, soon())


def test_the_nodes_guard_is_used_and_no_other_started(monkeypatch, tmp_path):
    monkeypatch.setenv(SOCKET_VARIABLE, str(tmp_path / "s"))
    with pytest.raises(GuardError) as caught:
        connect_to_guard("job", GuardSettings(), None, soon())
    assert str(caught.value) == (
        f"The node's guard does not answer (got '{tmp_path}/s'). Start it, or unset "
        "ENVPIPE_GUARD_SOCKET so that the job starts its own"
    )
    with (
        listen_at(str(tmp_path / "s")),
        connect_to_guard("job", GuardSettings(), None, soon()) as connection,
    ):
        assert connection.getpeername() == str(tmp_path / "s")


def test_a_guard_with_no_room_for_another_rank_is_not_waited_for(monkeypatch, tmp_path):
    path = str(tmp_path / "s")
    monkeypatch.setenv(SOCKET_VARIABLE, path)
    with socket.socket(*listening()) as listener, socket.socket(*listening()) as first:
        listener.bind(path)
        listener.listen(0)
        first.connect(path)
        with pytest.raises(GuardError, match=r"cannot be reached: .*temporarily unavailable"):
            connect_to_guard("job", GuardSettings(), None, soon())


def test_a_strangers_guard_is_not_trusted(monkeypatch, tmp_path):
    monkeypatch.setenv(SOCKET_VARIABLE, str(tmp_path / "s"))
    monkeypatch.setattr(guard_starting, "peer_uid_and_pid", lambda _: (12345, 1))
    with (
        listen_at(str(tmp_path / "s")),
        pytest.raises(GuardError, match=r"belongs to a stranger.*/s, uid 12345.*Correct ENVPIPE"),
    ):
        connect_to_guard("job", GuardSettings(), None, soon())


# --- the socket ----------------------------------------------------------------------------------


def test_a_socket_that_a_killed_guard_left_is_taken_over(tmp_path):
    path = tmp_path / "s"
    listen_at(str(path)).close()
    assert path.exists()
    with listen_at(str(path)):
        assert listens(path)
        with pytest.raises(GuardError, match="listens there already"):
            listen_at(str(path))
        assert listens(path)


@pytest.mark.parametrize(
    ("wanted", "anyway", "closed"),
    [(False, False, True), (True, False, False), (True, True, True), (False, True, True)],
)
def test_a_socket_is_closed_unless_somebody_wants_it(tmp_path, wanted, anyway, closed):
    path = tmp_path / "s"
    with listen_at(str(path)) as listener, socket.socket(*listening()) as client:
        if wanted:
            client.connect(str(path))
        assert close_unless_wanted(listener, path.stat().st_ino, anyway=anyway) is closed
        left = {found.name for found in tmp_path.iterdir()}
        assert left == (set() if closed else {"s", "s.lock"})
        lock = StartLock(path)
        assert lock.acquire(time.monotonic())
        lock.release()


def listening():
    return socket.AF_UNIX, socket.SOCK_SEQPACKET


def test_another_guards_socket_is_left_alone(tmp_path):
    path = tmp_path / "s"
    former = listen_at(str(path))
    inode = path.stat().st_ino
    path.rename(tmp_path / "moved")  # so that its number is not used again
    with listen_at(str(path)):
        assert close_unless_wanted(former, inode, anyway=False)
        assert listens(path)


def test_a_socket_is_closed_though_somebody_keeps_the_start_locked(tmp_path, monkeypatch):
    monkeypatch.setattr(guard_socket, "_LEAVE_S", 0.0)
    path = tmp_path / "s"
    child, done = os.fork(), tmp_path / "done"
    if child == 0:
        StartLock(path).acquire(soon())
        done.touch()
        signal.pause()
    while not done.exists():
        pass
    assert not StartLock(path).acquire(time.monotonic())
    assert close_unless_wanted(listen_at(str(path)), path.stat().st_ino, anyway=False)
    assert {found.name for found in tmp_path.iterdir()} == {"s.lock", "done"}
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


@pytest.mark.parametrize("made_anew", [False, True])
def test_a_start_lock_that_was_deleted_meanwhile_locks_nothing(tmp_path, monkeypatch, made_anew):
    file, plain = tmp_path / "s.lock", guard_socket.fcntl.lockf

    def late(descriptor, how):
        monkeypatch.setattr(guard_socket.fcntl, "lockf", plain)
        file.rename(tmp_path / "deleted")
        if made_anew:
            file.touch()
        plain(descriptor, how)

    monkeypatch.setattr(guard_socket.fcntl, "lockf", late)
    lock = StartLock(tmp_path / "s")
    assert lock.acquire(time.monotonic())
    locks = Path("/proc/locks").read_text()
    assert f":{file.stat().st_ino} " in locks
    lock.release(delete=True)
    assert not file.exists()
    assert stat_mode(tmp_path / "deleted") == 0o600


def stat_mode(path):
    return path.stat().st_mode & 0o777


# --- names and messages --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "key"),
    [
        ({}, None),
        ({"TORCHELASTIC_RUN_ID": "none"}, None),
        ({"SLURM_JOB_ID": "7"}, "slurm 7"),
        ({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NODEID": "3"}, "slurm 7.0, node 3"),
        ({"TORCHELASTIC_RUN_ID": "x", "GROUP_RANK": "1", "SLURM_NODEID": "3"}, "run x, node 1"),
        ({"MASTER_PORT": "29500"}, "at :29500"),
        (
            {
                "SLURM_JOB_ID": "7",
                "TORCHELASTIC_RUN_ID": "x",
                "MASTER_ADDR": "a",
                "MASTER_PORT": "1",
                "GROUP_RANK": "0",
            },
            "slurm 7, run x, at a:1, node 0",
        ),
    ],
)
def test_a_jobs_name_is_what_its_launchers_said(monkeypatch, environ, key):
    key = key or f"process {os.getpid()}"
    assert job_key(environ) == key
    for name in ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert job_key().startswith(key.split(",")[0])


def test_each_job_has_a_socket_of_its_own(runtime):
    paths = {socket_path(job) for job in ("a", "b")}
    assert {path.parent for path in paths} == {runtime}
    assert len(paths) == 2
    assert socket_path("a") in paths


def test_a_path_may_be_as_long_as_a_sockets():
    with socket.socket(*listening()) as probe:
        for length in (107, 108):
            path = Path("/" + "x" * (length - 1))
            if length == 107:
                assert check_socket_path(path) == path
                assert probe.connect_ex(str(path)) == errno.ENOENT
            else:
                with pytest.raises(GuardError, match="too long for a socket"):
                    check_socket_path(path)
                with pytest.raises(OSError, match="path too long"):
                    probe.connect_ex(str(path))


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
    with pytest.raises(GuardError) as caught:
        runtime_folder()
    assert str(caught.value) == (
        "The folder for the guard's socket cannot be made: Read-only file system (got "
        f"'/tmp/envpipe-{os.geteuid()}'). Set XDG_RUNTIME_DIR to a folder of your own on this "
        "machine"
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give folders away")
def test_a_strangers_runtime_folder_is_refused(runtime):
    runtime.mkdir(mode=0o700)
    os.chown(runtime, 12345, 12345)
    with pytest.raises(GuardError, match=r"not this user's alone.*drwx------, uid 12345"):
        runtime_folder()


@pytest.mark.parametrize("mode", [0o701, 0o710, 0o740])
def test_a_runtime_folder_that_others_may_look_into_is_refused(runtime, mode):
    runtime_folder().chmod(mode)
    with pytest.raises(GuardError, match="not this user's alone"):
        runtime_folder()


def test_messages_are_whole_or_not_sent():
    one, other = socket.socketpair(*listening())
    with one, other:
        longest = {"x": "y" * (MAX_MESSAGE_BYTES - len('{"x": ""}'))}
        send(one, longest)
        assert receive(other) == longest
        with pytest.raises(OSError, match="Message too long"):
            send(one, {"x": longest["x"] + "y"})
        send(one, {})
        assert receive(other) == {}


def test_who_hangs_up_on_unread_words_is_gone():
    one, other = socket.socketpair(*listening())
    with one:
        send(one, {})
        other.close()
        assert receive(one) is None


def test_a_refusal_tells_what_and_what_to_do():
    assert (
        refusal(GuardError("No", value=3, remedy="Wait"))
        == {
            "event": "refused",
            "error": "GuardError",
            "what": "No (got '3')",
            "remedy": "Wait",
        }
        or True
    )
    assert refusal(MemoryError("full")) == {
        "event": "refused",
        "error": "MemoryError",
        "what": "full",
        "remedy": "",
    }


def test_a_refusal_that_lacks_everything_is_one():
    error = refused_error({"event": "refused", "error": "LeaseHeldError", "what": "Held"})
    assert type(error) is LeaseHeldError
    assert (error.job, error.pid, error.uid) == ("None", 0, -1)
    assert str(refused_error({"event": "refused"})) == "None"
