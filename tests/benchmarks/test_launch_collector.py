"""The collector's benchmark runs, and what it measures of a few agents is what they sent."""

import json
import subprocess
import sys
from pathlib import Path

from on_request import on_request

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "launch" / "collector.py"


@on_request("FIGURES")
def test_a_few_agents_are_added_up():
    command = [sys.executable, str(SCRIPT), "--agents", "4", "--gpus", "2", "--json"]
    command += ["--seconds", "1", "--interval-s", "0.1"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert run.returncode == 0, run.stderr
    (row,) = json.loads(run.stdout)
    assert row["exact"]
    assert row["agents"] == 4
    assert row["cuts"] == 0
    assert 0 < row["latency_p50_ms"] <= row["latency_p99_ms"] <= row["latency_max_ms"]
    assert row["lines_per_s"] > 0
