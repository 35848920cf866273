"""Whether a job comes to the same result in another order of units: tried on its own iteration.

One iteration runs by megatron-core's own function, by that again, and by the interpreter in another
order, each from the same state and on the same data. Losses and gradients are to be equal to the
last bit if those of Megatron's two runs are; if Megatron does not repeat itself, the other order
may differ from it by a few times as much as it does from itself. It goes on from the last run, or
from another one of Megatron's if the order made a difference.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules

from envpipe_megatron.core.channel_model import find_stall
from envpipe_megatron.core.kinds import Kind, ScheduleError
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.integrations.megatron.repeating import RepeatedIteration
from envpipe_megatron.runtime.channel.collectives import Collectives
from envpipe_megatron.runtime.channel.messages import StageSpecs, TensorSpec
from envpipe_megatron.runtime.channel.p2p import P2PChannel

#: Megatron's two runs may differ from each other by chance less than others do.
_TIMES_AS_MUCH = 4.0
#: Elements of a gradient whose differences are looked at, and sums for all of them.
_SAMPLE, _COLUMNS = 4096, 4096
#: A first iteration of mixed precision may overflow: it would show nothing.
_MOST_TRIES = 20
#: Of what a microbatch in flight seems to hold, what must be free for one more.
_ROOM = 1.5

Arguments = dict[str, Any]


class SelfCheck:
    """Checks one iteration, as soon as its gradients are finite; every rank of the job does.

    Args:
        order_of: megatron-core's order of a number of microbatches, with this many forwards more on
            each stage before its first backward; ScheduleError if there is none.
        channel: carries the interpreter's messages.
        collectives: of the job.
        say: prints a line, on one rank.
    """

    def __init__(
        self,
        order_of: Callable[[int, Sequence[int]], Schedule],
        channel: P2PChannel,
        collectives: Collectives,
        say: Callable[[str], None],
    ) -> None:
        self._order_of = order_of
        self._channel = channel
        self._collectives = collectives
        self._say = say if collectives.is_planner else lambda text: None
        self._tries = 0
        self.done = False
        #: What differs, or stands against another order; None if nothing does, or it is not done.
        self.failed: str | None = None

    def __call__(
        self,
        arguments: Arguments,
        specs: StageSpecs,
        framework_function: Callable[..., list[Any]],
        interpret: Callable[[Arguments, Schedule], list[Any]],
    ) -> list[Any]:
        """Run the iteration; what megatron-core's function returns of it.

        `specs` is what the interpreter's messages carry.
        """
        begin_s = time.monotonic()
        chunks = (
            arguments["model"] if isinstance(arguments["model"], list) else [arguments["model"]]
        )
        iteration = RepeatedIteration(chunks, arguments["data_iterator"])

        def own(data: Any) -> list[Any]:
            return framework_function(**{**arguments, "data_iterator": data})

        def ours(data: Any) -> list[Any]:
            return interpret({**arguments, "data_iterator": data}, order)

        memory = _Memory()
        with _messages_seen(specs) as as_expected:
            losses: list[Any] = iteration.run(own)
        first = Outcome.of(losses, chunks)
        self._tries += 1
        if not self._collectives.on_all(first.finite):
            if self._tries == _MOST_TRIES:
                self._end("gradients were not finite in any of the first iterations")
            return losses
        if not self._collectives.on_all(all(as_expected)):
            self._end("stages send each other more than one tensor of hidden states")
            return losses
        again = Outcome.of(iteration.run(own), chunks)
        order = self._order(arguments["num_microbatches"], memory)
        losses = iteration.run(ours)
        self._end(self._compared(first, again, Outcome.of(losses, chunks)))
        if self.failed:
            return iteration.run(own)  # type: ignore[no-any-return]  # as above
        self._say(f"self-check: {time.monotonic() - begin_s:.1f} s for this iteration, three times")
        return losses

    def _order(self, num_microbatches: int, memory: _Memory) -> Schedule:
        """An order unlike Megatron's if there is room for one microbatch more, else that."""
        own = self._order_of(num_microbatches, ())
        has_room = memory.has_room(own.peak_in_flight[self._collectives.stage])
        if self._collectives.on_all(has_room):
            with contextlib.suppress(ScheduleError):
                longer = self._order_of(num_microbatches, [1] * (own.num_stages - 1) + [0])
                if not find_stall(longer, self._channel.capacity):
                    return longer
        return own

    def _compared(self, first: Outcome, again: Outcome, ours: Outcome) -> str | None:
        """What is different; None if nothing is that Megatron does not differ in by itself."""
        repeats = self._collectives.on_all(first.differs_from(again) is None)
        found = self._collectives.first(first.differs_from(ours))
        if found is None:
            self._say("self-check: losses and gradients are equal to the last bit")
            return None
        if repeats:
            return f"{found[1]} of stage {found[0]} differ from Megatron's, which repeats itself"
        own, other = (
            max(self._collectives.by_stage(first.distance(each), max)) for each in (again, ours)
        )
        said = f"by {other:.1e} of their size, and those of two runs of Megatron's by {own:.1e}"
        if other > _TIMES_AS_MUCH * own:
            return f"losses or gradients differ from Megatron's {said}"
        self._say(f"self-check: losses and gradients differ from Megatron's {said}")
        return None

    def _end(self, failed: str | None) -> None:
        self.done, self.failed = True, failed


