"""The page on schedules says what the simulator says, and each of its pictures is there."""

import re
from pathlib import Path

import pytest
from on_request import on_request

from benchmarks import outputs
from benchmarks.evidence import read_rows, row_of
from benchmarks.planner.workloads import read_workloads
from benchmarks.schedules import families
from benchmarks.schedules import pictures as schedule_pictures

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = DOCS / "understand" / "schedules.md"
NUMBER = re.compile(r"\d+(?:\.\d+)?")


@pytest.fixture(scope="module")
def cases():
    return schedule_pictures.make_cases()


def test_the_table_of_the_page_is_that_of_the_simulator(cases):
    page = PAGE.read_text(encoding="utf-8").splitlines()
    for line in schedule_pictures.table(cases).splitlines():
        words = NUMBER.sub("#", line)
        (said,) = [other for other in page if NUMBER.sub("#", other) == words]
        # Equal energies have several plans; solvers may differ in the last figure.
        assert numbers(said) == pytest.approx(numbers(line), rel=2e-3, abs=0.11)


@on_request("FIGURES")
@pytest.mark.skipif(not outputs.PERSEUS_DATA.is_dir(), reason="needs ../shared/data")
def test_the_rows_have_what_families_of_orders_save():
    """Of the workload with the fewest microbatches."""
    workload = read_workloads(outputs.PERSEUS_DATA)[0]
    rows = read_rows(DOCS / "evidence" / "rows" / "planning.jsonl")
    kept = {tuple(row.setting.values()): row.measured for row in rows if row.table == "families"}
    columns = (row.columns for row in families.compare(workload))
    found = [row_of("families", each, basis="computed") for each in columns]
    assert len(found) == 4  # Megatron runs no chunks with fewer microbatches than stages
    for row in found:
        measured = kept[tuple(row.setting.values())]
        assert measured.keys() == row.measured.keys()
        for name, figure in row.measured.items():
            # Equal energies have several plans; solvers may differ in the last figure.
            assert float(measured[name].value) == pytest.approx(float(figure.value), abs=0.2)


def numbers(line):
    return [float(number) for number in NUMBER.findall(line)]
