"""Runs Megatron's own forward-backward function with hooks around its units.

Order and messages stay Megatron's, so nothing can differ and nothing can hang: EnvPipe times each
unit and sets its clock. Its functions call `forward_step` and `backward_step` as names of
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
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.integrations.framework_units import (
    Reporter,
    SeenUnit,
    UnitFollower,
    once,
)
from envpipe_megatron.integrations.hooking import replaced
from envpipe_megatron.runtime.job.session import Session

_FUNCTIONS = {Kind.FORWARD: "forward_step", Kind.BACKWARD: "backward_step"}
_COMBINED = "combined_1f1b_schedule_for_interleaved_pipelining"
#: Takes as long as several units' events.
_signature = functools.cache(inspect.signature)


class HookedForwardBackward:
    """Replaces the function that `get_forward_backward_func` returns, and calls it.

    Args:
        session: gets an iteration for each call.
        framework_function: Megatron's.
        order_of: the order that is planned for, of a number of microbatches.
    """

    def __init__(
        self,
        session: Session,
        framework_function: Callable[..., list[Any]],
        order_of: Callable[[int], Schedule],
    ) -> None:
        self._session = session
        self._framework_function = framework_function
        self._order_of = functools.cache(order_of)
        self._warn = once()
        #: Numbers of microbatches whose units have come.
        self._seen: set[int] = set()
        self._against: str | None = None

    def __call__(self, **arguments: Any) -> list[Any]:
        """Call Megatron's function with its arguments, and return its result."""
        count = arguments["num_microbatches"]
        full = count == self._session.options.num_microbatches
        run = self._session.open_iteration(self._order_of(count), full_batch=full)
        followed = UnitFollower(run, self._session.highest_clock, self._warn)
        with _reported_units(followed):
            losses = self._framework_function(**arguments)
        followed.complete()
        if count not in self._seen:
            self._seen.add(count)
            found = self._session.parts.collectives.first(followed.against)
            self._against = self._against or (found and found[1])
        return losses

    def end_step(self, *, skipped: bool) -> str | None:
        """End a step; return why the job is to go on at a lower level, on all ranks alike.

        That is that the first iteration of a number of microbatches had other units than planned.
        """
        return self._against


def _reported_units(reporter: Reporter) -> AbstractContextManager[None]:
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
