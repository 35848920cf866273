"""The GPUs of this machine, and the back ends that list, read and control them, by name.

A back end is a class derived from `Gpu`. One whose library lists GPUs is a `VendorGpu`; one that
only sets clocks its own way is a `ReadThroughGpu` of `gpu.base`. It is imported when it is needed.
Another package names its class in its `pyproject.toml`, after which commands, jobs and guards take
the name:

    [project.entry-points."envpipe_megatron.gpu_backends"]
    acme = "my_package.acme:AcmeGpu"

CUDA numbers the GPUs that CUDA_VISIBLE_DEVICES leaves, in its order; a driver numbers all GPUs of
the node. So no number of CUDA's ever goes to a driver: a GPU's uid does. A process that has CUDA
asks it (`uid_of_cuda_device`); one that has not reads the variables as CUDA does (`visible_gpus`).
"""

from __future__ import annotations

import logging
import os
import re
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Self

from envpipe_megatron.gpu.base import Gpu, GpuAddress, GpuError, NoDriverError, ReadThroughGpu
from envpipe_megatron.gpu.site import SiteConfig, read_site

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

_LOG = logging.getLogger(__name__)

GROUP = "envpipe_megatron.gpu_backends"
READ_ONLY = "none"
"""The back end that opens a GPU for reading only."""

_HARDWARE = {
    "nvml": "envpipe_megatron.gpu.backends.nvml:NvmlGpu",
    "zeusd": "envpipe_megatron.gpu.backends.zeusd:ZeusdGpu",
    "command": "envpipe_megatron.gpu.backends.command:CommandGpu",
}
"""Back ends that change real clocks, in the order in which `auto` tries them."""

_OWN = {
    **_HARDWARE,
    "dry_run": "envpipe_megatron.gpu.base:DryRunGpu",
    "emulated": "envpipe_megatron.gpu.emulated.emulated_gpu:EmulatedGpu",
    READ_ONLY: "envpipe_megatron.gpu.base:ReadOnlyGpu",
}

VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"
ORDER_VARIABLE = "CUDA_DEVICE_ORDER"

