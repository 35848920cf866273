"""The guard and its clients: whom it serves, what it cannot be made to do, and when it lets go."""

import os
import queue
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from guard_rounds import DEADLINE_S, Node, Round
from stale_leases import undo_stale

from envpipe_megatron.gpu.base import (
    FORBID_VARIABLE,
    ClockControlForbiddenError,
    GpuAddress,
    GpuError,
)
from envpipe_megatron.gpu.guard import client as guard_client
from envpipe_megatron.gpu.guard import loop as guard_loop
from envpipe_megatron.gpu.guard import process as guard_module
from envpipe_megatron.gpu.guard import protocol as guard_protocol
from envpipe_megatron.gpu.guard.client import GuardEvent, hold_gpu
from envpipe_megatron.gpu.guard.holding import Holding, Phase
from envpipe_megatron.gpu.guard.lease import LeaseHeldError, list_leases, undo_lease
from envpipe_megatron.gpu.guard.loop import Guard
from envpipe_megatron.gpu.guard.protocol import (
    SOCKET_VARIABLE,
    GuardError,
    GuardProtocolError,
    GuardSettings,
    job_key,
    receive,
    refused_error,
    runtime_folder,
    send,
    socket_path,
)
from envpipe_megatron.gpu.guard.socket import StartLock
from envpipe_megatron.gpu.opening import open_gpu

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.fixture(scope="module")
def node(fake_nvml_library, tmp_path_factory):
    made = Node(tmp_path_factory.mktemp("guarded"), fake_nvml_library)
    with made.in_use():
        yield made


@pytest.fixture
def round_(node, request):
    """Ranks and guards on NVML GPUs; nothing of them is left afterwards."""
    made = Round(node, request.node.name, 1, 0)
    sockets = runtime_folder()
    yield made
    node.nvml.clear_faults()
    made.close()
    for thread in threading.enumerate():
        if thread.name == "envpipe-guard":
            thread.join(DEADLINE_S)
    shutil.rmtree(sockets, onerror=unless_gone)


def unless_gone(call, path, error):
    """A guard whose ranks have left may be taking its own socket away."""
    if not isinstance(error[1], FileNotFoundError):
        raise error[1]


def start_guard(
    round_, *options, code="from envpipe_megatron.gpu.guard.process import main; main()"
):
    """A guard that is this process's child, so that its exit status can be seen."""
    path = socket_path(round_.job)
    log = path.with_suffix(".log")
    options = ["--socket", str(path), "--job", round_.job, "--log", str(log), *options]
    guard = subprocess.Popen([sys.executable, "-c", code, *options])
    round_.know_guard(guard.pid)
    while not listens(path):
        assert guard.poll() is None, log.read_text()
        time.sleep(0.002)
    return guard


def listens(path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        return probe.connect_ex(str(path)) == 0


def gpu_options(addresses):
    return [word for a in addresses for word in ("--gpu", a.backend, a.uid)]


def connect(path):
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(DEADLINE_S)
    connection.connect(str(path))
    return connection


def ask(connection, address):
    send(connection, {"op": "hold", "backend": address.backend, "uid": address.uid})
    return receive(connection)


def until(condition):
    end_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.001)


def leased():
    return {record.address for record in list_leases()}


# --- whom it serves ------------------------------------------------------------------------------


@needs_root
def test_another_user_is_refused(round_):
    guard = start_guard(round_)
    path = socket_path(round_.job)
    # The folder alone keeps others out; here they are let in, to meet the guard itself.
    with pytest.raises(PermissionError):
        _as_nobody(lambda: connect(path))
    for folder in (path.parent, *list(path.parents)[1:-1]):
        folder.chmod(folder.stat().st_mode | 0o011)
    path.chmod(0o777)
    answer = _as_nobody(lambda: receive(connect(path)))
    assert answer["event"] == "refused"
    assert f"uid {NOBODY}" in answer["what"]
    assert leased() == set()
    assert guard.poll() is None


