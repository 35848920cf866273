"""What the GPU layer reads on real GPUs. Changes nothing.

    ENVPIPE_FORBID_CLOCK_CONTROL=1 torchrun --nproc-per-node 2 benchmarks/gpu/control.py \
        --output gpu_control.json

Parts: (mapping) torch's devices against NVML's; (clocks) their table and the sweep made from it;
(meters) how often they refresh, what a read takes, and whether they agree; (blocking) power of a
GPU that waits in a receive.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import threading
import time
import timeit
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import click
import pynvml
import torch
import torch.distributed as dist

from envpipe_megatron.gpu.backends.nvml import NvmlGpu
from envpipe_megatron.gpu.base import FORBID_VARIABLE, clock_control_forbidden
from envpipe_megatron.gpu.clock.controller import spread
from envpipe_megatron.gpu.devices import uid_of_cuda_device, visible_gpus
from envpipe_megatron.gpu.presets import override_for, sweep_range

MARKER_BYTES = 3 << 30
WINDOW_S = 5.0
PARTS = ("mapping", "clocks", "meters", "blocking")


class Node:
    """This rank among those of the job; without torchrun, the only one."""

    def __init__(self) -> None:
        self.rank = int(os.environ.get("RANK", 0))
        self.size = int(os.environ.get("WORLD_SIZE", 1))
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        self.uid = torch_uid(torch.cuda.current_device())
        self._host: dist.ProcessGroup | None = None
        if self.size > 1:
            dist.init_process_group("nccl", timeout=timedelta(seconds=120))
            self._host = dist.new_group(backend="gloo", timeout=timedelta(seconds=120))

    def gather(self, value: object) -> list[Any]:
        """What every rank gives, on every rank; a barrier too."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._host)
        return values


def torch_uid(device: int) -> str:
    """NVML's UUID of a torch device."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def measure_mapping(node: Node) -> dict[str, Any]:
    """Rank 0 maps every torch device, in processes that see different GPUs."""
    result: dict[str, Any] = {}
    if node.rank == 0:
        every = [str(index) for index in range(torch.cuda.device_count())]
        for name, visible in (
            ("all", None),
            ("reversed", ",".join(reversed(every))),
            ("only the last", every[-1]),
            ("only the last, by UUID", torch_uid(len(every) - 1)),
        ):
            environment = {key: value for key, value in os.environ.items() if key != "RANK"}
            if visible is not None:
                environment["CUDA_VISIBLE_DEVICES"] = visible
            command = [sys.executable, __file__, "--map", "--output", "-"]
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=100
            )
            result[name] = {"error": done.stderr[-2000:]}
            if done.returncode == 0:
                result[name] = json.loads(done.stdout.splitlines()[-1])
    node.gather(None)  # the others leave the GPUs' memory alone meanwhile
    return result


def map_devices() -> list[dict[str, Any]]:
    """Each torch device of this process: UUID, NVML's index, and where its memory shows up."""
    pynvml.nvmlInit()
    handles = list(map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount())))

    def used_bytes() -> list[int]:
        return [pynvml.nvmlDeviceGetMemoryInfo(handle).used for handle in handles]

    rows = []
    by_variables = [device.uid for device in visible_gpus()]
    for device in range(torch.cuda.device_count()):
        torch.zeros(1, device=device)
        before = used_bytes()
        marker = torch.empty(MARKER_BYTES, dtype=torch.uint8, device=device)
        more = [after - less for after, less in zip(used_bytes(), before, strict=True)]
        del marker
        torch.cuda.empty_cache()
        grown = [index for index, size in enumerate(more) if size > MARKER_BYTES // 2]
        uid = uid_of_cuda_device(str(torch.cuda.get_device_properties(device).uuid))
        index = pynvml.nvmlDeviceGetIndex(pynvml.nvmlDeviceGetHandleByUUID(uid))
        same = {uid, torch_uid(device), NvmlGpu(uid).address.uid, by_variables[device]} == {uid}
        row = {"torch": device, "nvml_by_uuid": index, "nvml_by_memory": grown, "uuid": uid}
        rows.append(row | {"right": same and grown == [index]})
    return rows


def measure_clocks(node: Node) -> dict[str, Any]:
    """The table of clocks, the sweep made from it, and the clock's state now."""
    gpu = NvmlGpu(node.uid)
    table = gpu.supported_frequencies_mhz
    times_s = timeit.repeat(gpu.clock_state, repeat=10, number=1)
    return {
        "gpu": gpu.name,
        "count": len(table),
        "highest_mhz": table[0],
        "lowest_mhz": table[-1],
        "sweep_mhz": sweep_range(table, override_for(gpu.name)),
        "steps_mhz": sorted({a - b for a, b in itertools.pairwise(table)}),
        "state": str(gpu.clock_state()),
        "state_call_us": 1e6 * statistics.median(times_s),
    }


def measure_meters(node: Node) -> dict[str, Any]:
    """Refresh and read time of the meters, idle and loaded, and whether they agree."""
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByUUID(node.uid)

    def field(number: int) -> Callable[[], int]:
        def read() -> int:
            value = pynvml.nvmlDeviceGetFieldValues(handle, [number])[0]
            pynvml._nvmlCheckReturn(value.nvmlReturn)
            return int(value.value.uiVal)

        return read

    meters: dict[str, Callable[[], int]] = {
        "energy_counter": lambda: int(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)),
        "power_usage": lambda: int(pynvml.nvmlDeviceGetPowerUsage(handle)),
        "power_instant": field(pynvml.NVML_FI_DEV_POWER_INSTANT),
        "power_average": field(pynvml.NVML_FI_DEV_POWER_AVERAGE),
    }
    result: dict[str, Any] = {}
    with load():
        result["library"] = guarded(lambda: library_meter(NvmlGpu(node.uid)))
        for name, read in meters.items():
            result[name] = guarded(partial(refreshes, read, 2.5))
        result["agreement"] = guarded(lambda: agreement(NvmlGpu(node.uid), meters))
    return result