@dataclass(frozen=True)
class Outcome:
    """What one run of an iteration came to on this rank.

    Args:
        digests: of each gradient by its parameter's name, and of the losses.
        samples: [sample] of each gradient, evenly spaced, on the host.
        losses: all numbers that the loss function returned.
    """

    digests: dict[str, bytes]
    samples: dict[str, torch.Tensor]
    losses: torch.Tensor

    @classmethod
    def of(cls, losses: Sequence[Any], chunks: Sequence[torch.nn.Module]) -> Outcome:
        """Read it."""
        numbers = [value.detach().float().flatten().cpu() for value in _tensors(losses)]
        of_losses = torch.cat(numbers) if numbers else torch.zeros(0)
        digests, samples = {"losses": of_losses.numpy().tobytes()}, {}
        for number, chunk in enumerate(chunks):
            for name, parameter in chunk.named_parameters():
                gradient = getattr(parameter, "main_grad", None)
                gradient = parameter.grad if gradient is None else gradient
                if gradient is not None:
                    flat = gradient.detach().flatten()
                    name = f"gradients of {name}" + f", chunk {number}" * (len(chunks) > 1)
                    digests[name] = _digest(flat)
                    every = max(1, flat.numel() // _SAMPLE)
                    samples[name] = flat[::every].float().cpu()
        return cls(digests, samples, of_losses)

    @property
    def finite(self) -> bool:
        """Whether gradients are, as far as is seen."""
        return all(bool(sample.isfinite().all()) for sample in self.samples.values())

    def differs_from(self, other: Outcome) -> str | None:
        """The name of the first that is not the same; None if all are."""
        names = dict.fromkeys((*self.digests, *other.digests))
        differ = (n for n in names if self.digests.get(n) != other.digests.get(n))
        return next(differ, None)

    def distance(self, other: Outcome) -> float:
        """The largest difference of a gradient, or of the losses, over its own size."""
        mine, theirs = ({**each.samples, "losses": each.losses} for each in (self, other))
        if mine.keys() != theirs.keys():
            return math.inf
        return max(
            float((own - theirs[name]).norm() / own.norm().clamp_min(1e-30))
            for name, own in mine.items()
        )


class _Memory:
    """What the device's memory was used for while an iteration ran."""

    def __init__(self) -> None:
        self._known = torch.cuda.is_available()
        if self._known:
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()

    def has_room(self, in_flight: int) -> bool:
        """Whether one microbatch more would fit beside so many."""
        if not self._known:
            return True
        peak = torch.cuda.max_memory_allocated()
        free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - peak
        return free > _ROOM * (peak - self._before) / in_flight


def _digest(flat: torch.Tensor) -> bytes:
    """Of all bits: their sums along rows and along columns."""
    bits = flat.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
    whole = bits.numel() - bits.numel() % _COLUMNS
    rows = bits[:whole].view(-1, _COLUMNS)
    parts = [rows.sum(along, dtype=torch.int64) for along in (0, 1)] + [bits[whole:]]
    found = hashlib.sha256()
    for part in parts:
        found.update(part.cpu().numpy().tobytes())
    return found.digest()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in nested lists, tuples and dictionaries."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


@contextlib.contextmanager
def _messages_seen(specs: StageSpecs) -> Iterator[list[bool]]:
    """Within, of each output that Megatron's forwards have for a next stage, whether it fits."""
    own, seen, expected = schedules.forward_step, [], specs.sends[Kind.FORWARD]

    def forward_step(*args: Any, **kwargs: Any) -> Any:
        result = own(*args, **kwargs)
        if not kwargs.get("is_last_stage"):
            parts = result[0] if isinstance(result[0], list) else [result[0]]
            fits = all(isinstance(part, torch.Tensor) for part in parts)
            if fits:
                found = TensorSpec.of(parts)
                fits = found.dtypes == expected.dtypes
                fits = fits and (specs.vary or found.shapes == expected.shapes)
            seen.append(fits)
        return result

    schedules.forward_step = forward_step
    try:
        yield seen
    finally:
        schedules.forward_step = own
