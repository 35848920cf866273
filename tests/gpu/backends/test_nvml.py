"""The NVML back end against the fake library: what it asks of a GPU is in the call history."""

import itertools
import math
import os
import random
import signal
import threading

import pynvml
import pytest
from fake_nvml.models import MODELS

from envpipe_megatron.gpu.backends import nvml_library
from envpipe_megatron.gpu.backends.nvml import STALL_S, EnergyCounter, NvmlGpu, list_nvml_gpus
from envpipe_megatron.gpu.backends.nvml_library import NvmlNotSupportedError
from envpipe_megatron.gpu.base import (
    ClockState,
    EnergyReading,
    GpuAddress,
    GpuError,
)
from envpipe_megatron.gpu.control import ChosenControl
from envpipe_megatron.gpu.guard.resetting import that_can_be_undone
from envpipe_megatron.gpu.opening import open_gpu
from envpipe_megatron.gpu.site import SiteConfig

LOCK = "nvmlDeviceSetGpuLockedClocks"
RESET = "nvmlDeviceResetGpuLockedClocks"


@pytest.fixture
def node(fake_nvml):
    fake_nvml.use_here()
    return fake_nvml


def _changes(node):
    return [(call.function, call.uuid, call.arguments) for call in node.changes()]


def test_the_gpus_of_a_node(node):
    devices = list_nvml_gpus()
    assert [device.index for device in devices] == [0, 1, 2, 3]
    assert [device.uid for device in devices] == node.uuids
    assert [device.pci_bus_id for device in devices] == node.pci_bus_ids
    assert {device.name for device in devices} == {"NVIDIA A100-SXM4-80GB"}


def test_a_lost_gpu_does_not_hide_the_others(node, caplog):
    node.set_fault(node.uuids[1], "lost")
    assert [device.index for device in list_nvml_gpus()] == [0, 2, 3]
    assert "GPU 1 is left out" in caplog.text


@pytest.mark.parametrize("name", ["NO_PERMISSION", "UNKNOWN", "IRQ_ISSUE"])
def test_nor_does_one_that_may_not_be_used_or_is_sick(node, caplog, monkeypatch, name):
    """NVML counts GPUs of which it then gives no handle."""
    by_index = pynvml.nvmlDeviceGetHandleByIndex

    def handle(index):
        if index == 1:
            raise pynvml.NVMLError(getattr(pynvml, f"NVML_ERROR_{name}"))
        return by_index(index)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", handle)
    assert [device.index for device in list_nvml_gpus()] == [0, 2, 3]
    assert ("GPU 1 is left out" in caplog.text) == (name != "NO_PERMISSION")


@pytest.mark.parametrize("name", sorted(MODELS))
def test_clocks_come_from_the_device(fake_nvml_node, name):
    node = fake_nvml_node(name)
    node.use_here()
    gpu = NvmlGpu(node.uuids[0])
    memory_mhz = 9501 if name == "rtx3090" else max(MODELS[name].graphics_mhz)
    assert gpu.supported_frequencies_mhz == MODELS[name].graphics_mhz[memory_mhz]
    assert (gpu.name, gpu.index) == (MODELS[name].name, 0)
    assert gpu.address == GpuAddress("nvml", node.uuids[0])
    assert gpu.late_request_s == 0.0
    assert node.changes() == []


@pytest.mark.parametrize("written", [lambda bus: bus, str.lower, lambda bus: bus[4:].lower()])
def test_found_by_pci_bus_id_with_the_uuid_as_address(node, written):
    gpu = NvmlGpu(written(node.pci_bus_ids[2]))
    assert (gpu.address.uid, gpu.index) == (node.uuids[2], 2)
    assert gpu.pci_bus_id == node.pci_bus_ids[2]


def not_supported(*arguments):
    raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


