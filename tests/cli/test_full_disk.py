"""A full disk: an error in a line, an exit status that is not 0, and no file that is cut short."""

import subprocess
import sys

import pytest
from cli_helpers import plan_for, run_badly
from energy_lines import window

from envpipe_megatron.cli import main
from envpipe_megatron.formats.energy import append_line

SAID = "Error: Cannot read or write the output: No space left on device. Make room there"
COMMANDS = {
    "help": "--help",
    "tables": "simulate --profile profile.csv --plan plan.json",
    "text": "export-schedule plan.json",
    "bill": "energy sum energy.jsonl",
}


@pytest.fixture(autouse=True)
def _here(tmp_path, profile_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan_for(profile_path, "plan.json")
    append_line(tmp_path / "energy.jsonl", window())


@pytest.mark.parametrize("command", COMMANDS)
def test_output_to_a_full_disk_is_an_error_in_a_line(monkeypatch, capsys, command):
    with open("/dev/full", "w") as full:  # noqa: PTH123  # what it still holds may not fail at its end
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(SystemExit) as end:
            main(COMMANDS[command].split(), "envpipe")
    assert end.value.code == 1
    *before, said = capsys.readouterr().err.splitlines()
    assert said.startswith(SAID)
    assert before in ([], ["Simulating plan.json ..."])


def test_the_interpreter_has_nothing_to_add():
    command = [sys.executable, "-m", "envpipe_megatron.cli", *COMMANDS["text"].split()]
    with open("/dev/full", "w") as full:  # noqa: PTH123
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, check=False, text=True)
    assert ended.returncode == 1
    assert ended.stderr.startswith(SAID)
    assert ended.stderr.count("\n") == 1


def test_a_plan_for_a_device_that_is_full(profile_path):
    words = ["plan", "--profile", profile_path, "--num-microbatches", 4, "--blocking-power", 80]
    assert "/dev/full: No space left on device" in run_badly(*words, "--output", "/dev/full")
