"""Finds which back end may change clocks on this machine, by reading only.

Rights are read from the process's capabilities, from sockets and from files; no lock is tried. So
the driver may still refuse what is allowed here (a script's sudo rule, a virtual GPU). Jobs enter
by `choose_control`, `beside_power_profiles` and `open_controlled`, `envpipe doctor` by
`check_controls`.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from envpipe_megatron.gpu.base import (
    FORBID_VARIABLE,
    Gpu,
    GpuAddress,
    GpuError,
    GpuPermissionError,
    clock_control_forbidden,
)
from envpipe_megatron.gpu.devices import list_gpus, look_at, open_gpu, open_reader
from envpipe_megatron.gpu.registry import (
    READ_ONLY,
    Device,
    VendorGpu,
    backend_class,
    hardware_backends,
)
from envpipe_megatron.gpu.site import SiteConfig

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
    """Says whether a back end that drives hardware may change clocks here, as far as can be read.

    `reason` is the evidence for yes or no; `remedy` says what would allow it, empty if it is.
    """

    backend: str
    allowed: bool
    reason: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class ChosenControl:
    """The back end that changes a job's clocks, and why this one.

    `backend` is None if clocks stay as they are and GPUs are only read; then `remedies` says
    what would allow control, one sentence a back end.
    """

    wanted: str
    backend: str | None
    why: str
    remedies: tuple[str, ...] = ()

    @property
    def warning(self) -> str | None:
        """The one text to warn with if control was wanted and none is allowed, else None."""
        if self.backend is not None or self.wanted == "none":
            return None
        return (
            f"Clocks are not controlled: {self.why}. Training runs at baseline clocks, and energy "
            f"is measured all the same. {' '.join(self.remedies)}".rstrip()
        )


def check_controls(site: SiteConfig) -> tuple[Control, ...]:
    """Return for each back end that drives hardware whether it is allowed, in `auto`'s order.

    Those that the site does not allow come last.
    """
    known = hardware_backends()
    allowed = known if site.backends is None else site.backends
    order = [*allowed, *(name for name in known if name not in allowed)]
    try:
        if clock_control_forbidden():
            raise GpuError(
                f"{FORBID_VARIABLE} is set", remedy=f"Unset {FORBID_VARIABLE} where you may"
            )
        devices = _controllable_gpus()
    except GpuError as error:
        return tuple(_refused(name, error) for name in order)
    return tuple(_check(name, name in allowed, site, devices) for name in order)


def _controllable_gpus() -> list[Device]:
    """Return this machine's GPUs whose clocks a user with rights can change."""
    found: list[Device] = []
    obstacles: list[GpuError] = []
    for device in list_gpus():
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
        return Control(backend, True, kind.rights(site, devices))
    except GpuError as error:
        return _refused(backend, error)


def _refused(backend: str, error: GpuError) -> Control:
    reason = error.what
    if reason[1:2].islower():  # a word, and no name in capitals
        reason = reason[0].lower() + reason[1:]
    return Control(backend, False, reason, error.remedy)


def choose_control(wanted: str, site: SiteConfig, *, require: bool = False) -> ChosenControl:
    """Choose the back end that changes a job's clocks: for `auto` the first that is allowed.

    A back end that is named is never replaced by another; `wanted` is one of `CHOICES`. Raises
    GpuPermissionError if control is required and none is allowed or what is wanted is none.
    """
    if require and wanted in ("none", "dry_run"):
        raise GpuPermissionError(
            "Clock control is required, and what was chosen changes no clock",
            value=wanted,
            remedy="Choose another --envpipe-gpu-control, or leave --envpipe-require-control out.",
        )
    if wanted == "none":
        return ChosenControl(wanted, None, "no clock control was requested")
    if wanted in ("dry_run", "emulated"):
        return ChosenControl(wanted, wanted, f"{wanted} was requested, and changes no real GPU")
    chosen = first_allowed(wanted, check_controls(site))
    if chosen.backend is None:
        return given_up(chosen, chosen.why, chosen.remedies, require=require)
    return chosen


def beside_power_profiles(
    chosen: ChosenControl, uid: str, site: SiteConfig, *, require: bool = False
) -> ChosenControl:
    """Give control of a GPU up if a power profile is enforced on it, unless the site allows it.

    A profile sets clocks and limits too, and the driver arbitrates: a clock for each unit would not
    be what was planned. What cannot be read is no obstacle. Raises GpuPermissionError if
    control is required, and given up.
    """
    if chosen.backend not in hardware_backends() or site.allow_power_profiles:
        return chosen
    try:
        gpu = open_reader(GpuAddress(chosen.backend, uid))
        enforced = gpu.power_state().enforced_profiles
    except GpuError as error:
        _LOG.debug("The power profiles of %s are not known: %s", uid, error)
        return chosen
    if not enforced:
        return chosen
    why = f"{gpu.name} ({uid}) enforces power profiles, which set clocks too: {', '.join(enforced)}"
    return given_up(chosen, why, (f"{PROFILES_REMEDY}.",), require=require)


def given_up(
    chosen: ChosenControl, why: str, remedies: tuple[str, ...], *, require: bool
) -> ChosenControl:
    """Return no control, for this reason; raise GpuPermissionError if it is required."""
    if require:
        raise GpuPermissionError(f"Clock control is required, but {why}", remedy=" ".join(remedies))
    return ChosenControl(chosen.wanted, None, why, remedies)


def first_allowed(wanted: str, controls: Sequence[Control]) -> ChosenControl:
    """Choose among the results of `check_controls`: `auto` takes the first that is allowed."""
    considered = [control for control in controls if wanted in ("auto", control.backend)]
    for control in considered:
        if control.allowed:
            auto = wanted == "auto"
            first = "the first back end that is allowed" if auto else "requested and allowed"
            return ChosenControl(wanted, control.backend, f"{first}: {control.reason}")
    # A reason that all share, such as the forbid variable, is given once.
    reasons = list(dict.fromkeys(control.reason for control in considered))
    remedies = tuple(
        dict.fromkeys(f"{control.remedy}." for control in considered if control.remedy)
    )
    if len(reasons) == 1:
        which = "no back end is" if wanted == "auto" else f"back end {wanted} is not"
        return ChosenControl(wanted, None, f"{which} allowed: {reasons[0]}", remedies)
    each = "; ".join(f"{control.backend}: {control.reason}" for control in considered)
    return ChosenControl(wanted, None, f"no back end is allowed ({each})", remedies)


def open_controlled(uid: str, chosen: ChosenControl, site: SiteConfig) -> Gpu:
    """Open a GPU by its uid under the chosen back end, for reading only if there is none."""
    return open_gpu(GpuAddress(chosen.backend or "none", uid), site)