def _as_nobody(do):
    """Do something as another user, in a child that has become it, and return what came out."""
    results, sent = os.pipe()
    if os.fork() == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            os.write(sent, repr(do()).encode())
        except BaseException as error:
            os.write(sent, type(error).__name__.encode())
        os._exit(0)
    os.close(sent)
    with os.fdopen(results, "rb") as file:
        said = file.read().decode()
    os.wait()
    if said == "PermissionError":
        raise PermissionError
    return eval(said, {"__builtins__": {}})


def test_a_gpu_that_is_not_on_the_starters_list_is_not_touched(round_):
    allowed, other = round_.addresses[:2]
    start_guard(round_, *gpu_options([allowed]))
    before = len(round_.node.nvml.changes())
    connection = connect(socket_path(round_.job))
    answer = ask(connection, other)
    assert answer["event"] == "refused"
    assert "not on the list" in answer["what"]
    with pytest.raises(GuardError, match="not on the list"):
        hold_gpu(other, round_.job, on_event=print)
    # Nor by another spelling of its address, nor by a release or a beat without a hold.
    for words in ({"op": "hold", "backend": "zeusd", "uid": other.uid}, {"op": "release"}):
        connection = connect(socket_path(round_.job))
        send(connection, words)
        answer = receive(connection)
        assert answer is None or answer["event"] == "refused"
    assert len(round_.node.nvml.changes()) == before
    hold = hold_gpu(allowed, round_.job, on_event=print)
    hold.release()
    assert {call.uuid for call in round_.node.nvml.changes()[before:]} == {allowed.uid}


def test_a_gpu_that_another_client_holds_is_not_touched(round_):
    (rank,) = round_.start(1, steady=True)
    clock = round_.node.locked_mhz(rank.address)
    assert clock is not None
    connection = connect(socket_path(round_.job))
    answer = ask(connection, rank.address)
    assert isinstance(refused_error(answer), LeaseHeldError)
    assert receive(connection) is None
    with pytest.raises(LeaseHeldError, match="Another rank of this job"):
        hold_gpu(rank.address, round_.job, on_event=print)
    assert round_.node.locked_mhz(rank.address) == clock
    round_.finish([rank])
    round_.end()


def test_no_operation_locks_a_clock(round_):
    hold = hold_gpu(round_.addresses[0], round_.job, on_event=print)
    guard_pid = hold.guard_pid
    hold.release()
    calls = [call.function for call in round_.node.nvml.changes() if call.pid == guard_pid]
    assert calls == ["nvmlDeviceResetGpuLockedClocks"]


# --- holding and letting go ----------------------------------------------------------------------


def assert_detached(guard_pid, path):
    """Nothing of the rank's is open in its guard, which is neither its child nor of its session."""
    log = path.with_suffix(".log")
    streams = sorted(Path(f"/proc/{guard_pid}/fd").iterdir(), key=lambda fd: int(fd.name))
    opened = [str(fd.readlink()) for fd in streams]
    assert opened[:3] == [os.devnull, str(log), str(log)]
    rest = [name for name in opened[3:] if not name.startswith(("socket:", "anon_inode:"))]
    assert all("/nvml/" in name or "/leases/" in name for name in rest)
    parent = Path(f"/proc/{guard_pid}/stat").read_text().rpartition(")")[2].split()[1]
    assert int(parent) != os.getpid()
    assert os.getsid(guard_pid) != os.getsid(0)
    assert [file.stat().st_mode & 0o777 for file in (log, path)] == [0o600, 0o700]
    assert re.match(r"\d{4}-\d\d-\d\d [\d:,]+ INFO GPU-.*: held for Process", log.read_text())


def test_the_lease_is_there_before_the_hold_is_answered_and_gone_after_the_release(round_):
    address = round_.addresses[0]
    hold = hold_gpu(address, round_.job, on_event=print)
    (record,) = list_leases()
    assert (record.address, record.job, record.live) == (address, round_.job, True)
    assert (record.guard.pid, record.rank.pid) == (hold.guard_pid, os.getpid())
    assert_detached(hold.guard_pid, socket_path(round_.job))
    round_.know_guard(hold.guard_pid)
    open_gpu(address).lock_frequency(1200)
    hold.release()
    assert round_.node.locked_mhz(address) is None
    assert leased() == set()
    hold.release()  # the second time nothing happens
    round_.end()
    assert [path.suffix for path in runtime_folder().iterdir()] == [".log"]


