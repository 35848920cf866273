"""`envpipe doctor`, and what it says of packages, by their files.

None is imported: torch takes seconds, and a package built for another CUDA can end the process.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import click
from rich.table import Table
from rich.text import Text

from envpipe_megatron.cli.machine.hardware import (
    Answer,
    Check,
    control_checks,
    driver_cuda,
    environment_checks,
    gpu_checks,
    looked,
)
from envpipe_megatron.console import print_table
from envpipe_megatron.integrations import versions
from envpipe_megatron.integrations.versions import version_of
from envpipe_megatron.patching.catalog import load_catalog, read_constants

FORMAT = "envpipe-doctor/1"


def software_checks(driver_cuda: tuple[int, int] | None) -> list[Check]:
    """Look at each package a job may use; `driver_cuda` is the newest (major, minor) that runs."""
    looks: dict[str, Callable[[], Answer]] = {
        "torch": partial(_torch, driver_cuda),
        "megatron-core": _megatron_core,
        "nvidia-ml-py": _nvidia_ml_py,
        "cuda-bindings": _cuda_bindings,
        "DeepSpeed": _deepspeed,
    }
    return looked("software", looks)


def _folder_of(module: str) -> Path | None:
    """Return the folder of a top-level package, found and not imported; None if there is none."""
    spec = find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def _torch(driver_cuda: tuple[int, int] | None) -> Answer:
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
    if driver_cuda is not None:
        evidence += f"; the driver runs CUDA {driver_cuda[0]}.{driver_cuda[1]}"
        if int(cuda.split(".")[0]) > driver_cuda[0]:
            remedy = f"Install a torch for CUDA {driver_cuda[0]}, or a newer driver"
            return False, evidence, remedy
    return True, evidence, ""


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


def _nvidia_ml_py() -> Answer:
    version, shim = version_of("nvidia-ml-py"), version_of("pynvml")
    remedy = "pip install nvidia-ml-py"
    if version is None:
        return False, "not installed", remedy
    if shim is not None and _major(shim) < 12:
        # Before 12 that package had a module of the same name; since then it only depends on ours.
        evidence = f"{version}, but the package pynvml {shim} has a module of the same name"
        return False, evidence, f"pip uninstall pynvml; {remedy}"
    return True, version, ""


def _cuda_bindings() -> Answer:
    version = version_of("cuda-bindings")
    return (
        version is not None,
        version or "not installed",
        "Without it NCCL carries messages between all GPUs, and kernels that wait slow units: "
        "pip install cuda-bindings, of torch's CUDA version",
    )


def _major(version: str) -> int:
    match = re.match(r"\d+", version)
    return int(match[0]) if match else 0


def _deepspeed() -> Answer:
    version = version_of("deepspeed")
    wanted = f"DS_BUILD_OPS=0 pip install '{versions.DEEPSPEED}'"
    if version is None:
        return False, "not installed", f"Not needed for Megatron-LM. {wanted}"
    return versions.is_tested(version, versions.DEEPSPEED), version, wanted


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the answers as JSON.")
def doctor(as_json: bool) -> None:
    """Say what this machine can do: GPUs, rights to control clocks, environment, packages.

    Each no comes with its remedy. Everything is learned by reading: no clock is touched to find out
    whether it may be, and no package is imported. Exits 0 when it could look, whatever it saw.

    Example:

      envpipe doctor --json
    """
    checks = all_checks()
    if as_json:
        document = {"format": FORMAT, "checks": [asdict(check) for check in checks]}
        click.echo(json.dumps(document, indent=2))
        return
    print_table(_table(checks))


def all_checks() -> list[Check]:
    """All that is looked at, each by reading alone."""
    return [
        *gpu_checks(),
        *control_checks(),
        *environment_checks(),
        *software_checks(driver_cuda()),
    ]


def _table(checks: list[Check]) -> Table:
    table = Table()
    for column in ("", "", "what was seen, and what to do"):
        table.add_column(column)
    before = checks[0].area
    asked_by: dict[str, str] = {}
    for check in checks:
        if check.area != before:
            table.add_section()
        before = check.area
        said = Text(check.evidence)
        if check.remedy:
            # One missing driver is the cause of many a no; what to do about it is said once.
            first = asked_by.setdefault(check.remedy, check.name)
            remedy = check.remedy if first == check.name else f"As for {first}"
            said.append(f"\n{remedy}", style="italic")
        answer = Text("yes", style="green") if check.ok else Text("no", style="red")
        table.add_row(check.name, answer, said)
    return table
