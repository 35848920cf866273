"""Layers over stages: DeepSpeed's partition methods, and those of `search.partition`."""

from __future__ import annotations

import logging

import deepspeed.pipe
import torch.distributed as dist

from envpipe_megatron.search.partition import METHODS, make_parts

logger = logging.getLogger(__name__)


class PipelineModule(deepspeed.pipe.PipelineModule):  # type: ignore[misc]  # DeepSpeed has no types
    """DeepSpeed's, with more of `partition_method`.

    `time:FILE` and `energy:FILE` split by a profile of layers, as `make_parts` does; `parts:0,3,7`
    gives the first layer of each stage, and the number of layers.
    """

    def _partition_layers(self, method: str = "uniform") -> None:
        if not method.startswith(METHODS):
            super()._partition_layers(method)
            return
        self.parts = make_parts(method, [1] * len(self._layer_specs), self.num_stages)
        if dist.get_rank() == 0:
            logger.info("layers of stages by %s: %s", method, self.parts)
        stage = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])
