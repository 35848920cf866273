"""From a GPU's address to an object that controls it."""

from __future__ import annotations

from envpipe_megatron.gpu.base import Gpu, GpuAddress, GpuError


def open_gpu(address: GpuAddress) -> Gpu:
    """Open a GPU by its address, in any process of the node.

    Back ends are imported when asked for: a guard loads no more than it needs.

    Raises:
        GpuError: an unknown back end, or one that cannot open this GPU.
    """
    if address.backend == "emulated":
        from envpipe_megatron.gpu.emulated import EmulatedGpu

        root, _, index = address.uid.rpartition("#")
        return EmulatedGpu.open(root, int(index))
    raise GpuError("Unknown GPU back end", value=address.backend, remedy="Use one of emulated.")