def library_meter(gpu: NvmlGpu) -> dict[str, Any]:
    """What reading the energy takes through the library, and how well instants are known, ms."""
    reads_ms, uncertainties_ms, instants_s = [], [], []
    end_s = time.monotonic() + 2.5
    while time.monotonic() < end_s:
        begin_s = time.monotonic()
        reading = gpu.read_energy()
        reads_ms.append(1e3 * (time.monotonic() - begin_s))
        uncertainties_ms.append(1e3 * reading.time_uncertainty_s)
        instants_s.append(reading.time_s)
        time.sleep(0.05)  # as the meter's thread does
    steps_ms = [1e3 * (b - a) for a, b in itertools.pairwise(instants_s) if b > a]
    return {
        "read_ms": spread(reads_ms),
        "uncertainty_ms": spread(uncertainties_ms),
        "refresh_ms": spread(steps_ms),
    }


def refreshes(read: Callable[[], int], seconds: float) -> dict[str, Any]:
    """Poll a meter: what a read takes, and how long it shows one value, ms."""
    reads_ms, changes_s, last = [], [], read()
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        begin_s = time.monotonic()
        value = read()
        now_s = time.monotonic()
        reads_ms.append(1e3 * (now_s - begin_s))
        if value != last:
            changes_s.append(now_s)
            last = value
    periods_ms = [1e3 * (b - a) for a, b in itertools.pairwise(changes_s)]
    return {"read_ms": spread(reads_ms), "refresh_ms": spread(periods_ms), "last": last}


def agreement(gpu: NvmlGpu, meters: dict[str, Callable[[], int]]) -> dict[str, Any]:
    """Energy of a loaded window by the counter, and by power summed up over it."""
    powers: dict[str, list[float]] = {name: [] for name in meters if name.startswith("power")}
    begin = gpu.read_energy()
    while gpu.time_s() < begin.time_s + WINDOW_S:
        for name in list(powers):
            try:
                powers[name].append(meters[name]() / 1e3)
            except pynvml.NVMLError:
                del powers[name]
        time.sleep(0.01)
    end = gpu.read_energy()
    window_s = end.time_s - begin.time_s
    counter_w = (end.energy_j - begin.energy_j) / window_s
    means_w = {name: statistics.fmean(values) for name, values in powers.items()}
    found = {w: {"mean_w": mean, "over_counter": mean / counter_w} for w, mean in means_w.items()}
    return {"window_s": window_s, "counter_w": counter_w, **found}


