"""README's and the guide's commands on the example profile, as they are written."""

import csv
import re
import shlex
from pathlib import Path

import pytest
from cli_helpers import run_well

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = "configs/profiles/quickstart.csv"


def commands(page):
    """The `envpipe` commands of a page's shell blocks that need nothing but the example profile."""
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    lines = [line for text in blocks for line in text.replace("\\\n", " ").split("\n")]
    return [shlex.split(line, comments=True)[1:] for line in lines if EXAMPLE in line]


@pytest.mark.parametrize(
    ("page", "names"), [("README.md", ["plan", "simulate"]), ("docs/guide.md", ["plan"])]
)
def test_documented_commands_run_as_written(tmp_path, monkeypatch, caplog, page, names):
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    found = commands(page)
    assert [words[0] for words in found] == names
    for words in found:
        run_well(*words)
    assert not caplog.records  # the profile's sidecar tells all
    if page == "README.md":
        assert Path("pictures", "timeline.png").is_file()
        return
    # The table under the guide's command is what it gives.
    text = (ROOT / page).read_text()
    rows = re.findall(r"^\| (\d+)[^|]*\| [\d ]+ \| (\d+) \| ([\d.]+) % ", text, re.MULTILINE)
    with Path("memory.csv").open() as file:
        made = {
            (row["peak_in_flight"], f"{float(row['energy_j']):.0f}",
             f"{float(row['saving_percent']):.1f}")
            for row in csv.DictReader(file)
        }  # fmt: skip
    assert len(rows) > 3
    assert set(rows) <= made
