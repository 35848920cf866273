"""DeepSpeed's own engine, and EnvPipe's orders on it: the same results to the last bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from free_port import free_port
from preset_profile import preset_profile

from envpipe_megatron.schedule import Kind

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.xdist_group("launch")

RANK = Path(__file__).with_name("engine_rank.py")
STAGES, MICROBATCHES = 3, 6
TIMES_S = {Kind.FORWARD: 0.002, Kind.BACKWARD: 0.004}
Run = dict[str, Any]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> list[dict[str, dict[str, Run]]]:
    """What each rank came to: by whether messages are tuples, and by run."""
    folder = tmp_path_factory.mktemp("deepspeed")
    preset_profile("a100-sxm", STAGES, TIMES_S, (1305, 1110)).write(folder / "profile.csv")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(STAGES)]
    command += ["--master-port", str(free_port()), str(RANK), str(folder)]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(STAGES)]


@pytest.mark.parametrize(
    ("run", "messages"),
    [
        ("gpipe", "tensors"),
        ("envpipe", "tensors"),
        ("envpipe", "tuples with a mask"),
    ],
)
def test_orders_change_no_bit(trained, run, messages):
    """Losses, evaluations between them and weights, tied ones too, of seven steps."""
    for rank in trained:
        runs = rank[str(messages != "tensors")]
        own, ours = runs["own"], runs[run]
        for name in ("losses", "evaluated", "weights"):
            assert ours[name] == own[name]
        assert len(own["losses"]) == 7
        assert ours["steps"] == 6, "the first is DeepSpeed's own"
        assert ours["held"] == 0, "buffers hold nothing between steps"


def test_the_orders_are_those_that_were_asked_for(trained):
    runs = trained[0]["False"]
    forwards = [f"F{number}" for number in range(MICROBATCHES)]
    assert runs["gpipe"]["units"][:MICROBATCHES] == forwards
    assert runs["envpipe"]["units"][:4] == forwards[:4], "further forwards"
    assert {run["phase"] for run in runs.values() if "phase" in run} <= {"steady", "reconfigure"}
