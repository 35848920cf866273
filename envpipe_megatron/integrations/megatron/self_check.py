"""Checks that another order of units gives the same result, on one of the job's iterations.

One iteration runs by megatron-core's own function, by that again, and by the interpreter in another
order, each from the same state and on the same data. Losses and gradients are to be equal to the
last bit if those of Megatron's two runs are; if Megatron does not repeat itself, the other order
may differ from it by a few times as much as it does from itself. Where backwards may be split, that
order splits them, and only if it makes a difference another one of whole backwards is tried.
Training goes on from the last run, or from another one of Megatron's if that made a difference.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import torch

from envpipe_megatron.core.channel_model import find_stall
from envpipe_megatron.core.kinds import Kind
from envpipe_megatron.core.orders.builders import split_late
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.integrations.megatron.repeating import RepeatedIteration
from envpipe_megatron.integrations.megatron.split_backward import waiting_bytes
from envpipe_megatron.integrations.megatron.work import listed
from envpipe_megatron.integrations.outcome import Outcome
from envpipe_megatron.runtime.channel.carrier import StageSpecs
from envpipe_megatron.runtime.execution.stage_run import Rehearsal
from envpipe_megatron.runtime.job.session import Session
from envpipe_megatron.runtime.memory.stage import device_memory

#: A first iteration of mixed precision may overflow: it would show nothing.
_MOST_TRIES = 20
#: Of what a microbatch in flight seems to hold, what must be free for each one more.
_ROOM = 1.5

Arguments = dict[str, Any]


class SelfCheck:
    """Checks an iteration, the first whose gradients are finite; every rank of the job does.

    A batch of fewer microbatches that admits fewer orders than a full one does shows too little,
    and runs by megatron-core's own function.

    Args:
        session: of the job; it keeps backwards whole if the check shows that they are not to be
            split.
        orders_of: of a number of microbatches, megatron-core's order, then others that are worth a
            try, the most different first.
        needed: whether whole backwards, too, are not to run in another order without a check.
    """

    def __init__(
        self, session: Session, orders_of: Callable[[int], Sequence[Schedule]], *, needed: bool
    ) -> None:
        self._orders_of = orders_of
        self._num_orders = len(orders_of(session.options.num_microbatches))
        self._channel, self._collectives = session.parts.channel, session.parts.collectives
        self._say = session.parts.say
        self._keep_whole = session.split_no_more if session.may_split else None
        self._needed = needed
        self._tries = 0
        self.done = False
        #: Why no other order may run; None if one may, or the check is not done.
        self.failed: str | None = None

    def __call__(
        self,
        arguments: Arguments,
        specs: StageSpecs,
        framework_function: Callable[..., list[Any]],
        interpret: Callable[[Arguments, Rehearsal], list[Any]],
    ) -> list[Any]:
        """Run the iteration; return what megatron-core's function does.

        `specs` is what the interpreter's messages carry.
        """
        own, *others = self._orders_of(arguments["num_microbatches"])
        if len(others) + 1 < self._num_orders:
            return framework_function(**arguments)
        begin_s, why = time.monotonic(), None
        chunks = listed(arguments["model"])
        # It may be an object with state; Megatron-Bridge binds one in which forwards count, too.
        step = arguments["forward_step_func"]
        owners = (step.func, *step.args) if isinstance(step, partial) else (step,)
        iteration = RepeatedIteration(chunks, arguments["data_iterator"], owners)

        def megatron(data: Any) -> list[Any]:
            return framework_function(**{**arguments, "data_iterator": data})

        def rehearsed(rehearsal: Rehearsal, data: Any) -> list[Any]:
            return interpret({**arguments, "data_iterator": data}, rehearsal)

        memory = _Memory(arguments, self._collectives.stage)
        losses: list[Any] = iteration.run(megatron)
        first = _outcome(losses, chunks)
        self._tries += 1
        if not self._collectives.on_all(first.finite):
            if self._tries == _MOST_TRIES:
                self.done, why = True, "gradients were not finite in any of the first iterations"
                self.failed = why if self._needed else None
                if self._keep_whole:
                    self._keep_whole(why)
            return losses
        again, runs = _outcome(iteration.run(megatron), chunks), 2
        for keep_whole in dict.fromkeys((self._keep_whole, None)):
            split = keep_whole is not None
            order = self._that_fits(own, others, memory, split=split)
            room = order is not None and self._channel.make_room(order, specs)
            if order is None or not self._collectives.on_all(room):
                order, why = None, "memory has no room to try another order"
            else:
                runs, rehearsal = runs + 1, Rehearsal(order, specs)
                losses = iteration.run(partial(rehearsed, rehearsal))
                why = self._compared(first, again, _outcome(losses, chunks), rehearsal.error)
            if why is None:
                how = f"{runs} times{', at last with split backwards' if split else ''}"
                self._say(
                    f"self-check: {time.monotonic() - begin_s:.1f} s for this iteration, {how}"
                )
                break
            if keep_whole:
                keep_whole(why)
                if runs == 2 and not self._needed:
                    break
            elif order or self._needed:
                self.failed = why
        self.done = True
        if why and runs > 2:
            losses = iteration.run(megatron)
        return losses

    def _that_fits(
        self, own: Schedule, others: Sequence[Schedule], memory: _Memory, *, split: bool
    ) -> Schedule | None:
        """Return the first of the others that there is room for, on all ranks; else Megatron's.

        None if there is no room for one with another sequence of forwards: a plan, whose memory is
        measured, may have it.
        """
        for order in (*others, own):
            tried = split_late(order) if split else order
            if find_stall(tried, self._channel.capacity):
                continue
            if self._collectives.on_all(memory.has_room(own, tried)):
                return tried
            if _forwards(order) != _forwards(own):
                return None
        return None

    def _compared(
        self, first: Outcome, again: Outcome, ours: Outcome, error: str | None
    ) -> str | None:
        """Return what differs by more than between two runs of Megatron's; None if nothing does."""
        if failed := self._collectives.first(error):
            return f"{failed[1]}, on stage {failed[0]}"
        if not self._collectives.on_all(ours.finite):
            return "gradients are not finite, and Megatron's are"
        repeats = self._collectives.on_all(first.differs_from(again) is None)
        found = self._collectives.first(first.differs_from(ours))
        if found is None:
            self._say("self-check: losses and gradients are equal to the last bit")
            return None
        if repeats:
            return f"{found[1]} of stage {found[0]} differ from Megatron's, which repeats itself"
        found = self._collectives.first(first.strays_from(ours, again))
        if found is not None:
            return f"on stage {found[0]}, {found[1]}"
        noise = max(self._collectives.by_stage(first.noise(again), max))
        self._say(
            "self-check: losses and gradients differ from Megatron's no more than those of two "
            f"runs of Megatron's do, by {noise:.1e} of their size"
        )
        return None


