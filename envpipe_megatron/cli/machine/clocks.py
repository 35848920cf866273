"""`envpipe clocks`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import click
import pynvml
from rich.console import Console
from rich.table import Table

from envpipe_megatron.cli.common import numbers
from envpipe_megatron.cli.machine.latency import measure_latency
from envpipe_megatron.console import say, show_tables
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.gpu.backends.nvml import list_nvml_gpus
from envpipe_megatron.gpu.backends.nvml_library import NoNvmlError, NvmlNotSupportedError, call_gpu
from envpipe_megatron.gpu.base import ClockState, Gpu, GpuAddress, GpuError
from envpipe_megatron.gpu.devices import VISIBLE_VARIABLE, visible_gpus
from envpipe_megatron.gpu.emulated.emulated_gpu import list_emulated
from envpipe_megatron.gpu.emulated.presets import override_for, sweep_range
from envpipe_megatron.gpu.emulated.store import ROOT_VARIABLE, default_root
from envpipe_megatron.gpu.guard.resetting import Resetter
from envpipe_megatron.gpu.opening import open_reader
from envpipe_megatron.gpu.site import read_site


@dataclass(frozen=True)
class ListedGpu:
    """A GPU of this node; the index is NVML's, or that of an emulated GPU."""

    index: int
    address: GpuAddress
    is_emulated: bool = False


def listed_gpus() -> list[ListedGpu]:
    """Return all GPUs of this node: real ones, or emulated ones if there is no NVML."""
    try:
        devices = list_nvml_gpus()
    except NoNvmlError:
        if not os.environ.get(ROOT_VARIABLE):
            raise
        root = default_root().absolute()
        return [
            ListedGpu(index, GpuAddress("emulated", f"{root}#{index}"), is_emulated=True)
            for index in list_emulated(root)
        ]
    return [ListedGpu(device.index, GpuAddress("nvml", device.uid)) for device in devices]


def _selected(wanted: Sequence[str], gpus: Sequence[ListedGpu]) -> list[ListedGpu]:
    """The GPUs that were named by index or UUID, in the order of the node."""
    for name in wanted:
        if not any(name in (str(gpu.index), gpu.address.uid) for gpu in gpus):
            known = ", ".join(f"{gpu.index} ({gpu.address.uid})" for gpu in gpus)
            raise EnvPipeError("There is no such GPU", value=name, remedy=f"There are {known}.")
    return [gpu for gpu in gpus if {str(gpu.index), gpu.address.uid} & set(wanted)]


@click.group()
def clocks() -> None:
    """Clocks of this node's GPUs: what there is, giving them back, how long a change takes.

    Example:

      envpipe clocks show
    """


clocks.add_command(measure_latency)


_GPU_OPTION = click.option(
    "--gpu",
    "wanted",
    multiple=True,
    metavar="INDEX|UUID",
    help="This GPU alone, by nvidia-smi's index or by UUID; repeat for more.",
)


@clocks.command()
@_GPU_OPTION
@click.option("--all-clocks", is_flag=True, help="List every supported SM clock.")
def show(wanted: tuple[str, ...], all_clocks: bool) -> None:
    """Show the clocks that each GPU supports, and how it runs now. Reads only.

    Where there is no NVML, the emulated GPUs of ENVPIPE_EMULATED_ROOT are shown.

    Example:

      envpipe clocks show --gpu 0
    """
    console = Console()
    gpus = listed_gpus()
    if not gpus:
        raise EnvPipeError("There is no GPU here", remedy="See `envpipe doctor`.")
    failed = False
    for listed in _selected(wanted, gpus) if wanted else gpus:
        try:
            show_tables(console, _table(listed, all_clocks))
        except GpuError as error:
            failed = True
            say(Console(stderr=True), f"GPU {listed.index} ({listed.address.uid}): {error}")
    if failed:
        raise EnvPipeError("Some GPUs could not be read", remedy="See the messages above.")


