"""`envpipe clocks`: shows and resets clocks, and measures how long a change takes."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from envpipe_megatron.cli.common import COUNTS, OUTPUT_FILE, check_outputs, numbers
from envpipe_megatron.console import say, show_table
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.files import replace_files
from envpipe_megatron.gpu.base import (
    Gpu,
    GpuError,
    GpuPermissionError,
    NoDriverError,
)
from envpipe_megatron.gpu.control import choose_control, open_controlled, reset_clocks
from envpipe_megatron.gpu.emulated.emulated_gpu import EmulatedGpu
from envpipe_megatron.gpu.emulated.store import ROOT_VARIABLE
from envpipe_megatron.gpu.guard.lease import list_leases
from envpipe_megatron.gpu.guard.lease_file import LeaseRecord, lease_name
from envpipe_megatron.gpu.presets import override_for, sweep_range
from envpipe_megatron.gpu.registry import (
    VISIBLE_VARIABLE,
    Device,
    VendorGpu,
    list_gpus,
    look_at,
    uid_of_cuda_device,
    unreadable_gpus,
    visible_gpus,
)
from envpipe_megatron.gpu.site import read_site
from envpipe_megatron.runtime.clocks.latency import measure_latency as measure


@click.command("measure-latency")
@click.option("--device", default=0, show_default=True, help="The GPU, by CUDA's number.")
@click.option("--emulated", metavar="PRESET", help="An emulated GPU of this preset instead.")
@click.option(
    "--clocks",
    type=COUNTS,
    metavar="MHZ,MHZ[,...]",
    help="Changed between every two of them. Default: near the highest, 3/4 and 1/2 of it.",
)
@click.option("--repeats", default=20, show_default=True, type=click.IntRange(1))
@click.option("--output", type=OUTPUT_FILE, help="A JSON file for the results.")
def measure_latency(
    device: int,
    emulated: str | None,
    clocks: tuple[int, ...] | None,
    repeats: int,
    output: Path | None,
) -> None:
    """Measure how long a change of clock takes: the call, and until kernels show it.

    CHANGES THE CLOCK of the GPU, which must be free of other work, and resets it at the end. A
    guard process resets it if this one is killed.

    Example: envpipe clocks measure-latency --output latency.json
    """
    check_outputs([output] if output else [], [])
    if find_spec("torch") is None:
        raise EnvPipeError(
            "Clocks are changed as a job changes them, with PyTorch, which is not installed",
            remedy="Install torch; for emulated GPUs one without CUDA will do.",
        )
    with tempfile.TemporaryDirectory() as folder:
        gpu = EmulatedGpu.create(emulated, 0, folder) if emulated else _real_gpu(device)
        result = measure(gpu, clocks, repeats, lambda text: say(f"{gpu.name}: {text}"))
    _show_latency(result)
    settling_s = result["frequency_change_s"]
    if settling_s is None:
        say("No change was seen: kernels take the same time at all of these clocks.")
    else:
        say(f'For the sidecar of a profile: "frequency_change_s": {settling_s:.4f}')
    if output:
        replace_files({output: [json.dumps(result, indent=1), "\n"]})
        say(f"Wrote {output}")


def _real_gpu(device: int) -> Gpu:
    """Return a GPU by CUDA's number, whose clock may be changed: the present one from here on."""
    # Before CUDA or a driver is touched: if it is forbidden, nothing is even read.
    chosen = choose_control("auto", read_site())
    if chosen.backend is None:
        raise GpuPermissionError(
            f"The clock cannot be changed: {chosen.why}",
            remedy=". ".join(filter(None, (chosen.remedy, "Or try --emulated PRESET"))),
        )
    import torch

    if device not in range(torch.cuda.device_count()):
        raise EnvPipeError(
            f"CUDA shows {torch.cuda.device_count()} GPUs to this process",
            value=device,
            remedy="Give another --device (from 0), or try --emulated PRESET.",
        )
    torch.cuda.set_device(device)
    uid = uid_of_cuda_device(str(torch.cuda.get_device_properties(device).uuid))
    say(f"Clocks are changed by {chosen.backend}: {chosen.why}")
    return open_controlled(uid, chosen)