def test_ranks_of_a_job_share_one_guard_whoever_comes_first(round_):
    holds = []

    def hold(address):
        holds.append(hold_gpu(address, round_.job, on_event=print))

    threads = [threading.Thread(target=hold, args=(a,)) for a in round_.addresses]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({hold.guard_pid for hold in holds}) == 1
    for one in holds:
        one.release()


def test_a_restarted_rank_waits_until_its_predecessors_clock_is_back(round_):
    first, other = round_.start(2, steady=True)
    round_.node.nvml.set_fault(first.address.uid, "timeout")
    first.kill(signal.SIGKILL)
    first.wait()
    held = []
    waiting = threading.Thread(
        target=lambda: held.append(hold_gpu(first.address, round_.job, on_event=print))
    )
    waiting.start()
    (guard_pid,) = round_.guards
    until(lambda: any(c.pid == guard_pid and c.result for c in round_.node.nvml.changes()))
    assert held == []
    round_.node.nvml.clear_faults()
    waiting.join(DEADLINE_S)
    assert round_.node.locked_mhz(first.address) is None
    held[0].release()
    round_.finish([other])
    round_.end()


def test_one_gpus_hanging_driver_does_not_keep_another_from_its_reset(round_):
    slow, quick = round_.start(2, steady=True)
    round_.node.nvml.set_fault(slow.address.uid, "slow_ms", 1_000_000)
    slow.kill(signal.SIGKILL)
    quick.kill(signal.SIGKILL)
    round_.await_back([quick.address])
    assert slow.address in leased()
    assert round_.node.locked_mhz(slow.address) is not None
    round_.node.nvml.clear_faults()
    round_.kill_guard()
    until(lambda: slow.address in undo_stale(open_gpu))
    round_.end()


def test_a_reset_that_fails_for_good_leaves_the_lease_and_an_exit_status(round_):
    guard = start_guard(round_, "--give-up-s", "0.3")
    stuck, fine = round_.start(2, steady=True)
    round_.node.nvml.set_fault(stuck.address.uid, "no_permission")
    fine.tell("finish")  # however long it takes, and not given up
    round_.await_back([fine.address])
    stuck.kill(signal.SIGKILL)
    assert guard.wait(DEADLINE_S) == 1
    (record,) = list_leases()
    assert (record.address, record.live) == (stuck.address, False)
    log = socket_path(round_.job).with_suffix(".log").read_text()
    assert f"{stuck.address.uid}: given up" in log
    round_.node.nvml.clear_faults()
    assert undo_stale(open_gpu) == [stuck.address]
    round_.end()


def test_a_full_disk_for_the_log_keeps_no_clock_locked(round_):
    path = socket_path(round_.job)
    guard = start_guard(round_, "--log", "/dev/full")
    ranks = round_.start(2)
    for rank in ranks:
        rank.kill(signal.SIGKILL)
    assert guard.wait(DEADLINE_S) == 0
    assert not path.exists()
    round_.end()


# --- being told to stop --------------------------------------------------------------------------


def test_ranks_that_ignore_the_stop_lose_the_guard_and_clean_up_themselves(round_):
    guard = start_guard(round_, "--stop-s", "0.2")
    events = queue.SimpleQueue()
    hold = hold_gpu(round_.addresses[0], round_.job, on_event=events.put)
    open_gpu(hold.address).lock_frequency(1200)
    guard.terminate()
    assert guard.wait(DEADLINE_S) == 1
    said = [events.get(timeout=DEADLINE_S)]
    while said[-1] is not GuardEvent.LOST:
        said.append(events.get(timeout=DEADLINE_S))
    assert said[0] is GuardEvent.STOP
    round_.await_back([hold.address])
    hold.release()


def test_a_release_in_the_callback_is_answered(round_):
    guard = start_guard(round_)
    done = threading.Event()

    def on_event(event):
        hold.release()
        done.set()

    hold = hold_gpu(round_.addresses[0], round_.job, on_event=on_event)
    guard.send_signal(signal.SIGINT)
    assert guard.wait(DEADLINE_S) == 0
    assert done.wait(DEADLINE_S)
    assert leased() == set()


# --- losing the guard ----------------------------------------------------------------------------


