"""Which NVIDIA GPUs a process sees, and in which order, as CUDA reads its variables.

The rules are those of the CUDA C++ Programming Guide, section CUDA Environment Variables.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from envpipe_megatron.gpu.backends.nvml_library import UID_START
from envpipe_megatron.gpu.base import GpuError, GpuNotSupportedError
from envpipe_megatron.gpu.devices import ORDER_VARIABLE, VISIBLE_VARIABLE
from envpipe_megatron.gpu.registry import Device, pci_address


def visible_among(devices: Sequence[Device], variables: Mapping[str, str]) -> tuple[Device, ...]:
    """Return the GPUs that CUDA would show to a process with these variables, in its order.

    As in CUDA, an entry that names no GPU (`-1`, too high a number, an unknown UUID) hides itself
    and all after it. Like GPUs that CUDA numbers by their speed are taken to be numbered by PCI bus
    id. Raises GpuError if unlike ones are numbered so, one is named twice, or an instance of MIG
    is.
    """
    visible = variables.get(VISIBLE_VARIABLE)
    in_pci_order = sorted(devices, key=lambda device: pci_address(device.pci_bus_id))
    chosen: Sequence[Device] = in_pci_order
    by_number = True
    if visible is not None:
        entries = [entry.strip() for entry in visible.split(",")]
        by_number = any(re.fullmatch("[0-9]+", entry) for entry in entries)
        chosen = _chosen(entries, in_pci_order)
    names = sorted({device.name for device in in_pci_order})
    if by_number and chosen and len(names) > 1 and variables.get(ORDER_VARIABLE) != "PCI_BUS_ID":
        raise GpuError(
            "CUDA numbers unlike GPUs by their speed, which only CUDA can tell",
            value=names,
            remedy=f"Set {ORDER_VARIABLE}=PCI_BUS_ID, or name GPUs in {VISIBLE_VARIABLE} by UUID",
        )
    return tuple(chosen)


def _chosen(entries: Sequence[str], in_pci_order: Sequence[Device]) -> list[Device]:
    chosen: list[Device] = []
    for entry in entries:
        if entry.startswith("MIG-"):
            raise GpuNotSupportedError(
                "CUDA shows a MIG instance, whose clock and meter are its whole GPU's",
                value=entry,
                remedy="Train on whole GPUs, with MIG off, or without clock control",
            )
        named = _named(entry, in_pci_order)
        if named is None:
            break
        if named in chosen:
            raise GpuError(
                f"{VISIBLE_VARIABLE} names a GPU twice",
                value=entry,
                remedy="Name each GPU once: CUDA shows none otherwise",
            )
        chosen.append(named)
    return chosen


def _named(entry: str, in_pci_order: Sequence[Device]) -> Device | None:
    if re.fullmatch("[0-9]+", entry):
        number = int(entry)
        return in_pci_order[number] if number < len(in_pci_order) else None
    if not entry.startswith(UID_START):
        return None
    # The start of a UUID is enough if no other GPU's starts so.
    matching = [d for d in in_pci_order if d.uid.lower().startswith(entry.lower())]
    return matching[0] if len(matching) == 1 else None
