"""Memory that two processes share, on a driver that is made up."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch

from envpipe_megatron.gpu.backends import nvml
from envpipe_megatron.runtime.channel import cuda_device
from envpipe_megatron.runtime.channel.carrier import ChannelError
from envpipe_megatron.runtime.channel.cuda_device import CudaDevice

_MAPPED = 10**6
#: The least that is taken.
WHOLE = 2**21


class Driver:
    """All processes'; `calls` has what was allocated, opened, closed and freed, in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        #: The calls that refuse, counted from 0.
        self.refused: tuple[str, set[int]] = "", set()
        self._counts: dict[str, int] = {}
        #: Bytes that nobody has, that torch has and could give back, and that it has had in use.
        self.free, self.cached, self.peak = 2**40, 0, 0
        self._sizes: dict[int, int] = {}
        self.CUipcMemHandle = SimpleNamespace

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> tuple[Any, ...]:
            count = self._counts.setdefault(name, 0)
            self._counts[name] += 1
            full = name == "cuMemAlloc" and arguments[0] > self.free
            if full or (name == self.refused[0] and count in self.refused[1]):
                return (Refusal(2),)
            return 0, getattr(self, f"_{name}")(*arguments)

        call.__name__ = name
        return call

    def _cuMemAlloc(self, num_bytes: int) -> int:  # noqa: N802  # the driver's name
        address = 100 * (1 + len(self.calls))
        self.calls.append(("alloc", address))
        self._sizes[address] = num_bytes
        self.free -= num_bytes
        return address

    def _cuIpcGetMemHandle(self, address: int) -> Any:  # noqa: N802
        return SimpleNamespace(reserved=address.to_bytes(64))

    def _cuIpcOpenMemHandle(self, handle: Any, flags: int) -> int:  # noqa: N802
        address = int.from_bytes(handle.reserved)
        self.calls.append(("open", address))
        return address + _MAPPED

    def _cuIpcCloseMemHandle(self, address: int) -> None:  # noqa: N802
        self.calls.append(("close", address - _MAPPED))

    def _cuMemFree(self, address: int) -> None:  # noqa: N802
        self.calls.append(("free", address))
        self.free += self._sizes.pop(address)

    def _cuStreamDestroy(self, stream: int) -> None:  # noqa: N802
        self.calls.append(("destroy", stream))

    def empty_cache(self) -> None:
        self.free, self.cached = self.free + self.cached, 0


class Refusal(int):
    name = "CUDA_ERROR_OUT_OF_MEMORY"


@pytest.fixture
def driver(monkeypatch):
    made = Driver()
    monkeypatch.setattr(cuda_device, "driver", made)
    monkeypatch.setattr(cuda_device, "_bytes_at", lambda address, num_bytes: address)
    cuda = SimpleNamespace(
        current_device=lambda: 0,
        Event=lambda: None,
        mem_get_info=lambda: (made.free, 2**41),
        memory_reserved=lambda: made.cached + made.peak // 2,
        max_memory_allocated=lambda: made.peak,
        empty_cache=made.empty_cache,
        synchronize=lambda: made.calls.append(("synchronize", 0)),
    )
    monkeypatch.setattr(cuda_device, "torch", SimpleNamespace(cuda=cuda, device=torch.device))
    return made


