"""One arm of `torchtitan_ratio`: torchtitan's own command, which takes turns with other jobs.

    torchrun ... torchtitan_arm.py JOB.json TORCHTITAN-ARGUMENTS...

No file of torchtitan is changed: a step of its trainer waits for its turn, trains on random tokens
(reading text would be most of a short step), and its loss is kept to the last bit. A Llama of about
1B is added to torchtitan's flavors, and a tiny one.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.megatron_lm.running.entry import Turns, die_with_parent
from benchmarks.megatron_lm.running.rest import let_torchtitan_rest, rests_in
from envpipe_megatron.integrations.options import divided
from envpipe_megatron.integrations.torch_pipelining.torchtitan import hook

#: Names a module whose `install` lets torchtitan run on CPUs.
SHIM_VARIABLE = "TORCHTITAN_CPU_SHIM"
_VOCABULARY = 32000


def main() -> None:
    """Run torchtitan's command, with EnvPipe where its options are given."""
    job = json.loads(Path(sys.argv.pop(1)).read_text())
    die_with_parent()
    settings, sys.argv[1:] = divided(sys.argv[1:])  # torchtitan reads them as it is imported
    if shim := os.environ.get(SHIM_VARIABLE):
        __import__(shim).install()
    import torchtitan.train as command  # type: ignore[import-not-found]

    _add_flavors()
    rank = int(os.environ["RANK"])
    turns = Turns(job["socket"], job["run"], rank, job["turns"], job["iterations"])
    losses = _take_turns(command.Trainer, turns)
    if job["rests"]:
        let_torchtitan_rest(lambda: rests_in(turns.turn))
    if settings:
        hook(command.Trainer, **settings)
    try:
        command.main(command.Trainer)
    finally:
        kept = {"rank": rank, "losses": [float(loss).hex() for loss in losses], "times": []}
        (Path(job["folder"]) / f"rank-{rank}.json").write_text(json.dumps(kept))


def _add_flavors() -> None:
    from torchtitan.models.llama3.model.args import (  # type: ignore[import-not-found]
        TransformerModelArgs,
    )
    from torchtitan.protocols import train_spec  # type: ignore[import-not-found]

    spec = train_spec.get_train_spec("llama3")
    sizes: dict[str, dict[str, Any]] = {
        "1B": {"dim": 2048, "n_layers": 16, "n_heads": 32, "ffn_dim_multiplier": 1.5},
        "tiny": {"dim": 64, "n_layers": 4, "n_heads": 8, "multiple_of": 64},
    }
    flavors = {
        name: TransformerModelArgs(n_kv_heads=8, vocab_size=_VOCABULARY, rope_theta=500000, **size)
        for name, size in sizes.items()
    }
    added = dataclasses.replace(spec, model_args={**spec.model_args, **flavors})
    train_spec.register_train_spec("llama3", added)


def _take_turns(trainer: type[Any], turns: Turns) -> list[torch.Tensor]:
    """Let steps wait for their turns; the losses that they return, as they come."""
    losses: list[torch.Tensor] = []
    step, forward_backward = trainer.train_step, trainer.forward_backward_step
    batches: dict[str, Iterator[Any]] = {}

    @functools.wraps(step)
    def train_step(self: Any, data_iterator: Any) -> None:
        last = self.job_config.training.steps
        if not turns.before_iteration():
            self.step = last  # ends training
            return
        step(self, batches.setdefault("random", _random_batches(self)))
        turns.after_iteration()

    @functools.wraps(forward_backward)
    def forward_backward_step(self: Any, **kwargs: Any) -> torch.Tensor:
        loss: torch.Tensor = forward_backward(self, **kwargs)
        losses.append(loss.detach())
        return loss

    trainer.train_step, trainer.forward_backward_step = train_step, forward_backward_step
    return losses


def _random_batches(trainer: Any) -> Iterator[Any]:
    training, metrics = trainer.job_config.training, trainer.metrics_processor
    source = torch.Generator().manual_seed(0)
    shape = (training.local_batch_size, training.seq_len + 1)
    while True:
        tokens = torch.randint(_VOCABULARY, shape, generator=source)
        metrics.ntokens_since_last_log += tokens[:, 1:].numel()
        metrics.data_loading_times.append(0.0)
        yield {"input": tokens[:, :-1].contiguous()}, tokens[:, 1:].contiguous()


if __name__ == "__main__":
    main()