def _outcome(losses: Sequence[Any], chunks: Sequence[torch.nn.Module]) -> Outcome:
    """Read the losses of a run, and the gradients that the model has."""
    gradients = dict[str, torch.Tensor]()
    for number, chunk in enumerate(chunks):
        for name, parameter in chunk.named_parameters():
            gradient = getattr(parameter, "main_grad", None)
            gradient = parameter.grad if gradient is None else gradient
            if gradient is not None:
                gradients[name + f", chunk {number}" * (len(chunks) > 1)] = gradient
    return Outcome.of(gradients, losses)


class _Memory:
    """The device memory that an iteration of this stage needed, where an allocator counts it."""

    def __init__(self, arguments: Arguments, stage: int) -> None:
        self._stage, self._device = stage, device_memory()
        self._waiting_bytes = max(waiting_bytes(arguments))
        self._before_bytes = self._device.read().allocated_bytes if self._device else 0

    @cached_property
    def _peak_bytes(self) -> int:
        """Return the peak of Megatron's own runs: it is first read before another order runs."""
        assert self._device is not None
        return self._device.read().peak_bytes

    def has_room(self, own: Schedule, other: Schedule) -> bool:
        """Return whether another order would fit where Megatron's own has just run."""
        if self._device is None or own.stages == other.stages:
            return True
        free_bytes = self._device.capacity_bytes() - self._peak_bytes
        held_bytes = self._peak_bytes - self._before_bytes
        each_bytes = held_bytes / own.peak_in_flight[self._stage]
        waiting_bytes = max(each_bytes, self._waiting_bytes)
        most_bytes = other.held(each_bytes, waiting_bytes)[self._stage].max()
        return bool(free_bytes > _ROOM * max(each_bytes, most_bytes - held_bytes))


def _forwards(order: Schedule) -> list[tuple[int, int]]:
    """Return microbatch and chunk of a stage's forwards, in their sequence; all have the same."""
    units = order.stages[0]
    return [(unit.microbatch, unit.chunk) for unit in units if unit.kind is Kind.FORWARD]
