"""A job in whose every other turn EnvPipe rests: what its work costs, told within one process.

Jobs beside each other differ by some 0.5 % in what has nothing to do with EnvPipe, such as how
their memory lies. Turns of one job do not, so they tell a thousandth. What idles costs alike in
both kinds of turns, and only jobs beside each other tell of that; but a job that keeps its
framework's order has nothing idle on the device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

#: The arm that turns count to in which EnvPipe rests.
RESTING = "resting"


def rests_in(turn: int) -> bool:
    """Whether EnvPipe rests in a turn: in 1, 4, 5, 8, ..., so that what drifts meets both kinds."""
    return turn > 0 and turn % 4 < 2


def let_rest(rests: Callable[[], bool]) -> Callable[[Any, str, Callable[..., Any]], None]:
    """Let no step be billed, no energy counter be read, and no clock be looked at in a rest.

    What is returned does the same for a function that runs units: it gets whose it is, its name,
    and what is to be called in a rest, with the same arguments.
    """
    from envpipe_megatron.runtime.clocks.watch import ClockWatch
    from envpipe_megatron.runtime.energy.meter import EnergyMeter
    from envpipe_megatron.runtime.job.session import Session

    def replace(of: Any, name: str, at_rest: Callable[..., Any]) -> None:
        own = getattr(of, name)

        @functools.wraps(own)
        def call(*args: Any, **kwargs: Any) -> Any:
            return (at_rest if rests() else own)(*args, **kwargs)

        setattr(of, name, call)

    for of, name in (
        (Session, "begin_step"),
        (Session, "end_step"),
        (EnergyMeter, "_sample"),
        (ClockWatch, "sample"),
    ):
        replace(of, name, lambda *_: None)
    return replace


def let_megatron_rest(rests: Callable[[], bool]) -> None:
    """Let a job at level `units` be Megatron's alone in a rest."""
    from envpipe_megatron.integrations.megatron.kept import KeptOrder

    def forward_backward(self: Any, **arguments: Any) -> Any:
        last = self._session.last_record
        if last is not None and last.followed:
            self._session.pause()  # once: it ends the step before the rest
        return self._framework_function(**arguments)

    let_rest(rests)(KeptOrder, "__call__", forward_backward)


def let_torchtitan_rest(rests: Callable[[], bool]) -> None:
    """Let a job at level `units` be torch's alone in a rest."""
    from envpipe_megatron.integrations.torch_pipelining import AttachedPipeline

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._begun:
            self.pause()
        return self._torch_step(*args, **kwargs)

    let_rest(rests)(AttachedPipeline, "_step", step)
