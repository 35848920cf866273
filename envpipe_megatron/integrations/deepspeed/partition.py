"""Layers over stages by time: DeepSpeed's partition methods, and one by a layer CSV."""

from __future__ import annotations

import logging
from itertools import accumulate
from pathlib import Path

import deepspeed.pipe
import torch.distributed as dist

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.policies.partitions.layers import read_layers
from envpipe_megatron.policies.partitions.search import SplitSpace, least_bottleneck

logger = logging.getLogger(__name__)

_METHOD = "time:"
#: The slowest stage decides; of equal ones, the order of stages does, at a usual number of
#: microbatches for each stage.
_MICROBATCHES_PER_STAGE = 4


def parts_by_time(path: Path, num_layers: int, num_stages: int) -> list[int]:
    """Split a pipeline's layers so that the slowest stage is as fast as can be.

    Returns DeepSpeed's `parts`: the first layer of each stage, and the number of layers.

    Args:
        path: a layer CSV (`layer,instruction,frequency,time,energy`) whose layers are `0` to `L-1`
            as they stand in the PipelineModule; `profile_layers` writes one.
        num_layers: L.
        num_stages: p.

    Raises EnvPipeError for a wrong file, another model's file, or fewer layers than stages.
    """
    table = read_layers(path)
    if table.names != tuple(str(layer) for layer in range(num_layers)):
        raise EnvPipeError(
            f"{path} is of another model: this one has layers 0 to {num_layers - 1}",
            value=list(table.names),
            remedy="Number all entries of the PipelineModule's `layers`, embeddings too.",
        )
    space = SplitSpace(table, num_stages, _MICROBATCHES_PER_STAGE * num_stages)
    return [0, *accumulate(least_bottleneck(space).split)]


class PipelineModule(deepspeed.pipe.PipelineModule):  # type: ignore[misc]  # DeepSpeed has no types
    """DeepSpeed's, with one more `partition_method`: `time:FILE`, as `parts_by_time` splits."""

    def _partition_layers(self, method: str = "uniform") -> None:
        if not method.startswith(_METHOD):
            super()._partition_layers(method)
            return
        path = Path(method.removeprefix(_METHOD))
        self.parts = parts_by_time(path, len(self._layer_specs), self.num_stages)
        if dist.get_rank() == 0:
            logger.info("layers of stages by the times of %s: %s", path, self.parts)
        stage = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])