def _table(listed: ListedGpu, all_clocks: bool) -> Table:
    gpu = open_reader(listed.address)
    supported = gpu.supported_frequencies_mhz
    state = gpu.clock_state()
    swept = sweep_range(supported, override_for(gpu.name))
    table = Table(title=f"GPU {listed.index}: {gpu.name}", title_justify="left", show_header=False)
    table.add_row("address" if gpu.is_emulated else "UUID", gpu.address.uid)
    table.add_row("SM clocks", _range_text(supported))
    if all_clocks:
        table.add_row("all SM clocks (MHz)", numbers(supported))
    table.add_row("a profile sweeps (MHz)", numbers(swept))
    if not gpu.is_emulated:
        table.add_row("memory clocks (MHz)", numbers(_memory_clocks(gpu)))
    table.add_row("SM clock now", _clock_text(state))
    limit = "" if state.power_limit_w is None else f" of at most {state.power_limit_w:.0f} W"
    table.add_row("power now", f"{gpu.power_w:.1f} W{limit}")
    table.add_row("held back by", ", ".join(state.throttle_reasons) or "nothing that it reports")
    return table


def _visible(gpus: Sequence[ListedGpu]) -> Sequence[ListedGpu]:
    """Those that CUDA_VISIBLE_DEVICES shows, in NVML's order; all, if it is not set."""
    if VISIBLE_VARIABLE not in os.environ or all(gpu.is_emulated for gpu in gpus):
        return gpus
    visible = {device.uid for device in visible_gpus().devices}
    return [gpu for gpu in gpus if gpu.address.uid in visible]


def _range_text(supported: Sequence[int]) -> str:
    """Lowest and highest clock, the steps between, and how many there are."""
    steps = sorted({high - low for high, low in pairwise(supported)})
    stepped = f" in steps of {' and '.join(map(str, steps))} MHz" if 0 < len(steps) <= 2 else ""
    return f"{supported[-1]} to {supported[0]} MHz{stepped}, {len(supported)} clocks"


def _clock_text(state: ClockState) -> str:
    asked = f", {state.requested_mhz} MHz asked for" if state.requested_mhz is not None else ""
    return f"{state.observed_mhz} MHz{asked}"


def _memory_clocks(gpu: Gpu) -> list[int]:
    read = pynvml.nvmlDeviceGetSupportedMemoryClocks
    try:
        return sorted(call_gpu(gpu.address.uid, "read the memory clocks", read), reverse=True)
    except NvmlNotSupportedError:
        return []


@clocks.command()
@_GPU_OPTION
@click.option("--dead-jobs", is_flag=True, help="Undo only what these left.")
def reset(wanted: tuple[str, ...], dead_jobs: bool) -> None:
    """Give clocks back: undo what dead jobs left, and reset every GPU that no live job holds.

    Without --gpu: all GPUs that CUDA_VISIBLE_DEVICES shows, and every GPU of this node on which a
    dead job left a lease. A GPU that a live job holds is refused, and the job named. Exits 0 only
    if every GPU was reset.

    With --dead-jobs, for the epilogue of a batch system: GPUs of live jobs, and locks that are not
    EnvPipe's, stay as they are, and it exits 0 if no dead job's lock is left.

    Example:

      envpipe clocks reset
    """
    if dead_jobs and wanted:
        raise click.UsageError("--dead-jobs is of all GPUs: leave out --gpu")
    site = read_site()
    gpus = listed_gpus()
    chosen = [] if dead_jobs else _selected(wanted, gpus) if wanted else _visible(gpus)
    resetter = Resetter(site)
    addresses = [gpu.address for gpu in chosen]
    index_of = {gpu.address.uid: gpu.index for gpu in gpus}
    console, done = Console(), []
    outcomes = resetter.reset_all(addresses)
    if not wanted:
        outcomes = chain(outcomes, resetter.undo_others(address.uid for address in addresses))
    for outcome in outcomes:
        index = index_of.get(outcome.uid)
        name = outcome.uid if index is None else f"GPU {index} ({outcome.uid})"
        say(console, f"{name}: {outcome.what}")
        done.append(outcome.done)
    if not all(done):
        raise EnvPipeError("Some clocks were not reset", remedy="See the lines above.")
    if not done:
        say(console, "There is nothing to reset.")
