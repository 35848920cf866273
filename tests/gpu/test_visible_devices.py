"""From CUDA's view to UUIDs: numbers, UUIDs, orders, and wrappers that show a rank one GPU."""

import pytest

from envpipe_megatron.gpu.backends.nvml import NvmlGpu
from envpipe_megatron.gpu.backends.nvml_library import visible_among
from envpipe_megatron.gpu.base import GpuError, GpuNotSupportedError
from envpipe_megatron.gpu.registry import Device, Driver, uid_of_cuda_device, visible_gpus


def _shown(variables):
    return visible_among(NvmlGpu.list_gpus(), variables)


def _indices(visible, **variables):
    """NVML's index of each device that CUDA shows."""
    if visible is not None:
        variables["CUDA_VISIBLE_DEVICES"] = visible
    return [device.index for device in _shown(variables)]


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        (None, [0, 1, 2, 3]),
        (" ", []),
        ("2", [2]),
        (" 3 , 1 ", [3, 1]),
        ("-1", []),
        ("1,-1,2", [1]),
        ("1,4,2", [1]),
        ("1,x,2", [1]),
        ("NoDevFiles", []),
    ],
)
def test_numbers_as_cuda_reads_them(node, visible, indices):
    assert _indices(visible, CUDA_DEVICE_ORDER="PCI_BUS_ID") == indices


def test_uuids_and_their_beginnings(node):
    uuids = node.uuids
    assert _indices(f"{uuids[2]},{uuids[0]}") == [2, 0]
    assert _indices(uuids[3][:12]) == [3]
    assert _indices(f"{uuids[1]},GPU-00000000-0000,{uuids[0]}") == [1]
    assert _indices("GPU-") == []  # the beginning of all


def test_numbers_follow_pci_addresses_whatever_nvml_says_first(monkeypatch):
    buses = ("00000001:01:00.0", "00000000:41:00.0", "00000000:0A:00.0")
    known = [Device("nvml", index, f"GPU-{index}", "one", bus) for index, bus in enumerate(buses)]
    monkeypatch.setattr(NvmlGpu, "driver", lambda: Driver("580"))
    monkeypatch.setattr(NvmlGpu, "list_gpus", lambda: known)
    assert _indices(None) == [2, 1, 0]
    assert _indices("0,2") == [2, 0]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert visible_gpus() == (known[1],)
    del known[1:]
    assert _shown({}) == _shown({"CUDA_VISIBLE_DEVICES": "0"})
    assert _shown({}) == (known[0],)


def test_unlike_gpus_have_numbers_only_in_pci_order(fake_nvml_node):
    node = fake_nvml_node("rtx3090", "h200")
    node.use_here()
    for variables in ({}, {"CUDA_VISIBLE_DEVICES": "1"}):
        with pytest.raises(GpuError, match=r"H200.*Set CUDA_DEVICE_ORDER=PCI_BUS_ID"):
            _shown(variables)
    assert _indices("1", CUDA_DEVICE_ORDER="PCI_BUS_ID") == [1]
    assert _indices(node.uuids[1]) == [1]
    assert _indices("") == []


def test_refused_entries(node):
    with pytest.raises(GpuNotSupportedError, match="MIG off"):
        _shown({"CUDA_VISIBLE_DEVICES": "MIG-1234"})
    with pytest.raises(GpuError, match="twice"):
        _shown({"CUDA_VISIBLE_DEVICES": f"1,{node.uuids[1]}"})


def test_uids_that_torch_gives(node):
    uuid = node.uuids[2]
    assert uid_of_cuda_device(uuid.removeprefix("GPU-")) == uuid
    assert uid_of_cuda_device(uuid.removeprefix("GPU-").upper()) == uuid
    assert uid_of_cuda_device(uuid) == uuid
    for unknown in ("0", "cuda:0", "GPU-1", "00000000-0000-0000-0000-000000000000", "MIG-1234"):
        with pytest.raises(GpuError, match=f"no driver's library lists.*{node.uuids[3]}"):
            uid_of_cuda_device(unknown)