def _show_latency(result: dict[str, Any]) -> None:
    columns = ("MHz", "call (ms)", "settled (ms)")
    rows = (
        (
            f"{row['from_mhz']} -> {row['to_mhz']}",
            *(_spread_ms(row[name]) for name in ("call_s", "settling_s")),
        )
        for row in result["changes"]
    )
    title = f"Changes of clock on {result['gpu']}, median (99th percentile)"
    show_table(title, columns, rows, caption="settled: kernels take the new time")


def _spread_ms(values: dict[str, Any]) -> str:
    if not values["count"]:
        return "not seen"
    return f"{1e3 * values['median']:.2f} ({1e3 * values['p99']:.2f})"


def _listed_gpus() -> tuple[Device, ...]:
    """Return all GPUs of this node: real ones, or emulated ones if there is no driver."""
    try:
        return list_gpus()
    except NoDriverError:
        if not os.environ.get(ROOT_VARIABLE):
            raise
        return EmulatedGpu.list_gpus()


def _selected(wanted: Sequence[str], gpus: Sequence[Device]) -> list[Device]:
    """Return the GPUs that were named by index or UUID, in the order of the node."""
    for name in wanted:
        if not any(name in (str(gpu.index), gpu.uid) for gpu in gpus):
            known = ", ".join(f"{gpu.index} ({gpu.uid})" for gpu in gpus)
            raise EnvPipeError("There is no such GPU", value=name, remedy=f"There are {known}.")
    return [gpu for gpu in gpus if {str(gpu.index), gpu.uid} & set(wanted)]


@click.group()
def clocks() -> None:
    """Show clocks of this node's GPUs, give them back, measure how long a change takes.

    Example:

      envpipe clocks show
    """


clocks.add_command(measure_latency)


_GPU_OPTION = click.option(
    "--gpu",
    "wanted",
    multiple=True,
    metavar="INDEX|UUID",
    help="Only this GPU, by nvidia-smi's index or by UUID; repeat for more.",
)


@clocks.command()
@_GPU_OPTION
@click.option("--all-clocks", is_flag=True, help="List every supported SM clock.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON; see docs/schemas/clocks.json.")
def show(wanted: tuple[str, ...], all_clocks: bool, as_json: bool) -> None:
    """Show each GPU's clocks, how it runs now, and which job slows it. Reads only.

    Where there is no driver, the emulated GPUs of ENVPIPE_EMULATED_ROOT are shown.

    Example:

      envpipe clocks show --gpu 0
    """
    gpus = _listed_gpus()
    if not gpus:
        raise EnvPipeError("There is no GPU here", remedy="See `envpipe doctor`.")
    errors = [] if wanted else [str(unreadable) for unreadable in unreadable_gpus()]
    leases: list[LeaseRecord] = []
    try:
        leases = sorted(list_leases(), key=lambda record: record.live)
    except (GpuError, OSError) as error:
        errors.append(f"Leases cannot be seen: {error}")
    marks = {lease.path.name: {**lease.mark, "live": lease.live} for lease in leases if lease.rank}
    shown = []
    for listed in _selected(wanted, gpus) if wanted else gpus:
        try:
            gpu = look_at(listed.uid)
            shown.append(_clocks_now(listed, gpu, marks.get(lease_name(listed.address))))
            if not as_json:
                _show_gpu(gpu, shown[-1], all_clocks)
        except GpuError as error:
            errors.append(f"GPU {listed.index} ({listed.uid}): {error}")
    if as_json:
        document = {"format": "envpipe-clocks/1", "gpus": shown, "errors": errors}
        click.echo(json.dumps(document, indent=1))
    for text in errors:
        say(text, Console(stderr=True))
    if errors:
        raise EnvPipeError("Some of this could not be read", remedy="See the messages above.")


def _clocks_now(listed: Device, gpu: Gpu, mark: dict[str, Any] | None) -> dict[str, Any]:
    """Return a GPU of docs/schemas/clocks.json. Raises GpuError if it cannot be read."""
    named = {"index": listed.index, "uid": listed.uid, "name": gpu.name}
    clock, limit_w = asdict(gpu.clock_state()), gpu.power_state().power_limit_w
    return {**named, **clock, "power_limit_w": limit_w, "power_w": gpu.power_w, "slowed_by": mark}


