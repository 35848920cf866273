"""Reports the units of Megatron's own forward-backward functions, by hooks around them.

Order and messages stay Megatron's, so nothing can differ and nothing can hang: EnvPipe times each
unit and sets its clock. Those functions call `forward_step` and `backward_step` as names of
`megatron.core.pipeline_parallel.schedules`, so that putting others there for the time of a call
reaches every unit (seen in 0.16 to 0.19). Where the communication of experts is overlapped, the
interleaved function calls one of other name for a forward, a backward, or both as one.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from megatron.core.pipeline_parallel import schedules

from envpipe_megatron.core.kinds import Kind
from envpipe_megatron.integrations.framework_units import (
    Reporter,
    SeenUnit,
)
from envpipe_megatron.integrations.hooking import replaced

_FUNCTIONS = {Kind.FORWARD: "forward_step", Kind.BACKWARD: "backward_step"}
_COMBINED = "combined_1f1b_schedule_for_interleaved_pipelining"
#: Takes as long as several units' events.
_signature = functools.cache(inspect.signature)


def reported_units(reporter: Reporter) -> AbstractContextManager[None]:
    """Within, each unit that a function of Megatron's runs is reported."""

    def around(kind: Kind, step: Callable[..., Any]) -> Callable[..., Any]:
        def unit(*args: Any, **kwargs: Any) -> Any:
            reporter.begin(SeenUnit(kind, kwargs.get("current_microbatch"), kwargs.get("vp_stage")))
            result = step(*args, **kwargs)
            reporter.end()
            return result

        return unit

    hooked = {name: around(kind, getattr(schedules, name)) for kind, name in _FUNCTIONS.items()}
    if hasattr(schedules, _COMBINED):
        hooked[_COMBINED] = _reported_pairs(getattr(schedules, _COMBINED), reporter)
    return replaced(schedules, **hooked)


def _reported_pairs(step: Callable[..., Any], reporter: Reporter) -> Callable[..., Any]:
    """Return Megatron's combined function, which reports what it runs: F, B, or both as a pair.

    A pair may wait for its inputs within the call, in `pre_forward` and `pre_backward`, which come
    in this order: its units begin behind these.
    """

    def units(*args: Any, **kwargs: Any) -> Any:
        given = _signature(step).bind(*args, **kwargs)
        of = given.arguments
        forward, backward = of.get("f_virtual_microbatch_id"), of.get("b_virtual_microbatch_id")
        pair = forward is not None and backward is not None

        def begin_forward() -> None:
            microbatch = of["get_microbatch_id_in_model_chunk"](forward, forward=True)
            chunk = of["get_model_chunk_id"](forward, forward=True)
            reporter.begin(SeenUnit(Kind.FORWARD, microbatch, chunk, combined=pair))
            if pair:
                reporter.end()

        def begin_backward() -> None:
            chunk = of["get_model_chunk_id"](backward, forward=False)
            reporter.begin(SeenUnit(Kind.BACKWARD, None, chunk))

        def behind(name: str, begin: Callable[[], None]) -> None:
            wait = of.get(name)
            if wait is None:
                begin()
                return

            def waited(*args: Any, **kwargs: Any) -> None:
                wait(*args, **kwargs)
                begin()

            of[name] = waited

        if forward is not None:
            behind("pre_forward", begin_forward)
        if backward is not None:
            behind("pre_backward", begin_backward)
        result = step(*given.args, **given.kwargs)
        reporter.end()
        return result

    return units