def devices() -> list[CudaDevice]:
    """Of three stages."""
    values: dict[tuple[int, int], SimpleQueue[Any]] = {
        (boundary, side): SimpleQueue() for boundary in range(2) for side in range(2)
    }

    def exchange(boundary: int, side: int, value: Any) -> Any:
        values[boundary, side].put(value)
        return values[boundary, 1 - side].get(timeout=10)

    return [CudaDevice(exchange) for _ in range(3)]


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Return what each returns or raises."""

    def outcome(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except MemoryError as error:
            return str(error)

    with ThreadPoolExecutor(len(calls)) as threads:
        return list(threads.map(outcome, calls))


def test_stages_share_whatever_they_share_with_others(driver):
    first, second, third = devices()
    one = together(lambda: first.share(0, 0, 8), lambda: second.share(0, 1, 8))
    two = together(lambda: second.share(1, 0, 8), lambda: third.share(1, 1, 8))
    for (own, theirs), (others_own, others_theirs) in (one, two):
        assert (theirs, others_theirs) == (others_own + _MAPPED, own + _MAPPED)


def test_memory_is_freed_when_the_other_side_has_closed_it(driver):
    first, second, _ = devices()
    for _ in range(3):
        together(lambda: first.share(0, 0, 8), lambda: second.share(0, 1, 8))
    freed = [address for call, address in driver.calls if call == "free"]
    assert len(freed) == 4
    for address in freed:
        assert driver.calls.index(("close", address)) < driver.calls.index(("free", address))
    assert sum(call == "open" for call, _ in driver.calls) == 6


@pytest.mark.parametrize("call", ["cuMemAlloc", "cuIpcGetMemHandle", "cuIpcOpenMemHandle"])
def test_both_sides_know_when_one_cannot_and_keep_what_they_have(driver, call):
    first, second, _ = devices()
    before = together(lambda: first.share(0, 0, 8), lambda: second.share(0, 1, 8))
    held, done = driver.free, len(driver.calls)
    driver.refused = call, {3, 4}  # one side's, which asks for memory twice
    refused = f"{call}: CUDA_ERROR_OUT_OF_MEMORY"
    said = together(lambda: first.share(0, 0, 8), lambda: second.share(0, 1, 8))
    assert sorted(said) == [refused, f"on the other side: {refused}"]
    assert driver.free == held
    gone = {address for call, address in driver.calls[done:] if call in ("close", "free")}
    assert gone.isdisjoint(own for own, _ in before)
    driver.refused = "", set()  # they may try again, and give all back
    assert len(together(lambda: first.share(0, 0, 4), lambda: second.share(0, 1, 4))[0]) == 2
    together(lambda: first.share(0, 0, 0), lambda: second.share(0, 1, 0))
    assert driver.free == 2**40


def test_what_torch_keeps_for_itself_makes_room_but_not_what_it_will_need(driver):
    first, second, _ = devices()
    share = (lambda: first.share(0, 0, 8), lambda: second.share(0, 1, 8))
    driver.free, driver.cached, driver.peak = 0, 3 * WHOLE, 4 * WHOLE
    said = together(*share)  # 5 are there, and torch has had 4 in use
    assert "0 bytes are left beside the most that torch has taken" in str(said)
    assert (driver.free, driver.cached) == (3 * WHOLE, 0)  # one had its own, and gave it back
    driver.free, driver.cached = 0, 4 * WHOLE
    assert all(len(each) == 2 for each in together(*share))
    assert (driver.free, driver.cached) == (2 * WHOLE, 0)


def test_what_torch_will_need_is_known_though_its_peak_was_reset(driver):
    """As where memory is watched: by then torch counts from the last unit on."""
    first, second, _ = devices()
    share = (lambda: first.share(0, 0, 8), lambda: second.share(0, 1, 8))
    driver.free, driver.peak = 4 * WHOLE, 4 * WHOLE
    assert all(len(each) == 2 for each in together(*share))
    driver.peak, driver.cached = 0, 2 * WHOLE  # all of which it will need
    assert "0 bytes are left" in str(together(*share))


def test_a_number_is_stored_by_the_stream_that_is_current_then(driver, monkeypatch):
    written, status = [], 0

    def write(*arguments: int) -> int:
        written.append(arguments)
        return status

    library = SimpleNamespace(cuStreamWriteValue32_v2=write)
    monkeypatch.setattr(cuda_device.ctypes, "CDLL", lambda name: library)
    monkeypatch.setattr(cuda_device, "register", lambda page: 4096)
    streams = [70, 71]
    monkeypatch.setattr(cuda_device, "_current_handle", lambda device: streams.pop(0))
    count = cuda_device.counter_in_stream(SimpleNamespace(address=1, num_bytes=8192))
    count(64, 7)
    count(0, 8)
    assert written == [(70, 4160, 7, 0), (71, 4096, 8, 0)]
    streams, status = [72], 1
    with pytest.raises(RuntimeError, match="cuStreamWriteValue32: error 1 of CUDA"):
        count(0, 9)
    del library.cuStreamWriteValue32_v2
    with pytest.raises(RuntimeError, match="no cuStreamWriteValue32"):
        cuda_device.counter_in_stream(SimpleNamespace(address=1, num_bytes=8192))


def test_units_run_on_the_stream_that_is_current_then(driver, monkeypatch):
    current = 70
    monkeypatch.setattr(cuda_device, "_current_handle", lambda device: current)
    cuda_device.torch.cuda.current_stream = lambda: SimpleNamespace(cuda_stream=current)
    device, _, _ = devices()
    first = device.units()
    assert first.handle == 70
    assert device.units() is first
    current = 71
    assert device.units().handle == 71


def test_peer_copies_that_are_switched_off_for_nccl_are_for_all(driver, monkeypatch):
    for variable, off, on in (
        ("NCCL_P2P_DISABLE", ("1", "2"), ("0", "")),
        ("NCCL_P2P_LEVEL", ("LOC", "0"), ("NVL", "PHB", "SYS", "1", "")),
    ):
        for value in off + on:
            monkeypatch.setenv(variable, value)
            said = f"{variable}={value}" if value in off else None
            assert cuda_device.obstacle() == said


@pytest.mark.parametrize("by_nvlink", [False, True])
@pytest.mark.parametrize("level", ["NVL", "PIX", "1", "PXB", "2", "PHB", "3"])
def test_gpus_are_as_near_as_nccl_is_to_want_them(monkeypatch, level, by_nvlink):
    furthest = {"NVL": -1, "PIX": 10, "1": 10, "PXB": 20, "2": 20, "PHB": 30, "3": 30}[level]
    far = {}
    monkeypatch.setattr(cuda_device, "uid_of_cuda_device", {"a": "GPU-a", "b": "GPU-b"}.__getitem__)
    monkeypatch.setattr(nvml, "call_gpu", lambda uid, action, function: function(uid))
    monkeypatch.setattr(nvml, "handle_of", lambda uid: uid)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetP2PStatus", lambda a, b, how: 0 if by_nvlink else 5)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetTopologyCommonAncestor", lambda *two: far[two])
    monkeypatch.setenv("NCCL_P2P_LEVEL", level)
    for distance in (0, 10, 20, 30, 40):
        far["GPU-a", "GPU-b"] = distance
        if by_nvlink or distance <= furthest:
            cuda_device.check_distance("a", "b")
        else:
            with pytest.raises(ChannelError, match=f"NCCL_P2P_LEVEL={level}"):
                cuda_device.check_distance("a", "b")
    with pytest.raises(KeyError):  # a GPU that no driver knows may be far
        cuda_device.check_distance("a", "of another node")
    monkeypatch.setenv("NCCL_P2P_LEVEL", "SYS")
    cuda_device.check_distance("a", "of another node")
