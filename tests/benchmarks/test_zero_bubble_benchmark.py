"""Zero-bubble orders against their authors' scheduler, where there is a checkout of it."""

import csv
import os

import pytest
from click.testing import CliRunner

from benchmarks.schedules import zero_bubble


def test_without_a_checkout_it_says_so(tmp_path, monkeypatch):
    monkeypatch.delenv(zero_bubble.CHECKOUT_VARIABLE, raising=False)
    for options in ([], ["--checkout", str(tmp_path)]):
        result = CliRunner().invoke(zero_bubble.main, options)
        assert result.exit_code == 0
        assert result.output.startswith("Skipped")


@pytest.mark.skipif(
    zero_bubble.CHECKOUT_VARIABLE not in os.environ, reason="needs the authors' checkout"
)
def test_iterations_are_never_longer_than_the_authors(tmp_path):
    result = CliRunner().invoke(
        zero_bubble.main, ["--stages", "2", "--output", str(tmp_path)], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    with (tmp_path / "zero_bubble.csv").open() as file:
        rows = list(csv.DictReader(file))
    own = [r for r in rows if r["scheduler"] in ("ZB", "ZB-V") and r["measure"] == "iteration"]
    assert len(own) > 100
    assert all(float(row["ours"]) <= float(row["theirs"]) * (1 + 1e-9) for row in own)
    assert all(float(row["ours"]) >= float(row["floor"]) * (1 - 1e-9) for row in rows)
