"""A rank that trains a small pipeline by DeepSpeed's own engine, and again by EnvPipe's orders.

Started by torchrun with DS_ACCELERATOR=cpu. Args: a folder, in which each rank leaves
`rank-<n>.json`: of each run, the losses, a digest of the weights, and the units of its last step.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import deepspeed
import plain_stages
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

from envpipe_megatron.integrations.deepspeed.engine import adopt
from envpipe_megatron.policies.planner import PlanRequest
from envpipe_megatron.runtime.session import SessionConfig

MICROBATCHES, MICROBATCH, WIDTH, LENGTH, WORDS = 6, 2, 8, 5, 11
STEPS = 6
#: What EnvPipe is asked for.
RUNS = {
    "gpipe": {"schedule": "gpipe", "policy": "baseline"},
    "envpipe": {"schedule": "envpipe", "policy": "envelope", "reconfigure": "balanced"},
}


class Embedding(torch.nn.Embedding):
    """The first layer, and the last: its weights are tied."""

    def __init__(self) -> None:
        super().__init__(WORDS, WIDTH)


def logits(embedding: Embedding, hidden: torch.Tensor) -> torch.Tensor:
    return hidden @ embedding.weight.t()


class Block(torch.nn.Module):
    """Dropout draws random numbers, in the order of forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.linear = torch.nn.Linear(WIDTH, WIDTH)
        self.dropout = torch.nn.Dropout(0.1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        attended, _ = self.attention(hidden, hidden, hidden, need_weights=False)
        return hidden + self.dropout(torch.nn.functional.gelu(self.linear(attended)))


class TupledBlock(Block):
    """Hands positions and a mask on beside what is learned, which get no gradient."""

    def forward(self, inputs: Any) -> Any:
        hidden, positions, mask = inputs
        hidden = hidden.masked_fill(mask.unsqueeze(-1), 0.0) + 0.01 * positions.unsqueeze(-1)
        return super().forward(hidden), positions, mask


class Begin(torch.nn.Module):
    def forward(self, hidden: torch.Tensor) -> Any:
        positions = torch.arange(LENGTH).expand(hidden.shape[0], LENGTH).contiguous()
        return hidden, positions, positions == 3


class End(torch.nn.Module):
    def forward(self, inputs: Any) -> torch.Tensor:
        return inputs[0]


def loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(outputs.flatten(0, 1), labels.flatten())


def layers(tupled: bool) -> list[Any]:
    embedding = TiedLayerSpec("embedding", Embedding)
    head = TiedLayerSpec("embedding", Embedding, forward_fn=logits)
    if tupled:
        blocks = [LayerSpec(Begin), *(LayerSpec(TupledBlock) for _ in range(6)), LayerSpec(End)]
    else:
        blocks = [LayerSpec(Block) for _ in range(6)]
    return [embedding, *blocks, head]


def batches() -> Any:
    generator = torch.Generator().manual_seed(5)
    while True:
        words = torch.randint(WORDS, (MICROBATCH, LENGTH + 1), generator=generator)
        yield words[:, :-1], words[:, 1:]


def train(folder: Path, run: str, tupled: bool) -> dict[str, Any]:
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = PipelineModule(
        layers(tupled), num_stages=dist.get_world_size(), loss_fn=loss, partition_method="uniform"
    )
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=[p for p in model.parameters() if p.requires_grad],
        config={
            "train_micro_batch_size_per_gpu": MICROBATCH,
            "gradient_accumulation_steps": MICROBATCHES,
            "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}},
            "gradient_clipping": 1.0,
            "steps_per_print": 1000,
        },
    )
    engine.set_has_attention_mask(tupled)
    torch.manual_seed(7)
    session = None
    if run in RUNS:
        config = SessionConfig(
            PlanRequest(MICROBATCHES, **RUNS[run]),
            warmup_iterations=2,
            profile_file=folder / "profile.csv",
        )
        session, _ = plain_stages.session(rank, config, folder / f"gpus-{run}-{tupled}")
        engine = adopt(engine, session, session._collectives)
    data = batches()
    losses = [engine.train_batch(data).item() for _ in range(STEPS)]
    evaluated = engine.eval_batch(data).item()
    losses.append(engine.train_batch(data).item())
    digest = hashlib.sha256()
    for _, weight in sorted(model.named_parameters()):
        digest.update(weight.detach().numpy().tobytes())
    held = [buffer for buffers in engine.pipe_buffers.values() for buffer in buffers]
    result = {"losses": losses, "evaluated": evaluated, "weights": digest.hexdigest()}
    if session is not None:
        result |= {
            "units": session.executed,
            "phase": session.state.phase.value,
            "held": sum(buffer is not None for buffer in held),
            "steps": len(session.state.iterations),
        }
        session.close()
    return result


def main() -> None:
    folder = Path(sys.argv[1])
    deepspeed.init_distributed("gloo")
    results = {
        str(tupled): {run: train(folder, run, tupled) for run in ("own", *runs)}
        for tupled, runs in ((False, RUNS), (True, ("envpipe",)))
    }
    (folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(results))
    dist.barrier()


main()