def _show_gpu(gpu: VendorGpu, now: dict[str, Any], all_clocks: bool) -> None:
    supported, memory_mhz = gpu.supported_frequencies_mhz, gpu.memory_clocks_mhz()
    limit_w, asked_mhz, mark = now["power_limit_w"], now["requested_mhz"], now["slowed_by"]
    limit = "" if limit_w is None else f" of at most {limit_w:.0f} W"
    asked = "" if asked_mhz is None else f", {asked_mhz} MHz asked for"
    slowed = "no job of EnvPipe's that can be seen from here"
    if mark is not None:
        slowed = "" if mark["live"] else "DEAD, `envpipe clocks reset --dead-jobs` undoes it: "
        slowed += f"{mark['job_name']} " if mark["job_name"] else ""
        slowed += "(job {job}) of {user}, process {pid}, since {created}".format(**mark)
        slowed += f", down to {mark['lowest_mhz']} MHz" if mark["lowest_mhz"] else ""
    rows = {
        "address" if gpu.address.backend == EmulatedGpu.backend else "UUID": now["uid"],
        "SM clocks": range_text(supported),
        "all SM clocks (MHz)": numbers(supported) if all_clocks else "",
        "a profile lists (MHz)": numbers(sweep_range(supported, override_for(gpu.name))),
        "memory clocks (MHz)": numbers(memory_mhz),
        "SM clock now": f"{now['observed_mhz']} MHz{asked}",
        "power now": f"{now['power_w']:.1f} W{limit}",
        "held back by": ", ".join(now["throttle_reasons"]) or "nothing that it reports",
        "slowed by": slowed,
    }
    show_table(f"GPU {now['index']}: {gpu.name}", ("", ""), filter(all, rows.items()))


def _visible(gpus: Sequence[Device]) -> Sequence[Device]:
    """Return GPUs that CUDA_VISIBLE_DEVICES shows, in the driver's order; all if it is not set."""
    emulated = all(gpu.backend == EmulatedGpu.backend for gpu in gpus)
    if VISIBLE_VARIABLE not in os.environ or emulated:
        return gpus
    visible = {device.uid for device in visible_gpus()}
    return [gpu for gpu in gpus if gpu.uid in visible]


def range_text(supported: Sequence[int]) -> str:
    """Say the lowest and highest clock, the steps between, and how many there are."""
    steps = sorted({high - low for high, low in pairwise(supported)})
    stepped = f" in steps of {' and '.join(map(str, steps))} MHz" if 0 < len(steps) <= 2 else ""
    return f"{supported[-1]} to {supported[0]} MHz{stepped}, {len(supported)} clocks"


def _can_be_locked(listed: Device) -> bool:
    """Say so of a GPU whose clock nobody can lock: there is nothing to give back."""
    try:
        obstacle = look_at(listed.uid).obstacle()
    except GpuError:
        return True  # resetting it says what is wrong
    if obstacle:
        say(f"GPU {listed.index} ({listed.uid}): left as it is: {obstacle}")
    return obstacle is None


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
    gpus: Sequence[Device] = ()
    with suppress(GpuError) if dead_jobs else nullcontext():  # their leases name GPUs, too
        gpus = _listed_gpus()
    chosen = [] if dead_jobs else _selected(wanted, gpus) if wanted else _visible(gpus)
    if not wanted:
        chosen = [gpu for gpu in chosen if _can_be_locked(gpu)]
    addresses = [gpu.address for gpu in chosen]
    index_of = {gpu.uid: gpu.index for gpu in gpus}
    done = []
    for outcome in reset_clocks(site, addresses, dead_jobs=not wanted):
        index = index_of.get(outcome.uid)
        name = outcome.uid if index is None else f"GPU {index} ({outcome.uid})"
        say(f"{name}: {outcome.what}")
        done.append(outcome.done)
    for error in () if wanted or dead_jobs else unreadable_gpus():
        say(f"not reset: {error}")
        done.append(False)
    if not all(done):
        raise EnvPipeError("Some clocks were not reset", remedy="See the lines above.")
    if not done:
        say("There is nothing to reset.")
