"""The NVML back end against the fake library: what it asks of a GPU is in the call history."""

import os
import threading
from collections.abc import Callable

import pynvml
import pytest
from fake_nvml.models import MODELS

from envpipe_megatron.gpu.backends.nvml import NvmlGpu
from envpipe_megatron.gpu.base import ClockState, GpuAddress, GpuError, GpuNotSupportedError
from envpipe_megatron.gpu.control import choose_for
from envpipe_megatron.gpu.registry import Driver, list_gpus, open_gpu

LOCK = "nvmlDeviceSetGpuLockedClocks"
RESET = "nvmlDeviceResetGpuLockedClocks"


def _changes(node):
    return [(call.function, call.uuid, call.arguments) for call in node.changes()]


@pytest.mark.parametrize("name", ["NO_PERMISSION", "UNKNOWN", "IRQ_ISSUE", "GPU_IS_LOST"])
def test_a_gpu_that_may_not_be_used_or_is_sick_does_not_hide_the_others(node, monkeypatch, name):
    """NVML counts GPUs of which it then gives no handle."""
    by_index = pynvml.nvmlDeviceGetHandleByIndex

    def handle(index):
        if index == 1:
            raise pynvml.NVMLError(getattr(pynvml, f"NVML_ERROR_{name}"))
        return by_index(index)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", handle)
    assert [device.index for device in NvmlGpu.list_gpus()] == [0, 2, 3]
    errors = [error.what for error in NvmlGpu.unreadable()]
    assert ["identify GPU 1" in what for what in errors] == [True] * (name != "NO_PERMISSION")


def test_a_container_without_libcuda_lists_its_gpus(node, monkeypatch):
    def no_library():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlSystemGetCudaDriverVersion_v2", no_library)
    assert [device.uid for device in list_gpus()] == node.uuids
    assert NvmlGpu.driver() == Driver("580.00.00-fake", None)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_clocks_come_from_the_device(fake_nvml_node, name):
    node = fake_nvml_node(name)
    node.use_here()
    gpu = NvmlGpu(node.uuids[0])
    memory_mhz = 9501 if name == "rtx3090" else max(MODELS[name].graphics_mhz)
    assert gpu.supported_frequencies_mhz == MODELS[name].graphics_mhz[memory_mhz]
    assert (gpu.name, gpu.device().index) == (MODELS[name].name, 0)
    assert gpu.address == GpuAddress("nvml", node.uuids[0])
    assert gpu.late_request_s == 0.0
    assert node.changes() == []


def not_supported(*arguments):
    raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


@pytest.mark.parametrize(
    "lacks",
    [
        ("SupportedMemoryClocks",),
        ("SupportedGraphicsClocks",),
        ("SupportedMemoryClocks", "MaxClockInfo"),
        (),  # the driver says so by an empty list
    ],
)
def test_a_gpu_without_a_list_of_clocks_is_read_and_never_locked(node, monkeypatch, lacks):
    """As under WSL, on boards with one memory, and on some cards for displays."""
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMaxClockInfo", lambda handle, kind: 1980)
    others = ("EnforcedPowerLimit", "CurrentClocksEventReasons", "CurrentClocksThrottleReasons")
    for name in (*lacks, *others, "FieldValues"):
        monkeypatch.setattr(pynvml, f"nvmlDeviceGet{name}", not_supported)
    if not lacks:
        monkeypatch.setattr(pynvml, "nvmlDeviceGetSupportedMemoryClocks", lambda handle: [])
    uid = node.uuids[0]
    gpu = open_gpu(GpuAddress("none", uid))
    now_mhz = gpu.clock_state().observed_mhz
    highest = now_mhz if "MaxClockInfo" in lacks else 1980
    assert gpu.supported_frequencies_mhz == (highest,)
    assert gpu.read_energy().energy_j > 0
    assert gpu.power_w > 0
    assert gpu.clock_state() == ClockState(None, now_mhz)
    for backend in ("nvml", "dry_run"):
        with pytest.raises(GpuNotSupportedError, match=f"lists no SM clocks.*{uid}"):
            open_gpu(GpuAddress(backend, uid))
        chosen = choose_for(uid, backend, one_clock=False)
        assert chosen.backend is None
        assert "lists no SM clocks" in chosen.warning
    assert "lists no SM clocks" in str(NvmlGpu(uid).obstacle())
    assert node.changes() == []


@pytest.mark.parametrize("name", ["NOT_FOUND", "UNKNOWN", "NO_PERMISSION"])
def test_a_gpu_that_fails_to_list_its_clocks_is_metered(node, monkeypatch, name):
    def fail(*arguments):
        raise pynvml.NVMLError(getattr(pynvml, f"NVML_ERROR_{name}"))

    monkeypatch.setattr(pynvml, "nvmlDeviceGetSupportedGraphicsClocks", fail)
    uid = node.uuids[0]
    chosen = choose_for(uid, "nvml", one_clock=False)
    assert "lists no SM clocks to choose from: Cannot read the SM clocks" in chosen.warning
    assert open_gpu(GpuAddress("none", uid)).read_energy().energy_j > 0
    node.set_fault(uid, "lost")
    with pytest.raises(GpuError, match="lost"):
        NvmlGpu(uid)


def test_clock_reasons_and_limit_are_told_apart(node):
    gpu = NvmlGpu(node.uuids[0])
    assert gpu.clock_state() == ClockState(None, 1410)
    gpu.lock_frequency(1410)
    node.set_fault(node.uuids[0], "clock_cap_mhz", 1305)
    assert gpu.clock_state() == ClockState(None, 1305, ("power cap",))


