"""Pauses a job before what frameworks run between training steps, such as checks of GPUs.

A GPU that a plan has slowed looks sick to a tool that compares GPUs. So the job pauses before each
row of the table here: the GPU is seen to run at its highest clock. Tools that read times of
training itself meet slowed GPUs all the same: NVRx gets its thresholds lowered by as much as that
explains; a job with Megatron's `--log-straggler`, which has none, has one clock for all GPUs
(`megatron.limits`). Integrations enter `between_steps`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any, NamedTuple

from envpipe_megatron.integrations.framework_units import once
from envpipe_megatron.integrations.hooking import replaced
from envpipe_megatron.integrations.leveled import LeveledJob


class Between(NamedTuple):
    """A function, by its name in a module or in an attribute of a trainer, and its purpose."""

    owner: str
    function: str
    what: str
    when: str = ""  # name of a function that tells by the same arguments if it does that


_LM, _BRIDGE = "megatron.training.training", "megatron.bridge.training.train"
_ENGINE, _HASHES = "deepspeed.runtime.pipe.engine", "check_param_hashes_across_dp_replicas"

#: By framework; versions that lack a function do without. Any forward-only call pauses too, and
#: Megatron-LM's patch pauses before a checkpoint.
BETWEEN_STEPS = {
    "Megatron-LM": (
        Between(_LM, "_run_gpu_sniff_test", "products and collectives, compared over ranks"),
        Between(_LM, "evaluate", "an evaluation"),
        Between(_LM, _HASHES, "hashes of weights, compared over replicas"),
    ),
    "Megatron-Bridge": (
        Between(_BRIDGE, "evaluate_and_print_results", "an evaluation"),
        Between(_BRIDGE, "save_checkpoint_and_time", "a checkpoint"),
        Between(_BRIDGE, _HASHES, "hashes of weights, compared over replicas"),
    ),
    "DeepSpeed": (
        Between(_ENGINE, "eval_batch", "an evaluation"),
        Between(_ENGINE, "save_checkpoint", "a checkpoint"),
        Between(_ENGINE, "load_checkpoint", "a checkpoint"),
    ),
    "torchtitan": (
        Between("checkpointer", "save", "a checkpoint", when="_should_save"),
        Between("validator", "validate", "an evaluation"),
    ),
}
#: Where NVRx has its reports, in newer and in older versions.
_NVRX = [f"nvidia_resiliency_ext.{path}straggler.reporting" for path in ("attribution.", "")]


@contextmanager
def between_steps(framework: str, job: LeveledJob, trainer: object = None) -> Iterator[None]:
    """Within, the job pauses before each row of a framework, and NVRx has lower thresholds."""
    with ExitStack() as stack:

        def put(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
            if function := getattr(owner, name, None):
                stack.enter_context(replaced(owner, **{name: make(function)}))

        for row in BETWEEN_STEPS[framework]:
            owner = sys.modules.get(row.owner) or getattr(trainer, row.owner, None)
            does = getattr(owner, row.when, lambda *_, **__: False) if row.when else None
            put(owner, row.function, partial(paused, lambda *_: job.pause(), does=does))
        for name in _NVRX:
            report = getattr(sys.modules.get(name), "Report", None)
            put(report, "identify_stragglers", partial(_lowered, job))
        yield


def paused(
    pause: Callable[..., object],
    function: Callable[..., Any],
    does: Callable[..., bool] | None = None,
) -> Callable[..., Any]:
    """Return a function that calls `pause`, with its first argument, before it `does` anything."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if does is None or does(*args, **kwargs):
            pause(*args[:1])
        return function(*args, **kwargs)

    return run


def _lowered(job: LeveledJob, identify: Callable[..., Any]) -> Callable[..., Any]:
    """Return NVRx's search for stragglers with thresholds that a slowed GPU that is well meets.

    A score is a share of the speed of the fastest GPU, or of this one's own best; at a lower clock
    no kernel is slower than by the ratio of the clocks.
    """
    signature, say = inspect.signature(identify), once()

    @wraps(identify)
    def lowered(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        share = 1.0 if job.job is None else job.session.slowest_share()
        if share < 1:
            say(f"NVRx's thresholds are lowered to {share:.0%}, as the slowest unit's clock was")
        for name, value in given.arguments.items():
            if name.endswith("_threshold") and value is not None:
                given.arguments[name] = share * value
        return identify(*given.args, **given.kwargs)

    return lowered
