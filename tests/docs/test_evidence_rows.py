"""Tables of evidence are what the rows give, and a row keeps the digits that it has."""

import json
import math

import page_evidence
import pytest

from benchmarks.evidence import Figure, Row, add_rows, as_cell, ratio, read_rows, row_of
from benchmarks.outputs import ROWS_FILE, leave

FAMILIES = page_evidence.read_families()
LINE = (
    '{"table": "t", "setting": {"job": "bf16, 8"}, "measured": {"time": {"value": 0.930, "upper":'
    ' 0.9380}, "peaks": {"value": [1609, 2.50], "unit": "GiB"}, "said": "no hang", "share":'
    ' {"value": -1.0, "high": 0.5, "unit": "%"}, "several": [1.10, {"value": 8.5, "plus_minus":'
    ' 0.4}]}, "basis": "GPUs", "gpus": "2 H200", "commit": "7429d644"}'
)


@pytest.mark.parametrize("page", sorted(page_evidence.PAGES.glob("*.md")), ids=lambda p: p.stem)
def test_tables_are_what_rows_give(page):
    """Where it fails: python docs/tools/page_evidence.py."""
    text = page.read_text()
    assert text == page_evidence.with_tables(page.stem, text, FAMILIES)


def test_every_file_of_rows_is_a_page_s():
    stems = {path.stem for path in (page_evidence.PAGES / "rows").iterdir()}
    assert stems == set(page_evidence.FAMILIES)


def test_the_front_table_has_at_most_a_dozen_claims():
    claims = [row for rows in FAMILIES.values() for row in rows if row.claim and not row.superseded]
    assert 6 <= len(claims) <= 12


def measured(family, table, column, **setting):
    """The column of all rows of a table that have these cells in their setting."""
    rows = [row for row in FAMILIES[family] if row.table == table and not row.superseded]
    return [
        row.measured[column]
        for row in rows
        if column in row.measured and setting.items() <= row.setting.items()
    ]


def test_what_the_front_table_sums_up_follows_from_the_rows():
    (split,) = measured("planning", "front", "split backwards (%)")
    (whole,) = measured("planning", "front", "whole backwards (%)")
    for found, order in ((split, "zero-bubble"), (whole, "envpipe")):
        cells = measured("planning", "families", "saved at the framework's time (%)", order=order)
        saved = [cell.value for cell in cells]
        assert (found.value, found.high) == (min(saved), max(saved))
    (since,) = measured("safety", "front", "rounds since")
    first, *later = measured("safety", "rounds of faults", "rounds")
    assert measured("safety", "front", "rounds") == [first]
    assert since.value == sum(rounds.value for rounds in later)
    kept = measured("units", "resting", "time")
    for kind in ("bf16", "FP8", "graphs", "experts"):
        assert measured("units", "front", kind)[0] in kept
    profile = [
        cell
        for column in ("one-sided, 1F1B", "one-sided, EnvPipe's order")
        for cell in measured("prediction", "from a profile", column, what="energy of both GPUs")
    ]
    (energy,) = measured("prediction", "front", "energy (%)")
    assert energy.value == min(cell.value for cell in profile)
    assert energy.high == max(cell.high for cell in profile)


def test_a_row_says_how_it_was_made():
    rows = [row for rows in FAMILIES.values() for row in rows if not row.superseded]
    assert not [row for row in rows if not (row.command or row.commit or row.log or row.gpus)]


def rows_of(tmp_path, *lines):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def test_a_line_is_read_and_written_with_all_digits(tmp_path):
    (row,) = read_rows(rows_of(tmp_path, LINE))
    assert row.to_json() == LINE
    shown = {name: page_evidence.shown(cell) for name, cell in row.measured.items()}
    assert shown == {
        "time": "0.930 (0.9380)",
        "peaks": "1,609 / 2.50 GiB",
        "said": "no hang",
        "share": "-1.0 to 0.5 %",
        "several": "1.10; 8.5 ± 0.4",
    }


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"basis": "guessed"}, "must be one of GPUs"),
        ({"commit": "main"}, "hexadecimal"),
        ({"measured": {}}, "needs all three"),
        ({"measured": {"job": 1}}, "keep it in one"),
        ({"claim": {"what": "it saves"}}, "must have what and value"),
        ({"colour": "red"}, "colour"),
        ({"measured": {"time": None}}, "is no cell"),
        ({"measured": {"time": {"upper": 1.0}}}, "value"),
    ],
)
def test_what_is_no_row_is_an_error_with_file_and_line(tmp_path, change, said):
    path = rows_of(tmp_path, LINE, json.dumps({**json.loads(LINE), **change}))
    with pytest.raises(ValueError, match=rf"rows\.jsonl:2: .*{said}"):
        read_rows(path)


