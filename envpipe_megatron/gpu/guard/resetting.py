"""Resets clocks that no guard holds: before a job locks any, and for `envpipe clocks reset`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
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


class Resetter:
    """Resets clocks by any back end that is allowed here."""

    def __init__(self, site: SiteConfig) -> None:
        self._site = site
        controls = check_controls(site)
        self._allowed = {check.backend for check in controls if check.allowed}
        #: The back end for real GPUs, or why there is none.
        self._chosen = first_allowed("auto", controls)

    def reset_all(self, addresses: Iterable[GpuAddress]) -> Iterator[ResetOutcome]:
        """Reset GPUs one by one, each under a lease, so that no job takes it at that moment.

        A real GPU whose back end is not allowed is reset by the chosen one. A lease that a dead job
        left on one of them is undone on the way; a GPU that a live job holds is left alone. Where
        no lease can be written the clock is reset all the same, unless a job holds it.
        """
        for address in addresses:
            yield _outcome(address.uid, partial(self._reset, address))

    def undo_others(self, uids: Iterable[str]) -> Iterator[ResetOutcome]:
        """Undo what dead jobs left on other GPUs than these; those of live jobs are left alone.

        Raises LeaseFolderError if a folder of leases is unsafe.
        """
        left_out = set(uids)
        for record in list_leases():
            if not record.live and record.address.uid not in left_out:
                yield _outcome(record.address.uid, partial(self._reset, record.address))

    def _open(self, address: GpuAddress) -> Gpu:
        if address.backend not in hardware_backends():
            return open_gpu(address)
        backend = address.backend if address.backend in self._allowed else self._chosen.backend
        if backend is None:
            raise GpuPermissionError(self._chosen.why, remedy=" ".join(self._chosen.remedies))
        return open_gpu(GpuAddress(backend, address.uid), self._site)

    def _reset(self, address: GpuAddress) -> str:
        gpu = self._open(address)
        try:
            _reset_leased(gpu, _JOB, None, self._open)
        except LeaseFolderError as error:
            _refuse_held(address.uid)
            gpu.reset_frequency()
            return f"reset by {gpu.address.backend}, without a lease: {error.what}"
        return f"reset by {gpu.address.backend}"


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


def _outcome(uid: str, reset: Callable[[], str]) -> ResetOutcome:
    try:
        return ResetOutcome(uid, True, reset())
    except GpuError as error:
        return ResetOutcome(uid, False, f"not reset: {error}")
