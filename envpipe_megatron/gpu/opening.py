"""From a GPU's address to an object that controls it."""

from __future__ import annotations

from envpipe_megatron.gpu.base import DryRunGpu, Gpu, GpuAddress, GpuError, ReadOnlyGpu
from envpipe_megatron.gpu.site import SiteConfig, read_site

BACKENDS = ("nvml", "zeusd", "command", "dry_run", "none", "emulated")


def open_gpu(address: GpuAddress, site: SiteConfig | None = None) -> Gpu:
    """Open a GPU by its address, in any process of the node; `site` None means this machine's.

    The back end `none` opens it for reading alone. Back ends are imported when needed, since a
    guard should stay small. Raises GpuError for an unknown back end, one that cannot open this GPU,
    or a wrong site configuration.
    """
    root, is_emulated, index = address.uid.rpartition("#")
    if is_emulated and address.backend in ("emulated", "none"):
        from envpipe_megatron.gpu.emulated.emulated_gpu import EmulatedGpu

        emulated = EmulatedGpu.open(root, int(index))
        return ReadOnlyGpu(emulated) if address.backend == "none" else emulated
    if address.backend not in BACKENDS:
        raise GpuError(
            "Unknown GPU back end",
            value=address.backend,
            remedy=f"Use one of {', '.join(BACKENDS)}.",
        )
    from envpipe_megatron.gpu.backends.nvml import NvmlGpu

    if address.backend == "none":
        return ReadOnlyGpu(NvmlGpu(address.uid))
    site = site or read_site()
    gpu = NvmlGpu(address.uid, reset_range_mhz=site.reset_range_mhz)
    if gpu.unlisted is not None:
        raise gpu.unlisted
    match address.backend:
        case "zeusd":
            from envpipe_megatron.gpu.backends.zeusd import Zeusd, ZeusdGpu, zeusd_socket

            return ZeusdGpu(gpu, gpu.pci_bus_id, Zeusd(zeusd_socket(site)), site.reset_range_mhz)
        case "command":
            from envpipe_megatron.gpu.backends.command import CommandGpu

            return CommandGpu(gpu, gpu.index, site)
        case "dry_run":
            return DryRunGpu(gpu)
    return gpu


def open_reader(address: GpuAddress) -> Gpu:
    """Open a GPU to read its meters, whatever back end changes its clock."""
    return open_gpu(address if address.backend == "emulated" else GpuAddress("none", address.uid))