@pytest.mark.parametrize(
    "lacks",
    [
        ("SupportedMemoryClocks",),
        ("SupportedGraphicsClocks",),
        ("SupportedMemoryClocks", "MaxClockInfo"),
    ],
)
def test_a_gpu_without_a_list_of_clocks_is_read_and_never_locked(node, monkeypatch, lacks):
    """As under WSL, on boards with one memory, and on some cards for displays."""
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMaxClockInfo", lambda handle, kind: 1980)
    others = ("EnforcedPowerLimit", "CurrentClocksEventReasons", "CurrentClocksThrottleReasons")
    for name in (*lacks, *others, "FieldValues"):
        monkeypatch.setattr(pynvml, f"nvmlDeviceGet{name}", not_supported)
    uid = node.uuids[0]
    gpu = open_gpu(GpuAddress("none", uid))
    highest = gpu.observed_frequency_mhz if "MaxClockInfo" in lacks else 1980
    assert gpu.supported_frequencies_mhz == (highest,)
    assert gpu.read_energy().energy_j > 0
    assert gpu.power_w > 0
    assert gpu.clock_state() == ClockState(None, gpu.observed_frequency_mhz)
    for backend in ("nvml", "dry_run"):
        with pytest.raises(NvmlNotSupportedError, match=f"lists no SM clocks.*{uid}"):
            open_gpu(GpuAddress(backend, uid))
        chosen = ChosenControl("auto", backend, "so")
        assert "lists no SM clocks" in that_can_be_undone(chosen, uid, SiteConfig()).warning
    assert "lists no SM clocks" in str(NvmlGpu(uid).control_obstacle())
    assert node.changes() == []


def test_lock_and_reset(node):
    gpu = open_gpu(GpuAddress("nvml", node.uuids[1]))
    assert gpu.requested_frequency_mhz is None
    gpu.lock_frequency(1200)
    assert node.locked_mhz(node.uuids[1]) == (1200, 1200)
    assert (gpu.requested_frequency_mhz, gpu.observed_frequency_mhz) == (1200, 1200)
    gpu.lock_frequency(900)
    gpu.reset_frequency()
    assert gpu.requested_frequency_mhz is None
    assert node.locked_mhz(node.uuids[1]) is None
    uuid = node.uuids[1]
    assert _changes(node) == [
        (LOCK, uuid, (1200, 1200)),
        (LOCK, uuid, (900, 900)),
        (RESET, uuid, ()),
    ]


def test_request_clock_reasons_and_limit_are_told_apart(node):
    gpu = NvmlGpu(node.uuids[0])
    assert gpu.clock_state() == ClockState(None, 1410, (), 400.0)
    gpu.lock_frequency(1410)
    node.set_fault(node.uuids[0], "clock_cap_mhz", 1305)
    assert gpu.clock_state() == ClockState(1410, 1305, ("power cap",), 400.0)


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


def test_what_a_gpu_does_not_tell_stays_empty(node, monkeypatch):
    def not_supported(*_):
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    for name in (
        "nvmlDeviceGetCurrentClocksEventReasons",
        "nvmlDeviceGetCurrentClocksThrottleReasons",
        "nvmlDeviceGetEnforcedPowerLimit",
        "nvmlDeviceGetMigMode",
        "nvmlDeviceGetVirtualizationMode",
    ):
        monkeypatch.setattr(pynvml, name, not_supported)
    gpu = NvmlGpu(node.uuids[0])
    assert gpu.clock_state() == ClockState(None, 1410, (), None)
    assert gpu.control_obstacle() is None


def test_an_old_driver_knows_the_reasons_by_their_old_name(node):
    node.set_fault(None, "old_driver")
    gpu = NvmlGpu(node.uuids[0])
    node.set_fault(node.uuids[0], "throttle_reasons", pynvml.nvmlClocksThrottleReasonSwPowerCap)
    for _ in range(2):
        assert gpu.clock_state().throttle_reasons == ("power cap",)
    called = [call.function for call in node.history() if "Reasons" in call.function]
    assert called == [
        "nvmlDeviceGetCurrentClocksEventReasons",
        "nvmlDeviceGetCurrentClocksThrottleReasons",
        "nvmlDeviceGetCurrentClocksThrottleReasons",
    ]


