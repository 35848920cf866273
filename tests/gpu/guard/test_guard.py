"""Guards and ranks as processes: what there is to see of them, and when they let go."""

import os
import queue
import re
import signal
import threading
from pathlib import Path

import pytest
from guard_rounds import DEADLINE_S, Node, Round, until

from envpipe_megatron.gpu.guard.hold import GuardEvent, guard_log, hold_gpu
from envpipe_megatron.gpu.guard.lease import list_leases
from envpipe_megatron.gpu.guard.messages import GuardError, GuardSettings
from envpipe_megatron.gpu.opening import open_gpu


@pytest.fixture(scope="module")
def node(fake_nvml_library, tmp_path_factory):
    made = Node(tmp_path_factory.mktemp("guarded"), fake_nvml_library)
    with made.in_use():
        yield made


@pytest.fixture
def round_(node, request):
    """Ranks and guards on NVML GPUs; nothing of them is left afterwards."""
    made = Round(node, request.node.name, 1, 0)
    yield made
    node.nvml.clear_faults()
    made.close()
    for thread in threading.enumerate():
        if thread.name == "envpipe-guard":
            thread.join(DEADLINE_S)


@pytest.fixture
def held(round_):
    """Holds the first GPU for this process, and locks its clock; what the guard says is noted."""

    def hold(on_event=None, **settings):
        hold = hold_gpu(
            round_.addresses[0],
            round_.job,
            on_event=on_event or events.put,
            settings=GuardSettings(**settings),
        )
        hold.events = events
        open_gpu(hold.address).lock_frequency(1200)
        return hold

    events = queue.SimpleQueue()
    return hold


def leased():
    return {record.address for record in list_leases()}


def test_the_lease_is_there_before_the_hold_is_answered_and_gone_after_the_release(round_, held):
    hold = held()
    (record,) = list_leases()
    assert (record.address, record.job, record.live) == (hold.address, round_.job, True)
    assert (record.guard.pid, record.rank.pid) == (hold.guard_pid, os.getpid())
    assert_detached(hold)
    hold.release()
    assert round_.node.locked_mhz(hold.address) is None
    assert leased() == set()
    hold.release()  # the second time nothing happens
    round_.end()
    calls = [c.function for c in round_.node.nvml.changes() if c.pid == hold.guard_pid]
    # Once before it holds the GPU, to see that it can.
    assert calls == ["nvmlDeviceResetGpuLockedClocks"] * 2


def assert_detached(hold):
    """Nothing of the rank's is open in its guard, which is neither its child nor of its session."""
    log = guard_log(hold.address)
    streams = sorted(Path(f"/proc/{hold.guard_pid}/fd").iterdir(), key=lambda fd: int(fd.name))
    opened = [str(fd.readlink()) for fd in streams]
    assert opened[:3] == [os.devnull, str(log), str(log)]
    rest = [name for name in opened[3:] if not name.startswith(("socket:", "anon_", "pipe:"))]
    assert all("/nvml/" in name or "/leases" in name for name in rest)
    fields = Path(f"/proc/{hold.guard_pid}/stat").read_text().rpartition(")")[2].split()
    assert int(fields[1]) != os.getpid()
    assert os.getsid(hold.guard_pid) != os.getsid(0)
    assert re.match(r"\d{4}-\d\d-\d\d [\d:,]+ INFO GPU-.*: held for Process", log.read_text())


@pytest.mark.parametrize("wakes", [True, False])
def test_a_guard_that_hangs_is_a_lost_one(round_, held, wakes):
    hold = held(heartbeat_s=1.0)
    os.kill(hold.guard_pid, signal.SIGSTOP)
    assert hold.events.get(timeout=DEADLINE_S) is GuardEvent.LOST
    until(lambda: round_.node.locked_mhz(hold.address) is None, "the reset")
    with pytest.raises(GuardError, match="not confirmed to be back"):
        hold.release(timeout_s=0.01)
    assert hold.address in leased()
    os.kill(hold.guard_pid, signal.SIGCONT if wakes else signal.SIGKILL)
    hold.release(DEADLINE_S)
    round_.await_back([hold.address])


def test_a_rank_can_hold_its_gpu_again_after_it_lost_the_guard(round_, held):
    called, go_on = threading.Event(), threading.Event()

    def on_event(event):
        called.set()
        go_on.wait(DEADLINE_S)

    former = held(on_event)
    os.kill(former.guard_pid, signal.SIGKILL)
    assert called.wait(DEADLINE_S)
    hold = held()
    go_on.set()
    former.release(DEADLINE_S)  # what is held anew is left alone
    assert hold.guard_pid != former.guard_pid
    assert round_.node.locked_mhz(hold.address) is not None
    hold.release()
    assert leased() == set()


def test_a_child_has_no_part_in_its_parents_hold(held):
    hold = held()
    child = os.fork()
    if child == 0:
        hold.release()
        os._exit(0)
    os.waitpid(child, 0)
    assert hold.address in leased()
    hold.release()
