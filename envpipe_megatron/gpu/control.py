"""Which back end may change clocks on this machine, learned by reading alone.

Rights are read from the process's capabilities, from sockets and from files; no lock is tried. So
the driver may still refuse what is allowed here (a script's sudo rule, a virtual GPU). Jobs enter
by `choose_control`, `beside_power_profiles` and `open_controlled`, `envpipe doctor` by
`check_controls`.
"""

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from envpipe_megatron.gpu.backends.nvml import NvmlGpu, list_nvml_gpus
from envpipe_megatron.gpu.backends.zeusd import (
    BEFORE_TOKEN_ENDS_S,
    CONTROL_GROUP,
    Zeusd,
    zeusd_socket,
)
from envpipe_megatron.gpu.base import (
    FORBID_VARIABLE,
    Gpu,
    GpuAddress,
    GpuError,
    GpuPermissionError,
    clock_control_forbidden,
)
from envpipe_megatron.gpu.devices import pci_address
from envpipe_megatron.gpu.opening import open_gpu, open_reader
from envpipe_megatron.gpu.site import HARDWARE_BACKENDS, SiteConfig, in_user_namespace

_LOG = logging.getLogger(__name__)

CHOICES = ("auto", *HARDWARE_BACKENDS, "dry_run", "emulated", "none")
"""Values of `--envpipe-gpu-control`."""

PROFILES_REMEDY = (
    "Have the profiles cleared (see `nvidia-smi power-profiles -h`), take one clock for the whole "
    "job (--envpipe-level uniform), or set allow_power_profiles = true in the site configuration"
)
"""The remedy for a power profile that is enforced on a GPU."""

_CAP_SYS_ADMIN = 21
_ZEUSD_TIME_LIMIT_S = 2.0


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
    order = [*site.backends, *(name for name in HARDWARE_BACKENDS if name not in site.backends)]
    try:
        if clock_control_forbidden():
            raise GpuError(
                f"{FORBID_VARIABLE} is set", remedy=f"Unset {FORBID_VARIABLE} where you may"
            )
        pci_bus_ids = _controllable_gpus()
    except GpuError as error:
        return tuple(_refused(name, error) for name in order)
    return tuple(_check(name, site, pci_bus_ids) for name in order)


def _controllable_gpus() -> list[str]:
    """The PCI bus ids of this machine's GPUs whose clocks a user with rights can change."""
    found: list[str] = []
    obstacles: list[GpuError] = []
    for device in list_nvml_gpus():
        try:
            obstacle: GpuError | None = NvmlGpu(device.uid).control_obstacle()
        except GpuError as error:  # a card for displays, for example, lists no clocks
            obstacle = error
        if obstacle is None:
            found.append(device.pci_bus_id)
        else:
            obstacles.append(obstacle)
            _LOG.debug("GPU %d cannot be controlled: %s", device.index, obstacle)
    if found:
        return found
    if obstacles:
        raise obstacles[0]
    raise GpuError("No GPU is seen by NVML", remedy="Make GPUs visible to this process")


def _check(backend: str, site: SiteConfig, pci_bus_ids: Sequence[str]) -> Control:
    try:
        if backend not in site.backends:
            raise GpuError(
                f"the site's configuration {site.path} does not allow it",
                remedy=f"Ask to have {backend!r} added to 'gpu_control.backends' there",
            )
        return Control(backend, True, _EVIDENCE[backend](site, pci_bus_ids))
    except GpuError as error:
        return _refused(backend, error)


def _refused(backend: str, error: GpuError) -> Control:
    reason = error.what
    if reason[1:2].islower():  # a word, and no name in capitals
        reason = reason[0].lower() + reason[1:]
    return Control(backend, False, reason, error.remedy)


