"""Measures one node's GPUs without Megatron: their speeds, messages and all-reduces.

    torchrun --nproc-per-node 8 -m envpipe_megatron.integrations.layer_profile.node FILE

Rank 0 pickles there, for the command that has started it, the `links` of a layer profile (messages
between ranks 0 and 1, all-reduces of the first 2, 4, ... ranks), and the matrix products a second
of each rank.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from envpipe_megatron.integrations.device import current_device
from envpipe_megatron.integrations.layer_profile.rank_gpu import now_s
from envpipe_megatron.runtime.channel.collectives import of_all_ranks
from envpipe_megatron.search.layer_profile import AllReduce, Curve, Links

_BYTES = tuple(4**power for power in range(7, 15))
_CPU_BYTES = _BYTES[:2]
_WARM_UP, _REPEATS = 3, 10

#: Of matrices that keep a GPU busy; where it is at its power limit, its clock has settled by then.
_WIDTH = 8192
_SETTLE_S, _SPEED_S = 3.0, 2.0


def main() -> None:
    """Measure, as one rank of torchrun's, and write to the file that the argument names."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    speeds, links = measure_speeds(), measure_links()
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_bytes(pickle.dumps((links, speeds)))
    dist.barrier()
    dist.destroy_process_group()


def measure_speeds() -> list[float]:
    """Return matrix products a second of each rank, measured at once; every rank calls it.

    GPUs of a kind differ by some percent where power limits their clocks. CPUs count as alike.
    """
    if torch.cuda.is_available():
        matrix = torch.randn(_WIDTH, _WIDTH, device=current_device(), dtype=torch.bfloat16)
        products = torch.empty_like(matrix)
        dist.barrier()
        _products_per_s(matrix, products, _SETTLE_S)
        return of_all_ranks(_products_per_s(matrix, products, _SPEED_S))
    return [1.0] * dist.get_world_size()


def _products_per_s(matrix: torch.Tensor, products: torch.Tensor, least_s: float) -> float:
    count, begin_s = 0, now_s()
    end_s = begin_s
    while end_s < begin_s + least_s:
        for _ in range(_REPEATS):
            torch.matmul(matrix, matrix, out=products)
        count += _REPEATS
        end_s = now_s()
    return count / (end_s - begin_s)


def measure_links() -> Links:
    """Measure the links of this node; every rank of the default group calls it, two or more."""
    sizes = _BYTES if torch.cuda.is_available() else _CPU_BYTES
    world = dist.get_world_size()
    groups = [2**power for power in range(1, world.bit_length()) if 2**power <= world]
    return Links(
        within_node=_curve(sizes, _there_and_back, range(2), trips=2),
        all_reduce=tuple(
            AllReduce(gpus, False, _curve(sizes, _all_reduce, range(gpus))) for gpus in groups
        ),
    )


def _curve(
    sizes: Sequence[int],
    transfer: Callable[[torch.Tensor, dist.ProcessGroup], object],
    ranks: Sequence[int],
    trips: int = 1,
) -> Curve:
    """Measure time by bytes between ranks; others wait."""
    group = dist.new_group(list(ranks))
    times_s = []
    for size in sizes:
        if dist.get_rank() in ranks:
            tensor = torch.zeros(size // 4, device=current_device())
            for _ in range(_WARM_UP):
                transfer(tensor, group)
            begin_s = now_s()
            for _ in range(_REPEATS):
                transfer(tensor, group)
            times_s.append((now_s() - begin_s) / _REPEATS / trips)
        else:
            times_s.append(0.0)
        dist.barrier()
    return Curve(np.array(sizes, dtype=float), np.array(times_s))


def _all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    dist.all_reduce(tensor, group=group)


def _there_and_back(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Send from rank 0 to rank 1 and back, as Megatron does: by a batch of one operation."""
    ways = (dist.isend, dist.irecv)
    for way in ways if dist.get_rank() == 0 else reversed(ways):
        operation = dist.P2POp(way, tensor, 1 - dist.get_rank(), group)
        for request in dist.batch_isend_irecv([operation]):
            request.wait()


if __name__ == "__main__":
    main()
