"""What plans lose when the times of units vary, made without and with knowledge of it.

Run from the checkout:

    python benchmarks/planner/spread.py                 # 24 microbatches: a minute
    python benchmarks/planner/spread.py --workload ""   # all

Each unit's time varies for itself, by a stated standard deviation; slowdown is of mean iteration
times against 1F1B at full clock drawn alike, over 10,000 draws that no plan was made by.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from benchmarks import outputs
from benchmarks.claims import CLAIMS_FILE, Claim, write_claims
from benchmarks.outputs import make_console, make_table, output_option, span, write_csv
from benchmarks.planner.workloads import Workload, read_workloads
from envpipe_megatron.core.conditions import Spread
from envpipe_megatron.core.uncertainty import expected
from envpipe_megatron.policies.planner import make_plan

COMMAND = "python benchmarks/planner/spread.py"
ORDERS = ("1f1b", "auto")
SPREADS_PERCENT = (1, 3, 5)
#: By how much the mean may be longer than that of 1F1B at full clock.
ALLOWED_PERCENT = (0.0, 0.5)
#: Slowdowns are kept to 0.01 %, and known from draws to about as much.
_SAME_PERCENT = 0.03


def spread_rows(
    workload: Workload, spreads_percent: Sequence[int] = SPREADS_PERCENT
) -> Iterator[dict[str, Any]]:
    """Expected slowdown and saving (%) of plans for mean times, and of those for the spread."""
    for order in ORDERS:
        for allowed in ALLOWED_PERCENT:
            factor = 1 + allowed / 100
            request = workload.request(order, "optimal", deadline_factor=factor)
            at_means = make_plan(workload.profile, request).plan
            for percent in spreads_percent:
                conditions = replace(workload.conditions, spread=Spread(percent / 100))
                asked = replace(request, conditions=conditions)
                kept = make_plan(workload.profile, asked).plan
                row: dict[str, Any] = {
                    "workload": workload.key,
                    "order": order,
                    "allowed (%)": allowed,
                    "spread (%)": percent,
                }
                for name, plan in (("without", at_means), ("with", kept)):
                    drawn = expected(replace(plan, conditions=conditions))
                    row[f"slowdown {name} (%)"] = drawn.slowdown.percent
                    row[f"error {name} (%)"] = drawn.slowdown.error
                    row[f"saving {name} (%)"] = drawn.saving.percent
                yield row


@click.command()
@output_option("spread")
@click.option("--workload", "name", default="mb24", help="Those whose name contains this.")
def main(output: Path, name: str) -> None:
    """Plan without and with knowledge of a spread, on the profiles of ../shared/data."""
    console, data = make_console(), outputs.PERSEUS_DATA
    if not data.is_dir():
        console.print(f"Skipped: there are no profiles at {data}.")
        return
    workloads = [workload for workload in read_workloads(data) if name in workload.key]
    rows = [row for workload in workloads for row in spread_rows(workload)]
    output.mkdir(parents=True, exist_ok=True)
    write_csv(output / "spread.csv", rows)
    console.print(make_table("Where times of units vary", rows))
    write_claims(output / CLAIMS_FILE, spread_claims(rows))


def spread_claims(rows: Sequence[dict[str, Any]]) -> list[Claim]:
    """What was seen, a sentence for each order and slowdown that is allowed."""
    claims = []
    for order, allowed in dict.fromkeys((row["order"], row["allowed (%)"]) for row in rows):
        some = [r for r in rows if (r["order"], r["allowed (%)"]) == (order, allowed)]
        said = []
        for percent in dict.fromkeys(row["spread (%)"] for row in some):
            of = [row for row in some if row["spread (%)"] == percent]
            without, kept = (
                f"{span([r[f'slowdown {which} (%)'] for r in of], 2)} % longer, saving "
                f"{span([r[f'saving {which} (%)'] for r in of])} %"
                for which in ("without", "with")
            )
            said.append(f"by {percent} %: {without}; with knowledge {kept}")
        claims.append(
            Claim(
                "spread",
                COMMAND,
                f"Where times of units vary and at most {allowed:g} % more time is allowed, "
                f"plans ({order}) take in the mean of 10,000 iterations, if times vary "
                f"{'; '.join(said)}",
                "replay of measured A100 and A40 profiles, times drawn lognormally",
                f"expected: with knowledge at most {allowed:g} % longer",
                all(r["slowdown with (%)"] <= allowed + _SAME_PERCENT for r in some),
            )
        )
    return claims


if __name__ == "__main__":
    main()
