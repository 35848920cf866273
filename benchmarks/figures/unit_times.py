"""How long the units of each stage take, from the operations of the real model's layers.

Operations are counted by torch over the modules themselves, on its meta device, which computes
nothing. A stage's forward takes its layers' matrix products and convolutions over an assumed rate
of the GPU. What is bound by memory (norms, softmax, element-wise) is left out, and so are messages:
of savings in percent, the ratios between stages decide, and those of clock changes to units.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.figures.experiments import MODELS, Job, Model, Precision
from benchmarks.figures.layers import Stage, build_stage, inputs_of
from envpipe_megatron.gpu.emulated.presets import load_preset, resolve_preset

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


#: The shortest forward of a pipeline is not made shorter than this share of what the longest is
#: asked to be, or the host would compute longer than the unit.
_SHORTEST_SHARE = 0.75
#: What of a preset is time.
_TIMES = ("frequency_change_s", "refresh_s")


def time_factor(times: UnitTimes, forward_s: float) -> float:
    """What emulated time is multiplied by for these units.

    Args:
        times: of the real size.
        forward_s: of the longest forward of the pipeline in wall time; longer where the shortest
            would else be too short for a host.
    """
    shortest_s = _SHORTEST_SHARE * forward_s
    return max(forward_s / max(times.forward_s), shortest_s / min(times.forward_s))


def write_scaled_preset(name: str, factor: float, folder: Path) -> Path:
    """Write a preset whose times are multiplied by a factor."""
    text = resolve_preset(name).read_text(encoding="utf-8")
    preset = load_preset(name)
    for field in _TIMES:
        value = f"{field} = {getattr(preset, field) * factor!r}"
        text, count = re.subn(rf"(?m)^{field} = .*$", value, text)
        assert count == 1, f"{name} says {field} {count} times"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.toml"
    path.write_text(text, encoding="utf-8")
    return path