def test_a_guard_that_hangs_is_a_lost_one(round_):
    guard = start_guard(round_, "--heartbeat-s", "1")
    events = queue.SimpleQueue()
    hold = hold_gpu(round_.addresses[0], round_.job, on_event=events.put)
    open_gpu(hold.address).lock_frequency(1200)
    guard.send_signal(signal.SIGSTOP)
    assert events.get(timeout=DEADLINE_S) is GuardEvent.LOST
    until(lambda: round_.node.locked_mhz(hold.address) is None)
    with pytest.raises(GuardError, match="died or hangs"):
        hold.release(timeout_s=0.05)
    guard.kill()
    guard.wait()
    round_.await_back([hold.address])


def test_a_guard_that_answers_is_not_lost_however_little_it_has_to_say(round_, monkeypatch):
    start_guard(round_, "--heartbeat-s", "3")
    beats, events = queue.SimpleQueue(), queue.SimpleQueue()
    plain_send = guard_client.send

    def send(connection, message):
        plain_send(connection, message)
        if message["op"] == "beat":
            beats.put(message)

    monkeypatch.setattr(guard_client, "send", send)
    hold = hold_gpu(round_.addresses[0], round_.job, on_event=events.put)
    for _ in range(3):
        beats.get(timeout=DEADLINE_S)
    assert events.empty()
    hold.release()


def test_the_lease_stays_where_the_callback_fails_because_the_rank_may_still_lock(round_):
    guard = start_guard(round_)

    def fail(event):
        raise RuntimeError("control has not ended")

    hold = hold_gpu(round_.addresses[0], round_.job, on_event=fail)
    open_gpu(hold.address).lock_frequency(1200)
    guard.kill()
    guard.wait()
    until(lambda: round_.node.locked_mhz(hold.address) is None)
    assert hold.address in leased()
    hold.release()
    assert leased() == set()


def test_a_rank_can_hold_its_gpu_again_after_it_lost_the_guard(round_):
    guard = start_guard(round_)
    lost = threading.Event()
    hold = hold_gpu(round_.addresses[0], round_.job, on_event=lambda event: lost.set())
    guard.kill()
    guard.wait()
    assert lost.wait(DEADLINE_S)
    again = hold_gpu(round_.addresses[0], round_.job, on_event=print)
    assert again.guard_pid != hold.guard_pid
    again.release()
    assert leased() == set()


def test_a_child_has_no_part_in_its_parents_hold(round_):
    hold = hold_gpu(round_.addresses[0], round_.job, on_event=print)
    child = os.fork()
    if child == 0:
        hold.release()
        os._exit(0)
    os.waitpid(child, 0)
    assert hold.address in leased()
    hold.release()


def test_a_guard_that_comes_round_lets_go(round_):
    guard = start_guard(round_, "--heartbeat-s", "1")
    lost = threading.Event()
    hold = hold_gpu(round_.addresses[0], round_.job, on_event=lambda event: lost.set())
    guard.send_signal(signal.SIGSTOP)
    assert lost.wait(DEADLINE_S)
    assert hold.address in leased()
    guard.send_signal(signal.SIGCONT)
    hold.release(DEADLINE_S)
    assert leased() == set()
    assert guard.wait(DEADLINE_S) == 0
    again = hold_gpu(round_.addresses[0], round_.job, on_event=print)
    again.release()


def test_a_driver_that_hangs_does_not_keep_the_rank_that_stands_in(round_):
    hanging, go_on = threading.Event(), threading.Event()

    class HangingGpu(LateGpu):
        late_request_s = 0.0

        def reset_frequency(self):
            hanging.set()
            go_on.wait(DEADLINE_S)

    guard = start_guard(round_)
    gpu = HangingGpu()
    hold = hold_gpu(round_.addresses[0], round_.job, on_event=print, open_gpu=lambda _: gpu)
    guard.kill()
    guard.wait()
    assert hanging.wait(DEADLINE_S)
    with pytest.raises(GuardError, match="not undone yet"):
        hold.release(timeout_s=0.05)
    go_on.set()
    hold.release(DEADLINE_S)
    assert leased() == set()


