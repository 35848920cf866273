"""Two ranks that train split models by torch.distributed.pipelining and by DeepSpeed.

Started with DS_ACCELERATOR=cpu. Args: a folder, and names of `tiny_models.CONFIGS`. Each rank
leaves `rank-<n>.pt`: by model and engine the losses, and the weights by their names in
transformers; `whole` is the unsplit model, trained in one process.
"""

import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "helpers"))
import deepspeed
import tiny_models as tiny
import torch
from forked_ranks import run_forked
from presets import preset_profile
from torch.distributed.pipelining import Schedule1F1B

from envpipe_megatron.core.kinds import Kind
from envpipe_megatron.integrations.deepspeed import end_training, initialize
from envpipe_megatron.integrations.huggingface import split_model, weights_of
from envpipe_megatron.integrations.huggingface.deepspeed_stages import pipeline_module
from envpipe_megatron.integrations.huggingface.torch_stages import (
    Stage,
    pipeline_stage,
    reduce_tied_gradients,
)

RANKS = 2


def train_whole(name: str) -> dict[str, Any]:
    config = tiny.config_of(name)
    model = split_model(config)
    whole = tiny.whole_with(config, weights_of(Stage(model, model.parts(1), 0)))
    return {"losses": tiny.train_whole(whole, name), "weights": whole.state_dict()}


def train_by_torch(name: str, rank: int) -> dict[str, Any]:
    model = split_model(tiny.config_of(name))
    first = tiny.microbatches(name)[0][0]
    stage = pipeline_stage(model, model.parts(RANKS), rank, first, torch.device("cpu"))
    schedule = Schedule1F1B(stage, tiny.MICROBATCHES, loss_fn=model.loss)
    optimizer, losses = tiny.Momentum(stage.submod.parameters()), []
    for _ in range(tiny.STEPS):
        inputs, extras, labels = zip(*tiny.microbatches(name), strict=True)
        named = {key: torch.cat([each[key] for each in extras]) for key in extras[0]}
        optimizer.zero_grad()
        found: list[torch.Tensor] = []
        schedule.step(
            *([torch.cat(inputs)] if rank == 0 else []),
            target=torch.cat(labels) if rank == RANKS - 1 else None,
            losses=found,
            **named,
        )
        reduce_tied_gradients([stage.submod])
        optimizer.step()
        losses.append(sum(loss.item() for loss in found) / tiny.MICROBATCHES)
    return {"losses": losses, "weights": weights_of(stage.submod)}


def train_by_deepspeed(name: str, settings: dict[str, Any] | bool) -> dict[str, Any]:
    model = split_model(tiny.config_of(name))
    module = pipeline_module(model, RANKS)
    parameters = [weight for weight in module.parameters() if weight.requires_grad]
    engine, *_ = initialize(
        model=module,
        model_parameters=parameters,
        optimizer=tiny.Momentum(parameters),
        config={
            "train_micro_batch_size_per_gpu": tiny.MICROBATCH,
            "gradient_accumulation_steps": tiny.MICROBATCHES,
            "gradient_clipping": 0.0,  # else it clips at 1
            "steps_per_print": 1000,
        },
        envpipe=settings,
    )
    engine.set_has_attention_mask("bert" in name)
    losses = []
    for _ in range(tiny.STEPS):
        batches = (
            ((inputs, *extras.values()) if extras else inputs, labels)
            for inputs, extras, labels in tiny.microbatches(name)
        )
        losses.append(engine.train_batch(batches).item())
    end_training(engine)
    found = {"losses": losses, "weights": weights_of(engine.module)}
    engine.destroy()
    return found


def main(folder: Path, names: list[str], rank: int) -> None:
    if rank == 0:
        times_s = {Kind.FORWARD: 0.001, Kind.BACKWARD: 0.002}
        preset_profile("a100-sxm", RANKS, times_s, (1305, 1110)).write(folder / "profile.csv")
    deepspeed.ops.__compatible_ops__.clear()  # else each machine compiles some first
    results: dict[str, Any] = {name: {"torch": train_by_torch(name, rank)} for name in names}
    if rank == 0:
        for name in names:
            results[name]["whole"] = train_whole(name)
    deepspeed.init_distributed("gloo")
    for name in names:
        results[name]["deepspeed"] = train_by_deepspeed(name, False)
        settings = {
            "type": "envelope",
            "baseline_steps": 2,
            "profile": str(folder / "profile.csv"),
            "output": str(folder / f"envpipe-{name}"),
        }
        results[name]["envpipe"] = train_by_deepspeed(name, settings)
    torch.save(results, folder / f"rank-{rank}.pt")


if __name__ == "__main__":
    target, *models = sys.argv[1:]
    sys.exit(run_forked(RANKS, partial(main, Path(target), models), Path(target)))
