"""Every command of benchmarks/ starts, by its name and by its path."""

import subprocess
import sys
from pathlib import Path

import pytest
from on_request import on_request

from benchmarks.all import commands

ROOT = Path(__file__).resolve().parents[2]
#: Run by each rank of another command, or without any option.
NO_HELP = ("worker", "entry", "shared_gpu", "torchtitan_arm")
NAMES = [line.split()[2].rstrip(":") for line in commands()]


def test_each_command_says_what_it_shows():
    assert len(NAMES) > 20
    assert all(line.partition(": ")[2] for line in commands())


@on_request("FIGURES")
@pytest.mark.parametrize("name", [n for n in NAMES if n.rpartition(".")[2] not in NO_HELP])
def test_a_command_has_help(name):
    path = f"{name.replace('.', '/')}.py"
    for command in (["-m", name], [path]):
        ran = subprocess.run(
            [sys.executable, *command, "--help"], cwd=ROOT, capture_output=True, text=True
        )
        assert ran.returncode == 0, ran.stderr
        assert "Usage" in ran.stdout
