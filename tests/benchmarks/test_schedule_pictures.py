"""The page on schedules says what the simulator says, and each of its pictures is there."""

import re
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
from benchmarks import outputs
from benchmarks.schedules import chunks
from benchmarks.schedules import pictures as schedule_pictures

PAGE = Path(__file__).resolve().parents[2] / "docs" / "schedules.md"
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


def test_every_picture_is_drawn_and_shown_on_the_page(cases, tmp_path):
    few = [case for case in cases if case.picture in ("1f1b", "no_pipelining")]
    schedule_pictures.draw(few, tmp_path)
    assert {path.stem for path in tmp_path.iterdir()} == {"1f1b", "no_pipelining"}
    page = PAGE.read_text(encoding="utf-8")
    for case in cases:
        if case.picture:
            assert f"](pictures/{case.picture}.png)" in page
            assert (PAGE.parent / "pictures" / f"{case.picture}.png").is_file()


@pytest.mark.skipif(not outputs.PERSEUS_DATA.is_dir(), reason="needs ../shared/data")
def test_the_page_has_what_clocks_save_on_interleaved_orders():
    """Of one workload, which is the first of each pair of figures."""
    workload = chunks.workloads(outputs.PERSEUS_DATA)[0]
    page = PAGE.read_text(encoding="utf-8").splitlines()
    for line in chunks.table(list(chunks.compare(workload))).splitlines()[2:]:
        *head, slower, own, saving, peak = line.strip("| ").split(" | ")
        (said,) = [other for other in page if other.startswith(f"| {' | '.join(head)} |")]
        firsts = [float(pair.split(" / ")[0]) for pair in said.strip("| ").split(" | ")[-4:]]
        figures = [float(slower), float(own), float(saving), float(peak)]
        assert firsts == pytest.approx(figures, abs=0.11)


def numbers(line):
    return [float(number) for number in NUMBER.findall(line)]
