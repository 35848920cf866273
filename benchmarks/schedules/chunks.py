"""Clocks alone on Megatron's interleaved orders, beside other orders: a table of docs/schedules.md.

    python benchmarks/schedules/chunks.py

GPT-3 175B as others profiled it. Its profiles know no chunks: each stage is split evenly, and
messages are free.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import click

from benchmarks import outputs
from benchmarks.claims import markdown_line
from benchmarks.outputs import output_option, write_csv
from benchmarks.planner.workloads import Workload, read_workloads
from envpipe_megatron.core.plan import Plan
from envpipe_megatron.policies.planner import make_plan
from envpipe_megatron.policies.request import PlanRequest

_MICROBATCHES = (24, 96)
_CHUNKS = (2, 4)
_COLUMNS = (
    "profile",
    "order",
    "clocks",
    "time against 1F1B (%)",
    "saved at its own time, of itself (%)",
    "saved at 1F1B's time (%)",
    "peak in flight",
)


@dataclass(frozen=True)
class Row:
    """One order of one workload.

    Args:
        own_time: the plan that takes no longer than the order at full clock.
        same_time: the plan that takes no longer than 1F1B at full clock.
        one_f_one_b: 1F1B at full clock.
    """

    workload: Workload
    order: str
    clocks: str
    own_time: Plan
    same_time: Plan
    one_f_one_b: Plan

    @property
    def slower_percent(self) -> float:
        """Time of the order at full clock against that of 1F1B."""
        return self.own_time.baseline.cost.slowdown_percent(self.one_f_one_b.cost)

    @property
    def own_saving_percent(self) -> float:
        """What clocks save at no loss of time, of the order's own energy at full clock."""
        return self.own_time.cost.saving_percent(self.own_time.baseline.cost)

    @property
    def saving_percent(self) -> float:
        """What order and clocks save in 1F1B's time, of its energy at full clock."""
        return self.same_time.cost.saving_percent(self.one_f_one_b.cost)

    @property
    def peak_in_flight(self) -> float:
        """The most microbatches of a whole stage that a stage holds; a chunk is a part of one."""
        schedule = self.own_time.schedule
        return max(schedule.peak_in_flight) / schedule.num_chunks


@click.command()
@output_option("chunks")
def main(output: Path) -> None:
    """Compare the orders on the profiles of ../shared/data and print the table."""
    if not outputs.PERSEUS_DATA.is_dir():
        click.echo(f"Skipped: there are no profiles at {outputs.PERSEUS_DATA}.")
        return
    rows = [row for workload in workloads(outputs.PERSEUS_DATA) for row in compare(workload)]
    output.mkdir(parents=True, exist_ok=True)
    write_csv(output / "chunks.csv", map(cells, rows))
    click.echo(table(rows))


def workloads(data_dir: Path) -> list[Workload]:
    """GPT-3 175B with few and with many microbatches, on each GPU."""
    known = read_workloads(data_dir)
    return [w for w in known if w.emulated and w.num_microbatches in _MICROBATCHES]


def compare(workload: Workload) -> Iterator[Row]:
    """The rows of one workload."""

    def planned(request: PlanRequest) -> Plan:
        return make_plan(workload.profile, request).plan

    full = planned(workload.request())
    for order, clocks, request in (
        ("1F1B", "optimal", workload.request("1f1b", "optimal")),
        ("EnvPipe's", "envelope, balanced", workload.request("envpipe", "envelope", "balanced")),
        ("joint", "optimal", workload.request("auto", "optimal")),
    ):
        plan = planned(request)
        yield Row(workload, order, clocks, plan, plan, full)
    for chunks in _CHUNKS:
        request = replace(workload.request("interleaved", "optimal"), num_chunks=chunks)
        own = planned(request)
        factor = full.cost.iteration_time_s / own.baseline.cost.iteration_time_s
        same = planned(replace(request, deadline_factor=factor))
        yield Row(workload, f"interleaved, V = {chunks}", "optimal", own, same, full)


def cells(row: Row) -> dict[str, object]:
    """A row of the CSV."""
    return {
        "workload": row.workload.key,
        "order": row.order,
        "clocks": row.clocks,
        "time_against_1f1b_percent": row.slower_percent,
        "own_saving_percent": row.own_saving_percent,
        "saving_percent": row.saving_percent,
        "gap_percent": row.own_time.gap_percent,
        "peak_in_flight": row.peak_in_flight,
    }


def table(rows: list[Row]) -> str:
    """The rows as a table in Markdown: numbers of microbatches side by side."""
    lines = [markdown_line(_COLUMNS), "| --- | --- | --- | ---: | ---: | ---: | ---: |"]
    together: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        name = f"{row.workload.model}, {row.workload.gpu}"
        together.setdefault((name, row.order, row.clocks), []).append(row)
    for head, alike in together.items():
        figures = [
            [f"{row.slower_percent:.1f}" for row in alike],
            [f"{row.own_saving_percent:.1f}" for row in alike],
            [f"{row.saving_percent:.1f}" for row in alike],
            [f"{row.peak_in_flight:g}" for row in alike],
        ]
        lines.append(markdown_line([*head, *map(" / ".join, figures)]))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
