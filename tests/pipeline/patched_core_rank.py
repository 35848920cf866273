"""Two ranks that train through a patched megatron-core: `patched_core_rank.py FOLDER`.

The hook is the only way by which EnvPipe's function gets to the training run.
"""

import json
import sys
from functools import partial
from pathlib import Path
from unittest.mock import patch

import training
from forked_ranks import run_forked
from jobs import Job, Ours
from megatron.core.pipeline_parallel import schedules

from envpipe_megatron.integrations.megatron.core import ForwardBackward

STAGES = 2


def train(folder: Path, rank: int) -> None:
    """Train by megatron-core's own function, then by what the hook puts in its place."""
    job = Job(stages=STAGES, tied=True, reducer=("overlap_grad_reduce",))
    stock = training.train(rank, job, None, folder)

    def through_hook(session: object, **_: object) -> object:
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


if __name__ == "__main__":
    target = Path(sys.argv[1])
    sys.exit(run_forked(STAGES, partial(train, target), target))
