"""The machine that a quickstart or a proof is measured on, and whether it is fit for that."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass

from envpipe_megatron import __version__
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.formats.energy import IDLE
from envpipe_megatron.gpu.base import GpuError
from envpipe_megatron.gpu.control import choose_control
from envpipe_megatron.gpu.presets import load_preset
from envpipe_megatron.gpu.registry import Device, look_at, vendors_here, visible_gpus
from envpipe_megatron.gpu.site import read_site
from envpipe_megatron.integrations.levels import version_of

_PACKAGES = ("torch", "megatron-core", "nvidia-ml-py", "numpy")
#: What a GPU may be busy with that only answers those who read its meters.
_MOST_BUSY_PERCENT = 5
_LEFT_ALONE = "--without-clocks was given"


@dataclass(frozen=True)
class Machine:
    """The machine that is measured on.

    Args:
        emulated: whether GPUs follow a model.
        gpu_names: one for each pipeline rank.
        devices: the real GPUs.
        missing: why no clock is changed; empty if clocks are.
        versions: of all that figures rest on.
    """

    emulated: bool
    gpu_names: tuple[str, ...]
    devices: tuple[Device, ...]
    missing: str
    versions: dict[str, str]

    @property
    def gpus(self) -> str:
        """Say how many GPUs of which name."""
        return f"{len(self.gpu_names)} x {self.gpu_names[0]}"


def emulated_machine(preset: str, num_stages: int, with_clocks: bool | None) -> Machine:
    """Return a machine of emulated GPUs, whose time does not depend on how busy the host is.

    Raises GpuError if there is no such preset.
    """
    name = f"{load_preset(preset).gpu} (emulated)"
    missing = _LEFT_ALONE if with_clocks is False else ""
    return Machine(True, (name,) * num_stages, (), missing, _versions())


def real_machine(with_clocks: bool | None) -> Machine:
    """Look at this machine's GPUs, as CUDA shows them to this process.

    By default clocks are changed where a right to is found.

    Raises EnvPipeError: fewer than two GPUs, no right to change clocks that are to be, or the
    machine is not quiet. GpuError: the driver cannot be read.
    """
    chosen = choose_control("auto", read_site())
    missing = "" if chosen.backend else ". ".join(filter(None, (chosen.why, chosen.remedy)))
    if missing and with_clocks:
        without = "Or leave --with-clocks out: the order is proven without any right."
        raise EnvPipeError(
            f"Clocks may not be changed here: {chosen.why}",
            remedy=". ".join(filter(None, (chosen.remedy, without))),
        )
    devices = visible_gpus()
    if len(devices) < 2:
        raise EnvPipeError(
            "A pipeline needs two GPUs or more; CUDA shows fewer to this process",
            value=len(devices),
            remedy="Give it more, or try --gpu a100-sxm, which emulates them.",
        )
    unrest = [text for device in devices for text in _unrest(device)]
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load >= cores:
        unrest.append(f"the host's load is {load:.1f}, on {cores} cores")
    if unrest:
        raise EnvPipeError(
            "The machine is not quiet, so what is measured would not be EnvPipe's",
            value=unrest,
            remedy="End what runs there, or wait until it has ended; a GPU that is held back while "
            "idle needs cooling, or another power limit.",
        )
    drivers = [driver.version for _, driver in vendors_here()]
    return Machine(
        False,
        tuple(device.name for device in devices),
        tuple(devices),
        _LEFT_ALONE if with_clocks is False else missing,
        {**_versions(), "driver": ", ".join(drivers)},
    )


def _unrest(device: Device) -> list[str]:
    """Say what speaks against measuring on a GPU; GpuError if it cannot be read."""
    gpu, name, found = look_at(device.uid), f"GPU {device.index}", []
    seen = gpu.activity()
    if seen.processes:
        found.append(f"{name} is used by process {', '.join(map(str, seen.processes))}")
    if (seen.busy_percent or 0) > _MOST_BUSY_PERCENT:
        found.append(f"{name} is {seen.busy_percent} % busy")
    if held := [reason for reason in gpu.clock_state().throttle_reasons if reason != IDLE]:
        found.append(f"{name} is held back by {', '.join(held)}")
    return found


def newcomers(machine: Machine) -> list[str]:
    """Return, in words, which real GPUs have other processes than the one rank of the proof."""
    found = []
    for device in machine.devices:
        with suppress(GpuError):
            count = len(look_at(device.uid).activity().processes)
            found += [f"{count} processes on GPU {device.index}"] if count > 1 else []
    return found


def _versions() -> dict[str, str]:
    installed = {package: found for package in _PACKAGES if (found := version_of(package))}
    return {"envpipe-megatron": __version__, **installed}
