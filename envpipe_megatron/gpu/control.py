"""Finds which back end may change clocks on this machine, by reading only, and gives clocks back.

Rights are read from the process's capabilities, from sockets and from files; no lock is tried. So
the driver may still refuse what is allowed here (a script's sudo rule, a virtual GPU). Jobs enter
by `choose_for` and `open_controlled`, `envpipe doctor` by `check_controls`, `envpipe clocks reset`
by `reset_clocks`.
"""

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple, Self

from envpipe_megatron.gpu.base import (
    FORBID_VARIABLE,
    Gpu,
    GpuAddress,
    GpuError,
    GpuPermissionError,
    clock_control_forbidden,
)
from envpipe_megatron.gpu.guard.lease import Lease, list_leases
from envpipe_megatron.gpu.guard.lease_file import PATH_BACKENDS, LeaseFolderError
from envpipe_megatron.gpu.registry import (
    READ_ONLY,
    Device,
    VendorGpu,
    backend_class,
    hardware_backends,
    list_gpus,
    look_at,
    open_gpu,
)
from envpipe_megatron.gpu.site import SiteConfig, read_site

_LOG = logging.getLogger(__name__)

CHOICES = ("auto", *hardware_backends(), "dry_run", "emulated", READ_ONLY)
"""Values of `--envpipe-gpu-control`."""

PROFILES_REMEDY = (
    "Have the profiles cleared (see `nvidia-smi power-profiles -h`), take one clock for the whole "
    "job (--envpipe-level uniform), or set allow_power_profiles = true in the site configuration"
)
"""The remedy for a power profile that is enforced on a GPU."""


@dataclass(frozen=True, slots=True)
class Control:
    """The back end that changes clocks for who wanted it, as far as can be read, and why this one.

    `wanted` is one of `CHOICES`. `backend` is None if clocks stay as they are and GPUs are only
    read; then `remedy` says what would allow control.
    """

    wanted: str
    backend: str | None
    why: str
    remedy: str = ""

    @property
    def warning(self) -> str | None:
        """The one text to warn with if control was wanted and none is allowed, else None."""
        if self.backend is not None or self.wanted == READ_ONLY:
            return None
        text = (
            f"Clocks are not controlled: {self.why}. Training runs at baseline clocks, and energy "
            "is measured all the same."
        )
        return f"{text} {self.remedy}." if self.remedy else text

    def required(self) -> Self:
        """Return the same; GpuPermissionError if clocks stay as they are."""
        if self.backend is None:
            raise GpuPermissionError(
                f"Clock control is required, but {self.why}", remedy=self.remedy
            )
        return self


def check_controls(site: SiteConfig, uid: str | None = None) -> tuple[Control, ...]:
    """Return for each back end that drives hardware whether it is allowed, in `auto`'s order.

    Those that the site does not allow come last. Without a `uid`, for all GPUs of this machine.
    """
    known = hardware_backends()
    allowed = known if site.backends is None else site.backends
    order = list(dict.fromkeys([*allowed, *known]))
    try:
        if clock_control_forbidden():
            raise GpuError(
                f"{FORBID_VARIABLE} is set", remedy=f"Unset {FORBID_VARIABLE} where you may"
            )
        devices = _controllable_gpus([look_at(uid).device()] if uid else list_gpus())
    except GpuError as error:
        return tuple(_refused(name, error) for name in order)
    return tuple(_check(name, name in allowed, site, devices) for name in order)


def _controllable_gpus(devices: Sequence[Device]) -> list[Device]:
    """Return the GPUs whose clocks a user with rights can change; GpuError if there is none."""
    found: list[Device] = []
    obstacles: list[GpuError] = []
    for device in devices:
        try:
            obstacle = look_at(device.uid).obstacle()
        except GpuError as error:  # a card for displays, for example, lists no clocks
            obstacle = error
        if obstacle is None:
            found.append(device)
        else:
            obstacles.append(obstacle)
            _LOG.debug("GPU %d cannot be controlled: %s", device.index, obstacle)
    if found:
        return found
    if obstacles:
        raise obstacles[0]
    raise GpuError("No driver lists a GPU", remedy="Make GPUs visible to this process")


def _check(backend: str, allowed: bool, site: SiteConfig, devices: Sequence[Device]) -> Control:
    try:
        if not allowed:
            raise GpuError(
                f"the site's configuration {site.path} does not allow it",
                remedy=f"Ask to have {backend!r} added to 'gpu_control.backends' there",
            )
        kind = backend_class(backend)
        if issubclass(kind, VendorGpu):
            devices = [device for device in devices if device.backend == backend]
            if not devices:
                raise GpuError("none of its GPUs is here", remedy="Use another back end")
        return Control(backend, backend, kind.rights(site, devices))
    except GpuError as error:
        return _refused(backend, error)
    except Exception as error:  # another package's may fail in any way
        return _refused(backend, GpuError(f"it failed: {error!r}"))


def _refused(backend: str, error: GpuError) -> Control:
    reason = error.what
    if reason[1:2].islower():  # a word, and no name in capitals
        reason = reason[0].lower() + reason[1:]
    return Control(backend, None, reason, error.remedy)