@pytest.mark.parametrize(("model", "reader"), [("h200", "FieldValues"), ("a100", "PowerUsage")])
def test_power_is_instantaneous(fake_nvml_node, model, reader):
    node = fake_nvml_node(model)
    node.use_here()
    gpu = NvmlGpu(node.uuids[0])
    gpu.lock_frequency(1200)
    before = len(node.history())
    assert gpu.power_w == 50 + 0.125 * 1200
    assert node.history()[-1].function == f"nvmlDeviceGet{reader}"
    assert gpu.power_w == 200.0
    # The field is asked for once where there is none.
    assert len(node.history()) - before == (2 if model == "h200" else 3)


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
        found.append(NvmlGpu(node.uuids[0]).index)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [0] * 8
    assert sum("Init" in call.function for call in node.history()) == 1


def test_a_forked_child_initialises_again(node):
    gpu = NvmlGpu(node.uuids[3])
    child = os.fork()
    if child == 0:
        status = 1
        try:
            gpu.lock_frequency(1005)
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert node.locked_mhz(node.uuids[3]) == (1005, 1005)
    gpu.reset_frequency()
    assert node.locked_mhz(node.uuids[3]) is None
    initialised = [call.pid for call in node.history() if "Init" in call.function]
    assert initialised == [os.getpid(), child]
    of_child = [call.function for call in node.history() if call.pid == child]
    assert of_child[0] == "nvmlInitWithFlags"  # and no call before


