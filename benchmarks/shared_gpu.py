"""Runs a script as one of several ranks that share a GPU: proofs of equality need no other GPU.

    torchrun --nproc-per-node 4 benchmarks/shared_gpu.py RANKS_PER_GPU SCRIPT ARGUMENTS...

NCCL refuses two ranks of one GPU unless it takes them for ranks of two machines; it then sends over
sockets. From 2.30 on it takes them as they are with NCCL_MULTI_RANK_GPU_ENABLE=1, and sends as it
does between GPUs. All else is as it would be with a GPU for each rank, but time, energy, and free
memory. Where NVIDIA's MPS runs (`nvidia-cuda-mps-control -d`), each rank has its own share of the
multiprocessors and computes beside the others: then times can be compared, too.
"""

from __future__ import annotations

import atexit
import math
import os
import runpy
import sys
from collections.abc import Mapping
from pathlib import Path


def sharing(environment: Mapping[str, str], ranks_per_gpu: int) -> dict[str, str]:
    """What to change in the environment of a rank, by what torchrun has put there.

    Neighbours get different GPUs, where there are several.
    """
    gpus = math.ceil(int(environment["LOCAL_WORLD_SIZE"]) / ranks_per_gpu)
    changed = {
        "LOCAL_RANK": str(int(environment["LOCAL_RANK"]) % gpus),
        "NCCL_SOCKET_IFNAME": "lo",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(100 // ranks_per_gpu),  # nothing without MPS
    }
    if environment.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1":
        changed["NCCL_HOSTID"] = f"rank {environment['RANK']}"
    return changed


def partitioned(environment: Mapping[str, str]) -> bool:
    """Whether MPS runs, so that ranks which share a GPU have multiprocessors of their own."""
    pipes = environment.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
    return (Path(pipes) / "control").exists()


def main() -> None:
    """Run the script in this process, as if it had been named on the command line."""
    ranks_per_gpu, script = int(sys.argv[1]), sys.argv[2]
    os.environ.update(sharing(os.environ, ranks_per_gpu))
    sys.argv = sys.argv[2:]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")
    # All memory at once: piece by piece, it took 40 s beside ranks that compute.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
