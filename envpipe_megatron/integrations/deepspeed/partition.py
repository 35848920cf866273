"""Layers over stages: DeepSpeed's partition methods, and those of `search.parts`."""

from __future__ import annotations

import logging
from pathlib import Path

import deepspeed.pipe
import torch.distributed as dist

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.search.parts import (
    check_parts,
    parts_by_energy,
    parts_by_time,
)

__all__ = ["PARTS", "PipelineModule", "parts_by_time"]

logger = logging.getLogger(__name__)

PARTS = "parts:"
_BY_FILE = {"time:": parts_by_time, "energy:": parts_by_energy}


class PipelineModule(deepspeed.pipe.PipelineModule):  # type: ignore[misc]  # DeepSpeed has no types
    """DeepSpeed's, with more of `partition_method`.

    `time:FILE` and `energy:FILE` split by a profile of layers, as `parts_by_time` and `parts_by_energy` do;
    `parts:0,3,7` gives the first layer of each stage, and the number of layers.
    """

    def _partition_layers(self, method: str = "uniform") -> None:
        name, colon, rest = method.partition(":")
        if name + colon not in (*_BY_FILE, PARTS):
            super()._partition_layers(method)
            return
        num_layers = len(self._layer_specs)
        if name + colon == PARTS:
            self.parts = check_parts(_numbers(rest), num_layers, self.num_stages)
        else:
            self.parts = _BY_FILE[name + colon](Path(rest), num_layers, self.num_stages)
        if dist.get_rank() == 0:
            logger.info("layers of stages by %s: %s", method, self.parts)
        stage = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])


def _numbers(text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise EnvPipeError(f"{PARTS} takes numbers with commas between them", value=text) from None
