"""Guards and ranks as processes: what there is to see of them, and when they let go."""

import os
import re
import signal
from pathlib import Path

import pytest
from guard_rounds import DEADLINE_S, FAULTS, Node, Round, play, until

from envpipe_megatron.gpu.clock.page import DUE, ClockPage
from envpipe_megatron.gpu.guard import hold as hold_module
from envpipe_megatron.gpu.guard.hold import guard_log, hold_gpu
from envpipe_megatron.gpu.guard.lease import list_leases
from envpipe_megatron.gpu.guard.messages import ProcessIdentity
from envpipe_megatron.gpu.presets import override_for, sweep_range
from envpipe_megatron.gpu.registry import open_gpu

RESET = "nvmlDeviceResetGpuLockedClocks"


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


@pytest.fixture
def held(round_, monkeypatch):
    """Holds the first GPU for this process, and sets its clock."""
    monkeypatch.setattr(hold_module, "job_key", lambda: round_.job)

    def hold():
        page = ClockPage.create()
        hold = hold_gpu(round_.addresses[0], page)
        page.close_file()
        page.count(DUE, page.ask(1200))
        until(lambda: round_.node.locked_mhz(hold.address), "a clock")
        holds.append(hold)
        return hold

    holds = []
    yield hold
    for hold in holds:
        hold.release()
        hold._thread.join(DEADLINE_S)


def leased():
    return {record.address for record in list_leases()}


def test_the_lease_is_there_before_the_hold_is_answered_and_gone_after_the_release(round_, held):
    hold = held()
    (record,) = list_leases()
    assert (record.address, record.job, record.live) == (hold.address, round_.job, True)
    assert (record.guard.pid, record.rank.pid) == (hold.guard_pid, os.getpid())
    clocks = open_gpu(hold.address).supported_frequencies_mhz
    usual = sweep_range(clocks, override_for(open_gpu(hold.address).name), 0.0)
    assert (record.mark["highest_mhz"], record.mark["lowest_mhz"]) == (clocks[0], usual[-1])
    assert_detached(hold)
    hold.release()
    assert round_.node.locked_mhz(hold.address) is None
    assert leased() == set()
    hold.release()  # the second time nothing happens
    round_.end()
    calls = [c.function for c in round_.node.nvml.changes() if c.pid == hold.guard_pid]
    # Once before it holds the GPU, to see that it can.
    assert calls == [RESET, "nvmlDeviceSetGpuLockedClocks", RESET]


def assert_detached(hold):
    """Nothing of the rank's is open in its guard, which is neither its child nor of its session."""
    log = guard_log(hold.address)
    streams = sorted(Path(f"/proc/{hold.guard_pid}/fd").iterdir(), key=lambda fd: int(fd.name))
    opened = [str(fd.readlink()) for fd in streams]
    assert opened[0].startswith("socket:")
    assert opened[1:3] == [str(log), str(log)]
    rest = [name for name in opened[3:] if not name.startswith(("socket:", "anon_", "pipe:"))]
    assert all("/nvml/" in name or "/leases" in name or "/memfd:" in name for name in rest)
    fields = Path(f"/proc/{hold.guard_pid}/stat").read_text().rpartition(")")[2].split()
    assert int(fields[1]) != os.getpid()
    assert os.getsid(hold.guard_pid) != os.getsid(0)
    maps = Path(f"/proc/{hold.guard_pid}/maps").read_text()
    assert "numpy" not in maps, "a guard starts in half the time without"
    assert re.match(r"\d{4}-\d\d-\d\d [\d:,]+ INFO GPU-.*: held for Process", log.read_text())


def test_a_rank_can_hold_its_gpu_again_after_it_lost_the_guard(round_, held):
    former = held()
    os.kill(former.guard_pid, signal.SIGKILL)
    until(lambda: former._page.failure, "the end of its guard")
    hold = held()
    former.release()  # what is held anew is left alone
    assert hold.guard_pid != former.guard_pid
    assert round_.node.locked_mhz(hold.address) is not None
    hold.release()
    assert leased() == set()


def test_a_process_that_runs_another_program_is_no_rank_any_more(round_, held):
    """It may hold its GPU anew, as one that starts itself again does, though a child lives on."""
    told, tell = os.pipe()
    rank = os.fork()
    if rank == 0:
        held()
        if (child := os.fork()) == 0:
            signal.pause()
        os.write(tell, str(child).encode())
        os.execvp("sleep", ["sleep", "60"])
    child = int(os.read(told, 20))
    until(lambda: not leased(), "the end of its lease")
    assert round_.node.locked_mhz(round_.addresses[0]) is None
    for pid in (rank, child):
        assert ProcessIdentity.of(pid).is_alive()
        os.kill(pid, signal.SIGKILL)
    os.waitpid(rank, 0)
    os.close(told)
    os.close(tell)


@pytest.mark.parametrize("fault", FAULTS)
def test_no_clock_stays_locked_after(node, fault):
    seed = int.from_bytes(os.urandom(4), "big")
    print(f"seed {seed}")
    play(node, fault, seed % 4, seed)  # on a back end by chance
