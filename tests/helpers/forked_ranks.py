"""Ranks of one gloo group that are forked from this process, which has imported what they need.

For frameworks whose import takes seconds, and which must be imported in another way than pytest's
own process does; where that is not so, `rank_pool` keeps ranks for many tests.
"""

import multiprocessing
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


def run_forked(size: int, train: Callable[[int], None], folder: Path) -> int:
    """Call `train(rank)` on all ranks; 0 where all of them came to their end."""
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=_run, args=(rank, size, train, folder)) for rank in range(size)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    return int(any(rank.exitcode for rank in ranks))


def _run(rank: int, size: int, train: Callable[[int], None], folder: Path) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(folder / "store"), size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=300),
    )
    train(rank)
    dist.barrier()
    os._exit(0)  # gloo's threads have nothing left to say