def test_what_a_rank_holds_anew_is_not_reset_by_who_stands_in_for_its_former_guard(round_):
    called, go_on = threading.Event(), threading.Event()

    def on_event(event):
        called.set()
        go_on.wait(DEADLINE_S)

    guard = start_guard(round_)
    former = hold_gpu(round_.addresses[0], round_.job, on_event=on_event)
    guard.kill()
    guard.wait()
    assert called.wait(DEADLINE_S)
    hold = hold_gpu(round_.addresses[0], round_.job, on_event=print)
    open_gpu(hold.address).lock_frequency(1200)
    go_on.set()
    former.release(DEADLINE_S)
    assert round_.node.locked_mhz(hold.address) is not None
    assert hold.address in leased()
    hold.release()


def test_signals_that_are_meant_for_ranks_are_ignored(round_):
    guard = start_guard(round_)
    hold = hold_gpu(round_.addresses[0], round_.job, on_event=print)
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        guard.send_signal(number)
    hold.release()
    assert guard.wait(DEADLINE_S) == 0


def test_a_folder_that_vanishes_keeps_nobody(round_):
    """As XDG_RUNTIME_DIR does when its user logs out."""
    guard = start_guard(round_)
    hold = hold_gpu(round_.addresses[0], round_.job, on_event=print)
    open_gpu(hold.address).lock_frequency(1200)
    shutil.rmtree(runtime_folder())
    hold.release()
    assert guard.wait(DEADLINE_S) == 0
    runtime_folder()  # for what cleans up


# --- starting ------------------------------------------------------------------------------------


def test_no_guard_is_started_and_nothing_touched_while_clock_control_is_forbidden(
    round_, monkeypatch
):
    monkeypatch.setenv(FORBID_VARIABLE, "1")
    before = len(round_.node.nvml.changes())
    with pytest.raises(ClockControlForbiddenError):
        hold_gpu(round_.addresses[0], round_.job, on_event=print)
    assert list(runtime_folder().iterdir()) == []
    # Nor does a guard that runs already, and stands under the ban itself, promise anything.
    start_guard(round_)
    monkeypatch.delenv(FORBID_VARIABLE)
    with pytest.raises(ClockControlForbiddenError):
        hold_gpu(round_.addresses[0], round_.job, on_event=print)
    assert len(round_.node.nvml.changes()) == before
    assert leased() == set()


def test_emulated_gpus_are_guarded_while_clock_control_is_forbidden(round_, monkeypatch):
    monkeypatch.setenv(FORBID_VARIABLE, "1")
    address = round_.node.addresses["emulated"][0]
    hold = hold_gpu(address, round_.job, on_event=print)
    open_gpu(address).lock_frequency(1200)
    hold.release()
    assert round_.node.locked_mhz(address) is None


def test_a_gpu_that_cannot_be_opened_is_refused_by_name(round_):
    with pytest.raises(GpuError, match="GPU-00000000"):
        hold_gpu(GpuAddress("nvml", "GPU-00000000-0000"), round_.job, on_event=print)
    assert leased() == set()


@pytest.mark.parametrize("made", [None, "a link"])
def test_a_guard_that_cannot_start_says_why(round_, tmp_path, made):
    log = tmp_path / ("log" if made else "none/log")
    if made:
        log.symlink_to(tmp_path / "precious")
    said = "Too many levels of symbolic links" if made else "No such file"
    with pytest.raises(GuardError, match=f"could not start.*{said}"):
        hold_gpu(round_.addresses[0], round_.job, on_event=print, log=log)
    assert not (tmp_path / "precious").exists()


def test_the_nodes_guard_is_used_and_never_started(round_, monkeypatch, tmp_path):
    monkeypatch.setenv(SOCKET_VARIABLE, str(tmp_path / "guard.sock"))
    with pytest.raises(GuardError, match=f"node's guard does not answer.*{SOCKET_VARIABLE}"):
        hold_gpu(round_.addresses[0], on_event=print)
    agents = start_guard(round_, "--socket", str(socket_path(round_.job)))
    monkeypatch.setenv(SOCKET_VARIABLE, str(socket_path(round_.job)))
    hold = hold_gpu(round_.addresses[0], "whatever the rank thinks", on_event=print)
    assert (hold.guard_pid, hold.job) == (agents.pid, round_.job)
    hold.release()


