"""How long the units of each stage take, from the operations of the real model's layers.

Torch counts matrix products and convolutions on its meta device; an assumed rate of the GPU makes
times of them. What is bound by memory (norms, softmax, element-wise) is left out, and so are
messages: of savings in percent, the ratios between stages decide.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.figures.experiments import MODELS, Job, Model, Precision
from benchmarks.figures.layers import Stage, build_stage, inputs_of
from envpipe_megatron.gpu.presets import load_preset, resolve_preset

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
class EmulatedTime:
    """Times of each stage's units at the maximum clock, by a factor those of the real size."""

    factor: float
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]


#: The shortest forward is at least this share of the longest time asked for, or the host would
#: compute longer than the unit.
_SHORTEST_SHARE = 0.75
_TIMES = ("frequency_change_s", "refresh_s")


def emulated_time(job: Job, forward_ms: int) -> EmulatedTime:
    """Time of a job on its emulated GPU, whose longest forward has this wall time."""
    model = MODELS[job.model]
    peak, share = ASSUMED_RATES[job.gpu, model.precision]
    counted = stage_operations(model, job.stages, job.microbatch_size)
    forward_s = [operations.forward / (peak * share) for operations in counted]
    factor = time_factor(forward_s, forward_ms / 1e3)
    return EmulatedTime(
        factor,
        tuple(factor * time_s for time_s in forward_s),
        tuple(factor * (operations.backward / (peak * share)) for operations in counted),
    )


def time_factor(real_s: Sequence[float], longest_s: float) -> float:
    """What brings the forwards of all stages to some longest time, or longer for short ones."""
    return max(longest_s / max(real_s), _SHORTEST_SHARE * longest_s / min(real_s))


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
