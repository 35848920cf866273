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


def test_only_mps_gives_each_rank_multiprocessors_of_its_own(tmp_path):
    environment = {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)}
    assert not shared_gpu.partitioned(environment)
    (tmp_path / "control").touch()
    assert shared_gpu.partitioned(environment)
    place = {"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4", "RANK": "7"}
    assert shared_gpu.sharing(place, 4)["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "25"


def test_neighbours_get_different_gpus():
    places = [{"LOCAL_RANK": str(n), "LOCAL_WORLD_SIZE": "8", "RANK": str(n)} for n in range(8)]
    given = [shared_gpu.sharing(place, 2)["LOCAL_RANK"] for place in places]
    assert given == ["0", "1", "2", "3", "0", "1", "2", "3"]


def test_a_job_of_fewer_ranks_than_share_a_gpu_has_one_gpu():
    place = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "RANK": "1"}
    assert shared_gpu.sharing(place, 4)["LOCAL_RANK"] == "0"


def test_where_nccl_takes_ranks_of_one_gpu_they_are_of_one_host():
    place = {"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4", "RANK": "7"}
    assert "NCCL_HOSTID" in shared_gpu.sharing(place, 2)
    assert "NCCL_HOSTID" not in shared_gpu.sharing(place | {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}, 2)
