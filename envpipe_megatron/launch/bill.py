"""Writes a bill for people and machines: tables, JSON and CSV, and its file as it grows."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Mapping
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.console import Console

from envpipe_megatron.console import say, say_as_launcher, show_table
from envpipe_megatron.files import csv_text, lock_file, replace_files
from envpipe_megatron.formats.account import UNDER_BUDGETS, Tariff, account_lines
from envpipe_megatron.formats.bill import Bill, num_gpus
from envpipe_megatron.formats.energy import SHARES, Phase
from envpipe_megatron.formats.energy_sums import EnergySums, total_of
from envpipe_megatron.launch.agent.ledger import log_path

logger = logging.getLogger(__name__)

_LONGEST_NAME = 16
_GPU_NAMES = ("node", "gpu_uid", "gpu", "rank", "stage")

#: EnvPipe's columns, then ours.
CSV_COLUMNS = (
    "Model", "Microbatch size", "Minibatch size", "Type", "Scheduling", "Reconfig",
    "Throughput (sample/s)", "Energy (mJ)",
    "Phase", "GPUs", "Iterations", "Iteration time (s)", "Energy per iteration (J)",
    "Average power (W)",
)  # fmt: skip


def bill_facts(bill: Bill, tariff: Tariff, *, over: bool = True) -> dict[str, Any]:
    """Return a bill as JSON; until its job is `over`, none is missing, and GPUs have no entries.

    Those of a thousand GPUs are two megabytes, and a job of weeks has thousands of lines.
    """
    missing = bill.missing() if over else []

    def entries(*names: str) -> list[dict[str, Any]]:
        return [
            {**dict(zip(names, values, strict=True)), **_total_facts(total)}
            for values, total in bill.total_by(*names).items()
        ]

    job, by_node = bill.total(), bill.total_by("node")
    return {
        "job": {
            **_total_facts(job),
            "iterations": bill.num_iterations,
            **{f"energy_per_{unit}_j": value for unit, value in bill.per_unit().items()},
            **tariff.facts(job.energy_j),
        },
        "complete": over and not missing,
        "missing": missing,
        **bill.comparison_facts(),
        "facts": bill.facts,
        "nodes": [
            {"node": name, **_total_facts(by_node.get((name,), EnergySums())), **asdict(node)}
            for name, node in sorted(bill.nodes.items())
        ],
        "stages": entries("stage"),
        **({"gpus": _gpu_facts(bill)} if over else {}),
        "phases": entries("run", "phase"),
    }


def _gpu_facts(bill: Bill) -> list[dict[str, Any]]:
    named = {window.gpu_key: window for window in reversed(bill.windows())}
    gpus = {
        gpu_key: {
            **{name: getattr(named[gpu_key], name) for name in _GPU_NAMES},
            **_total_facts(total),
            "phases": {},
        }
        for (gpu_key,), total in bill.total_by("gpu_key").items()
    }
    for (gpu_key, phase), total in bill.total_by("gpu_key", "phase").items():
        gpus[gpu_key]["phases"][phase] = _total_facts(total)
    return list(gpus.values())


def _total_facts(total: EnergySums) -> dict[str, Any]:
    """Return a sum as JSON."""
    return {
        "energy_j": total.energy_j,
        "energy_uncertainty_j": total.energy_uncertainty_j,
        "gpu_seconds": total.duration_s,
        "average_power_w": total.average_power_w,
        "num_gpus": len(total.gpus),
        "windows": total.windows,
        **dict(zip(SHARES, total.known_shares_s or (None,) * len(SHARES), strict=True)),
    }


def show_bill(bill: Bill, tariff: Tariff, console: Console) -> None:
    """Print a bill as tables and sentences."""
    phases = ("run", "phase") if any(window.run for window in bill.windows()) else ("phase",)
    _show_totals(phases, bill.total_by(*phases), console)
    by_gpu = {key: total for (key,), total in bill.total_by("gpu_key").items()}
    _show_totals(("node", "GPU"), by_gpu, console)
    for name in ("stage", "node"):
        _show_totals((name,), bill.total_by(name), console)
    _show_totals(("job",), {("all",): bill.total()}, console)
    for line in bill_lines(bill, tariff):
        say(line, console)


def bill_lines(bill: Bill, tariff: Tariff) -> list[str]:
    """Return the bill in sentences."""
    lines = list(account_lines(bill, tariff, bill.comparisons()))
    if known := bill.per_unit():
        each = ", ".join(f"{value:.4g} J per {unit}" for unit, value in known.items())
        lines.append(f"{bill.num_iterations} iterations: {each}")
    notes = bill.facts.get("notes")
    lines += [str(note) for note in notes] if isinstance(notes, list) else []
    lines += [f"INCOMPLETE: {reason}" for reason in bill.missing()]
    return lines


def bill_csv(bill: Bill) -> str:
    """Return a row for the baseline's steps and one for the steady ones, summed over nodes.

    A step of the baseline is the one that steady steps were compared with: warm-ups begin slowly.
    """
    facts, samples, compared = bill.facts, bill.fact("samples_per_iteration"), bill.compared()
    rows: list[tuple[object, ...]] = [CSV_COLUMNS]
    for phase in (Phase.WARMUP.value, Phase.STEADY.value):
        step, sums = bill.steps(phase), bill.of_phase(phase)
        if step is None or (energy_j := step.energy_j) is None:
            continue
        total, gpus, iterations = total_of(sums), num_gpus(sums), step.iterations
        if phase == Phase.WARMUP and compared and (base_j := compared[1].energy_j) is not None:
            step, energy_j = compared[1], base_j
        own = ("baseline", "1f1b", "default")
        if phase == Phase.STEADY:
            own = tuple(facts.get(name, "") for name in ("type", "scheduling", "reconfigure"))
        rows.append((
            facts.get("model", ""), facts.get("microbatch_size", ""), samples, *own,
            samples / step.time_s if samples else "", total.energy_j * 1e3,
            phase, gpus, iterations, step.time_s,
            energy_j * gpus, total.average_power_w,
        ))  # fmt: skip
    return csv_text(rows)


def _show_totals(
    names: tuple[str, ...], totals: Mapping[tuple[Any, ...], EnergySums], console: Console
) -> None:
    rows = (
        (
            *(_short("" if value is None else str(value)) for value in values),
            f"{total.energy_j:.1f}",
            "" if total.energy_uncertainty_j is None else f"{total.energy_uncertainty_j:.1f}",
            f"{total.duration_s:.1f}",
            f"{total.average_power_w:.1f}",
            "/".join(
                f"{100 * share_s / total.duration_s:.0f}"
                for share_s in total.known_shares_s or ()
                if total.duration_s
            ),
        )
        for values, total in totals.items()
    )
    title = f"By {' and '.join(names)}" if names != ("job",) else "The job"
    figures = ("energy (J)", "+- (J)", "GPU time (s)", "power (W)", "units/receives/ rest (%)")
    show_table(title, (*names, *figures), rows, left=names, console=console)


def _short(name: str) -> str:
    """Return a UUID or folder that leaves room for figures; the JSON has the whole."""
    return name if len(name) <= _LONGEST_NAME else f"{name[:8]}...{name[-5:]}"


class BillReport:
    """Writes the job's bill on the node of rank 0: `bill.json` as it grows, and `bill.csv`.

    `interval` iterations lie between that while the job trains; with 0 it is written at the end
    only. Where another live job has its bill in the folder, the file's name has `node` in it.
    """

    def __init__(self, folder: Path, tariff: Tariff, interval: int = 0, node: str = "") -> None:
        self._folder = folder
        self._node = node
        self._tariff = tariff
        self._interval = interval
        #: Iterations that the last line was of.
        self._done = 0
        #: The last bill, and whether it is written.
        self._ended: tuple[Bill, bool] | None = None

    @cached_property
    def _path(self) -> Path:
        """Return the path of this job's bill."""
        try:
            self._lock = lock_file(self._folder / ".bill.lock")
        except BlockingIOError:
            log = log_path(self._folder, self._node)
            path = log.with_name(log.name.replace("energy", "bill", 1)).with_suffix(".json")
            why = "Another live job has its bill in %s: this job's is %s"
            logger.warning(why, self._folder, path.name)
            return path
        except OSError:  # a file system without locks, or whose files cannot be written
            pass
        return self._folder / "bill.json"

    def look(self, bill: Bill) -> None:
        """Show and write the bill so far, if training is an interval further.

        Only the number of iterations is read of a bill that grows, and all else of its snapshot.
        """
        path = self._path  # settled before anything is written, as other jobs may end first
        further = bill.num_iterations - self._done
        if not self._interval or further < self._interval:
            return
        now = bill.snapshot()
        self._done, job = now.num_iterations, now.total()
        line = f"{self._done} iterations: {job.energy_j:.0f} J "
        line += f"in all on {len(job.gpus)} GPUs, {job.average_power_w:.1f} W each"
        compared = now.comparison()
        line += f"; against the job's own baseline {compared}" if compared else ""
        line += UNDER_BUDGETS if compared and now.facts.get("power") else ""
        say_as_launcher(line)
        self._write(path, bill_facts(now, self._tariff, over=False))

    def _write(self, path: Path, facts: Mapping[str, Any] | str) -> bool:
        """Write a file of the bill; return False, and log it, if that cannot be."""
        text = facts if isinstance(facts, str) else json.dumps(facts, indent=1) + "\n"
        try:
            replace_files({path: [text]})
        except OSError as error:  # a full disk: the sums go on
            logger.error("%s is not written: %s", path.name, error)
            return False
        return True

    def end(self, bill: Bill) -> None:
        """Write the last bill. What cannot be written stops nothing else."""
        self.look(bill)
        self._ended = bill, self._write(self._path, bill_facts(bill, self._tariff))
        self._write(self._path.with_suffix(".csv"), bill_csv(bill))
        if bill.unreadable:
            logger.warning("%d torn or foreign lines of energy logs passed over", bill.unreadable)
        of_nodes = {log_path(self._folder, node) for node in bill.nodes}
        for log in sorted(set(self._folder.glob("energy-*.jsonl")) - of_nodes):
            logger.warning("%s is not in this bill; `envpipe energy sum` adds it", log)

    def show(self) -> None:
        """Show the last bill on this node, if it was here, to who still reads."""
        if self._ended is None:
            return
        bill, written = self._ended
        with contextlib.suppress(OSError, SystemExit, UnicodeError):  # nobody reads any more
            show_bill(bill, self._tariff, Console())
        if written:
            say_as_launcher(f"the bill is in {self._path}")
