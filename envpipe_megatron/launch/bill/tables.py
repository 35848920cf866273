"""A bill for people and for machines."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from envpipe_megatron.console import show_tables
from envpipe_megatron.formats.energy import SHARES, EnergyWindow, Phase
from envpipe_megatron.launch.bill.bill import JOULES_PER_KWH, Bill, EnergyTotal, total_of
from envpipe_megatron.runtime.energy.steps import percent

_LONGEST_NAME = 16
_GPU_NAMES = ("node", "gpu_uid", "gpu", "rank", "stage")

#: EnvPipe's columns, then ours.
CSV_COLUMNS = (
    "Model", "Microbatch size", "Minibatch size", "Type", "Scheduling", "Reconfig",
    "Throughput (sample/s)", "Energy (mJ)",
    "Phase", "GPUs", "Iterations", "Iteration time (s)", "Energy per iteration (J)",
    "Average power (W)",
)  # fmt: skip


@dataclass(frozen=True)
class Tariff:
    """What a kWh costs, in any currency, and its g of CO2; None if it is not known."""

    price_per_kwh: float | None = None
    grid_g_per_kwh: float | None = None

    def facts(self, energy_j: float) -> dict[str, float]:
        """Cost and CO2 of an energy; those that are known."""
        kwh = energy_j / JOULES_PER_KWH
        known = {"cost": self.price_per_kwh, "co2_g": self.grid_g_per_kwh}
        return {name: kwh * per_kwh for name, per_kwh in known.items() if per_kwh is not None}


def bill_facts(bill: Bill, tariff: Tariff, *, over: bool = True) -> dict[str, Any]:
    """A bill as JSON; while its job is not `over`, nobody is missing yet, and GPUs have no entries.

    Those of a thousand GPUs are two megabytes, and a job of weeks has thousands of lines.
    """
    missing = bill.missing() if over else []

    def entries(
        names: tuple[str, ...], key: Callable[[EnergyWindow], tuple[Any, ...]]
    ) -> list[dict[str, Any]]:
        return [
            {**dict(zip(names, values, strict=True)), **total_facts(total)}
            for values, total in bill.total_by(key).items()
        ]

    job, comparison = bill.total(), bill.comparison()
    by_node = bill.total_by(lambda w: w.node)
    return {
        "job": {
            **total_facts(job),
            "iterations": bill.num_iterations,
            **{f"energy_per_{unit}_j": value for unit, value in bill.per_unit().items()},
            **tariff.facts(job.energy_j),
        },
        "complete": over and not missing,
        "missing": missing,
        "comparison": None if comparison is None else asdict(comparison),
        "facts": bill.facts,
        "nodes": [
            {"node": name, **total_facts(by_node.get(name, total_of([]))), **asdict(node)}
            for name, node in sorted(bill.nodes.items())
        ],
        "stages": entries(("stage",), lambda w: (w.stage,)),
        **({"gpus": _gpu_facts(bill)} if over else {}),
        "phases": entries(("run", "phase"), lambda w: (w.run, w.phase)),
    }


def _gpu_facts(bill: Bill) -> list[dict[str, Any]]:
    named = {phase.window.gpu_key: phase.window for phase in reversed(bill.phases.values())}
    gpus = {
        gpu_key: {
            **{name: getattr(named[gpu_key], name) for name in _GPU_NAMES},
            **total_facts(total),
            "phases": {},
        }
        for gpu_key, total in bill.total_by(lambda w: w.gpu_key).items()
    }
    for (gpu_key, phase), total in bill.total_by(lambda w: (w.gpu_key, w.phase)).items():
        gpus[gpu_key]["phases"][phase] = total_facts(total)
    return list(gpus.values())


def total_facts(total: EnergyTotal) -> dict[str, Any]:
    """A sum as JSON."""
    shares = total.shares_s
    return {
        "energy_j": total.energy_j,
        "energy_uncertainty_j": total.energy_uncertainty_j,
        "gpu_seconds": total.duration_s,
        "average_power_w": total.average_power_w,
        "num_gpus": total.num_gpus,
        "windows": total.windows,
        **(dict(zip(SHARES, shares, strict=True)) if shares else dict.fromkeys(SHARES)),
    }


def show_bill(bill: Bill, tariff: Tariff, console: Console) -> None:
    """Print a bill as tables and sentences."""
    groups: list[tuple[tuple[str, ...], Mapping[tuple[Any, ...], EnergyTotal]]] = [
        (("run", "phase"), bill.total_by(lambda w: (w.run, w.phase))),
        (("node", "GPU"), bill.total_by(lambda w: w.gpu_key)),
        (("stage",), bill.total_by(lambda w: (w.stage,))),
        (("node",), bill.total_by(lambda w: (w.node,))),
        (("job",), {("all",): bill.total()}),
    ]
    if not any(phase.window.run for phase in bill.phases.values()):
        groups[0] = ("phase",), bill.total_by(lambda w: (w.phase,))
    show_tables(console, *(_table(names, totals) for names, totals in groups))
    for line in bill_lines(bill, tariff):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def bill_lines(bill: Bill, tariff: Tariff) -> list[str]:
    """The bill in sentences."""
    job, known = bill.total(), bill.per_unit()
    lines = [
        f"{job.energy_j:.1f} J on {job.num_gpus} GPUs, {job.average_power_w:.1f} W each on average"
    ]
    if known:
        each = ", ".join(f"{value:.4g} J per {unit}" for unit, value in known.items())
        lines.append(f"{bill.num_iterations} iterations: {each}")
    elif bill.num_iterations and not bill.unreadable and not bill.silent():
        lines.append("J per iteration are left out: a run began twice, by a restart or as another")
    compared = bill.comparison()
    if compared is not None and compared.saving_percent is not None:
        saved = percent(compared.saving_percent, compared.saving_uncertainty_percent)
        slower = percent(compared.slowdown_percent, compared.slowdown_uncertainty_percent)
        lines.append(f"steady steps against the job's own baseline: saved {saved}, slower {slower}")
    facts = tariff.facts(job.energy_j)
    if "cost" in facts:
        lines.append(f"cost: {facts['cost']:.4g} at {tariff.price_per_kwh:g} a kWh")
    if "co2_g" in facts:
        lines.append(f"CO2: {facts['co2_g']:.4g} g at {tariff.grid_g_per_kwh:g} g a kWh")
    notes = bill.facts.get("notes")
    lines += [str(note) for note in notes] if isinstance(notes, list) else []
    lines += [f"INCOMPLETE: {reason}" for reason in bill.missing()]
    return lines


def bill_csv(bill: Bill) -> str:
    """A row for the baseline's steps and one for the steady ones, summed over nodes."""
    facts = bill.facts
    samples = bill.fact("samples_per_iteration")
    text = io.StringIO()
    rows = csv.writer(text)
    rows.writerow(CSV_COLUMNS)
    for phase in (Phase.WARMUP.value, Phase.STEADY.value):
        step = bill.steps(phase)
        if step is None or step.energy_j is None:
            continue
        total = total_of(
            own
            for (_, run, name, _), own in bill.phases.items()
            if name == phase and run not in bill.other_runs
        )
        own = ("baseline", "1f1b", "default")
        if phase == Phase.STEADY:
            own = tuple(facts.get(name, "") for name in ("type", "scheduling", "reconfigure"))
        rows.writerow(
            (
                facts.get("model", ""), facts.get("microbatch_size", ""), samples, *own,
                samples / step.time_s if samples else "", total.energy_j * 1e3,
                phase, total.num_gpus, step.iterations, step.time_s,
                step.energy_j * total.num_gpus, total.average_power_w,
            )
        )  # fmt: skip
    return text.getvalue()


def _table(names: tuple[str, ...], totals: Mapping[tuple[Any, ...], EnergyTotal]) -> Table:
    table = Table(title=f"By {' and '.join(names)}" if names != ("job",) else "The job")
    for name in names:
        table.add_column(name)
    for name in ("energy (J)", "+- (J)", "GPU time (s)", "power (W)", "units/receives/ rest (%)"):
        table.add_column(name, justify="right")
    for values, total in totals.items():
        known = total.energy_uncertainty_j
        shares = [
            f"{100 * share_s / total.duration_s:.0f}"
            for share_s in total.shares_s or ()
            if total.duration_s
        ]
        table.add_row(
            *(_short("" if value is None else str(value)) for value in values),
            f"{total.energy_j:.1f}",
            "" if known is None else f"{known:.1f}",
            f"{total.duration_s:.1f}",
            f"{total.average_power_w:.1f}",
            "/".join(shares),
        )
    return table


def _short(name: str) -> str:
    """A UUID or folder that leaves room for figures; the JSON has the whole."""
    return escape(name if len(name) <= _LONGEST_NAME else f"{name[:8]}...{name[-5:]}")
