"""Commands and Python of the README and of the planner's page, as they are written."""

import csv
import re
import shlex
from pathlib import Path

import page_commands
import pytest
from commands import run_badly, run_well

from envpipe_megatron import api

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = "configs/profiles/quickstart.csv"
PAGE = "docs/do/plan.md"
PYTHON_PAGE = "docs/lookup/python.md"


def commands(page):
    """The `envpipe` commands of a page's blocks that need nothing but the example profile."""
    blocks = [block.commands() for block in page_commands.blocks(ROOT / page)]
    lines = [line for block in blocks if EXAMPLE in " ".join(block) for line in block]
    return [shlex.split(line, comments=True)[1:] for line in lines]


PLANNED = ["plan", "export-schedule", "plan", "plan", "plan", "straggler", "compare"]


@pytest.mark.parametrize(("page", "names"), [("README.md", ["plan", "simulate"]), (PAGE, PLANNED)])
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
    # The table under the last command is what it gives.
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


def test_the_python_of_the_planners_page_runs_and_it_names_all_there_is(tmp_path, monkeypatch):
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    text = (ROOT / PYTHON_PAGE).read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        exec(compile(block, PYTHON_PAGE, "exec"), {})
    assert run_well("export-schedule", "plan.json").stdout
    refused = run_badly("plan", "--profile", EXAMPLE, "--schedule", "order.csv")
    assert "has 2 stages, 3 microbatches" in refused
    listed = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| `.*", text, re.MULTILINE))))
    assert set(api.__all__) <= listed


@pytest.mark.parametrize("page", ["README.md", "docs/start/quickstart.md", PAGE])
def test_before_its_first_command_a_page_says_how_it_gets_on_the_path(page):
    text = (ROOT / page).read_text()
    assert "source .venv/bin/activate" in text.partition("\nenvpipe ")[0]


def test_without_arguments_three_commands_are_named_that_exist():
    shown = run_well().stdout
    named = re.findall(r"^  envpipe ([a-z]+)", shown, flags=re.MULTILINE)
    assert len(named) == 3
    for command in named:
        assert f"Usage: main {command}" in run_well(command, "--help").stdout
