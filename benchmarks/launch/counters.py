"""Holds the bill of `envpipe launch` against the GPUs' own counters, read by somebody else.

    python benchmarks/launch/counters.py --nodes 2 --output out -- pretrain_gpt.py ... --envpipe

Runs a job on all NVIDIA GPUs of this machine as one or more nodes. Compares each GPU's counter
with what its lines add up to, and the job's bill with the lines of all nodes. A line that begins
where none has ended would be a gap in the bill.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import click
import numpy as np
import pynvml

from benchmarks.outputs import make_console, make_table
from envpipe_megatron.cli.common import OUTPUT_FOLDER

_POLL_S = 0.005
#: Ends of lines lie within refreshes, between which both sides draw straight lines.
_TOLERANCE = 0.005
#: A begin and a duration are rounded, to the last bit of seconds since the machine was started.
_GAP_S = 1e-6


@dataclass
class Counter:
    """A GPU's energy counter as it was seen to refresh."""

    uid: str
    handle: object
    times_s: list[float] = field(default_factory=list)
    readings_j: list[float] = field(default_factory=list)

    def read(self) -> None:
        """Look once more."""
        energy_j = pynvml.nvmlDeviceGetTotalEnergyConsumption(self.handle) / 1e3
        if not self.readings_j or energy_j != self.readings_j[-1]:
            self.times_s.append(time.monotonic())
            self.readings_j.append(energy_j)

    def energy_j(self, begin_s: float, end_s: float) -> float:
        """Between two instants."""
        begin_j, end_j = np.interp([begin_s, end_s], self.times_s, self.readings_j)
        return float(end_j - begin_j)


class Reader:
    """Reads the counters of all GPUs, beside the job."""

    def __init__(self) -> None:
        pynvml.nvmlInit()
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        self.counters = [Counter(pynvml.nvmlDeviceGetUUID(handle), handle) for handle in handles]
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while not self._over.wait(_POLL_S):
            for counter in self.counters:
                counter.read()

    def stop(self) -> None:
        """Read no more."""
        self._over.set()
        self._thread.join()


def start_nodes(
    num_nodes: int, visible: Sequence[str], output: Path, script: Sequence[str]
) -> list[int]:
    """Run the job as some nodes of this machine; their exit statuses."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
    per_node = len(visible) // num_nodes
    processes = []
    for index in range(num_nodes):
        command = [sys.executable, "-m", "envpipe_megatron.cli", "launch"]
        command += ["--nnodes", str(num_nodes), "--node-rank", str(index)]
        command += ["--master-addr", "127.0.0.1", "--master-port", str(port)]
        command += ["--nproc-per-node", str(per_node)]
        command += ["--node-name", f"n{index}", "--output", str(output), *script]
        mine = visible[index * per_node : (index + 1) * per_node]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(mine)}
        with (output / f"n{index}.txt").open("wb") as log:
            processes.append(
                subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
            )
    return [process.wait() for process in processes]


def compare(output: Path, counters: Mapping[str, Counter]) -> list[dict[str, Any]]:
    """For each GPU what its lines add up to, its counter over that time, and the longest gap."""
    compared: list[dict[str, Any]] = []
    for path in sorted(output.glob("energy-*.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        windows = [line for line in lines if "energy_j" in line]
        for uid in sorted({window["gpu_uid"] for window in windows}):
            own = [window for window in windows if window["gpu_uid"] == uid]
            begins_s = np.array([window["begin_s"] for window in own])
            ends_s = begins_s + [window["duration_s"] for window in own]
            lines_j = sum((Fraction(window["energy_j"]) for window in own), Fraction())
            counter_j = counters[uid].energy_j(begins_s[0], ends_s[-1])
            compared.append(
                {
                    "node": own[0]["node"],
                    "gpu": uid[:12],
                    "lines": len(own),
                    "duration_s": float(ends_s[-1] - begins_s[0]),
                    "bill_j": lines_j,
                    "counter_j": counter_j,
                    "difference_percent": 100 * (float(lines_j) / counter_j - 1),
                    "gap_ms": 1e3 * float(np.abs(begins_s[1:] - ends_s[:-1]).max(initial=0.0)),
                }
            )
    return compared


@click.command(help=__doc__.split("\n\n")[0])
@click.option("--nodes", type=click.IntRange(1), default=1, show_default=True)
@click.option("--output", type=OUTPUT_FOLDER, required=True, help="A new folder.")
@click.argument("script", nargs=-1, required=True)
def main(nodes: int, output: Path, script: tuple[str, ...]) -> None:
    """Run and compare."""
    output.mkdir(parents=True)
    reader = Reader()
    visible = [counter.uid for counter in reader.counters]
    codes = start_nodes(nodes, visible, output, script)
    reader.stop()
    compared = compare(output, {counter.uid: counter for counter in reader.counters})
    rows = [{**gpu, "bill_j": float(gpu["bill_j"])} for gpu in compared]
    make_console().print(make_table(f"Exit statuses {codes}", rows))
    bill = json.loads((output / "bill.json").read_text())
    total_j = float(sum((gpu["bill_j"] for gpu in compared), Fraction()))
    click.echo(
        f"bill {bill['job']['energy_j']} J, lines {total_j} J; {bill['missing'] or 'complete'}"
    )
    if bill["job"]["energy_j"] != total_j or len(compared) != len(visible):
        raise click.ClickException("The bill is not what the lines of all GPUs add up to.")
    if any(gpu["gap_ms"] > 1e3 * _GAP_S for gpu in compared):
        raise click.ClickException("A line begins where none has ended.")
    if any(abs(gpu["difference_percent"]) > 100 * _TOLERANCE for gpu in compared):
        raise click.ClickException(f"A GPU's lines differ by more than {_TOLERANCE:.1%}.")


if __name__ == "__main__":
    main()
