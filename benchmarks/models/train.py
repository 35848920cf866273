r"""Train one of EnvPipe's models in stages under DeepSpeed, and bill the energy.

    torchrun --nproc-per-node 4 -m benchmarks.models.train --model bert-336m

One process a GPU. On a machine without GPUs, small ones on emulated GPUs:

    ENVPIPE_EMULATED_GPU=a100-sxm ENVPIPE_EMULATED_FORWARD_S=0.01 \
        torchrun --nproc-per-node 2 -m benchmarks.models.train --model bert-336m --tiny

The models are those of transformers, complete with embedding and head; data are random.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import click
import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import BertConfig, GPT2Config, ResNetConfig

from benchmarks.figures.experiments import MODELS as SIZES
from benchmarks.figures.experiments import Family, Model
from envpipe_megatron.integrations.deepspeed import end_training, initialize
from envpipe_megatron.integrations.huggingface import split_model
from envpipe_megatron.integrations.huggingface.deepspeed_stages import pipeline_module
from envpipe_megatron.integrations.huggingface.layers import IGNORED_LABEL
from envpipe_megatron.runtime.job.options import OPTIONS

_BERT_WORDS, _GPT_WORDS = 30522, 50257
#: BERT predicts this share of its tokens.
_MASKED = 0.15

#: By the name that the command takes.
_SIZED = {name.lower().replace("_", "-"): size for name, size in SIZES.items()}
NAMES = tuple(_SIZED)


def config_of(name: str, tiny: bool) -> Any:
    """A model's configuration; with `tiny`, of a size that a CPU trains."""
    size = _SIZED[name]
    if size.family is Family.RESNET:
        group = 8 if tiny else 4 * size.width
        return ResNetConfig(
            embedding_size=8 if tiny else size.width,
            hidden_sizes=[group * 2**stage for stage in range(4)],
            depths=[1, 2, 2, 1] if tiny else list(size.layers),
            num_labels=size.outputs,
        )
    if tiny:
        size = replace(size, layers=(4,), width=32, heads=4)
    return _bert(size, tiny) if size.family is Family.BERT else _gpt(size, tiny)


def _bert(size: Model, tiny: bool) -> Any:
    return BertConfig(
        vocab_size=512 if tiny else _BERT_WORDS,
        hidden_size=size.width,
        num_hidden_layers=size.layers[0],
        num_attention_heads=size.heads,
        intermediate_size=4 * size.width,
        max_position_embeddings=size.length,
    )


def _gpt(size: Model, tiny: bool) -> Any:
    return GPT2Config(
        vocab_size=512 if tiny else size.outputs or _GPT_WORDS,
        n_embd=size.width,
        n_layer=size.layers[0],
        n_head=size.heads,
        n_positions=size.length,
        bos_token_id=None,
        eos_token_id=None,
    )


def length_of(name: str, tiny: bool) -> int:
    """Tokens of a sequence, or pixels of an image's side."""
    return 32 if tiny else _SIZED[name].length


def batches(config: Any, samples: int, length: int, seed: int = 1) -> Iterator[tuple[Any, Tensor]]:
    """Random inputs and labels as DeepSpeed's engine takes them, without an end."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        if config.model_type == "resnet":
            images = torch.randn(samples, 3, length, length, generator=generator)
            yield images, torch.randint(config.num_labels, (samples,), generator=generator)
            continue
        words = torch.randint(config.vocab_size, (samples, length + 1), generator=generator)
        tokens = words[:, :-1]
        if config.model_type == "bert":
            is_hidden = torch.rand(samples, length, generator=generator) < _MASKED
            segments = (torch.arange(length) >= length // 2).long().expand(samples, length)
            is_token = torch.ones_like(is_hidden)
            labels = tokens.masked_fill(~is_hidden, IGNORED_LABEL)
            yield (tokens.masked_fill(is_hidden, 0), segments.contiguous(), is_token), labels
        else:
            yield tokens, words[:, 1:]


def deepspeed_config(microbatch_size: int, num_microbatches: int, precision: str) -> dict[str, Any]:
    """Adam, and in half precision gradients that are added up in fp32."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": microbatch_size,
        "gradient_accumulation_steps": num_microbatches,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-4, "torch_adam": True}},
        "steps_per_print": 10,
    }
    if precision == "bf16":
        config |= {
            "bf16": {"enabled": True},
            "data_types": {"grad_accum_dtype": "fp32"},
            "zero_optimization": {"stage": 1},
        }
    return config


@click.command()
@click.option("--model", "name", type=click.Choice(NAMES), required=True)
@click.option("--tiny", is_flag=True, help="The same kind of model, small enough for a CPU.")
@click.option("--iterations", default=100, show_default=True)
@click.option("--microbatch-size", default=4, show_default=True)
@click.option("--num-microbatches", default=16, show_default=True)
@click.option("--num-stages", type=int, help="Default: as many as processes.")
@click.option("--cut", default="parameters", show_default=True, help="Or time:FILE, energy:FILE.")
@click.option("--precision", type=click.Choice(["bf16", "fp32"]), help="Default: bf16 on GPUs.")
@click.option(
    "--type",
    "kind",
    type=click.Choice(OPTIONS["type"].words),
    default="envelope",
    show_default=True,
)
@click.option("--scheduling", type=click.Choice(OPTIONS["scheduling"].words))
@click.option("--reconfig", type=click.Choice(OPTIONS["reconfigure"].words))
@click.option("--output", help="Folder for profile, plan, energy log and summary.")
def main(
    name: str,
    tiny: bool,
    iterations: int,
    microbatch_size: int,
    num_microbatches: int,
    num_stages: int | None,
    cut: str,
    precision: str | None,
    kind: str,
    scheduling: str | None,
    reconfig: str | None,
    output: str | None,
) -> None:
    """Train; started by torchrun."""
    deepspeed.init_distributed()
    is_first = dist.get_rank() == 0
    config, length = config_of(name, tiny), length_of(name, tiny)
    model = split_model(config)
    module = pipeline_module(model, num_stages or dist.get_world_size(), cut)
    if is_first:
        millions = sum(model.num_parameters) / 1e6
        print(f"{name}: {millions:.1f} million parameters, layers of stages {module.parts}")
    options = {"scheduling": scheduling, "reconfig": reconfig, "output": output}
    engine, *_ = initialize(
        model=module,
        model_parameters=[weight for weight in module.parameters() if weight.requires_grad],
        config=deepspeed_config(
            microbatch_size,
            num_microbatches,
            precision or ("bf16" if torch.cuda.is_available() else "fp32"),
        ),
        envpipe={"type": kind, **{key: value for key, value in options.items() if value}},
    )
    engine.set_has_attention_mask(config.model_type == "bert")
    data = batches(config, microbatch_size, length)
    for iteration in range(1, iterations + 1):
        begun_s = time.monotonic()
        loss = engine.train_batch(data).item()
        took_s = time.monotonic() - begun_s
        if is_first and (iteration % 10 == 0 or iteration == 1):
            print(f"iteration {iteration}: loss {loss:.4f}, {took_s:.3f} s", flush=True)
    end_training(engine)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
