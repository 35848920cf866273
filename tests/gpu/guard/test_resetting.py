"""A clock is locked only where it can be reset; `envpipe clocks reset` has tests of its own."""

import pytest

from envpipe_megatron.gpu.base import GpuAddress, GpuPermissionError
from envpipe_megatron.gpu.control import ChosenControl
from envpipe_megatron.gpu.guard.lease import Lease, list_leases
from envpipe_megatron.gpu.guard.lease_file import LEASE_DIR_VARIABLE
from envpipe_megatron.gpu.guard.messages import ProcessIdentity
from envpipe_megatron.gpu.guard.resetting import that_can_be_undone
from envpipe_megatron.gpu.opening import open_gpu
from envpipe_megatron.gpu.site import SiteConfig

NVML = ChosenControl("auto", "nvml", "this process has the right")


@pytest.fixture
def node(fake_nvml, monkeypatch, tmp_path):
    monkeypatch.setenv(LEASE_DIR_VARIABLE, str(tmp_path / "leases"))
    fake_nvml.use_here()
    return fake_nvml


def test_a_clock_that_can_be_reset_may_be_locked(node):
    (uid, *_) = node.uuids
    open_gpu(GpuAddress("nvml", uid)).lock_frequency(1200)
    assert that_can_be_undone(NVML, uid, SiteConfig()) is NVML
    assert node.locked_mhz(uid) is None, "what nobody has a lease for is gone"
    assert list_leases() == []


@pytest.mark.parametrize("backend", [None, "dry_run", "emulated"])
def test_what_sets_no_clock_has_nothing_to_undo(node, backend):
    chosen = ChosenControl("auto", backend, "so")
    assert that_can_be_undone(chosen, node.uuids[0], SiteConfig()) is chosen
    assert node.changes() == []


def test_who_may_not_reset_may_not_lock(node):
    """Training goes on without, unless control is required."""
    (uid, *_) = node.uuids
    node.set_fault(uid, "no_permission")
    found = that_can_be_undone(NVML, uid, SiteConfig())
    assert found.backend is None
    assert f"the clock of {uid} cannot be reset by nvml" in found.warning
    with pytest.raises(GpuPermissionError, match="is required, but the clock of"):
        that_can_be_undone(NVML, uid, SiteConfig(), require=True)
    assert list_leases() == []


def test_a_clock_that_a_job_holds_is_left_alone(node):
    address = GpuAddress("nvml", node.uuids[0])
    lease = Lease.take(address, "another", rank=ProcessIdentity.own(), open_gpu=open_gpu)
    open_gpu(address).lock_frequency(1200)
    found = that_can_be_undone(NVML, address.uid, SiteConfig())
    assert "job another" in found.warning
    with pytest.raises(GpuPermissionError, match=r"required, but .*job another"):
        that_can_be_undone(NVML, address.uid, SiteConfig(), require=True)
    assert node.locked_mhz(address.uid) == (1200, 1200)
    lease.release()
