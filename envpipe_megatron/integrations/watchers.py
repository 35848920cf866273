"""What frameworks run between training steps that is not training, and what judges GPUs there.

A GPU that a plan has slowed looks sick to a tool that compares GPUs. So the job pauses before each
row of the table here: the GPU is seen to run at its highest clock. Tools that read times of
training itself meet slowed GPUs all the same: NVRx gets its thresholds lowered by as much as that
explains; a job with Megatron's `--log-straggler`, which has none, has one clock for all GPUs
(`megatron.limits`). Integrations enter `between_steps`.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from envpipe_megatron.integrations.framework_units import once
from envpipe_megatron.integrations.hooking import replaced
from envpipe_megatron.integrations.leveled import LeveledJob


class Between(NamedTuple):
    """A function that a framework calls between steps; versions that lack it do without.

    Args:
        owner: where it is called by its name: a module, or an attribute of the object that trains.
        what: it does.
        when: another function of the owner, which says by the same arguments whether it does that.
    """

    owner: str
    function: str
    what: str
    when: str = ""


_LM, _BRIDGE = "megatron.training.training", "megatron.bridge.training.train"
_HASHES = "check_param_hashes_across_dp_replicas"
_ENGINE = "deepspeed.runtime.pipe.engine"

#: By framework. Any forward-only call pauses too, wherever it comes from.
BETWEEN_STEPS: Mapping[str, tuple[Between, ...]] = {
    "Megatron-LM": (
        Between(_LM, "_run_gpu_sniff_test", "products and collectives, compared over ranks"),
        Between(_LM, "evaluate", "an evaluation"),
        Between(_LM, "save_checkpoint_and_time", "a checkpoint, which older patches mark too"),
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
#: Where NVRx has its reports, in older and in newer versions.
_NVRX = (
    "nvidia_resiliency_ext.straggler.reporting",
    "nvidia_resiliency_ext.attribution.straggler.reporting",
)


@contextmanager
def between_steps(framework: str, job: LeveledJob, trainer: object = None) -> Iterator[None]:
    """Within, the job pauses before each row of a framework, and NVRx has lower thresholds.

    Args:
        framework: a key of `BETWEEN_STEPS`.
        trainer: has the owners that are not modules, as attributes.
    """
    with ExitStack() as stack:
        for row in BETWEEN_STEPS[framework]:
            owner = sys.modules.get(row.owner) or getattr(trainer, row.owner, None)
            if function := getattr(owner, row.function, None):
                asks = getattr(owner, row.when, None) if row.when else None
                if not row.when or asks is not None:
                    instead = {row.function: _paused(function, job, asks)}
                    stack.enter_context(replaced(owner, **instead))
        for name in _NVRX:
            if report := getattr(sys.modules.get(name), "Report", None):
                lowered = _lowered(report.identify_stragglers, job)
                stack.enter_context(replaced(report, identify_stragglers=lowered))
        yield


def _paused(
    function: Callable[..., Any], job: LeveledJob, asks: Callable[..., bool] | None
) -> Callable[..., Any]:
    @functools.wraps(function)
    def paused(*args: Any, **kwargs: Any) -> Any:
        if asks is None or asks(*args, **kwargs):
            job.pause()
        return function(*args, **kwargs)

    return paused


def _lowered(identify: Callable[..., Any], job: LeveledJob) -> Callable[..., Any]:
    """Return NVRx's search for stragglers with thresholds that a slowed GPU that is well meets.

    A score is a share of the speed of the fastest GPU, or of this one's own best; at a lower clock
    no kernel is slower than by the ratio of the clocks.
    """
    signature, say = inspect.signature(identify), once()

    @functools.wraps(identify)
    def lowered(*args: Any, **kwargs: Any) -> Any:
        given, share = signature.bind(*args, **kwargs), job.slowest_share()
        given.apply_defaults()
        for name in given.arguments:
            if name.endswith("_threshold"):
                given.arguments[name] *= share
        if share < 1:
            say(
                f"Units ran at clocks down to {share:.0%} of the highest, so NVRx's thresholds "
                "are lowered to that share of what was set; docs/operators.md"
            )
        return identify(*given.args, **given.kwargs)

    return lowered
