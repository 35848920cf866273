"""The fake library itself: real nvidia-ml-py talks to it, and processes share what it keeps."""

import os
import signal
import subprocess
import sys
import threading

import pynvml
import pytest
from fake_nvml.fake_nvml import FakeNvml, build_library, compilers

LOCK_FOREVER = """
import sys, pynvml
pynvml.nvmlInit()
handle = pynvml.nvmlDeviceGetHandleByUUID(sys.argv[1])
print("ready", flush=True)
clock = 210
while True:
    clock = 210 + (clock - 195) % 1200
    pynvml.nvmlDeviceSetGpuLockedClocks(handle, clock, clock)
"""


@pytest.fixture
def handles(fake_nvml):
    fake_nvml.use_here()
    pynvml.nvmlInit()
    return [pynvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in fake_nvml.uuids]


@pytest.mark.parametrize("compiler", ["cc", "zig"])
def test_each_compiler_builds_a_library_that_nvidia_ml_py_can_use(compiler, tmp_path):
    if compiler not in compilers():
        pytest.skip("this machine has no system compiler; the other one is from PyPI")
    library = build_library(tmp_path / "library", compilers()[compiler])
    node = FakeNvml(tmp_path / "node", library, ["h200", "rtx3090"])
    script = (
        "import pynvml as n; n.nvmlInit(); print(n.nvmlDeviceGetCount(), "
        "n.nvmlDeviceGetUUID(n.nvmlDeviceGetHandleByIndex(1)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **node.environment},
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["2", node.uuids[1]], done.stderr


def test_a_lock_outlives_its_process_and_is_in_the_history(fake_nvml):
    script = (
        "import sys, pynvml as n; n.nvmlInit(); "
        "n.nvmlDeviceSetGpuLockedClocks(n.nvmlDeviceGetHandleByUUID(sys.argv[1]), 900, 1200)"
    )
    uuid = fake_nvml.uuids[2]
    subprocess.run(
        [sys.executable, "-c", script, uuid],
        env={**os.environ, **fake_nvml.environment},
        check=True,
    )
    assert fake_nvml.locked_mhz(uuid) == (900, 1200)
    assert [fake_nvml.locked_mhz(other) for other in fake_nvml.uuids].count(None) == 3
    (change,) = fake_nvml.changes()
    assert (change.function, change.arguments, change.uuid, change.result) == (
        "nvmlDeviceSetGpuLockedClocks",
        (900, 1200),
        uuid,
        0,
    )
    assert change.pid != os.getpid()


def test_killed_callers_leave_a_state_that_agrees_with_the_history(fake_nvml):
    uuid = fake_nvml.uuids[0]
    for round_number in range(5):
        before = len(fake_nvml.changes())
        caller = subprocess.Popen(
            [sys.executable, "-c", LOCK_FOREVER, uuid],
            env={**os.environ, **fake_nvml.environment},
            stdout=subprocess.PIPE,
            text=True,
        )
        caller.stdout.readline()
        while len(fake_nvml.changes()) < before + 20 * (round_number + 1):
            pass
        caller.send_signal(signal.SIGKILL)
        caller.wait()
        changes = fake_nvml.changes()
        # A killed caller may have written its last line and not yet made the change.
        last = [call.arguments for call in changes[-2:]]
        assert fake_nvml.locked_mhz(uuid) in last


def test_faults_act_at_once_and_go(fake_nvml, handles):
    uuid = fake_nvml.uuids[1]
    pynvml.nvmlDeviceSetGpuLockedClocks(handles[1], 1200, 1200)
    for fault, code in {
        "no_permission": pynvml.NVML_ERROR_NO_PERMISSION,
        "lost": pynvml.NVML_ERROR_GPU_IS_LOST,
        "timeout": pynvml.NVML_ERROR_TIMEOUT,
        "not_supported": pynvml.NVML_ERROR_NOT_SUPPORTED,
        "mig": pynvml.NVML_ERROR_NOT_SUPPORTED,
        "vgpu": pynvml.NVML_ERROR_NOT_SUPPORTED,
    }.items():
        fake_nvml.set_fault(uuid, fault)
        with pytest.raises(pynvml.NVMLError) as raised:
            pynvml.nvmlDeviceResetGpuLockedClocks(handles[1])
        assert raised.value.value == code
        assert fake_nvml.changes()[-1].result == code
        pynvml.nvmlDeviceResetGpuLockedClocks(handles[0])
        fake_nvml.clear_faults()
    assert fake_nvml.locked_mhz(uuid) == (1200, 1200)


def test_fails_after_so_many_more_calls(fake_nvml, handles):
    fake_nvml.set_fault(fake_nvml.uuids[0], "fail_after", 2)
    for _ in range(2):
        pynvml.nvmlDeviceGetPowerUsage(handles[0])
    for _ in range(2):
        with pytest.raises(pynvml.NVMLError_Unknown):
            pynvml.nvmlDeviceGetPowerUsage(handles[0])


def test_a_capped_lock_is_accepted_and_its_clock_stays_below(fake_nvml, handles):
    uuid = fake_nvml.uuids[0]
    pynvml.nvmlDeviceSetGpuLockedClocks(handles[0], 1410, 1410)
    fake_nvml.set_fault(uuid, "clock_cap_mhz", 1305)
    assert fake_nvml.locked_mhz(uuid) == (1410, 1410)
    assert pynvml.nvmlDeviceGetClockInfo(handles[0], pynvml.NVML_CLOCK_SM) == 1305
    assert pynvml.nvmlDeviceGetCurrentClocksEventReasons(handles[0]) == 4


def _energies_over_a_refresh(handle):
    """The counter's values before and after its next change, in mJ, and how often it was read."""
    first = last = pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    reads = 1
    while last == first:
        last = pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
        reads += 1
    return first, last, reads


def test_the_energy_counter_moves_by_refreshes_at_the_power_of_the_clock(fake_nvml, handles):
    pynvml.nvmlDeviceSetGpuLockedClocks(handles[0], 1200, 1200)
    for _ in range(2):  # leaves the refresh in which the clock changed behind
        _energies_over_a_refresh(handles[0])
    before, after, reads = _energies_over_a_refresh(handles[0])
    assert reads > 2
    # 50 W and 0.125 W a MHz, so 20 J in each tenth of a second; a busy host may miss some.
    assert (after - before) % 20_000 in (0, 1, 19_999)


def test_the_energy_counter_stalls_and_goes_back(fake_nvml, handles):
    uuid = fake_nvml.uuids[0]
    fake_nvml.set_fault(uuid, "stall")
    stalled = pynvml.nvmlDeviceGetTotalEnergyConsumption(handles[0])
    _energies_over_a_refresh(handles[1])
    _energies_over_a_refresh(handles[1])
    assert pynvml.nvmlDeviceGetTotalEnergyConsumption(handles[0]) == stalled
    fake_nvml.set_fault(uuid, "energy_back_mj", 5000)
    assert pynvml.nvmlDeviceGetTotalEnergyConsumption(handles[0]) == stalled - 5000


def test_a_slow_gpu_does_not_hold_up_the_others(fake_nvml, handles):
    fake_nvml.set_fault(fake_nvml.uuids[0], "slow_ms", 200)
    thread = threading.Thread(target=pynvml.nvmlDeviceGetPowerUsage, args=(handles[0],))
    thread.start()
    while thread.is_alive():
        pynvml.nvmlDeviceGetIndex(handles[1])
    uuids = [call.uuid for call in fake_nvml.history() if call.function != "nvmlInitWithFlags"]
    slow = uuids.index(fake_nvml.uuids[0], len(handles))
    assert uuids[len(handles) : slow].count(fake_nvml.uuids[1]) > 1


def test_other_calls_that_change_a_gpu_are_seen(fake_nvml, handles):
    pynvml.nvmlDeviceSetPersistenceMode(handles[0], 1)
    pynvml.nvmlDeviceSetPowerManagementLimit(handles[1], 250_000)
    pynvml.nvmlDeviceSetApplicationsClocks(handles[2], 1215, 1200)
    pynvml.nvmlDeviceResetMemoryLockedClocks(handles[3])
    pynvml.nvmlDeviceGetCurrentClocksEventReasons(handles[3])
    assert [(call.function, call.uuid, call.arguments) for call in fake_nvml.changes()] == [
        ("nvmlDeviceSetPersistenceMode", fake_nvml.uuids[0], (1,)),
        ("nvmlDeviceSetPowerManagementLimit", fake_nvml.uuids[1], (250_000,)),
        ("nvmlDeviceSetApplicationsClocks", fake_nvml.uuids[2], (1215, 1200)),
        ("nvmlDeviceResetMemoryLockedClocks", fake_nvml.uuids[3], ()),
    ]


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("driver_mismatch", pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH),
        ("driver_not_loaded", pynvml.NVML_ERROR_DRIVER_NOT_LOADED),
    ],
)
def test_a_library_that_cannot_be_initialised(fake_nvml, fault, error):
    fake_nvml.use_here()
    fake_nvml.set_fault(None, fault)
    with pytest.raises(pynvml.NVMLError) as raised:
        pynvml.nvmlInit()
    assert raised.value.value == error
    fake_nvml.clear_faults()
    pynvml.nvmlInit()
    assert pynvml.nvmlDeviceGetCount() == 4


def test_a_forked_child_is_not_initialised(fake_nvml, handles):
    child = os.fork()
    if child == 0:
        try:
            pynvml.nvmlDeviceGetPowerUsage(handles[0])
        except pynvml.NVMLError as error:
            os._exit(error.value)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == pynvml.NVML_ERROR_UNINITIALIZED
    pynvml.nvmlDeviceGetPowerUsage(handles[0])
