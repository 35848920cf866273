"""A bill as tables and sentences for people, and as JSON and CSV for machines."""

import csv
import io
import math
import re

import pytest
from energy_lines import bill, job, note, window
from rich.console import Console

from envpipe_megatron.formats.bill import Bill
from envpipe_megatron.launch.bill import (
    Tariff,
    bill_csv,
    bill_facts,
    bill_lines,
    show_bill,
)


def told(energy_j: float, error_j: float, gpus: int, windows: int, *shares_s: float) -> dict:
    """A sum in the JSON."""
    return {
        "energy_j": energy_j,
        "energy_uncertainty_j": pytest.approx(error_j),
        "gpu_seconds": sum(shares_s),
        "average_power_w": energy_j / sum(shares_s),
        "num_gpus": gpus,
        "windows": windows,
        **dict(zip(("compute_s", "blocking_s", "idle_s"), shares_s, strict=True)),
    }


#: Two iterations and a checkpoint on one GPU, one iteration on that of a node that is still there.
MIXED = (
    note("begun", "n1"),
    window(1, 0, 40.0, node="n1", rank=0) | {"gpu": "H100"},
    window(0, 0, 100.0, rank=1),
    window(0, 1, 120.0, rank=1, energy_uncertainty_j=1.2),
    window(
        0, None, 60.0, rank=1, phase="between", duration_s=4.0, compute_s=0.0, blocking_s=0.0,
        idle_s=4.0, stage=None,
    ),
    job(num_gpus=3, tokens_per_iteration=50, notes=["no plan: why"]),
)  # fmt: skip


def test_json_of_a_bill():
    shown = bill_facts(bill(*MIXED), Tariff(price_per_kwh=3.6e6))
    steady, between = told(220.0, 1.3, 1, 2, 2.0, 1.0, 1.0), told(60.0, 0.5, 1, 1, 0.0, 0.0, 4.0)
    first = told(280.0, math.hypot(1.3, 0.5), 1, 3, 2.0, 1.0, 5.0)
    other = told(40.0, 0.5, 1, 1, 1.0, 0.5, 0.5)
    all_ = told(320.0, math.hypot(1.3, 0.5, 0.5), 2, 4, 3.0, 1.5, 5.5)
    each = {"iterations": 2, "energy_per_iteration_j": 160.0, "energy_per_token_j": 3.2}
    ended = {"agent": False, "running": False, "exit_code": None, "lost": 0}
    missing = [
        "n1 was lost: its energy up to its last line is in the bill",
        "1 of 3 GPUs sent nothing",
    ]
    assert shown == {
        "job": {**all_, **each, "cost": 320.0},
        "complete": False,
        "missing": missing,
        "comparison": None,
        "other_batches": {},
        "facts": {"num_gpus": 3, "tokens_per_iteration": 50, "notes": ["no plan: why"]},
        "nodes": [
            {"node": "n0", **first, **ended, "agent": True},
            {"node": "n1", **other, **ended, "agent": True, "running": True},
        ],
        "stages": [
            {"stage": 1, **other},
            {"stage": None, **between},
            {"stage": 0, **steady},
        ],
        "gpus": [
            {
                "node": "n1", "gpu_uid": "GPU-1", "gpu": "H100", "rank": 0, "stage": 1, **other,
                "phases": {"steady": other},
            },
            {
                "node": "n0", "gpu_uid": "GPU-0", "gpu": "NVIDIA A100", "rank": 1, "stage": 0,
                **first, "phases": {"steady": steady, "between": between},
            },
        ],
        "phases": [
            {"run": "", "phase": "steady", **told(260.0, math.hypot(1.3, 0.5), 2, 3, 3, 1.5, 1.5)},
            {"run": "", "phase": "between", **between},
        ],
    }  # fmt: skip
    going_on = bill_facts(bill(*MIXED), Tariff(price_per_kwh=3.6e6), over=False)
    del shown["gpus"]
    assert going_on == {**shown, "missing": []}