def test_a_guard_with_a_list_stays_until_its_starter_has_ended(round_):
    path = socket_path(round_.job)
    arguments = ["--socket", str(path), "--job", round_.job, "--log", str(path) + ".log"]
    arguments += gpu_options(round_.addresses[:1])
    code = (
        "import subprocess, sys\n"
        "guard = subprocess.Popen([sys.executable, '-m', 'envpipe_megatron.gpu.guard.process',"
        " *sys.argv[1:]])\n"
        "print(guard.pid, flush=True)\n"
        "input()\n"
    )
    agent = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    round_.know_guard(int(agent.stdout.readline()))
    until(lambda: listens(path))  # its file is there before that
    for _ in range(2):  # one job after another
        hold_gpu(round_.addresses[0], round_.job, on_event=print).release()
    assert not select.select([round_.guard], [], [], 0)[0]
    agent.communicate("end\n")
    round_.end()


def test_a_second_guard_at_the_same_socket_gives_way(round_):
    start_guard(round_)
    path = socket_path(round_.job)
    second = subprocess.run(
        [
            *(sys.executable, "-m", "envpipe_megatron.gpu.guard.process", "--socket", str(path)),
            *("--job", "second", "--log", str(path) + ".second"),
        ],
        timeout=DEADLINE_S,
    )
    assert second.returncode != 0
    assert "listens there already" in Path(str(path) + ".second").read_text()
    hold_gpu(round_.addresses[0], round_.job, on_event=print).release()


def test_start_lock_excludes_processes_and_survives_its_deletion(tmp_path):
    lock = StartLock(tmp_path / "s")
    assert lock.acquire(time.monotonic())
    results, sent = os.pipe()
    child = os.fork()
    if child == 0:
        other = StartLock(tmp_path / "s")
        os.write(sent, b"no" if not other.acquire(time.monotonic()) else b"yes")
        other.acquire(time.monotonic() + DEADLINE_S)
        other.release()
        os._exit(0)
    assert os.read(results, 10) == b"no"
    lock.release(delete=True)  # the child takes the new one
    assert os.waitpid(child, 0)[1] == 0
    os.close(results)
    os.close(sent)


# --- the small parts -----------------------------------------------------------------------------


class LateGpu:
    """A GPU whose requests outlive their process; notes when it was reset."""

    drives_hardware = False
    late_request_s = 7.0
    fails = False

    def __init__(self):
        self.resets = 0

    def reset_frequency(self):
        if self.fails:
            raise GpuError("the driver is busy")
        self.resets += 1


def test_a_dead_ranks_gpu_is_reset_once_more_after_its_late_requests(node, round_):
    gpu, posted = LateGpu(), queue.SimpleQueue()
    address = node.addresses["emulated"][0]
    holding = Holding(address, "job", None, GuardSettings(), lambda _: gpu, posted.put)
    posted.get(timeout=DEADLINE_S)(100.0)
    assert holding.phase is Phase.HELD
    holding.end(100.0, late=True)
    posted.get(timeout=DEADLINE_S)(100.1)
    assert (holding.phase, gpu.resets, holding.next_instant_s()) == (Phase.ENDING, 1, 107.0)
    assert address in leased()
    holding.on_time(106.9)
    holding.on_time(107.0)
    posted.get(timeout=DEADLINE_S)(107.1)
    assert (holding.phase, gpu.resets) == (Phase.OVER, 2)
    assert leased() == set()