def test_throttle_reasons_in_words(node):
    gpu = NvmlGpu(node.uuids[0])
    bits = (
        pynvml.nvmlClocksThrottleReasonGpuIdle
        | pynvml.nvmlClocksThrottleReasonHwSlowdown
        | pynvml.nvmlClocksThrottleReasonHwThermalSlowdown
        | 1 << 40
    )
    node.set_fault(node.uuids[0], "throttle_reasons", bits)
    assert gpu.clock_state().throttle_reasons == (
        *("idle", "hardware slowdown", "hardware thermal slowdown"),
        "reason 0x10000000000",
    )


def test_a_gpu_that_knows_no_mig_and_no_vgpu_is_neither(node, monkeypatch):
    for name in ("MigMode", "VirtualizationMode"):
        monkeypatch.setattr(pynvml, f"nvmlDeviceGet{name}", not_supported)
    assert NvmlGpu(node.uuids[0]).obstacle() is None


def test_an_old_driver_knows_the_reasons_by_their_old_name(node):
    node.set_fault(None, "old_driver")
    gpu = NvmlGpu(node.uuids[0])
    node.set_fault(node.uuids[0], "throttle_reasons", pynvml.nvmlClocksThrottleReasonSwPowerCap)
    assert gpu.clock_state().throttle_reasons == ("power cap",)
    called = [call.function for call in node.history() if "Reasons" in call.function]
    assert called == [
        "nvmlDeviceGetCurrentClocksEventReasons",
        "nvmlDeviceGetCurrentClocksThrottleReasons",
    ]


@pytest.mark.parametrize(("model", "reader"), [("h200", "FieldValues"), ("a100", "PowerUsage")])
def test_power_is_instantaneous(fake_nvml_node, model, reader):
    node = fake_nvml_node(model)
    node.use_here()
    gpu = NvmlGpu(node.uuids[0])
    gpu.lock_frequency(1200)
    for lacks_for_once in (False, model == "h200", False):
        node.set_fault(node.uuids[0], "no_instant_power", lacks_for_once or model == "a100")
        assert gpu.power_w == 50 + 0.125 * 1200
        wanted = "PowerUsage" if lacks_for_once else reader
        assert node.history()[-1].function == f"nvmlDeviceGet{wanted}"


def test_energy_of_a_window_is_power_times_time(node):
    gpu = NvmlGpu(node.uuids[0])
    gpu.lock_frequency(1200)
    gpu.read_energy()  # a refresh in which the clock changed
    first = gpu.read_energy()
    while (last := gpu.read_energy()).time_s < first.time_s + 0.25:
        pass
    time_s = last.time_s - first.time_s
    uncertain_s = first.time_uncertainty_s + last.time_uncertainty_s
    energy_j = last.energy_j - first.energy_j
    assert 200 * (time_s - uncertain_s) <= energy_j + 0.002
    assert energy_j <= 200 * (time_s + uncertain_s) + 0.002
    assert gpu.time_s() >= last.time_s


def test_threads_that_initialise_at_once(node):
    barrier = threading.Barrier(8)
    found = []

    def work():
        barrier.wait()
        found.append(NvmlGpu(node.uuids[0]).name)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == ["NVIDIA A100-SXM4-80GB"] * 8
    assert any("Init" in call.function for call in node.history())


def run_in_forked_child(*work: Callable[[], object]) -> int:
    """Run some calls in a forked child, which must end well; return its pid."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            for call in work:
                call()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    return child


def test_a_forked_child_initialises_again(node):
    gpu = NvmlGpu(node.uuids[3])
    child = run_in_forked_child(lambda: gpu.lock_frequency(1005))
    assert node.locked_mhz(node.uuids[3]) == (1005, 1005)
    gpu.reset_frequency()
    assert node.locked_mhz(node.uuids[3]) is None
    initialised = [call.pid for call in node.history() if "Init" in call.function]
    assert initialised == [os.getpid(), child]
    of_child = [call.function for call in node.history() if call.pid == child]
    assert of_child[0] == "nvmlInitWithFlags"  # and no call before


def test_a_forked_child_in_which_other_code_initialises_first(node):
    """NVML refuses there what it gave the parent, and not as uninitialised (driver 580)."""
    gpu = NvmlGpu(node.uuids[3])
    child = run_in_forked_child(pynvml.nvmlInit, lambda: gpu.lock_frequency(1005))
    of_child = [call.function for call in node.history() if call.pid == child]
    assert of_child[:2] == ["nvmlInitWithFlags", "nvmlDeviceGetHandleByUUID"]


def test_somebody_else_shuts_nvml_down(node):
    gpu = NvmlGpu(node.uuids[0])
    pynvml.nvmlShutdown()
    gpu.lock_frequency(1200)
    assert gpu.clock_state().observed_mhz == 1200
    assert _changes(node) == [(LOCK, node.uuids[0], (1200, 1200))]


def test_a_call_does_not_hold_up_the_interpreter(node):
    node.set_fault(node.uuids[0], "slow_ms", 100)
    other = NvmlGpu(node.uuids[1])
    gpu_thread = threading.Thread(target=NvmlGpu, args=(node.uuids[0],))
    gpu_thread.start()
    while gpu_thread.is_alive():
        assert other.clock_state().observed_mhz == 1410
    pids_and_uuids = [call.uuid for call in node.history() if call.function.endswith("ClockInfo")]
    assert len(pids_and_uuids) > 10