def measure_blocking(node: Node) -> dict[str, Any]:
    """Power of waiting in a receive, of a spinning kernel, and of idling, each after a load."""
    gpu = NvmlGpu(node.uid)
    results: dict[str, Any] = {}
    results["idle"] = _window(node, gpu, nothing, nothing)
    spin: Callable[[int], None] = torch.cuda._sleep
    for _ in range(2):  # the first loads the kernel
        begin_s = time.monotonic()
        spin(100_000_000)
        torch.cuda.synchronize()
    cycles = int(100_000_000 * (WINDOW_S + 1.0) / (time.monotonic() - begin_s))
    results["spinning kernel of one thread (stands in for a receive)"] = _window(
        node, gpu, lambda: spin(cycles), nothing
    )
    if node.size > 1:
        message = torch.zeros(1 << 20, device="cuda")
        partner = node.rank ^ 1
        for repeat, receiving in ((0, 0), (0, 1), (1, 0), (1, 1)):
            start: Callable[[], Any] = nothing
            finish: Callable[[], Any] = nothing
            name = "idle beside a receiver"
            if partner < node.size and node.rank % 2 == receiving:
                start, name = (lambda: dist.recv(message, partner)), "NCCL receive"
            elif partner < node.size:
                finish = partial(dist.send, message, partner)
            if repeat == 0:  # makes the communicators and loads their kernels
                start()
                finish()
                torch.cuda.synchronize()
                node.gather(None)
            else:
                results[name] = _window(node, gpu, start, finish)
    return results


def nothing() -> None:
    """What an idle GPU is given to do."""


def _window(
    node: Node, gpu: NvmlGpu, before: Callable[[], Any], after: Callable[[], Any]
) -> dict[str, Any]:
    """Load the GPU, start something that waits, measure, end it; all ranks together."""
    with load():
        time.sleep(1.0)
    torch.cuda.synchronize()
    node.gather(None)
    before()
    time.sleep(0.3)
    begin = gpu.read_energy()
    time.sleep(WINDOW_S / 2)
    clock_mhz = gpu.clock_state().observed_mhz
    time.sleep(WINDOW_S / 2)
    end = gpu.read_energy()
    node.gather(None)
    after()
    torch.cuda.synchronize()
    return {
        "power_w": (end.energy_j - begin.energy_j) / (end.time_s - begin.time_s),
        "window_s": end.time_s - begin.time_s,
        "clock_mhz": clock_mhz,
    }


@contextmanager
def load() -> Any:
    """Matrix products on this GPU, launched by another thread, while the block runs."""
    device, stop = torch.cuda.current_device(), threading.Event()

    def run() -> None:
        torch.cuda.set_device(device)
        one = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        while not stop.is_set():
            for _ in range(20):
                one @ one
            torch.cuda.synchronize()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    time.sleep(0.5)
    try:
        yield
    finally:
        stop.set()
        thread.join()


def guarded(call: Callable[[], Any]) -> Any:
    """What a call returns, or its error: what else is measured must not be lost."""
    try:
        return call()
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}


@click.command()
@click.option("--part", "parts", multiple=True, type=click.Choice(PARTS), help="Only these.")
@click.option("--map", "map_only", is_flag=True, hidden=True)
@click.option("--output", type=click.Path(path_type=Path), required=True, help="JSON file.")
def main(parts: tuple[str, ...], map_only: bool, output: Path) -> None:
    """Measure what the GPU layer reads."""
    if not clock_control_forbidden():
        raise click.ClickException(f"Set {FORBID_VARIABLE}=1: this only reads.")
    if map_only:
        click.echo(json.dumps(map_devices()))
        return
    node = Node()
    measures: dict[str, Callable[[], Any]] = {
        "mapping": lambda: measure_mapping(node),
        "clocks": lambda: measure_clocks(node),
        "meters": lambda: measure_meters(node),
        "blocking": lambda: measure_blocking(node),
    }
    mine: dict[str, Any] = {"uuid": node.uid, "gpu": torch.cuda.get_device_name()}
    for name in parts or PARTS:
        begin_s = time.monotonic()
        mine[name] = guarded(measures[name])
        mine.setdefault("seconds", {})[name] = round(time.monotonic() - begin_s, 1)
        if node.rank == 0:  # what is there when a later part hangs
            output.write_text(json.dumps({"torch": torch.__version__, "ranks": [mine]}) + "\n")
        guarded(lambda: node.gather(None))
    ranks = guarded(lambda: node.gather(mine))
    if node.rank == 0:
        ranks = ranks if isinstance(ranks, list) else [mine]
        output.write_text(json.dumps({"torch": torch.__version__, "ranks": ranks}, indent=1) + "\n")
        click.echo(f"What {len(ranks)} ranks measured is in {output}")
    if node.size > 1:
        guarded(dist.destroy_process_group)


if __name__ == "__main__":
    main()