def test_tables_and_sentences_of_a_bill():
    shown = io.StringIO()
    tariff = Tariff(3.6e6, 7.2e6)
    unshared = window(2, 0, 7.25, energy_uncertainty_j=None, idle_s=None, node="0123456789abcdef")
    made = bill(*MIXED, {**unshared, "gpu_uid": "0123456789abcdefg"})
    show_bill(made, tariff, Console(file=shown, width=200))
    assert "│ between │       60.0 │" in shown.getvalue()
    lines = [line.strip() for line in shown.getvalue().splitlines()]
    assert [line for line in lines if line.startswith(("By", "The job"))] == [
        "By phase", "By node and GPU", "By stage", "By node", "The job"
    ]  # fmt: skip
    figures = ["energy (J)", "+- (J)", "GPU time (s)", "power (W)", "units/receives/ rest (%)"]
    checkpoint = ["60.0", "0.5", "4.0", "15.0", "0/0/100"]
    first = ["280.0", "1.4", "8.0", "35.0", "25/12/62"]
    other = ["40.0", "0.5", "2.0", "20.0", "50/25/25"]
    odd = ["7.2", "", "2.0", "3.6", ""]
    rows = [re.split(" *[│┃] *", line)[1:-1] for line in lines if line[:1] in ("│", "┃")]
    assert rows[3:7] == [
        ["node", "GPU", *figures],
        ["n1", "GPU-1", *other],
        ["n0", "GPU-0", *first],
        ["0123456789abcdef", "01234567...cdefg", *odd],
    ]
    assert rows[-1] == ["all", "327.2", "", "12.0", "27.3", ""]
    assert ["", *checkpoint] in rows, "of no stage"
    show_bill(made, tariff, Console(file=io.TextIOWrapper(io.BytesIO(), "ascii", "strict")))
    assert lines[-4:] == bill_lines(made, tariff)
    assert lines[-4:] == [
        "energy of 3 GPUs: 327 J, 0.0909 Wh, 27.3 W each on average; cost 327.2 at 3.6e+06 a "
        "kWh, 654.5 g of CO2 at 7.2e+06 g a kWh; measured by the GPUs' counters",
        "2 iterations: 163.6 J per iteration, 3.272 J per token",
        "no plan: why",
        "INCOMPLETE: n1 was lost: its energy up to its last line is in the bill",
    ]


def test_batches_of_each_size_are_compared_as_in_the_jobs_own_bill():
    base = {"iterations": 9, "time_s": 2.0, "time_uncertainty_s": None,
            "energy_j": 125.0, "metering_uncertainty_j": 1.0}  # fmt: skip
    made = bill(window(baseline=base), window(0, 1, 50.0, phase="steady m4", baseline=base))
    facts, lines = bill_facts(made, Tariff()), bill_lines(made, Tariff())
    savings = facts["comparison"], facts["other_batches"]["m4"]
    assert [each["saving_percent"] for each in savings] == pytest.approx([20.0, 60.0])
    assert "own baseline: a step takes 2 s" in lines[0]
    assert "own baseline, batches of m4: a step takes 2 s" in lines[2]


def test_a_gpu_that_serves_another_stage_or_rank_after_a_restart():
    """Its rank is the last one."""
    made = bill_facts(bill(window(0, 0, 10.0, stage=0), window(0, 1, 20.0, stage=1)), Tariff())
    assert [(each["stage"], each["energy_j"]) for each in made["stages"]] == [(0, 10), (1, 20)]
    (gpu,) = made["gpus"]
    assert gpu["phases"]["steady"]["energy_j"] == 30
    (gpu,) = bill_facts(bill(window(0, 0), window(0, 1, rank=3)), Tariff())["gpus"]
    assert gpu["rank"] == 3


ENVPIPE_COLUMNS = [
    "Model", "Microbatch size", "Minibatch size", "Type", "Scheduling", "Reconfig",
    "Throughput (sample/s)", "Energy (mJ)",
]  # fmt: skip


