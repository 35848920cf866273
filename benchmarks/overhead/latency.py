"""From the end of a unit to the call of the driver, beside training threads of three kinds."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from benchmarks.overhead.trigger_latency import StandIn, measure

_LOOK_S = 2e-4
#: Width of a matrix whose product takes about a millisecond on a core.
_MATRIX = 256


class _Waiting(StandIn):
    """The training thread sleeps between launches: it waits for a neighbour."""

    def launch(self, position: int) -> None:
        time.sleep(0.9 * self.UNIT_S)

    def end_iteration(self) -> list[float]:
        while not self.end_ns(self._count - 1):
            time.sleep(_LOOK_S)
        return [float(self.end_ns(unit)) for unit in range(self._first, self._count)]


class _Computing(_Waiting):
    """The training thread is inside torch, which gives up the interpreter lock."""

    def __init__(self) -> None:
        super().__init__()
        self._matrix = torch.randn(_MATRIX, _MATRIX)

    def launch(self, position: int) -> None:
        end_s = time.perf_counter() + 0.9 * self.UNIT_S
        while time.perf_counter() < end_s:
            self._matrix @ self._matrix


#: What the training thread does, in words, and a stand-in for the GPU beside such a thread.
THREADS: dict[str, Callable[[], StandIn]] = {
    "waits": _Waiting,
    "is inside torch": _Computing,
    "runs pure Python": StandIn,
}


def measure_latency(
    thread: str, switch_interval_s: float, seconds: float
) -> dict[str, float] | None:
    """Units for some time beside one kind of training thread, a key of `THREADS`.

    Gives `median`, `p99`, `max` (microseconds from a unit's end to the driver's call) and `count`;
    None where the machine was too busy to answer any request in that time.
    """
    torch.set_num_threads(1)  # as in a rank: more would compete with the controller for cores
    found = measure(THREADS[thread](), switch_interval_s, seconds)["trigger_us"]
    return found if found["count"] else None
