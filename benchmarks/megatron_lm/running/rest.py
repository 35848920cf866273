"""A job in whose every other turn EnvPipe rests: what its work costs, told within one process.

What jobs beside each other differ by for reasons of their own, such as where their memory lies,
turns of one job do not. What idles costs alike in both kinds of turns, and only jobs beside each
other tell of that; but while EnvPipe rests it has nothing on the device, in any order.
"""

from __future__ import annotations

import functools
import signal
import sys
from collections.abc import Callable
from typing import Any

#: The arm that turns count to in which EnvPipe rests.
RESTING = "resting"
#: Python's switch interval without EnvPipe, s.
_SWITCH_INTERVAL_S = 0.005
#: It is cut to whole us.
_HALF_OF_ITS_UNIT_S = 5e-7

Question = Callable[[], bool]


def rests_in(turn: int) -> bool:
    """Whether EnvPipe rests in a turn: in 1, 4, 5, 8, ..., so that what drifts meets both kinds."""
    return turn > 0 and turn % 4 < 2


def let_megatron_rest(rests: Question, rests_next: Question) -> Callable[[], None]:
    """Let a job be Megatron's alone, in Megatron's order, while the iteration that has begun rests.

    Returns what is to be called between a turn and the next: a rest begins there, in neither turn.

    Args:
        rests_next: of the next iteration, whose step EnvPipe begins before it is that one's turn.
    """
    from envpipe_megatron.integrations.megatron.core import ForwardBackward
    from envpipe_megatron.integrations.megatron.training import Training
    from envpipe_megatron.runtime.job.session import Session

    own = Session.end_step
    at_work, at_rest = list[Session](), list[Session]()

    def end_step(self: Session) -> None:
        own(self)
        at_work[:] = [self]

    def between_turns() -> None:
        if at_work and rests_next():
            at_rest.append(at_work.pop())
            at_rest[0].pause()  # it closes the step, so that none of the rest is billed
            _tell_reader(at_rest[0], signal.SIGSTOP)
        elif at_rest and not rests_next():
            _tell_reader(at_rest.pop(), signal.SIGCONT)

    Session.end_step = end_step  # type: ignore[method-assign]  # in a benchmark's process
    _replace(rests_next, Session, "begin_step", _nothing)
    _replace(rests, Session, "end_step", _nothing)

    def own_function(self: Any, **given: Any) -> Any:
        return self._framework_function(**given)

    _rest(rests, "_follow_units", own_function, Training)
    _replace(rests, ForwardBackward, "__call__", own_function)
    return between_turns


def _tell_reader(session: Any, number: signal.Signals) -> None:
    """Tell the process that reads a real GPU's counter, which sums up what nobody reads."""
    reader = session.parts.meter._reader
    if reader is not None:
        reader._process.send_signal(number)


def let_torchtitan_rest(rests: Question) -> None:
    """Let a job at level `units` be torch's alone while `rests` says so.

    The last step before a rest is closed, and read, in the rest's first step: nobody says before
    that it has ended. Medians of a turn's steps do not know of it.
    """
    from envpipe_megatron.integrations.torch_pipelining import AttachedPipeline

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.in_step:
            self.pause()
        return self._torch_step(*args, **kwargs)

    _rest(rests, "_step", step, AttachedPipeline)


def _rest(rests: Question, name: str, at_rest: Callable[..., Any], *of: Any) -> None:
    """Call `at_rest` in place of a function of EnvPipe's, of whichever class a job has.

    Nothing is read, or looked at, then.
    """
    from envpipe_megatron.runtime.clocks.watch import ClockWatch
    from envpipe_megatron.runtime.energy.meter import EnergyMeter

    #: Shorter from the first request on, where a thread of this process sets the clock.
    own_s, rested = _SWITCH_INTERVAL_S, False

    def resting() -> bool:
        nonlocal own_s, rested
        now = rests()
        if now and not rested:
            own_s = sys.getswitchinterval()
            sys.setswitchinterval(_SWITCH_INTERVAL_S)
        elif rested and not now:
            sys.setswitchinterval(own_s + _HALF_OF_ITS_UNIT_S)
        rested = now
        return now

    _replace(rests, EnergyMeter, "_try_sample", _nothing)
    _replace(rests, ClockWatch, "sample", _nothing)
    for each in of:
        _replace(resting, each, name, at_rest)


def _replace(rests: Question, of: Any, name: str, at_rest: Callable[..., Any]) -> None:
    own = getattr(of, name)

    @functools.wraps(own)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (at_rest if rests() else own)(*args, **kwargs)

    setattr(of, name, call)


def _nothing(*_: Any) -> None:
    """Of what rests."""
