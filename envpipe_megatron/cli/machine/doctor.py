"""`envpipe doctor`: GPUs, the rights to control them, variables and packages. Reads only.

One broken thing does not stop the other questions. No package is imported: torch takes seconds, and
a package built for another CUDA can end the process.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

import click
from rich.text import Text

from envpipe_megatron.cli.machine.clocks import range_text
from envpipe_megatron.console import show_table
from envpipe_megatron.core.channel_model import QUEUES_VARIABLE, hardware_capacity
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.formats.energy import IDLE
from envpipe_megatron.gpu.base import FORBID_VARIABLE, GpuError, clock_control_forbidden
from envpipe_megatron.gpu.control import PROFILES_REMEDY, check_controls, first_allowed
from envpipe_megatron.gpu.guard.lease import list_leases
from envpipe_megatron.gpu.registry import (
    VISIBLE_VARIABLE,
    VendorGpu,
    hardware_backends,
    list_gpus,
    look_at,
    unreadable_gpus,
    vendors_here,
    visible_gpus,
)
from envpipe_megatron.gpu.site import DEFAULT_SITE_PATH, SITE_VARIABLE, read_site
from envpipe_megatron.integrations.levels import DEEPSPEED, is_tested, version_of
from envpipe_megatron.patching.catalog import load_catalog, read_constants

FORMAT = "envpipe-doctor/1"


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
Look = Callable[[], Answer]
#: What is looked at, in this order: area, name, and the look.
_LOOKS: list[tuple[str, str, Look]] = []


def _check(area: str, name: str) -> Callable[[Look], Look]:
    """Make a function a look of `envpipe doctor`."""

    def add(look: Look) -> Look:
        _LOOKS.append((area, name, look))
        return look

    return add


def answered(area: str, name: str, look: Look) -> Check:
    """Make a check of a look; one that fails in any way is a no."""
    try:
        ok, evidence, remedy = look()
    except EnvPipeError as error:
        ok, evidence = False, str(error).removesuffix(f". {error.remedy}")
        remedy = error.remedy or "Correct what is named there"
    except Exception as error:  # of any kind: the other questions stay
        ok, evidence = False, f"could not be looked at: {type(error).__name__}: {error}"
        remedy = "Repair or reinstall it"
    return Check(area, name, ok, evidence, "" if ok else remedy)


def all_checks() -> list[Check]:
    """Look at all, each by reading only."""
    checks = []
    for area, name, look in _LOOKS:
        checks.append(answered(area, name, look))
        if look is _forbid:
            checks += _back_ends()
    return checks


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the answers as JSON.")
def doctor(as_json: bool) -> None:
    """Say what this machine can do: GPUs, rights to control clocks, environment, packages.

    Each no comes with its remedy. Everything is learned by reading: no clock is touched to find out
    whether it may be, and no package is imported. Exits 0 when it could look, even if it saw a no.

    Example:

      envpipe doctor --json
    """
    checks = all_checks()
    if as_json:
        document = {"format": FORMAT, "checks": [asdict(check) for check in checks]}
        click.echo(json.dumps(document, indent=2))
        return
    rows = []
    first: dict[tuple[str, ...], str] = {}
    for check in checks:
        said = Text(check.evidence)
        if check.remedy:
            # One missing driver is the cause of many a no; it, and what to do, are said once.
            asked = first.setdefault((check.remedy,), check.name)
            caused = first.setdefault((check.remedy, check.evidence.lower()), check.name)
            said = said.append("\n") if caused == check.name else Text()
            like = asked if caused == check.name else caused
            remedy = check.remedy if like == check.name else f"As for {like}"
            said.append(remedy, style="italic")
        answer = Text("yes", style="green") if check.ok else Text("no", style="red")
        rows.append((check.name, answer, said))
    seen = "what was seen, and what to do"
    show_table("", ("", "", seen), rows, left=(seen,))


@_check("gpu", "driver")
def _driver() -> Answer:
    said = []
    for _, driver in vendors_here():
        runs = f", runs CUDA {driver.cuda[0]}.{driver.cuda[1]}" if driver.cuda else ""
        said.append(f"driver {driver.version}{runs}")
    return True, "; ".join(said), ""


@_check("gpu", "GPUs")
def _gpus() -> Answer:
    counted = Counter(device.name for device in list_gpus())
    evidence = ", ".join(f"{number} x {kind}" for kind, number in counted.items())
    if lost := unreadable_gpus():
        return False, "; ".join([evidence, *(error.what for error in lost)]), lost[0].remedy
    remedy = "Give the container GPUs (docker run --gpus all); see nvidia-smi -L"
    return bool(counted), evidence or "none is listed", remedy


def _every_gpu() -> dict[int, VendorGpu]:
    """Return all GPUs by index; GpuError if there is none, or one cannot be read."""
    gpus = {device.index: look_at(device.uid) for device in list_gpus()}
    if not gpus:
        raise GpuError("There is no GPU to look at", remedy="See the line on GPUs")
    return gpus


@_check("gpu", "supported clocks")
def _supported_clocks() -> Answer:
    tables = Counter(range_text(gpu.supported_frequencies_mhz) for gpu in _every_gpu().values())
    return True, "; ".join(f"{text}, on {number} GPUs" for text, number in tables.items()), ""


def _of_each(name: str, fine: str, remedy: str) -> Callable[[Callable[[VendorGpu], str]], None]:
    """Make a function, which says what is wrong with a GPU, a look at all; `fine` if nothing is."""

    def add(fault: Callable[[VendorGpu], str]) -> None:
        def look() -> Answer:
            gpus = _every_gpu()
            indices = defaultdict[str, list[str]](list)
            with ThreadPoolExecutor(len(gpus)) as threads:  # a counter may take seconds
                for index, text in zip(gpus, threads.map(fault, gpus.values()), strict=True):
                    indices[text].append(str(index))
            indices.pop("", None)
            said = "; ".join(f"GPU {', '.join(same)}: {text}" for text, same in indices.items())
            return not said, said or fine, remedy

        _check("gpu", name)(look)

    return add


@_of_each("no GPU refuses locks", "none does", "Jobs train there without clock control")
def _obstacle(gpu: VendorGpu) -> str:
    return str(gpu.obstacle() or "")


@_of_each(
    "energy counter",
    "on all, and it moves",
    "Energy counters need a GPU since Volta; savings cannot be measured without",
)
def _counter_error(gpu: VendorGpu) -> str:
    try:
        gpu.read_energy()
    except GpuError as error:
        return error.what
    return ""


@_of_each(
    "nothing holds clocks back",
    "nothing",
    "Hardware slowdown and power brake mean heat or a power supply at its limit; a power cap, the "
    "power limit: jobs run, and say where a clock was not reached",
)
def _held_back(gpu: VendorGpu) -> str:
    return ", ".join(reason for reason in gpu.clock_state().throttle_reasons if reason != IDLE)


@_of_each(
    "default power",
    "no power profile is enforced, and no limit is below the default",
    "A limit is a fact, and no fault: the highest clocks may not be reached. A profile sets clocks "
    "too: jobs that set a clock for each unit set none there, unless the site allows it. "
    f"{PROFILES_REMEDY}",
)
def _power_other_than_default(gpu: VendorGpu) -> str:
    state = gpu.power_state()
    return str(state) if state.enforced_profiles or state.is_capped else ""


@_check("control", "site configuration")
def _site() -> Answer:
    site = read_site()
    if site.path is None:
        where = f"none at {DEFAULT_SITE_PATH} and {SITE_VARIABLE} is not set: the defaults hold"
        return True, where, ""
    allowed = ", ".join(hardware_backends() if site.backends is None else site.backends)
    return True, f"{site.path} allows {allowed or 'no back end'}", ""


@_check("control", f"{FORBID_VARIABLE} unset")
def _forbid() -> Answer:
    if not clock_control_forbidden():
        return True, "real GPUs may be changed", ""
    value = os.environ[FORBID_VARIABLE]
    return (
        False,
        f"set to {value!r}: nothing changes a real GPU, even if flags ask for it",
        f"Leave it if these GPUs must not be changed; otherwise unset {FORBID_VARIABLE}",
    )


def _back_ends() -> list[Check]:
    try:
        controls = check_controls(read_site())
    except GpuError:
        return []  # the site configuration's line says what is wrong with it
    checks = [
        Check("control", f"back end {each.wanted}", each.backend is not None, each.why, each.remedy)
        for each in controls
    ]
    chosen = first_allowed("auto", controls)
    if chosen.backend is not None:
        auto = Check("control", "auto", True, f"takes {chosen.backend}, {chosen.why}")
    else:
        remedy = "Do what one of the back ends asks for; without it jobs only change their order"
        auto = Check("control", "auto", False, "takes none: training at baseline clocks", remedy)
    return [*checks, auto]


@_check("control", "no leases of dead jobs")
def _leases() -> Answer:
    records = list_leases()
    said = [
        f"{'held now' if record.live else 'left'}: {record.address.uid} by job {record.job}"
        for record in records
    ]
    left = any(not record.live for record in records)
    return not left, "; ".join(said) or "none", "Run `envpipe clocks reset`"


@_check("environment", VISIBLE_VARIABLE)
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


@_check("environment", QUEUES_VARIABLE)
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


def _folder_of(module: str) -> Path | None:
    """Return the folder of a top-level package, found and not imported; None if there is none."""
    spec = find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def _driver_cuda() -> tuple[int, int] | None:
    """Return the newest CUDA version that a driver here runs, None if none runs any."""
    try:
        return next((driver.cuda for _, driver in vendors_here() if driver.cuda), None)
    except GpuError:
        return None


@_check("software", "torch")
def _torch() -> Answer:
    folder = _folder_of("torch")
    if folder is None:
        return False, "not installed", "pip install 'torch>=2.11'"
    built = read_constants(folder / "version.py", ("__version__", "cuda"))
    version, cuda = built.get("__version__"), built.get("cuda")
    if not isinstance(cuda, str):
        return (
            False,
            f"{version}, built without CUDA",
            "Good for the quickstart; for GPUs install a CUDA build (https://pytorch.org)",
        )
    evidence = f"{version}, built for CUDA {cuda}"
    driver_cuda = _driver_cuda()
    if driver_cuda is not None:
        evidence += f"; the driver runs CUDA {driver_cuda[0]}.{driver_cuda[1]}"
        if int(cuda.split(".")[0]) > driver_cuda[0]:
            remedy = f"Install a torch for CUDA {driver_cuda[0]}, or a newer driver"
            return False, evidence, remedy
    return True, evidence, ""


@_check("software", "megatron-core")
def _megatron_core() -> Answer:
    catalog = load_catalog()
    wanted = f"Supported: {', '.join(patch.name for patch in catalog)}"
    folder = _folder_of("megatron")
    package_info = folder / "core" / "package_info.py" if folder else None
    if package_info is None or not package_info.is_file():
        return False, "not installed", wanted
    said = read_constants(package_info, ("MAJOR", "MINOR", "PATCH"))
    version = (said[key] for key in ("MAJOR", "MINOR", "PATCH") if key in said)
    evidence = f"{'.'.join(map(str, version))} at {package_info.parent}"
    supported = any(patch.recognition.fits(package_info.parents[2]) for patch in catalog)
    return supported, evidence, wanted


@_check("software", "cuda-bindings")
def _cuda_bindings() -> Answer:
    version = version_of("cuda-bindings")
    return (
        version is not None,
        version or "not installed",
        "Without it NCCL carries messages between all GPUs, and kernels that wait slow units: "
        "pip install cuda-bindings, of torch's CUDA version",
    )


@_check("software", "DeepSpeed")
def _deepspeed() -> Answer:
    version = version_of("deepspeed")
    wanted = f"DS_BUILD_OPS=0 pip install '{DEEPSPEED}'"
    if version is None:
        return False, "not installed", f"Not needed for Megatron-LM. {wanted}"
    return is_tested(version, DEEPSPEED), version, wanted


@_check("software", "watchers")
def _watchers() -> Answer:
    nvrx = version_of("nvidia-resiliency-ext")
    found = [*filter(shutil.which, ("nv-hostengine", "dcgm-exporter", "gcm"))]
    found += [f"nvidia-resiliency-ext {nvrx}, whose thresholds jobs lower"] if nvrx else []
    blind = "what compares stages while they train cannot tell a slowed one from a sick one"
    return True, f"{', '.join(found) or 'none is found'}; {blind}: docs/do/operators.md", ""
