"""Layers over stages: DeepSpeed's partition methods, and those of `search.parts`."""

from __future__ import annotations

import logging

import deepspeed.pipe
import torch.distributed as dist

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.search.parts import ENERGY, TIME, check_parts, parts_by_file

__all__ = ["PARTS", "PipelineModule"]

logger = logging.getLogger(__name__)

PARTS = "parts:"


class PipelineModule(deepspeed.pipe.PipelineModule):  # type: ignore[misc]  # DeepSpeed has no types
    """DeepSpeed's, with more of `partition_method`.

    `time:FILE` and `energy:FILE` split by a profile of layers, as `parts_by_file` does;
    `parts:0,3,7` gives the first layer of each stage, and the number of layers.
    """

    def _partition_layers(self, method: str = "uniform") -> None:
        num_layers = len(self._layer_specs)
        if method.startswith(PARTS):
            given = _numbers(method.removeprefix(PARTS))
            self.parts = check_parts(given, num_layers, self.num_stages)
        elif method.startswith((TIME, ENERGY)):
            self.parts = parts_by_file(method, num_layers, self.num_stages)
        else:
            super()._partition_layers(method)
            return
        if dist.get_rank() == 0:
            logger.info("layers of stages by %s: %s", method, self.parts)
        stage = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])


def _numbers(text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise EnvPipeError(f"{PARTS} takes numbers with commas between them", value=text) from None
