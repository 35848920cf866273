r"""What each layer of a model takes on this GPU, and what splits by different methods make of it.

    python benchmarks/deepspeed_engine/split_layers.py --model gpt-350m --num-stages 4 \
        --output layers.json

Needs one GPU, whose clocks stay as they are. Prints the slowest stage of each method's split, a
forward and a backward of one microbatch; the stage that takes longest decides a pipeline's time.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import click
import numpy as np
import torch
from deepspeed.pipe import TiedLayerSpec
from deepspeed.runtime.utils import partition_balanced, partition_uniform

from benchmarks.models.configs import NAMES, config_of
from benchmarks.outputs import make_console, make_table
from envpipe_megatron.core.kinds import Kind
from envpipe_megatron.integrations.deepspeed.layer_profile import profile_layers
from envpipe_megatron.integrations.huggingface import split_model
from envpipe_megatron.integrations.huggingface.deepspeed_stages import deepspeed_layers
from envpipe_megatron.search.layer_file import read_layers
from envpipe_megatron.search.layer_profile import Sizes
from envpipe_megatron.search.partition import make_parts


@click.command()
@click.option("--model", type=click.Choice([n for n in NAMES if n.startswith(("gpt", "llama"))]))
@click.option("--num-stages", default=4)
@click.option("--microbatch-size", default=4)
@click.option("--sequence-length", default=1024)
@click.option("--output", type=click.Path(path_type=Path), required=True, help="Layer profile.")
def main(
    model: str, num_stages: int, microbatch_size: int, sequence_length: int, output: Path
) -> None:
    """Measure the layers in bf16, and split them."""
    device = torch.device("cuda", torch.cuda.current_device())
    config = config_of(model, tiny=False)
    split = split_model(config)
    layers = deepspeed_layers(split)
    size = (microbatch_size, sequence_length)
    words = torch.randint(config.vocab_size, size, device=device)
    torch.set_default_dtype(torch.bfloat16)
    profile_layers(layers, (words, words), split.loss, device, output)
    sums = read_layers(output).sums(Sizes())
    time_s = np.diff(sums.time_s)
    forward_j, backward_j = (sums.by_clock[kind][0][:, 0] for kind in (Kind.FORWARD, Kind.BACKWARD))
    energy_j = np.diff(forward_j + backward_j)
    rows = [
        {
            "layer": f"{index} {split.entries[index].run.__name__}",
            "tied": isinstance(layer, TiedLayerSpec),
            "time_ms": 1e3 * float(time_s[index]),
            "energy_j": float(energy_j[index]),
            "parameters": split.num_parameters[index],
        }
        for index, layer in enumerate(layers)
    ]
    make_console().print(make_table("Layers", rows))
    splits = {
        "uniform": partition_uniform(len(layers), num_stages),
        "parameters": partition_balanced([row["parameters"] for row in rows], num_stages),
        "time": make_parts(f"time:{output}", split.num_parameters, num_stages),
    }
    stages = [
        {
            "method": method,
            "first_layers": str(parts),
            "slowest_stage_ms": 1e3 * float(max(time_s[a:b].sum() for a, b in pairwise(parts))),
            "mean_stage_ms": 1e3 * float(time_s.sum()) / num_stages,
        }
        for method, parts in splits.items()
    ]
    make_console().print(make_table("Splits", stages))


if __name__ == "__main__":
    main()
