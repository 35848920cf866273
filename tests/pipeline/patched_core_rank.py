"""Four ranks that train through a patched megatron-core: `patched_core_rank.py FOLDER`.

The hook is the only way by which EnvPipe's function gets to the training run. Ranks are forked, so
that megatron-core, which is imported from the path of this process, takes its seconds once.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
import training
from jobs import Job, Ours
from megatron.core.pipeline_parallel import schedules

from envpipe_megatron.integrations.megatron_core import ForwardBackward

STAGES = 4


def train(rank: int, folder: Path) -> None:
    """Train by megatron-core's own function, then by what the hook puts in its place."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(STAGES))
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(folder / "store"), STAGES),
        rank=rank,
        world_size=STAGES,
        timeout=timedelta(seconds=60),
    )
    job = Job(stages=STAGES, tied=True, reducer=("overlap_grad_reduce",))
    stock = training.train(rank, job, None, folder)

    def through_hook(session: object) -> object:
        schedules.envpipe_hook = lambda function: ForwardBackward(
            session, framework_iterations=1, framework_function=function
        )
        return schedules.get_forward_backward_func()

    with patch.object(training, "ForwardBackward", through_hook):
        ours = training.train(rank, job, Ours(), folder)
    told = {
        "patched_file": schedules.__file__,
        "losses_equal": stock.losses == ours.losses,
        "weights_equal": stock.weights == ours.weights,
        "losses": len(stock.losses),
        "executed": ours.executed,
    }
    (folder / f"rank{rank}.json").write_text(json.dumps(told))
    dist.barrier()
    os._exit(0)  # gloo's threads have nothing left to say


def main() -> int:
    """Run the ranks; 0 where all of them came to their end."""
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=train, args=(r, Path(sys.argv[1]))) for r in range(STAGES)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    return int(any(rank.exitcode for rank in ranks))


if __name__ == "__main__":
    sys.exit(main())