def test_a_benchmark_s_columns_become_a_row(tmp_path):
    found = {"GPU": "a40", "stages": 4, "even": True, "saved (%)": 9.70342, "steady": 23}
    found |= {"not measured": None, "no optimum": math.nan}
    row = row_of("costs", found, basis="emulated")
    assert row.setting.keys() == {"GPU", "stages", "even"}
    assert {name: str(cell) for name, cell in row.measured.items()} == {
        "saved (%)": "9.703",
        "steady": "23",
    }
    add_rows(tmp_path / "rows.jsonl", [row])
    add_rows(tmp_path / "rows.jsonl", [row])
    assert read_rows(tmp_path / "rows.jsonl") == [row, row]
    texts = row_of("stress", {"setting": "pp2", "outcome": "no hang"}, basis="GPUs")
    assert (texts.setting, texts.measured) == ({"setting": "pp2"}, {"outcome": "no hang"})


def test_a_benchmark_leaves_its_last_run_s_rows(tmp_path):
    tables = {"costs": [{"GPU": "a40", "saved (%)": 9.7}], "noise": [{"share": "1 %", "x": 2.0}]}
    leave(tmp_path, "CPU", {"costs": [{"GPU": "v100", "saved (%)": 1.0}]})
    leave(tmp_path, "emulated", tables)
    rows = read_rows(tmp_path / ROWS_FILE)
    assert [row.table for row in rows] == ["costs", "noise"]
    assert {row.basis for row in rows} == {"emulated"}


def test_small_and_large_numbers_keep_four_digits():
    numbers = (0.000123456, 123456.7, -1e-13, 1.5e9)
    assert [str(as_cell(number)) for number in numbers] == [
        "0.0001235", "123,500", "0", "1,500,000,000",
    ]  # fmt: skip
    assert str(ratio(0.91234567, 0.95)) == "0.9123 (0.9500)"
    assert ratio(0.9, float("inf")).upper is None


HEAD = "<!-- rows: costs -->\n\n| GPU | saved |\n| --- | ---: |\n"


def made(gpu, saved, table="costs", **more):
    return Row(table, {"GPU": gpu}, {"saved": saved}, "emulated", **more)


def test_a_table_has_the_columns_of_its_head_and_the_rows_of_its_marker():
    rows = [made("a40", "1"), made("h200", "2"), made("v100", "3", superseded="a40")]
    families = {"loop": [*rows, made("a40", "4", table="others")]}
    text = f"before\n\n{HEAD}| old | row |\n\nafter\n"
    written = page_evidence.with_tables("loop", text, families)
    assert written == f"before\n\n{HEAD}| a40 | 1 |\n| h200 | 2 |\n\nafter\n"
    assert page_evidence.with_tables("loop", written, families) == written
    one = HEAD.replace("costs", "costs; GPU = h200")
    assert page_evidence.with_tables("loop", one, families) == f"{one}| h200 | 2 |\n"


def test_a_marker_without_rows_and_an_unknown_column_are_errors():
    families = {"loop": [made("a40", "1")]}
    with pytest.raises(ValueError, match=r"no row of rows/loop\.jsonl fits the marker 'cost'"):
        page_evidence.with_tables("loop", HEAD.replace("costs", "cost"), families)
    with pytest.raises(ValueError, match=r"loop.md, costs: no row has a column 'lost'"):
        page_evidence.with_tables("loop", HEAD.replace("saved", "lost"), families)


def test_a_claim_and_what_it_superseded_are_shown_where_they_belong():
    claim = {"what": "it saves", "value": "{saved} %"}
    saved = {"saved": Figure(7)}
    rows = [
        Row("costs", {"GPU": "a40"}, saved, "GPUs", "2 H200", claim=claim),
        Row("costs", {"GPU": "v100"}, saved, "GPUs", superseded="[now](loop.md)"),
    ]
    front = "<!-- rows: front -->\n\n| claim | value (interval) | kind | rows |\n| --- |\n"
    assert page_evidence.with_tables("index", front, {"loop": rows}).endswith(
        "| it saves | 7 % | GPUs, 2 H200 | [loop](loop.md) |\n"
    )
    old = "<!-- rows: superseded -->\n\n| what | seen | superseded by |\n| --- |\n"
    assert page_evidence.with_tables("archive", old, {"loop": rows}).endswith(
        "| v100 | saved 7 | [now](loop.md) |\n"
    )
