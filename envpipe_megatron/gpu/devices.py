"""The door to the GPUs of this machine: lists them, opens them, and finds those that CUDA sees.

CUDA numbers the GPUs that CUDA_VISIBLE_DEVICES leaves, in its order; a driver numbers all GPUs of
the node. So no number of CUDA's ever goes to a driver: a GPU's uid does. A process that has CUDA
asks it (`uid_of_cuda_device`); one that has not reads the variables as CUDA does (`visible_gpus`).
What lists and opens is a back end (`gpu.registry`), imported when it is needed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from envpipe_megatron.gpu.base import (
    Gpu,
    GpuAddress,
    GpuError,
    NoDriverError,
    ReadThroughGpu,
)
from envpipe_megatron.gpu.registry import (
    READ_ONLY,
    Device,
    Driver,
    VendorGpu,
    backend_class,
    vendor_of,
    vendors,
)
from envpipe_megatron.gpu.site import SiteConfig, read_site

VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"
ORDER_VARIABLE = "CUDA_DEVICE_ORDER"


def vendors_here() -> tuple[tuple[type[VendorGpu], Driver], ...]:
    """Return the back ends that list GPUs, and have their driver here, with what it says.

    Raises NoDriverError, that of the first one, if no driver is here; GpuError if one fails.
    """
    found, missing = [], []
    for vendor in vendors():
        try:
            found.append((vendor, vendor.driver()))
        except NoDriverError as error:
            missing.append(error)
    if not found and missing:
        raise missing[0]
    return tuple(found)


def list_gpus() -> tuple[Device, ...]:
    """Return this node's GPUs, each vendor's in its library's order. Raises as `vendors_here`."""
    return tuple(device for vendor, _ in vendors_here() for device in vendor.list_gpus())


def unreadable_gpus() -> tuple[GpuError, ...]:
    """Return why GPUs that are here are not listed, such as one that fell off the bus."""
    try:
        return tuple(error for vendor, _ in vendors_here() for error in vendor.unreadable())
    except NoDriverError:
        return ()


def visible_gpus() -> tuple[Device, ...]:
    """Return the GPUs that this process sees, or would if it had CUDA, as CUDA numbers them.

    Raises GpuError if the variables do not say which they are, and as `list_gpus`.
    """
    return tuple(device for vendor, _ in vendors_here() for device in vendor.visible())


def uid_of_cuda_device(uuid: str) -> str:
    """Return the uid of the GPU that torch names `str(get_device_properties(i).uuid)`.

    Raises GpuError if no driver lists it.
    """
    devices = list_gpus()
    for device in devices:
        if uuid.lower() in (device.cuda_uuid.lower(), device.uid.lower()):
            return device.uid
    raise GpuError(
        "CUDA uses a GPU that no driver's library lists",
        value=uuid,
        remedy=f"Listed are {', '.join(d.uid for d in devices) or 'none'}. Give the container "
        "the same GPUs for 'compute' and 'utility'; instances of MIG cannot be controlled",
    )


def narrowed(numbers: Sequence[int]) -> str:
    """Return the variable's value that leaves these of the GPUs that CUDA shows this process.

    Empty where the variable leaves fewer; no driver is asked.
    """
    visible = os.environ.get(VISIBLE_VARIABLE)
    names = list(map(str, range(max(numbers) + 1))) if visible is None else visible.split(",")
    if max(numbers) >= len(names):
        return ""
    return ",".join(names[number].strip() for number in numbers)


def are_near(uid: str, other: str, level: str) -> bool:
    """Tell whether two GPUs are as near as NCCL_P2P_LEVEL asks. Raises GpuError."""
    return vendor_of(uid).are_near(uid, other, level)


def open_gpu(address: GpuAddress, site: SiteConfig | None = None) -> Gpu:
    """Open a GPU by its address, in any process of the node; `site` None means this machine's.

    The back end `none` opens it for reading only. Raises GpuError for an unknown back end, one that
    cannot open this GPU, a GPU whose clock nobody can lock, or a wrong site configuration.
    """
    backend = backend_class(address.backend)
    vendor = backend if issubclass(backend, VendorGpu) else vendor_of(address.uid)
    if address.backend == READ_ONLY or not vendor.drives_hardware:
        site = site or SiteConfig()  # a wrong file must not keep a GPU from being read
        gpu = vendor.from_uid(address.uid)
    else:
        site = site or read_site()
        gpu = vendor.from_uid(address.uid, site.reset_range_mhz)
        if obstacle := gpu.obstacle():
            raise obstacle
    return backend(gpu, site) if issubclass(backend, ReadThroughGpu) else gpu


def look_at(uid: str) -> VendorGpu:
    """Open a GPU as its vendor does, for what only that knows. Raises GpuError."""
    return vendor_of(uid).from_uid(uid)


def open_reader(address: GpuAddress) -> Gpu:
    """Open a GPU to read its meters; any back end may change its clock."""
    return open_gpu(address if address.backend == "emulated" else GpuAddress("none", address.uid))
