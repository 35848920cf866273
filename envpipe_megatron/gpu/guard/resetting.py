"""Resets clocks that no guard holds: before a job locks any, and for `envpipe clocks reset`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from envpipe_megatron.gpu.base import Gpu, GpuAddress, GpuError, GpuPermissionError
from envpipe_megatron.gpu.control import (
    ChosenControl,
    check_controls,
    first_allowed,
    given_up,
    open_controlled,
)
from envpipe_megatron.gpu.devices import open_gpu
from envpipe_megatron.gpu.guard.hold import job_key
from envpipe_megatron.gpu.guard.lease import Lease, LeaseHeldError, OpenGpu, list_leases
from envpipe_megatron.gpu.guard.lease_file import LeaseFolderError
from envpipe_megatron.gpu.guard.messages import ProcessIdentity
from envpipe_megatron.gpu.registry import hardware_backends
from envpipe_megatron.gpu.site import SiteConfig

_JOB = "envpipe clocks reset"


def that_can_be_undone(
    chosen: ChosenControl, uid: str, site: SiteConfig, *, require: bool = False
) -> ChosenControl:
    """Give control of a GPU up if its clock cannot be reset: who may lock need not be allowed to.

    It is reset, under a lease, unless another job holds it. So is control given up of a GPU that
    cannot be opened but to read it. Raises GpuPermissionError if control is required, and given up.
    """
    if chosen.backend in (None, "emulated"):
        return chosen
    try:
        gpu = open_controlled(uid, chosen, site)
        if chosen.backend in hardware_backends():
            _reset_leased(gpu, job_key(), ProcessIdentity.own(), open_gpu)
    except GpuError as error:
        why = f"the clock of {uid} cannot be reset by {chosen.backend}: {error.what}"
        remedies = (f"{error.remedy}.",) if error.remedy else ()
        return given_up(chosen, why, remedies, require=require)
    return chosen


class ResetOutcome(NamedTuple):
    """The result for one GPU: `what` was done, or why not and what to do."""

    uid: str
    done: bool
    what: str


def reset_clocks(
    site: SiteConfig, addresses: Sequence[GpuAddress], *, dead_jobs: bool
) -> Iterator[ResetOutcome]:
    """Reset GPUs one by one, each under a lease, so that no job takes it at that moment.

    A real GPU whose back end is not allowed is reset by the first one that is. A lease that a dead
    job left on one of them is undone on the way; a GPU that a live job holds stays as it is. Where
    no lease can be written the clock is reset all the same, unless a job holds it.

    Args:
        dead_jobs: whether to undo, behind these, what dead jobs left on other GPUs; raises
            LeaseFolderError if a folder of leases is unsafe.
    """
    controls = check_controls(site)
    allowed = {check.backend for check in controls if check.allowed}
    #: The back end for real GPUs, or why there is none.
    chosen = first_allowed("auto", controls)

    def open_allowed(address: GpuAddress) -> Gpu:
        if address.backend not in hardware_backends():
            return open_gpu(address)
        backend = address.backend if address.backend in allowed else chosen.backend
        if backend is None:
            raise GpuPermissionError(chosen.why, remedy=" ".join(chosen.remedies))
        return open_gpu(GpuAddress(backend, address.uid), site)

    def reset(address: GpuAddress) -> ResetOutcome:
        try:
            gpu = open_allowed(address)
            what = f"reset by {gpu.address.backend}"
            try:
                _reset_leased(gpu, _JOB, None, open_allowed)
            except LeaseFolderError as error:
                _refuse_held(address.uid)
                gpu.reset_frequency()
                what += f", without a lease: {error.what}"
        except GpuError as error:
            return ResetOutcome(address.uid, False, f"not reset: {error}")
        return ResetOutcome(address.uid, True, what)

    yield from map(reset, addresses)
    if dead_jobs:
        uids = {address.uid for address in addresses}
        left = (record for record in list_leases() if not record.live)
        yield from (reset(record.address) for record in left if record.address.uid not in uids)


def _reset_leased(gpu: Gpu, job: str, rank: ProcessIdentity | None, open_gpu: OpenGpu) -> None:
    """Reset a GPU while it has a lease, so that no job takes it at that moment."""
    lease = Lease.take(gpu.address, job, rank=rank, open_gpu=open_gpu)
    try:
        gpu.reset_frequency()
    finally:
        lease.release()


def _refuse_held(uid: str) -> None:
    """Refuse a GPU that a live job holds, as far as leases can be read."""
    try:
        held = [record for record in list_leases() if record.address.uid == uid and record.live]
    except LeaseFolderError:
        return  # no lease in such a folder is to be trusted
    for record in held:
        raise LeaseHeldError(f"job {record.job} holds it", remedy="Wait for that job or end it")
