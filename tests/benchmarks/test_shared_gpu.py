"""Ranks on one GPU: each has its device, and a host of its own for NCCL."""

import os
import subprocess
import sys
from pathlib import Path

from benchmarks import shared_gpu


def test_a_script_runs_as_a_rank_that_shares_its_gpu(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\n"
        "print(__name__, sys.argv[1:], sys.path[0] == os.path.dirname(__file__))\n"
        "print(*(os.environ[n] for n in ('RANK', 'LOCAL_RANK', 'NCCL_HOSTID')), sep=', ')\n"
    )
    ran = subprocess.run(
        [sys.executable, Path(shared_gpu.__file__), "2", script, "--some", "argument"],
        env={**os.environ, "RANK": "7", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.splitlines() == ["__main__ ['--some', 'argument'] True", "7, 1, rank 7"]


def shared(rank, size, each=4, **environment):
    """Variables of a rank of a job of so many, of which some share each GPU."""
    place = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size), "RANK": str(rank)}
    return shared_gpu.sharing(place | environment, each)


def test_only_mps_gives_each_rank_multiprocessors_of_its_own(tmp_path):
    environment = {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)}
    assert not shared_gpu.partitioned(environment)
    (tmp_path / "control").touch()
    assert shared_gpu.partitioned(environment)
    assert shared(3, 4)["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "25"


def test_neighbours_get_different_gpus_and_one_host_where_nccl_takes_them():
    given = [shared(rank, 8, 2)["LOCAL_RANK"] for rank in range(8)]
    assert given == ["0", "1", "2", "3", "0", "1", "2", "3"]
    assert shared(1, 2)["LOCAL_RANK"] == "0"  # fewer ranks than share a GPU
    assert "NCCL_HOSTID" in shared(3, 4, 2)
    assert "NCCL_HOSTID" not in shared(3, 4, 2, NCCL_MULTI_RANK_GPU_ENABLE="1")
