"""Measures messages between GPUs and all-reduces of one node, without Megatron.

    torchrun --nproc-per-node 8 -m envpipe_megatron.integrations.layer_profile.links links.json

Rank 0 writes the `links` of a layer profile: messages between ranks 0 and 1, all-reduces of the
first 2, 4, ... ranks.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from envpipe_megatron.files import replace_files
from envpipe_megatron.integrations.device import current_device
from envpipe_megatron.search.layer_file import links_text
from envpipe_megatron.search.layer_profile import Curve, Links

_BYTES = tuple(4**power for power in range(7, 15))
_CPU_BYTES = _BYTES[:2]
_WARM_UP, _REPEATS = 3, 10


def main() -> None:
    """Measure, as one rank of torchrun's, and write the file that the argument names."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    links = measure_links()
    if dist.get_rank() == 0:
        replace_files({Path(sys.argv[1]): [links_text(links)]})
    dist.barrier()
    dist.destroy_process_group()


def measure_links() -> Links:
    """The links of this node; every rank of the default group calls it, two or more."""
    sizes = _BYTES if torch.cuda.is_available() else _CPU_BYTES
    world = dist.get_world_size()
    groups = [2**power for power in range(1, world.bit_length()) if 2**power <= world]
    return Links(
        within_node=_curve(sizes, _there_and_back, range(2), trips=2),
        all_reduce={(gpus, False): _curve(sizes, _all_reduce, range(gpus)) for gpus in groups},
    )


def _curve(
    sizes: Sequence[int],
    transfer: Callable[[torch.Tensor, dist.ProcessGroup], object],
    ranks: Sequence[int],
    trips: int = 1,
) -> Curve:
    """Time by bytes; ranks outside wait."""
    group = dist.new_group(list(ranks))
    times_s = []
    for size in sizes:
        if dist.get_rank() in ranks:
            tensor = torch.zeros(size // 4, device=current_device())
            for _ in range(_WARM_UP):
                transfer(tensor, group)
            begin_s = _now_s()
            for _ in range(_REPEATS):
                transfer(tensor, group)
            times_s.append((_now_s() - begin_s) / _REPEATS / trips)
        else:
            times_s.append(0.0)
        dist.barrier()
    return Curve(np.array(sizes, dtype=float), np.array(times_s))


def _all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    dist.all_reduce(tensor, group=group)


def _there_and_back(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """From rank 0 to rank 1 and back, as Megatron sends: through a batch of one operation."""
    ways = (dist.isend, dist.irecv)
    for way in ways if dist.get_rank() == 0 else reversed(ways):
        operation = dist.P2POp(way, tensor, 1 - dist.get_rank(), group)
        for request in dist.batch_isend_irecv([operation]):
            request.wait()


def _now_s() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    main()
