"""Two nodes that are started by hand with plain torchrun: two guards, and one energy bill."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from free_port import free_port

from envpipe_megatron.cli import main

pytestmark = pytest.mark.xdist_group("pipeline")

SCRIPT = Path(__file__).parents[1] / "hand_started_node.py"


def test_two_hand_started_nodes_add_up(tmp_path):
    (tmp_path / "run").mkdir(mode=0o700)
    environment = {
        **os.environ,
        "XDG_RUNTIME_DIR": str(tmp_path / "run"),
        "ENVPIPE_LEASE_DIR": str(tmp_path / "leases"),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    port, nodes = free_port(), [tmp_path / name for name in ("node-a", "node-b")]
    started = []
    for number, node in enumerate(nodes):
        node.mkdir()
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank",
            str(number), "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port",
            str(port), str(SCRIPT), str(node),
        ]  # fmt: skip
        started.append(
            subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
        )
    said = [process.communicate(timeout=120)[0].decode() for process in started]
    assert [process.returncode for process in started] == [0, 0], "\n".join(said)

    bills = [json.loads((node / "bill.json").read_text()) for node in nodes]
    assert len({bill["guard_pid"] for bill in bills}) == 2
    assert len({bill["job"] for bill in bills}) == 2
    assert [bill["locked"] for bill in bills] == [None, None]
    assert not list((tmp_path / "leases").glob("*.json"))

    logs = [str(tmp_path / "output" / f"energy-{node.name}.jsonl") for node in nodes]
    result = CliRunner().invoke(main, ["energy", "sum", "--json", *logs])
    assert result.exit_code == 0, result.output
    total = json.loads(result.stdout)
    logged_j = math.fsum(j for bill in bills for j in bill["logged_j"])
    assert total["job"]["energy_j"] == pytest.approx(logged_j, rel=1e-14)
    # The log misses no more than what ran before the first iteration and after the last.
    assert total["job"]["energy_j"] == pytest.approx(
        sum(bill["counter_j"] for bill in bills), rel=0.25
    )