_PCI = re.compile(r"([0-9a-f]{4,8}):([0-9a-f]{2}):([0-9a-f]{2})(?:\.([0-7]))?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU of this node, as its vendor's library lists it now.

    `index` is the library's, for people and for commands that know no other name: it may be
    another one after a reset or a reboot.
    """

    backend: str
    index: int
    uid: str
    name: str
    pci_bus_id: str

    @property
    def address(self) -> GpuAddress:
        """Its address under the back end that lists it."""
        return GpuAddress(self.backend, self.uid)


@dataclass(frozen=True, slots=True)
class Driver:
    """A vendor's driver, and the newest CUDA (major, minor) that it runs; None if it runs none."""

    version: str
    cuda: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Activity:
    """A GPU's present work; what it does not report is () or None.

    `processes` are those that compute on it, by the node's numbers, which a container may not know.
    """

    processes: tuple[int, ...] = ()
    busy_percent: int | None = None
    temperature_c: int | None = None


class VendorGpu(Gpu):
    """A back end that lists GPUs and opens them itself; others read GPUs through it."""

    @classmethod
    @abstractmethod
    def owns(cls, uid: str) -> bool:
        """Tell whether a uid is formed as this vendor's, by its text only."""

    @classmethod
    @abstractmethod
    def list_gpus(cls) -> tuple[Device, ...]:
        """Return this node's GPUs. Raises NoDriverError without a driver, GpuError if it fails."""

    @classmethod
    @abstractmethod
    def from_uid(cls, uid: str, reset_range_mhz: tuple[int, int] | None = None) -> Self:
        """Open a GPU; a reset leaves these lowest and highest clocks, None for the default."""

    @classmethod
    @abstractmethod
    def driver(cls) -> Driver:
        """Return what the driver says of itself. Raises as `list_gpus` does."""

    @classmethod
    def unreadable(cls) -> tuple[GpuError, ...]:
        """Return why `list_gpus` leaves GPUs out that this process should see."""
        return ()

    @classmethod
    def visible(cls) -> tuple[Device, ...]:
        """Return the GPUs that this process sees, in the order of their numbers; by default all."""
        return cls.list_gpus()

    def obstacle(self) -> GpuError | None:
        """Return what makes this GPU refuse locks to every user, None if nothing is known to."""
        return None

    @classmethod
    def uid_of_cuda_device(cls, uuid: str) -> str | None:
        """Return the uid of the GPU that torch names so; by default None: it has none."""
        return None

    def device(self) -> Device:
        """Return where the vendor's library lists it now. Raises GpuError if it does not."""
        uid = self.address.uid
        for device in self.list_gpus():
            if device.uid == uid:
                return device
        raise GpuError("The driver lists no such GPU any more", value=uid)

    def activity(self) -> Activity:
        """Return what goes on on it. May take milliseconds."""
        return Activity()

    def memory_clocks_mhz(self) -> tuple[int, ...]:
        """Return the memory clocks that it has, highest first; () if it does not list them."""
        return ()

    @classmethod
    def are_near(cls, uid: str, other: str, level: str) -> bool:
        """Tell whether two GPUs are as near as NCCL_P2P_LEVEL asks; by default never."""
        return False


@cache
def _added() -> dict[str, EntryPoint]:
    """Return the back ends of other packages; none can replace one of ours."""
    from importlib.metadata import entry_points  # a guard of one of ours starts without it

    return {entry.name: entry for entry in entry_points(group=GROUP) if entry.name not in _OWN}


def hardware_backends() -> tuple[str, ...]:
    """Return names of back ends that change real clocks, in the order in which `auto` tries them.

    A back end of another package counts as one.
    """
    return (*_HARDWARE, *_added())


@cache
def backend_class(name: str) -> type[Gpu]:
    """Return the class of a back end, which is imported now; a guard should stay small.

    Raises GpuError if there is none of that name, or its package cannot be imported.
    """
    if name in _OWN:
        module, _, attribute = _OWN[name].partition(":")
        try:
            found: type[Gpu] = getattr(import_module(module), attribute)
        except ModuleNotFoundError as error:  # an old package takes it along as it goes
            raise NoDriverError(
                f"The GPU back end {name} cannot be imported: {error}",
                remedy="pip install --force-reinstall 'nvidia-ml-py>=12.570.86'",
            ) from error
        return found
    if name not in _added():
        known = ", ".join((*_OWN, *_added()))
        raise GpuError("Unknown GPU back end", value=name, remedy=f"Use one of {known}.")
    entry = _added()[name]
    try:
        loaded: type[Gpu] = entry.load()
        if not issubclass(loaded, Gpu):
            raise TypeError(f"{entry.value} is not derived from Gpu")
    except Exception as error:  # a package may do anything as it is imported
        raise GpuError(
            f"The GPU back end {name} cannot be imported: {error}",
            value=entry.value,
            remedy="Fix or remove the package that adds it",
        ) from error
    return loaded


@cache
def vendors() -> tuple[type[VendorGpu], ...]:
    """Return the back ends that list real GPUs; another package's that fails is left out.

    Raises NoDriverError if NVML's cannot be imported.
    """
    found = []
    for name in hardware_backends():
        try:
            backend = backend_class(name)
        except NoDriverError:
            raise
        except GpuError as error:
            _LOG.warning("%s", error)
            continue
        if issubclass(backend, VendorGpu):
            found.append(backend)
    return tuple(found)


def vendor_of(uid: str) -> type[VendorGpu]:
    """Return the back end whose GPU a uid names; GpuError if it is nobody's."""
    emulated = backend_class("emulated")
    assert issubclass(emulated, VendorGpu)
    if emulated.owns(uid):
        return emulated
    for vendor in vendors():
        if vendor.owns(uid):
            return vendor
    raise GpuError(
        "No back end knows a GPU of such a name",
        value=uid,
        remedy="See `envpipe clocks show`: GPUs have UUIDs, emulated ones a folder and an index",
    )


# --- the GPUs of this machine -------------------------------------------------------------------


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
    for vendor, _ in vendors_here():
        if (uid := vendor.uid_of_cuda_device(uuid)) is not None:
            return uid
    raise GpuError(
        "CUDA uses a GPU that no driver's library lists",
        value=uuid,
        remedy=f"Listed are {', '.join(d.uid for d in list_gpus()) or 'none'}. Give the container "
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
    """Open a GPU as its vendor does, to read it; any back end may change its clock.

    Raises GpuError.
    """
    return vendor_of(uid).from_uid(uid)


def pci_address(text: str) -> tuple[int, int, int, int]:
    """Return domain, bus, device and function of a PCI bus id, however a driver writes it.

    Raises GpuError if it is none.
    """
    match = _PCI.fullmatch(text)
    if match is None:
        raise GpuError("Not a PCI bus id", value=text, remedy="One is 0000:1b:00.0")
    domain, bus, device, function = (int(part or "0", 16) for part in match.groups())
    return domain, bus, device, function
