"""Doctor's checks of GPUs, of the rights to control them, and of the environment. Reads only.

One broken thing does not stop the other questions (`looked`).
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from envpipe_megatron.core.channel_model import QUEUES_VARIABLE, hardware_capacity
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.formats.energy import IDLE
from envpipe_megatron.gpu.base import FORBID_VARIABLE, GpuError, clock_control_forbidden
from envpipe_megatron.gpu.control import PROFILES_REMEDY, check_controls, first_allowed
from envpipe_megatron.gpu.devices import (
    VISIBLE_VARIABLE,
    list_gpus,
    look_at,
    unreadable_gpus,
    vendors_here,
    visible_gpus,
)
from envpipe_megatron.gpu.guard.lease import list_leases
from envpipe_megatron.gpu.registry import VendorGpu, hardware_backends
from envpipe_megatron.gpu.site import DEFAULT_SITE_PATH, SITE_VARIABLE, SiteConfig, read_site


@dataclass(frozen=True)
class Check:
    """One line of `envpipe doctor`.

    Attributes:
        area: `gpu`, `control`, `environment` or `software`.
        evidence: what was seen.
        remedy: what turns a no into a yes, or a note that nothing needs to be done.
    """

    area: str
    name: str
    ok: bool
    evidence: str
    remedy: str = ""


#: `ok`, `evidence` and `remedy` of a check; the remedy counts only if it is a no.
Answer = tuple[bool, str, str]


def looked(area: str, looks: Mapping[str, Callable[[], Answer]]) -> list[Check]:
    """Make a check of each look, by its name; one that fails in any way is a no."""
    return [_looked(area, name, look) for name, look in looks.items()]


def _looked(area: str, name: str, look: Callable[[], Answer]) -> Check:
    try:
        ok, evidence, remedy = look()
    except EnvPipeError as error:
        ok, evidence = False, str(error).removesuffix(f". {error.remedy}")
        remedy = error.remedy or "Correct what is named there"
    except Exception as error:  # whatever is broken there, the other questions stay
        ok, evidence = False, f"could not be looked at: {type(error).__name__}: {error}"
        remedy = "Repair or reinstall it"
    return Check(area, name, ok, evidence, "" if ok else remedy)


def driver_cuda() -> tuple[int, int] | None:
    """Return the newest CUDA version that a driver here runs, None if none runs any."""
    try:
        return next((driver.cuda for _, driver in vendors_here() if driver.cuda), None)
    except GpuError:
        return None


# --- GPUs ----------------------------------------------------------------------------------------


def gpu_checks() -> list[Check]:
    """Look at the driver, the GPUs, and what makes one refuse whoever asks."""
    return looked(
        "gpu",
        {
            "driver": _driver,
            "GPUs": _gpus,
            "supported clocks": _supported_clocks,
            "no GPU refuses locks": _of_each(
                lambda gpu: str(gpu.obstacle() or ""),
                "none does",
                "Jobs train there without clock control",
            ),
            "energy counter": _of_each(
                _counter_error,
                "on all, and it moves",
                "Energy counters need a GPU since Volta; savings cannot be measured without",
            ),
            "nothing holds clocks back": _of_each(
                lambda gpu: ", ".join(r for r in gpu.clock_state().throttle_reasons if r != IDLE),
                "nothing",
                "Hardware slowdown and power brake mean heat or a power supply at its limit; a "
                "power cap, the power limit: jobs run, and say where a clock was not reached",
            ),
            "default power": _of_each(
                _power_other_than_default,
                "no power profile is enforced, and no limit is below the default",
                "A limit is a fact, and no fault: the highest clocks may not be reached. A profile "
                "sets clocks too: jobs that set a clock for each unit leave clocks alone there, "
                f"unless the site allows it. {PROFILES_REMEDY}",
            ),
        },
    )


def _driver() -> Answer:
    said = []
    for _, driver in vendors_here():
        runs = f", runs CUDA {driver.cuda[0]}.{driver.cuda[1]}" if driver.cuda else ""
        said.append(f"driver {driver.version}{runs}")
    return True, "; ".join(said), ""


def _gpus() -> Answer:
    counted = Counter(device.name for device in list_gpus())
    evidence = ", ".join(f"{number} x {kind}" for kind, number in counted.items())
    if lost := unreadable_gpus():
        return False, "; ".join([evidence, *(error.what for error in lost)]), lost[0].remedy
    remedy = "Give the container GPUs (docker run --gpus all); see nvidia-smi -L"
    return bool(counted), evidence or "none is listed", remedy


def _every_gpu() -> dict[int, VendorGpu]:
    """All GPUs by index; GpuError if there is none, or one cannot be read."""
    gpus = {device.index: look_at(device.uid) for device in list_gpus()}
    if not gpus:
        raise GpuError("There is no GPU to look at", remedy="See the line on GPUs")
    return gpus


def _supported_clocks() -> Answer:
    tables = Counter(
        (len(clocks), clocks[-1], clocks[0])
        for clocks in (gpu.supported_frequencies_mhz for gpu in _every_gpu().values())
    )
    evidence = "; ".join(
        f"{count} clocks, {low} to {high} MHz, on {number} GPUs"
        for (count, low, high), number in tables.items()
    )
    return True, evidence, ""


def _of_each(fault: Callable[[VendorGpu], str], fine: str, remedy: str) -> Callable[[], Answer]:
    """Make a look at every GPU: `fault` says what is wrong with one, `fine` that nothing is."""

    def look() -> Answer:
        gpus = _every_gpu()
        indices = defaultdict[str, list[str]](list)
        with ThreadPoolExecutor(len(gpus)) as threads:  # a counter that stands still takes seconds
            for index, text in zip(gpus, threads.map(fault, gpus.values()), strict=True):
                indices[text].append(str(index))
        indices.pop("", None)
        said = "; ".join(f"GPU {', '.join(same)}: {text}" for text, same in indices.items())
        return not said, said or fine, remedy

    return look


def _counter_error(gpu: VendorGpu) -> str:
    try:
        gpu.read_energy()
    except GpuError as error:
        return error.what
    return ""


def _power_other_than_default(gpu: VendorGpu) -> str:
    state = gpu.power_state()
    return str(state) if state.enforced_profiles or state.is_capped else ""


# --- rights --------------------------------------------------------------------------------------


def control_checks() -> list[Check]:
    """Look at the rights to control clocks, and at what dead jobs left."""
    first = looked("control", {"site configuration": _site, f"{FORBID_VARIABLE} unset": _forbid})
    try:
        site = read_site()
    except GpuError:
        site = None  # the first line says what is wrong with it
    back_ends = [] if site is None else _back_ends(site)
    return [*first, *back_ends, *looked("control", {"no leases of dead jobs": _leases})]


def _site() -> Answer:
    site = read_site()
    if site.path is None:
        where = f"none at {DEFAULT_SITE_PATH} and {SITE_VARIABLE} is not set: the defaults hold"
        return True, where, ""
    allowed = ", ".join(hardware_backends() if site.backends is None else site.backends)
    return True, f"{site.path} allows {allowed or 'no back end'}", ""


def _forbid() -> Answer:
    if not clock_control_forbidden():
        return True, "real GPUs may be changed", ""
    value = os.environ[FORBID_VARIABLE]
    return (
        False,
        f"set to {value!r}: nothing changes a real GPU, whatever flags say",
        f"Leave it if these GPUs must not be changed; otherwise unset {FORBID_VARIABLE}",
    )


def _back_ends(site: SiteConfig) -> list[Check]:
    controls = check_controls(site)
    checks = [
        Check("control", f"back end {check.backend}", check.allowed, check.reason, check.remedy)
        for check in controls
    ]
    chosen = first_allowed("auto", controls)
    if chosen.backend is not None:
        auto = Check("control", "auto", True, f"takes {chosen.backend}, {chosen.why}")
    else:
        remedy = "Do what one of the back ends asks for; without it jobs only change their order"
        auto = Check("control", "auto", False, "takes none: training at baseline clocks", remedy)
    return [*checks, auto]


def _leases() -> Answer:
    records = list_leases()
    said = [
        f"{'held now' if record.live else 'left'}: {record.address.uid} by job {record.job}"
        for record in records
    ]
    left = any(not record.live for record in records)
    return not left, "; ".join(said) or "none", "Run `envpipe clocks reset`"


# --- environment ---------------------------------------------------------------------------------


def environment_checks() -> list[Check]:
    """Look at the variables that decide which GPU is which, and how many queues it has."""
    return looked(
        "environment",
        {
            VISIBLE_VARIABLE: _visible,
            QUEUES_VARIABLE: _connections,
        },
    )


def _visible() -> Answer:
    value = os.environ.get(VISIBLE_VARIABLE)
    shown = "not set" if value is None else repr(value)
    devices = visible_gpus()
    named = 0 if value is None else len([entry for entry in value.split(",") if entry.strip()])
    seen = ", ".join(f"{i}: {device.uid}" for i, device in enumerate(devices)) or "no GPU"
    ok = bool(devices) and len(devices) >= named
    return (
        ok,
        f"{shown}; CUDA numbers {seen}",
        "An entry that names no GPU hides itself and all after it: correct or unset it",
    )


def _connections() -> Answer:
    value = os.environ.get(QUEUES_VARIABLE)
    few = hardware_capacity(os.environ) is not None
    return (
        not few,
        f"{value}: counts as a single hardware queue, in which a transfer of NCCL that waits holds "
        "up every kernel behind it"
        if few
        else value or "not set (8)",
        "Where NCCL carries messages, orders are lowered to what one queue holds; set 8 unless "
        "Megatron asks for 1 (tensor or context parallelism before Blackwell)",
    )
