"""The memory of one rank's device, as its allocator counts it."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Reading:
    """One look at an allocator: what live tensors take, and what is neither live nor available.

    The latter are holes between live blocks, and freed blocks that another stream still uses.
    """

    allocated_bytes: int
    unusable_bytes: int = 0


class CudaMemory:
    """torch's caching allocator on the current device.

    Resetting the peak is seen by everyone who asks torch for it: `torch.cuda.max_memory_allocated`
    then counts from the last iteration that was watched.
    """

    def __init__(self) -> None:
        self._device = torch.cuda.current_device()

    def read(self) -> Reading:
        """One call into the allocator; the flat `memory_stats` takes several times as long."""
        stats = torch.cuda.memory.memory_stats_as_nested_dict(self._device)
        allocated = stats["allocated_bytes"]["all"]["current"]
        awaiting_streams = stats["active_bytes"]["all"]["current"] - allocated
        return Reading(
            allocated, awaiting_streams + stats["inactive_split_bytes"]["all"]["current"]
        )

    def peak_bytes(self) -> int:
        """As `torch.cuda.max_memory_allocated`."""
        return torch.cuda.max_memory_allocated(self._device)

    def reset_peak(self) -> None:
        """As `torch.cuda.reset_peak_memory_stats`."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def capacity_bytes(self) -> int:
        """What the driver has free and what the allocator has reserved.

        Segments without a live block are given back before an allocation fails, so they count.
        """
        free, _ = torch.cuda.mem_get_info(self._device)
        return free + torch.cuda.memory_reserved(self._device)

    def reserve(self, count: int) -> bool:
        """Let the allocator take from the driver what it lacks, and keep it.

        What it holds already is asked for first, if it has pieces of that size.
        """
        pieces = []
        try:
            while (lacking := count - torch.cuda.memory_reserved(self._device)) > 0:
                pieces.append(torch.empty(lacking, dtype=torch.uint8, device=self._device))
        except torch.OutOfMemoryError:
            return False
        return True


def device_memory() -> CudaMemory | None:
    """The memory of this rank's device; None without a CUDA device in use, or without counters."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's
        return None
    memory = CudaMemory()
    try:
        memory.read()
    except Exception as error:  # an allocator of somebody else's need not count
        logger.warning("The memory of this rank's device is not known: %s", error)
        return None
    return memory