def test_a_child_that_is_forked_while_a_thread_initialises(node):
    with nvml_library._LIBRARY._lock:  # as that thread holds it
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            os._exit(len(list_nvml_gpus()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == len(node.uuids)


def test_somebody_else_shuts_nvml_down(node):
    gpu = NvmlGpu(node.uuids[0])
    pynvml.nvmlShutdown()
    gpu.lock_frequency(1200)
    assert gpu.observed_frequency_mhz == 1200
    assert _changes(node) == [(LOCK, node.uuids[0], (1200, 1200))]


def test_a_call_does_not_hold_up_the_interpreter(node):
    node.set_fault(node.uuids[0], "slow_ms", 100)
    other = NvmlGpu(node.uuids[1])
    gpu_thread = threading.Thread(target=NvmlGpu, args=(node.uuids[0],))
    gpu_thread.start()
    while gpu_thread.is_alive():
        assert other.observed_frequency_mhz == 1410
    pids_and_uuids = [call.uuid for call in node.history() if call.function.endswith("ClockInfo")]
    assert len(pids_and_uuids) > 10


POWER_W = 200.0


class Staircase:
    """A counter on a clock of its own: a read takes 3.4 ms and sees the value at some point."""

    def __init__(self, period_s, seed=0, read_s=0.0034):
        self._random = random.Random(seed)
        self._period_s = period_s
        self._phase_s = self._random.random() * period_s
        self._read_s = read_s
        self.now_s = 1e6  # eleven days of uptime
        self.offset_j = 0.0
        self.stalled_at_s = math.inf
        self.reads = 0
        self.refresh_s = {}
        self.fail = False

    def read_j(self):
        self.reads += 1
        if self.fail:
            raise RuntimeError("lost")
        before_s = self._random.random() * self._read_s
        seen_s = min(self.now_s + before_s, self.stalled_at_s)
        self.now_s += self._read_s
        number = math.floor((seen_s - self._phase_s) / self._period_s)
        energy_j = round(number * self._period_s * POWER_W, 3) + self.offset_j
        self.refresh_s[energy_j] = number * self._period_s + self._phase_s
        return energy_j

    def monotonic_s(self):
        return self.now_s

    def sleep(self, time_s):
        assert time_s >= 0
        self.now_s += time_s + self._random.random() * 1e-4  # sleeps overshoot

    def counter(self):
        return EnergyCounter(self.read_j, "GPU", self.monotonic_s, self.sleep)


def _poll_until_it_fails(counter, staircase):
    while True:
        counter.read()
        staircase.now_s += 0.05


@pytest.mark.parametrize("period_s", [0.1, 0.1003, 0.0997, 0.02, 0.15])
@pytest.mark.parametrize("poll_s", [0.0, 0.02, 0.0466, 0.05, 0.2, 7.0])
@pytest.mark.parametrize("seed", range(3))
def test_refreshes_are_where_the_reading_says(period_s, poll_s, seed):
    staircase = Staircase(period_s, seed)
    counter = staircase.counter()
    for _ in range(200):
        reading = counter.read()
        error_s = reading.time_s - staircase.refresh_s[reading.energy_j]
        assert abs(error_s) <= reading.time_uncertainty_s
        # Two reads and a step: half of that.
        assert reading.time_uncertainty_s < 0.0045
        staircase.now_s += poll_s


def test_a_poll_of_50_ms_sees_each_refresh_with_few_reads():
    staircase = Staircase(0.1)
    counter = staircase.counter()
    counter.read()
    staircase.reads = 0
    readings = set()
    for _ in range(400):
        readings.add(counter.read())
        staircase.now_s += 0.05
    energies = sorted(reading.energy_j for reading in readings)
    steps = {round(b - a) for a, b in itertools.pairwise(energies)}
    assert steps == {20}  # J in 0.1 s
    assert staircase.reads <= 4 * len(readings)


def test_a_fresh_reading_is_given_again():
    staircase = Staircase(0.1)
    counter = staircase.counter()
    reading = counter.read()
    reads = staircase.reads
    staircase.now_s = reading.time_s + 0.039
    assert counter.read() is reading
    assert staircase.reads == reads
    staircase.now_s = reading.time_s + 0.041
    assert counter.read().energy_j == reading.energy_j + 20.0


def test_a_counter_that_stands_still():
    staircase = Staircase(0.1)
    counter = staircase.counter()
    counter.read()
    staircase.stalled_at_s = staircase.now_s
    begun_s = staircase.now_s
    with pytest.raises(GpuError, match=r"not moved for 3 s.*not measured"):
        _poll_until_it_fails(counter, staircase)
    assert STALL_S < staircase.now_s - begun_s < STALL_S + 0.5
    staircase.stalled_at_s = math.inf
    assert counter.read().energy_j > 0


def test_a_counter_that_goes_back():
    staircase = Staircase(0.1)
    counter = staircase.counter()
    first = counter.read()
    staircase.offset_j = -1000.0
    staircase.now_s += 0.05
    with pytest.raises(GpuError, match="went back"):
        counter.read()
    after = counter.read()
    assert after.energy_j < first.energy_j
    assert after.time_s > first.time_s


def test_a_counter_that_goes_back_while_it_is_watched():
    staircase = Staircase(0.1)

    def sleep(time_s):
        staircase.sleep(time_s)
        staircase.offset_j = -1000.0

    counter = EnergyCounter(staircase.read_j, "GPU", staircase.monotonic_s, sleep)
    with pytest.raises(GpuError, match=r"counter of GPU went back from \d+\.\d{3} J"):
        counter.read()


def test_a_read_that_fails_leaves_the_next_one_whole():
    staircase = Staircase(0.1)
    counter = staircase.counter()
    counter.read()
    staircase.now_s += 0.05
    staircase.fail = True
    with pytest.raises(RuntimeError, match="lost"):
        counter.read()
    staircase.fail = False
    reading = counter.read()
    assert abs(reading.time_s - staircase.refresh_s[reading.energy_j]) < 0.0045


def test_rounding_asks_for_no_negative_sleep():
    """Of 0.991 s and a hair: ten periods less the lead less that are a hair below 0."""
    staircase = Staircase(0.1)
    counter = staircase.counter()
    counter._reading = EnergyReading(energy_j=-1.0, time_s=0.0)
    staircase.now_s = math.nextafter(10 * 0.1 - 0.009, math.inf)
    assert counter.read().time_s > 0.99
