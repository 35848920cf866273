"""`envpipe clocks measure-latency`: how long a change of clock takes on this GPU."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from envpipe_megatron.cli.common import OUTPUT_FILE, check_outputs, counts
from envpipe_megatron.console import say, show_tables, table_of
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.files import replace_files
from envpipe_megatron.gpu.base import (
    FORBID_VARIABLE,
    ClockControlForbiddenError,
    Gpu,
    clock_control_forbidden,
)
from envpipe_megatron.gpu.control import choose_control, open_controlled
from envpipe_megatron.gpu.emulated.emulated_gpu import EmulatedGpu
from envpipe_megatron.gpu.site import read_site
from envpipe_megatron.runtime.clocks.latency import (
    CudaKernelTimer,
    EmulatedKernelTimer,
    KernelTimer,
    usual_clocks_mhz,
)
from envpipe_megatron.runtime.clocks.latency import measure_latency as measure


@click.command("measure-latency")
@click.option("--device", default=0, show_default=True, help="The GPU, by CUDA's number.")
@click.option("--emulated", metavar="PRESET", help="An emulated GPU of this preset instead.")
@click.option(
    "--clocks",
    type=counts(),
    metavar="MHZ,MHZ[,...]",
    help="Changed between every two of them. Default: near all, 3/4 and 1/2 of the highest.",
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
    """Measure how long a change of clock takes: the call, until it runs, and the first kernel.

    CHANGES THE CLOCK of the GPU, which must be free of other work, and resets it at the end. A
    guard process resets it if this one is killed.

    Example: envpipe clocks measure-latency --output latency.json
    """
    check_outputs([output] if output else [], [])
    console = Console()
    if emulated:
        with tempfile.TemporaryDirectory() as folder:
            gpu = EmulatedGpu.create(emulated, 0, folder)
            result = _measure(console, gpu, EmulatedKernelTimer(gpu), clocks, repeats)
    else:
        # Checked before CUDA or NVML is touched: if it is forbidden, nothing is even read.
        if clock_control_forbidden():
            raise ClockControlForbiddenError(
                "measure-latency changes the GPU's clock, which is forbidden here",
                value=os.environ[FORBID_VARIABLE],
                remedy=f"Unset {FORBID_VARIABLE}, or try --emulated PRESET.",
            )
        site = read_site()
        chosen = choose_control("auto", site, require=True)
        uid, timer = _cuda_device(device)
        say(console, f"Clocks are changed by {chosen.backend}: {chosen.why}")
        result = _measure(console, open_controlled(uid, chosen, site), timer, clocks, repeats)
    show_tables(console, _table(result))
    settling_s = result["frequency_change_s"]
    if settling_s is None:
        say(console, "No change was seen: kernels take the same time at all of these clocks.")
    else:
        say(console, f'For the sidecar of a profile: "frequency_change_s": {settling_s:.4f}')
    if output:
        replace_files({output: [json.dumps(result, indent=1), "\n"]})
        say(console, f"Wrote {output}")


def _cuda_device(device: int) -> tuple[str, KernelTimer]:
    """The UUID of CUDA's device, and a timer on it."""
    try:
        import torch
    except ImportError as error:
        raise EnvPipeError(
            "Kernels are timed with PyTorch, which is not installed",
            remedy="Install torch, or try --emulated PRESET.",
        ) from error
    if device >= torch.cuda.device_count():
        raise EnvPipeError(
            f"CUDA shows {torch.cuda.device_count()} GPUs to this process",
            value=device,
            remedy="Give another --device (from 0), or try --emulated PRESET.",
        )
    from envpipe_megatron.gpu.devices import uid_of_cuda_device

    torch.cuda.set_device(device)
    uid = uid_of_cuda_device(str(torch.cuda.get_device_properties(device).uuid))
    return uid, CudaKernelTimer()


def _measure(
    console: Console,
    gpu: Gpu,
    timer: KernelTimer,
    clocks: Sequence[int] | None,
    repeats: int,
) -> dict[str, Any]:
    def tell(text: str) -> None:
        say(console, f"{gpu.name}: {text}")

    return measure(gpu, timer, clocks or usual_clocks_mhz(gpu), repeats, tell)


def _table(result: dict[str, Any]) -> Table:
    columns = ("MHz", "call (ms)", "settled (ms)", "shown (ms)", "first kernel")
    rows = (
        (
            f"{row['from_mhz']} -> {row['to_mhz']}",
            *(_spread(row[name], 1e3) for name in ("call_s", "settling_s", "shown_s")),
            _spread(row["first_kernel_ratio"], 1.0),
        )
        for row in result["changes"]
    )
    title = f"Changes of clock on {result['gpu']}, median (99th percentile)"
    table = table_of(title, columns, rows)
    table.caption = (
        "settled: kernels take the new time; shown: the driver says so; "
        "first kernel: the first after the call, over the steady ones"
    )
    return table


def _spread(values: dict[str, Any], scale: float) -> str:
    if not values["count"]:
        return "not seen"
    return f"{scale * values['median']:.2f} ({scale * values['p99']:.2f})"
