"""nanotron (2411b022a75f), engines `1f1b` and `afab`: tell EnvPipe when units begin and end.

`engine.forward` and `engine.backward` receive within, and waiting is no work: a forward begins at
the stage's first block, a backward when its gradient (one tensor) is there. Make an
`InstrumentedPipeline` of `parallel_context.pp_pg`, put its `step` around `trainer.training_step`,
and call its `pause` before `save_checkpoint`.
"""

from typing import Any


def hook(pipeline: Any, engine: Any, model: Any, state: Any, *, is_last: bool) -> None:
    """Hook a rank's engine.

    Args:
        pipeline: an `InstrumentedPipeline`.
        engine: nanotron's pipeline engine.
        model: this stage's; its `PipelineBlock`s that run here have a `pp_block`.
        state: the module nanotron.parallel.pipeline_parallel.state.
        is_last: whether this is the last stage, whose backwards receive nothing.
    """
    block = next(module for module in model.modules() if hasattr(module, "pp_block"))
    block.pp_block.register_forward_pre_hook(lambda *_: pipeline.on_instruction_begin("forward"))
    forward, backward, receive = engine.forward, engine.backward, state.RecvGrad.__call__

    def ends_forward(**inputs: Any) -> Any:
        output = forward(**inputs)
        pipeline.on_instruction_end("forward")
        return output

    def ends_backward(**inputs: Any) -> None:
        if is_last:
            pipeline.on_instruction_begin("backward")
        backward(**inputs)
        pipeline.on_instruction_end("backward")

    def begins_backward(self: Any) -> Any:
        gradient = receive(self)
        pipeline.on_instruction_begin("backward")
        return gradient

    engine.forward, engine.backward, state.RecvGrad.__call__ = (
        ends_forward,
        ends_backward,
        begins_backward,
    )