def test_csv_begins_with_envpipes_columns_and_sums_over_nodes():
    def phase(name, energy_j):
        return [
            window(gpu, i, energy_j, node=f"n{gpu}", phase=name) for gpu in range(2) for i in (0, 1)
        ]

    facts = {
        "model": "gpt",
        "microbatch_size": 4,
        "samples_per_iteration": 32,
        "type": "envpipe",
        "scheduling": "ours",
        "reconfigure": "greedy",
    }
    made = bill(*phase("warm-up", 120.0), *phase("steady", 90.0), job(**facts))
    header, baseline, ours = csv.reader(bill_csv(made).splitlines())
    assert header[: len(ENVPIPE_COLUMNS)] == ENVPIPE_COLUMNS
    assert baseline[:6] == ["gpt", "4", "32", "baseline", "1f1b", "default"]
    assert ours[:6] == ["gpt", "4", "32", "envpipe", "ours", "greedy"]
    for row, energy_j in ((baseline, 120), (ours, 90)):
        told = dict(zip(header, row, strict=True))
        assert float(told["Throughput (sample/s)"]) == 16
        assert float(told["Energy (mJ)"]) == 4 * energy_j * 1000
        assert float(told["Energy per iteration (J)"]) == 2 * energy_j
        assert (told["GPUs"], told["Iterations"]) == ("2", "2")
        assert float(told["Average power (W)"]) == energy_j / 2


def test_csv_has_the_baseline_that_steps_were_compared_with():
    base = {"iterations": 2, "time_s": 2.0, "time_uncertainty_s": 0.0,
            "energy_j": 110.0, "metering_uncertainty_j": 1.0}  # fmt: skip
    slow = [window(0, i, 150.0, phase="warm-up", duration_s=3.0) for i in range(2)]
    made = bill(*slow, window(0, 2, baseline=base), window(0, 3, baseline=base))
    baseline, steady = csv.DictReader(bill_csv(made).splitlines())
    assert float(baseline["Iteration time (s)"]) == 2
    assert float(baseline["Energy per iteration (J)"]) == 110
    assert (baseline["Iterations"], float(baseline["Energy (mJ)"])) == ("2", 300_000)
    assert float(steady["Energy per iteration (J)"]) == 100


def test_csv_counts_a_rank_once_that_had_another_gpu_after_a_restart():
    lines = [window(gpu, 0, run="a 2026-01-01T00:00:00") for gpu in range(2)]
    lines += [
        window(gpu, 1, node="n1", gpu_uid=f"of n1 {gpu}", run="a 2026-01-02T00:00:00")
        for gpu in range(2)
    ]
    (row,) = csv.DictReader(bill_csv(bill(*lines)).splitlines())
    assert (row["GPUs"], row["Iterations"]) == ("2", "2")
    assert float(row["Energy per iteration (J)"]) == 200


def test_csv_of_a_job_that_tells_nothing_of_itself():
    (row,) = csv.DictReader(bill_csv(bill(window())).splitlines())
    assert row["Model"] == row["Throughput (sample/s)"] == ""
    assert float(row["Energy (mJ)"]) == 100_000
    assert not list(csv.DictReader(bill_csv(Bill()).splitlines()))
    show_bill(Bill(), Tariff(0.1, 0.1), Console(file=io.StringIO()))
    assert bill_facts(Bill(), Tariff())["complete"]


def test_names_are_shown_as_they_are():
    """Also those that would be markup to the library that draws the tables."""
    made = bill(window(node="[/b]", gpu_uid="[red]GPU"), window(1, node="x" * 60))
    shown = io.StringIO()
    show_bill(made, Tariff(), Console(file=shown, width=120))
    assert "[/b]" in shown.getvalue()
    assert "[red]GPU" in shown.getvalue()
    assert "x" * 60 not in shown.getvalue()
    assert "energy of 2 GPUs: 200 J, 0.05556 Wh, 50.0 W each on average" in shown.getvalue()
