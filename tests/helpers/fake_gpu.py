"""A GPU that tests hold in their hands: its time, its counter, its driver's speed and errors."""

import gc
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import pytest

from envpipe_megatron.gpu.base import ClockState, EnergyReading, Gpu, GpuAddress, PowerState
from envpipe_megatron.gpu.clock.controller import PageController
from envpipe_megatron.gpu.clock.page import ClockPage


@dataclass(eq=False)
class FakeGpu(Gpu):
    """Remembers every request.

    Args:
        now_s: its time base.
        observed_mhz: the clock that runs, whatever is asked for; None where it follows.
        counter_j: the energy counter at an instant; it shows the last multiple of `refresh_s`.
    """

    drives_hardware: ClassVar[bool] = False
    name: str = "fake"
    address: ClassVar[GpuAddress] = GpuAddress("fake", "fake#0")
    supported_frequencies_mhz: tuple[int, ...] = tuple(range(1400, 900, -100))
    now_s: float = 0.0
    counter_j: Callable[[float], float] = lambda time_s: 100 * time_s
    refresh_s: float = 0.1
    observed_mhz: int | None = None
    throttle_reasons: tuple[str, ...] = ()
    power_limit_w: float | None = None
    history: list[int | None] = field(default_factory=list)
    error: Exception | None = None
    reset_error: Exception | None = None
    #: Cleared by a test that wants the driver to take its time.
    driver: threading.Event = field(default_factory=threading.Event)
    in_driver: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.driver.set()

    def _lock(self, frequency_mhz: int) -> None:
        self.in_driver.set()
        assert self.driver.wait(10)
        if self.error is not None:
            raise self.error
        self.history.append(frequency_mhz)

    def _reset(self) -> None:
        if self.reset_error is not None:
            raise self.reset_error
        self.history.append(None)

    @property
    def requested_frequency_mhz(self) -> int | None:
        return self.history[-1] if self.history else None

    @property
    def observed_frequency_mhz(self) -> int:
        return (
            self.observed_mhz or self.requested_frequency_mhz or self.supported_frequencies_mhz[0]
        )

    def clock_state(self) -> ClockState:
        if self.error is not None:
            raise self.error
        return ClockState(
            self.requested_frequency_mhz,
            self.observed_frequency_mhz,
            self.throttle_reasons,
        )

    def power_state(self) -> PowerState:
        if self.error is not None:
            raise self.error
        return PowerState(power_limit_w=self.power_limit_w)

    @property
    def power_w(self) -> float:
        return 0.0

    def read_energy(self) -> EnergyReading:
        if self.error is not None:
            raise self.error
        # Rounded up by a hair, or 0.3 / 0.1 would still show the refresh at 0.2.
        refresh_s = int(self.now_s / self.refresh_s + 1e-9) * self.refresh_s
        return EnergyReading(energy_j=self.counter_j(refresh_s), time_s=refresh_s)

    def time_s(self) -> float:
        return self.now_s


class ServedPage(PageController):
    """Serves a page on a thread, in a guard's place, until it is closed."""

    def __init__(self, gpu: Gpu, page: ClockPage) -> None:
        super().__init__(gpu, page)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closing.wait(1e-4):
            self.serve()

    def close(self) -> None:
        self._closing.set()
        self._thread.join(20)
        assert not self._thread.is_alive()
        super().close()


def look_until(condition: Callable[[], object]) -> None:
    """Nothing tells of the fake's history growing, so look often."""
    end = threading.Event()
    for _ in range(20_000):
        if condition():
            return
        end.wait(0.001)
    raise AssertionError("waited in vain")


@pytest.fixture(scope="module", autouse=True)
def pages_go() -> Iterator[None]:
    """Where it is imported: mapped memory keeps a file open, and other tests count open files."""
    yield
    gc.collect()
