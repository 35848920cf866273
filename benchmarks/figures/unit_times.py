"""How long the units of each stage take, from the operations of the real model's layers.

Operations are counted by torch over the modules themselves, on its meta device, which computes
nothing. A stage's forward takes its layers' matrix products and convolutions over an assumed rate
of the GPU. What is bound by memory (norms, softmax, element-wise) is left out, and so are messages:
of savings in percent, the ratios between stages decide, and those of clock changes to units.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.figures.data import inputs_of
from benchmarks.figures.experiments import MODELS, Job, Model, Precision
from benchmarks.figures.layers import Stage, build_stage

#: What a GPU is assumed to reach: its vendor's figure for dense matrix products (operations/s), and
#: the share of it that training reaches.
ASSUMED_RATES = {
    ("v100", Precision.FP32): (15.7e12, 0.6),
    ("v100", Precision.FP16): (125e12, 0.4),
    ("rtx3090", Precision.FP32): (35.6e12, 0.6),
    ("rtx3090", Precision.FP16): (71e12, 0.4),
}


@dataclass(frozen=True)
class Operations:
    """Floating-point operations of one unit of each kind."""

    forward: float
    backward: float


def count_operations(stage: Stage, inputs: torch.Tensor) -> tuple[Operations, torch.Tensor]:
    """Of one forward and one backward, with what it recomputes; and the forward's output."""
    with FlopCounterMode(display=False) as forward:
        outputs = stage(inputs)
    with FlopCounterMode(display=False) as backward:
        outputs.sum().backward()
    return Operations(forward.get_total_flops(), backward.get_total_flops()), outputs


@cache
def stage_operations(model: Model, stages: int, microbatch_size: int) -> tuple[Operations, ...]:
    """Of each stage of a model, for one microbatch."""
    counted = []
    passed = inputs_of(model, microbatch_size, 0, torch.device("cpu")).to("meta")
    for index in range(stages):
        with torch.device("meta"):
            stage = build_stage(model, stages, index)
        operations, outputs = count_operations(stage, passed)
        counted.append(operations)
        passed = outputs.detach().requires_grad_()
    return tuple(counted)


@dataclass(frozen=True)
class UnitTimes:
    """Of each stage at the maximum clock, s."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]

    def scaled(self, factor: float) -> UnitTimes:
        """The same in another unit of time."""
        return UnitTimes(
            tuple(time_s * factor for time_s in self.forward_s),
            tuple(time_s * factor for time_s in self.backward_s),
        )


def unit_times(job: Job) -> UnitTimes:
    """What the units of a job take on its GPU by the assumed rate."""
    model = MODELS[job.model]
    peak, share = ASSUMED_RATES[job.gpu, model.precision]
    counted = stage_operations(model, job.stages, job.microbatch_size)
    return UnitTimes(
        tuple(operations.forward / (peak * share) for operations in counted),
        tuple(operations.backward / (peak * share) for operations in counted),
    )
