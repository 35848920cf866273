"""AReaL (4aef98d8d818), Archon engine: attach to the schedule of its `PipelinedRunner`.

The runner makes a new schedule for each step, and `attach` takes one, so the runner keeps it. A
step is a `train_batch`. Steps with another number of microbatches than `count` are not billed.
AReaL asks for torch below 2.11, EnvPipe for 2.11 or newer; torch 2.13 calls the loss once more when
it prepares stages, and AReaL's runs out of labels then, without EnvPipe too.
"""

from typing import Any

from envpipe_megatron.integrations.torch_pipelining import attach


def hook(runner: Any, count: int, **settings: Any) -> Any:
    """Hook `engine.runner` on every rank, for steps of `count` microbatches.

    Returns what `attach` returns: call its `pause` before rollouts, its `end_training` at the end.
    """
    create, now = runner._create_schedule, {}
    kept = create(count, lambda output, target: now["loss"](output, target))
    pipeline = attach(kept, level="units", **settings)

    def create_or_keep(n_microbatches: int, loss_fn: Any) -> Any:
        if loss_fn is None or n_microbatches != count:
            pipeline.pause()
            return create(n_microbatches, loss_fn)
        now["loss"] = loss_fn
        kept._stage_forward_initialized = kept._stage_backward_initialized = False  # lengths vary
        return kept

    runner._create_schedule = create_or_keep
    return pipeline
