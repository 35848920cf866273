"""Shows and writes the job's bill on the node of rank 0, as it grows and at the end."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

from rich.console import Console

from envpipe_megatron.console import say_as_launcher
from envpipe_megatron.files import lock_file, replace_files
from envpipe_megatron.formats.energy import (
    BETWEEN,
    EnergyFileError,
    EnergyWindow,
    append_line,
    name_of_run,
    read_energy_logs,
)
from envpipe_megatron.launch.agent.node_log import log_path
from envpipe_megatron.launch.bill.bill import Bill
from envpipe_megatron.launch.bill.tables import Tariff, bill_csv, bill_facts, show_bill
from envpipe_megatron.runtime.energy.steps import percent

logger = logging.getLogger(__name__)


class BillReport:
    """The job's bill on the node of rank 0: `bill.jsonl` as it grows, `bill.json` and `bill.csv`.

    `interval` iterations lie between lines while the job trains; with 0 there are none. Where
    another live job has its bill in the folder, `node` is in the names of these files.
    """

    def __init__(self, folder: Path, tariff: Tariff, interval: int = 0, node: str = "") -> None:
        self._folder = folder
        self._node = node
        self._tariff = tariff
        self._interval = interval
        #: Iterations at the last line; and for each GPU, its steps and J in training then.
        self._done = 0
        self._before: dict[tuple[str, str], tuple[int, float]] = {}
        self._writer = ThreadPoolExecutor(1, "envpipe-bill")
        self._writing: Future[None] | None = None

    @cached_property
    def _stem(self) -> str:
        """How the names of this job's files begin."""
        try:
            self._lock = lock_file(self._folder / ".bill.lock")
        except BlockingIOError:
            stem = log_path(self._folder, self._node).stem.replace("energy", "bill", 1)
            why = "Another live job has its bill in %s: this job's is %s.json"
            logger.warning(why, self._folder, stem)
            return stem
        except OSError:  # a file system without locks, or whose files cannot be written
            pass
        return "bill"

    def look(self, bill: Bill) -> None:
        """Show the grown bill, if training is an interval further."""
        _ = self._stem  # settled before anything is written, as other jobs may end first
        if not self._interval:
            return
        now: dict[tuple[str, str], tuple[int, float]] = {}
        longest = self._interval  # of lines, by which GPUs may lie apart
        for phase in bill.phases.values():
            gpu = phase.window.gpu_key
            if phase.window.phase != BETWEEN:
                longest = max(longest, phase.window.steps)
                steps, energy_j = now.get(gpu, (0, 0.0))
                now[gpu] = steps + phase.steps, energy_j + phase.energy_j
        counts = [steps for steps, _ in now.values()]
        if len(counts) < (bill.fact("num_gpus") or 0):
            counts.append(0)  # of GPUs that have sent nothing yet
        # All GPUs together; but one that is cut off ends no lines.
        done = max(min(counts, default=0), max(counts, default=0) - 2 * longest)
        if done - self._done < self._interval:
            return
        each_j = 0.0
        for gpu, (steps, energy_j) in now.items():
            steps_before, energy_before_j = self._before.get(gpu, (0, 0.0))
            if steps > steps_before:
                each_j += (energy_j - energy_before_j) / (steps - steps_before)
        job = bill.total()
        line = f"{done} iterations: {each_j:.1f} J each since the last line, {job.energy_j:.0f} J "
        line += f"in all on {job.num_gpus} GPUs, {job.average_power_w:.1f} W each"
        compared = bill.comparison()
        if compared is not None and compared.saving_percent is not None:
            line += f"; saved {percent(compared.saving_percent, None)}"
            line += f", slower {percent(compared.slowdown_percent, None)}"
        self.tell(line, bill)
        self._done, self._before = done, now

    def tell(self, line: str, bill: Bill) -> None:
        """Show a line and append the bill to `bill.jsonl`. Returns at once.

        A terminal that is stopped, or a disk that hangs, holds up a thread that nobody waits for
        before the end; lines are left out meanwhile.
        """
        if self._writing is None or self._writing.done():
            self._writing = self._writer.submit(self._write, line, bill.snapshot())

    def _write(self, line: str, bill: Bill) -> None:
        try:
            say_as_launcher(line)
            facts = bill_facts(bill, self._tariff, over=False)
            append_line(self._folder / f"{self._stem}.jsonl", facts)
        except OSError as error:  # a full disk or a closed terminal: the sums go on
            logger.error("A line of the bill could not be written: %s", error)

    def end(self, bill: Bill) -> None:
        """The job is over. What cannot be written or shown keeps nothing else from being so."""
        self._add_other_nodes(bill)
        facts = bill_facts(bill, self._tariff)
        as_json = json.dumps(facts, indent=1) + "\n"
        stem = self._stem
        self._try(f"{stem}.json", lambda path: replace_files({path: [as_json]}))
        self._try(f"{stem}.csv", lambda path: replace_files({path: [bill_csv(bill)]}))
        self._writer.shutdown()
        self._try(f"{stem}.jsonl", lambda path: append_line(path, facts))
        if bill.unreadable:
            logger.warning("%d torn or foreign lines of energy logs passed over", bill.unreadable)
        with contextlib.suppress(OSError, SystemExit):  # by rich, if nobody reads any more
            show_bill(bill, self._tariff, Console())
        files = f"{stem}.json, {stem}.csv, and as it grew {stem}.jsonl"
        say_as_launcher(f"the bill is in {self._folder}: {files}")

    def _try(self, name: str, write: Callable[[Path], object]) -> None:
        try:
            write(self._folder / name)
        except OSError as error:
            logger.error("%s is not written: %s", name, error)

    def _add_other_nodes(self, bill: Bill) -> None:
        """Add what is left of starts that the bill has, by nodes that the last start was not on."""
        starts = {run for _, run, _, _ in bill.phases if run != name_of_run(run)}
        known = {log_path(self._folder, node) for node in bill.nodes}
        for log in sorted(set(self._folder.glob("energy-*.jsonl")) - known):
            windows: list[EnergyWindow] = []
            with contextlib.suppress(OSError, EnergyFileError):
                windows = [w for w in read_energy_logs([log]).windows if w.run in starts]
            for window in windows:
                bill.add(window)
            if not windows:
                logger.warning("%s is not in this bill; `envpipe energy sum` adds it", log)
