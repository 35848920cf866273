"""Leases of tests: taken, left by dead guards, and undone as `envpipe clocks reset` does."""

import multiprocessing
import os
import signal
import subprocess

import pytest

from envpipe_megatron.gpu.base import GpuAddress, GpuError
from envpipe_megatron.gpu.emulated.emulated_gpu import EmulatedGpu
from envpipe_megatron.gpu.guard import lease as lease_module
from envpipe_megatron.gpu.guard.lease import Lease, OpenGpu, list_leases, undo_lease
from envpipe_megatron.gpu.guard.lease_file import LEASE_DIR_VARIABLE
from envpipe_megatron.gpu.guard.messages import ProcessIdentity
from envpipe_megatron.gpu.registry import open_gpu

REAL = GpuAddress("nvml", "GPU-11111111-2222-3333-4444-555555555555")


def undo_stale(open_gpu: OpenGpu) -> list[GpuAddress]:
    """Undo every stale lease; return the GPUs of those that are gone."""
    stale = [record for record in list_leases() if not record.live]
    return [record.address for record in stale if undo_lease(record, open_gpu)]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    path = tmp_path / "leases"
    monkeypatch.setattr(lease_module, "_PATIENCE_S", 0.0)
    monkeypatch.setenv(LEASE_DIR_VARIABLE, str(path))
    return path


@pytest.fixture
def gpu(tmp_path):
    return EmulatedGpu.create("a100-sxm", 0, tmp_path / "node")


class FakeGpu:
    """Counts resets; fails as often as told."""

    late_request_s = 0.0

    def __init__(self, failures=0):
        self.resets, self.failures = 0, failures

    def __call__(self, address):  # opens itself
        return self

    def reset_frequency(self):
        if self.failures:
            self.failures -= 1
            raise GpuError("the driver is busy")
        self.resets += 1


def dead():
    process = subprocess.Popen(["sleep", "60"])
    identity = ProcessIdentity.of(process.pid)
    process.kill()
    process.wait()
    return identity


def take(address, job="job", rank=None, open_gpu=open_gpu, **more):
    rank = rank or ProcessIdentity.own()
    return Lease.take(address, job, rank=rank, open_gpu=open_gpu, **more)


def left_by_a_dead_guard(address, rank, job="dead job"):
    """A lease whose guard has died; its rank may live."""

    def guard():
        Lease.take(address, job, rank=rank, open_gpu=FakeGpu())
        os.kill(os.getpid(), signal.SIGKILL)

    process = multiprocessing.get_context("fork").Process(target=guard)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    (record,) = [r for r in list_leases() if r.address == address]
    return record