def choose_control(wanted: str, site: SiteConfig, uid: str | None = None) -> Control:
    """Choose the back end that changes a job's clocks: for `auto` the first that is allowed.

    A back end that is named is never replaced by another; `wanted` is one of `CHOICES`. No GPU but
    that of a `uid` is asked: the driver of another one may hang.
    """
    if wanted == READ_ONLY:
        return Control(wanted, None, "no clock control was requested")
    if wanted in ("dry_run", "emulated"):
        return Control(wanted, wanted, f"{wanted} was requested, and changes no real GPU")
    return first_allowed(wanted, check_controls(site, uid))


def first_allowed(wanted: str, controls: Sequence[Control]) -> Control:
    """Choose among the results of `check_controls`: `auto` takes the first that is allowed."""
    considered = [control for control in controls if wanted in ("auto", control.wanted)]
    for control in considered:
        if control.backend is not None:
            auto = wanted == "auto"
            first = "the first back end that is allowed" if auto else "requested and allowed"
            return Control(wanted, control.backend, f"{first}: {control.why}")
    # A reason that all share, such as the forbid variable, is given once.
    reasons = list(dict.fromkeys(control.why for control in considered))
    remedies = dict.fromkeys(control.remedy for control in considered if control.remedy)
    if len(reasons) == 1:
        which = "no back end is" if wanted == "auto" else f"back end {wanted} is not"
        why = f"{which} allowed: {reasons[0]}"
    else:
        each = "; ".join(f"{control.wanted}: {control.why}" for control in considered)
        why = f"no back end is allowed ({each})"
    return Control(wanted, None, why, ". ".join(remedies))


def choose_for(uid: str, wanted: str, *, one_clock: bool) -> Control:
    """Choose the back end for a GPU, by the site's rules; none if they cannot be read.

    Nor is there one if it cannot open the GPU, or where a power profile is enforced, which sets
    clocks and limits too: the driver arbitrates, and a clock for each unit would not be what was
    planned. A profile does not matter if the job has `one_clock` or the site allows it. That the
    clock can be reset is seen when it is held.
    """
    try:
        site = SiteConfig() if wanted == "emulated" else read_site()
    except GpuError as error:
        return Control(wanted, None, error.what, error.remedy)
    chosen = choose_control(wanted, site, uid)
    if chosen.backend is None:
        return chosen
    try:
        gpu = open_controlled(uid, chosen, site)
    except GpuError as error:
        why = f"the clock of {uid} cannot be set by {chosen.backend}: {error.what}"
        return Control(wanted, None, why, error.remedy)
    if one_clock or chosen.backend not in hardware_backends() or site.allow_power_profiles:
        return chosen
    enforced: tuple[str, ...] = ()
    with suppress(GpuError):  # what cannot be read is no obstacle
        enforced = gpu.power_state().enforced_profiles
    if not enforced:
        return chosen
    why = f"{gpu.name} ({uid}) enforces power profiles, which set clocks too: {', '.join(enforced)}"
    return Control(wanted, None, why, PROFILES_REMEDY)


def open_controlled(uid: str, chosen: Control, site: SiteConfig | None = None) -> Gpu:
    """Open a GPU by its uid under the chosen back end, for reading only if there is none."""
    return open_gpu(GpuAddress(chosen.backend or READ_ONLY, uid), site)


# --- giving back what no guard holds -------------------------------------------------------------


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
        dead_jobs: whether to undo, after these, what dead jobs left on other GPUs, except another
            user's emulated ones, which are paths; raises LeaseFolderError if a folder of leases is
            unsafe.
    """

    def open_allowed(address: GpuAddress) -> Gpu:
        if address.backend not in hardware_backends():
            return open_gpu(address)
        controls = check_controls(site, address.uid)
        chosen = first_allowed(address.backend, controls)
        if chosen.backend is None:
            chosen = first_allowed("auto", controls)
        if chosen.backend is None:
            raise GpuPermissionError(chosen.why, remedy=chosen.remedy)
        return open_controlled(address.uid, chosen, site)

    def reset(address: GpuAddress) -> ResetOutcome:
        try:
            gpu = open_allowed(address)
            what = f"reset by {gpu.address.backend}"
            try:
                job = "envpipe clocks reset"
                lease = Lease.take(gpu.address, job, rank=None, open_gpu=open_allowed)
                try:
                    gpu.reset_frequency()
                finally:
                    lease.release()
            except LeaseFolderError as error:
                _refuse_held(address.uid)
                gpu.reset_frequency()
                what += f", without a lease: {error.what}"
        except Exception as error:  # as of what a lease says, which its user wrote
            return ResetOutcome(address.uid, False, f"not reset: {error}")
        return ResetOutcome(address.uid, True, what)

    yield from map(reset, addresses)
    if dead_jobs:
        uids = {address.uid for address in addresses}
        for record in list_leases():
            known = record.uid == os.geteuid() or record.address.backend not in PATH_BACKENDS
            if known and not record.live and record.address.uid not in uids:
                yield reset(record.address)


def _refuse_held(uid: str) -> None:
    """Refuse a GPU that a live job holds, as far as leases can be read."""
    try:
        held = [record for record in list_leases() if record.address.uid == uid and record.live]
    except LeaseFolderError:
        return  # no lease in such a folder is to be trusted
    for record in held:
        raise GpuError(f"job {record.job} holds it", remedy="Wait for that job or end it")
