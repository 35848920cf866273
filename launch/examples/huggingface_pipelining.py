r"""A model of Hugging Face's transformers, cut into stages of plain PyTorch, with EnvPipe's bill.

Two stages on a machine without GPUs, with a small GPT-2 that is made from nothing:

    ENVPIPE_EMULATED_GPU=a100-sxm ENVPIPE_EMULATED_FORWARD_S=0.01 \
        torchrun --nproc-per-node 2 launch/examples/huggingface_pipelining.py

With a folder that `save_pretrained` left, its model and its weights: `... huggingface_pipelining.py
FOLDER`. Each rank makes, and reads, only its own stage.
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.pipelining import Schedule1F1B
from torch_pipelining import device_of_rank
from transformers import AutoConfig, GPT2Config

from envpipe_megatron.integrations.huggingface import split_model
from envpipe_megatron.integrations.huggingface.torch_stages import (
    pipeline_stage,
    reduce_tied_gradients,
)
from envpipe_megatron.integrations.torch_pipelining import attach

MICROBATCHES, MICROBATCH, LENGTH, STEPS = 8, 2, 32, 160


def train(folder: str | None, device: torch.device) -> None:
    """Train on random text that repeats, a stage a rank."""
    rank, stages = dist.get_rank(), dist.get_world_size()
    config = AutoConfig.from_pretrained(folder) if folder else GPT2Config(
        n_embd=64, n_head=4, n_layer=4, vocab_size=256, bos_token_id=None, eos_token_id=None
    )  # fmt: skip
    model = split_model(config, weights=folder)
    parts = model.parts(stages)  # or by time: model.parts(stages, "time:layers.json")
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(
        config.vocab_size, (MICROBATCHES * MICROBATCH, LENGTH + 1), generator=generator
    ).to(device)
    tokens, labels = text[:, :-1], text[:, 1:]
    stage = pipeline_stage(model, parts, rank, tokens[:MICROBATCH], device)
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=model.loss)
    pipeline = attach(schedule)
    optimizer = torch.optim.AdamW(stage.submod.parameters(), lr=1e-3)
    losses: list[torch.Tensor] = []
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        schedule.step(*([tokens] if rank == 0 else []), target=labels, losses=losses)
        reduce_tied_gradients([stage.submod])  # before clipping and the optimizer
        optimizer.step()
        if step % 10 == 0:
            report = pipeline.report().line()  # on every rank
            if rank == stages - 1:
                loss = torch.stack(losses).mean().item()
                print(f"step {step} | loss {loss:.4f} |{report}", flush=True)
    pipeline.end_training()


if __name__ == "__main__":
    train(sys.argv[1] if len(sys.argv) > 1 else None, device_of_rank())
    dist.destroy_process_group()