def _nvml_evidence(site: SiteConfig, pci_bus_ids: Sequence[str]) -> str:
    """Return the evidence that NVML takes locks from this process; GpuError if it does not."""
    user = f"user {os.geteuid()}"
    if not has_sys_admin():
        raise GpuError(
            f"{user} has no CAP_SYS_ADMIN",
            remedy="Start the container with --cap-add SYS_ADMIN, or give it the socket of a zeusd"
            if os.geteuid() == 0
            else "Nothing needs to run as root: have an administrator run zeusd, or grant a "
            "command in the site configuration",
        )
    if in_user_namespace():
        raise GpuError(
            "CAP_SYS_ADMIN here is that of a user namespace (a rootless container), which the "
            "driver does not take",
            remedy="Give the container the socket of a zeusd that runs outside",
        )
    return f"{user} has CAP_SYS_ADMIN"


def has_sys_admin() -> bool:
    """True if this process has the capability that the driver asks of who locks clocks."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return os.geteuid() == 0
    effective = next(
        (line.split()[1] for line in status.splitlines() if line.startswith("CapEff:")), "0"
    )
    return bool(int(effective, 16) >> _CAP_SYS_ADMIN & 1)


def _zeusd_evidence(site: SiteConfig, pci_bus_ids: Sequence[str]) -> str:
    """Return the evidence that a zeusd changes clocks for this process; GpuError if none does."""
    zeusd = Zeusd(zeusd_socket(site), _ZEUSD_TIME_LIMIT_S)
    offer = zeusd.discover()
    if CONTROL_GROUP not in offer.groups:
        raise GpuError(
            f"zeusd at {zeusd.address} offers {', '.join(sorted(offer.groups)) or 'nothing'}",
            remedy=f"Start zeusd with --enable {CONTROL_GROUP}",
        )
    if offer.auth_required and zeusd.token_ends_s() < time.time() + BEFORE_TOKEN_ENDS_S:
        raise GpuError(
            f"The token of {zeusd.address} ends within {BEFORE_TOKEN_ENDS_S / 60:g} minutes",
            remedy="Issue one that outlives the job: nothing could reset a clock behind its end",
        )
    missing = [name for name in pci_bus_ids if pci_address(name) not in offer.gpu_ids]
    if missing:
        raise GpuError(
            f"zeusd at {zeusd.address} does not manage {', '.join(missing)}",
            remedy="Have zeusd see all GPUs of the machine, and restart it after changes",
        )
    return f"zeusd at {zeusd.address} offers {CONTROL_GROUP} to this user"


def _command_evidence(site: SiteConfig, pci_bus_ids: Sequence[str]) -> str:
    """Return the evidence that this user can run the site's commands; GpuError if not."""
    if not site.lock_command:
        where = f"in {site.path}" if site.path else "(there is no site configuration)"
        raise GpuError(
            f"no lock_command is set {where}",
            remedy="Set lock_command and reset_command in the site configuration",
        )
    for program in (site.lock_command[0], site.reset_command[0]):
        if not os.access(program, os.X_OK) or not Path(program).is_file():
            raise GpuError(
                f"this user cannot run {program}",
                remedy=f"Correct the command in {site.path}, or make it executable",
            )
    return f"{site.path} names commands that this user can run"


_EVIDENCE: dict[str, Callable[[SiteConfig, Sequence[str]], str]] = {
    "nvml": _nvml_evidence,
    "zeusd": _zeusd_evidence,
    "command": _command_evidence,
}


def choose_control(wanted: str, site: SiteConfig, *, require: bool = False) -> ChosenControl:
    """Choose the back end that changes a job's clocks: for `auto` the first that is allowed.

    A back end that is named is never replaced by another. Raises GpuPermissionError if control
    is required and none is allowed or what is wanted is none, GpuError if `wanted` is not one of
    `CHOICES`.
    """
    if wanted not in CHOICES:
        raise GpuError(
            "Unknown way to control clocks", value=wanted, remedy=f"Use {', '.join(CHOICES)}."
        )
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
    be what was planned. What cannot be read stands against nothing. Raises GpuPermissionError if
    control is required, and given up.
    """
    if chosen.backend not in HARDWARE_BACKENDS or site.allow_power_profiles:
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
    """No control, for this reason; GpuPermissionError if it is required."""
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
    # A reason that all share, such as the forbid variable, stands once.
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
    """Open a GPU by its uid under the chosen back end, for reading alone if there is none."""
    return open_gpu(GpuAddress(chosen.backend or "none", uid), site)