def test_resets_that_fail_are_tried_again_further_and_further_apart(node, round_):
    gpu, posted, opened, told = LateGpu(), queue.SimpleQueue(), [], []
    address = node.addresses["emulated"][0]

    def open_it(_):
        opened.append(gpu)
        return gpu

    holding = Holding(address, "job", None, GuardSettings(), open_it, posted.put)
    holding.on_was_reset = lambda: told.append("reset")
    posted.get(timeout=DEADLINE_S)(0.0)
    gpu.fails, now_s, waits_s = True, 0.0, []
    holding.reset()
    for _ in range(9):
        posted.get(timeout=DEADLINE_S)(now_s)
        due_s = holding.next_instant_s()
        waits_s.append(round(due_s - now_s, 6))
        now_s = due_s - 1e-6
        holding.on_time(now_s)
        now_s = due_s
        holding.on_time(now_s)
        assert holding.next_instant_s() is None
    assert waits_s == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    assert len(opened) == 9  # by each anew: the driver may have been reloaded
    gpu.fails = False
    posted.get(timeout=DEADLINE_S)(now_s)
    assert (holding.phase, told, holding.next_instant_s()) == (Phase.HELD, ["reset"], None)
    gpu.fails = True
    holding.reset()
    posted.get(timeout=DEADLINE_S)(100.0)
    assert holding.next_instant_s() == 100.05
    holding.leave()
    assert undo_lease(*list_leases(), lambda _: LateGpu(), gave_up=True)


def test_what_cannot_be_brought_back_is_given_up_after_its_late_requests(node, round_):
    gpu, posted, over = LateGpu(), queue.SimpleQueue(), []
    address, settings = node.addresses["emulated"][0], GuardSettings(give_up_s=3.0)
    holding = Holding(address, "job", None, settings, lambda _: gpu, posted.put)
    holding.on_over = lambda: over.append(holding.undone)
    posted.get(timeout=DEADLINE_S)(100.0)
    gpu.fails = True
    holding.end(100.0, late=True)
    posted.get(timeout=DEADLINE_S)(100.0)
    holding.on_time(109.9)
    assert (holding.phase, over) == (Phase.ENDING, [])
    holding.on_time(110.0)
    assert (holding.phase, holding.next_instant_s(), over) == (Phase.OVER, None, [False])
    (record,) = list_leases()
    assert not record.live
    holding.end(111.0, late=True)  # nothing any more
    assert holding.next_instant_s() is None
    assert undo_lease(record, lambda _: LateGpu(), gave_up=True)


def test_the_reset_at_the_end_begins_after_the_end(node, round_):
    """Those under way before may have been done with when the rank locked for the last time."""
    gpu, posted = LateGpu(), queue.SimpleQueue()
    address = node.addresses["emulated"][0]
    holding = Holding(address, "job", None, GuardSettings(), lambda _: gpu, posted.put)
    posted.get(timeout=DEADLINE_S)(100.0)
    for _ in range(3):
        holding.reset()
    results = [posted.get(timeout=DEADLINE_S) for _ in range(2)]  # the third is one too many
    holding.end(100.0, late=False)
    for result in results:
        result(100.1)
    assert (holding.phase, address in leased()) == (Phase.ENDING, True)
    posted.get(timeout=DEADLINE_S)(100.2)
    assert (holding.phase, gpu.resets) == (Phase.OVER, 3)
    assert leased() == set()


def test_a_reset_in_distress_says_when_it_is_done(node, round_):
    """A guard without memory waits for that alone before it ends."""
    gpu, posted = LateGpu(), queue.SimpleQueue()
    address = node.addresses["emulated"][0]
    holding = Holding(address, "job", None, GuardSettings(), lambda _: gpu, posted.put)
    posted.get(timeout=DEADLINE_S)(100.0)
    assert holding.reset_in_distress().wait(DEADLINE_S)
    assert gpu.resets == 1
    holding.leave()
    undo_lease(*list_leases(), lambda _: gpu, gave_up=True)


def test_a_gpu_that_hangs_when_it_is_opened_is_given_up(node, round_):
    go_on, posted = threading.Event(), queue.SimpleQueue()
    address = node.addresses["emulated"][0]

    def open_late(_):
        go_on.wait(DEADLINE_S)
        return LateGpu()

    holding = Holding(address, "job", None, GuardSettings(), open_late, posted.put)
    holding.end(100.0, late=True)
    assert holding.next_instant_s() == 700.0
    holding.on_time(700.0)
    assert (holding.phase, holding.undone) == (Phase.OVER, True)
    go_on.set()
    posted.get(timeout=DEADLINE_S)(701.0)
    assert leased() == set()


def test_a_guard_that_stays_sleeps_while_no_rank_has_come(monkeypatch, tmp_path):
    monkeypatch.setattr(guard_loop, "_FIRST_RANK_S", 0.0)
    starter = os.pidfd_open(os.getpid())
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(tmp_path / "s"))
        guard = Guard(listener, "job", GuardSettings(), allowed=[], starter_pidfd=starter)
        assert guard._wait_s() is None
    os.close(starter)


