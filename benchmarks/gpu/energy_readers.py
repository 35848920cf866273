"""What energy readers of one host cost each other, and whoever else calls the driver.

    ENVPIPE_FORBID_CLOCK_CONTROL=1 python -m benchmarks.gpu.energy_readers [--readers 8 ...]

A job has one reader a rank, a process that reads its GPU's counter around each refresh. Reads of
one host may wait for each other in the driver, and so may the requests for clocks of a guard. With
each number of readers, over the GPUs in turn: how many refreshes a reader sees and how well it
knows their instants, what a call of the driver takes that only reads a clock, and what a unit takes
that the host bounds. Several readers on a GPU stand for more GPUs. Without a GPU it rehearses on
emulated ones.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.gpu.control import torch_uid
from benchmarks.gpu.unit_cost import Work
from benchmarks.outputs import leave, make_console, make_table, output_option
from envpipe_megatron.gpu.backends.nvml import NvmlGpu
from envpipe_megatron.gpu.base import Gpu
from envpipe_megatron.gpu.clock.controller import spread
from envpipe_megatron.gpu.emulated.emulated_gpu import EmulatedGpu
from envpipe_megatron.gpu.energy_reader import EnergyReader
from envpipe_megatron.integrations.layer_profile.measuring import now_s
from envpipe_megatron.runtime.energy.meter import POLL_S

_PAUSE_S = 0.005
#: A reader's first refresh comes after its process has started.
_START_S = 20.0


def measure(gpus: list[Gpu], readers: int, seconds: float) -> dict[str, Any]:
    """One row: these readers for so long, and calls and units beside them."""
    work = Work("host")
    with ExitStack() as stack:
        started = [
            stack.enter_context(closing(EnergyReader(gpu.address, POLL_S)))
            for gpu in itertools.islice(itertools.cycle(gpus), readers)
        ]
        for reader in started:
            if not list(reader.look(_START_S)):
                raise click.ClickException(f"A reader saw no refresh in {_START_S:g} s")
        calls_s, units_s = [], []
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            begin_s = time.perf_counter()
            _ = gpus[0].clock_state().observed_mhz
            calls_s.append(time.perf_counter() - begin_s)
            begin_s = time.perf_counter()
            work.run()
            now_s()
            units_s.append(time.perf_counter() - begin_s)
            _pause(gpus)
        seen = [list(reader.take()) for reader in started]
    apart_s = [
        late.time_s - early.time_s for each in seen for early, late in itertools.pairwise(each)
    ]
    known_to_s = [reading.time_uncertainty_s for each in seen for reading in each]
    row: dict[str, Any] = {"readers": readers}
    for name, values_s in (
        ("call", calls_s),
        ("unit", units_s),
        ("refreshes_apart", apart_s),
        ("refresh_known_to", known_to_s),
    ):
        found = spread(values_s)
        row |= {f"{name}_{key}_ms": 1e3 * found.get(key, float("nan")) for key in ("median", "p99")}
    row["refreshes_a_second"] = statistics.fmean(map(len, seen)) / seconds if seen else 0.0
    return row


def _pause(gpus: list[Gpu]) -> None:
    time.sleep(_PAUSE_S)
    for gpu in gpus:
        if isinstance(gpu, EmulatedGpu):
            gpu.advance_to(gpu.time_s() + _PAUSE_S)  # nothing else does


@click.command(help=__doc__)
@click.option("--readers", "counts", type=click.IntRange(0), multiple=True, default=(0, 1, 4, 8))
@click.option("--seconds", default=5.0, show_default=True, help="For each number.")
@output_option("energy_readers")
def main(counts: tuple[int, ...], seconds: float, output: Path) -> None:
    """Measure, print, and write energy_readers.csv."""
    with tempfile.TemporaryDirectory() as folder:
        gpus: list[Gpu] = (
            [NvmlGpu(torch_uid(device)) for device in range(torch.cuda.device_count())]
            if torch.cuda.is_available()
            else [EmulatedGpu.create("h100", index, Path(folder)) for index in range(2)]
        )
        # Forwards and backwards: what drifts meets all numbers alike.
        rows = [measure(gpus, count, seconds) for count in (*counts, *reversed(counts))]
    make_console().print(make_table("Energy readers of one host", rows))
    leave(output, {"energy_readers": rows})


if __name__ == "__main__":
    main()
