"""A rank of torchrun that trains through a patched megatron-core: `patched_core_rank.py FOLDER`.

The hook is the only way by which EnvPipe's function gets to the training run.
"""

from __future__ import annotations

import json
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


def main() -> None:
    """Train by megatron-core's own function, then by what the hook puts in its place."""
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    torch.set_num_threads(1)
    rank = dist.get_rank()
    job = Job(stages=4, tied=True, reducer=("overlap_grad_reduce",))
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


if __name__ == "__main__":
    main()