def test_a_guard_sleeps_while_nothing_is_due(node, round_, monkeypatch, tmp_path):
    """An instant that has passed and means nothing any more would make it spin."""
    monkeypatch.setattr(guard_loop, "_FIRST_RANK_S", 0.0)
    gpu, address = LateGpu(), node.addresses["emulated"][0]
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        guard = Guard(listener, "job", GuardSettings(heartbeat_s=1e-3), open_gpu=lambda _: gpu)
        connection = connect(tmp_path / "s")
        guard._turn()
        assert guard._wait_s() is None  # the first rank has come, though it holds nothing
        send(connection, {"op": "hold", "backend": address.backend, "uid": address.uid})
        until(lambda: guard._turn() is None and leased())
        gpu.fails = True
        send(connection, {"op": "release"})
        until(lambda: guard._turn() is None and guard._holdings[0].phase is Phase.ENDING)
        time.sleep(0.002)  # no heartbeat, which matters no more
        until(lambda: guard._holdings[0]._retry_at_s or guard._turn())
        until(lambda: guard._turn() is None and guard._wait_s() > 0.0)
        guard._holdings[0].leave()
    (record,) = list_leases()
    assert undo_lease(record, lambda _: LateGpu(), gave_up=True)


def test_job_key_tells_jobs_and_nodes_apart_and_ranks_not():
    torchrun = {"TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}
    ranks = [{**torchrun, "RANK": str(rank), "GROUP_RANK": "0"} for rank in range(2)]
    assert job_key(ranks[0]) == job_key(ranks[1]) == "at a:29500, node 0"
    different = [
        ranks[0],
        {**ranks[0], "GROUP_RANK": "1"},
        {**ranks[0], "MASTER_PORT": "29501"},
        {**ranks[0], "TORCHELASTIC_RUN_ID": "x"},
        {**ranks[0], "SLURM_JOB_ID": "1"},
        {**ranks[0], "SLURM_JOB_ID": "1", "SLURM_STEP_ID": "2"},
        {"SLURM_JOB_ID": "1", "SLURM_NODEID": "3"},
        {},
    ]
    assert len({job_key(environ) for environ in different}) == len(different)


def test_a_runtime_folder_that_cannot_be_made_is_named(monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/proc/self")  # this user's; nothing can be made there
    with pytest.raises(GuardError, match=r"cannot be made.*/proc/self/envpipe"):
        runtime_folder()


def test_what_a_guard_must_be_given(capsys):
    with pytest.raises(SystemExit):
        guard_module.main([])
    assert "required: --socket, --job, --log" in capsys.readouterr().err


def test_the_runtime_folder_is_the_users_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = runtime_folder()
    assert (folder, folder.stat().st_mode & 0o777) == (tmp_path / "envpipe", 0o700)
    folder.chmod(0o755)
    with pytest.raises(GuardError, match="not this user's alone"):
        runtime_folder()
    folder.rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(GuardError, match="not this user's alone"):
        runtime_folder()


def test_a_path_too_long_for_a_socket_is_said(tmp_path, monkeypatch):
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    with pytest.raises(GuardError, match="too long"):
        socket_path("job")


def test_errors_keep_their_names_over_the_socket():
    original = LeaseHeldError("Held", job="j", pid=3, uid=0, remedy="Wait")
    told = refused_error(guard_protocol.refusal(original))
    assert (type(told), str(told)) == (LeaseHeldError, str(original))
    assert (told.job, told.pid, told.uid) == ("j", 3, 0)
    forbidden = ClockControlForbiddenError("No", value=1, remedy="Unset it")
    told = refused_error(guard_protocol.refusal(forbidden))
    assert (type(told), str(told)) == (ClockControlForbiddenError, str(forbidden))
    told = refused_error(guard_protocol.refusal(MemoryError()))
    assert type(told) is GuardError


def test_what_is_not_a_message_is_an_error():
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    one.send(b"{")
    with pytest.raises(GuardProtocolError):
        receive(other)
    one.close()
    assert receive(other) is None
