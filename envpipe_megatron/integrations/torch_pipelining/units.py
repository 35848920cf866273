"""Reports the units that torch.distributed.pipelining runs, and the limits that they show."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from envpipe_megatron.core.kinds import Kind
from envpipe_megatron.core.schedule import Placement, Schedule, profiled_kinds
from envpipe_megatron.integrations.framework_units import Reporter, SeenUnit
from envpipe_megatron.integrations.hooking import replaced
from envpipe_megatron.integrations.levels import Level, Limit, limits_where
from envpipe_megatron.integrations.torch_pipelining import parts

_ORDINARY = "forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"
#: Kinds of those whose arguments do not matter.
_KINDS = {_ORDINARY[0]: (Kind.FORWARD,), _ORDINARY[2]: (Kind.WEIGHT_GRADIENT,)}
_NOT_TRIED = "none was tried in two parts"


#: State that units may change beside their outputs and gradients, and the effect of another order.
BUFFERS_BY_BACKWARDS = "buffers that backwards change"
DRAWN_BY_BACKWARDS = "random numbers in backwards"
DRAWN_BY_FORWARDS = "random numbers on ranks of several stages"
_EFFECTS = {
    BUFFERS_BY_BACKWARDS: "another order gives them other values",
    DRAWN_BY_BACKWARDS: "another order gives units other numbers",
    # Each stage's forwards keep their order in any order of units; a rank's do not.
    DRAWN_BY_FORWARDS: "another order gives forwards other numbers",
}


class Units:
    """Reports the units of this rank's stages to `reporter`, while there is one.

    On the last stage a forward ends behind its loss, which the schedule computes.

    Args:
        stages: of this rank, in the order of their chunks.
        split: whether the order lists whole backwards as two parts that run as one.
    """

    def __init__(self, stages: Iterable[Any], *, split: bool) -> None:
        self.reporter: Reporter | None = None
        #: State that units were seen to change; None while they are not watched.
        self.seen: set[str] | None = None
        self.split = split
        #: By chunk, why its backwards stay whole, if they do; None if that is not looked for.
        self.why_whole: dict[int, str] | None = None
        self._awaits_loss = False
        self._reporting: list[Any] = []
        self._replaced = contextlib.ExitStack()
        for chunk, stage in enumerate(stages):
            for name in _ORDINARY:
                self.replace(stage, name, self._around(stage, chunk, name))

    def release(self) -> None:
        """Give stages and schedules their own functions back."""
        self.reporter = None
        self._replaced.close()

    def forget(self) -> None:
        """Report nothing of the rest of a step, which has failed."""
        self.reporter, self._awaits_loss = None, False

    def report_losses_of(self, schedule: Any) -> None:
        """Have a schedule of these stages report when it has computed a loss."""
        if any(schedule is each for each in self._reporting):
            return
        self._reporting.append(schedule)
        compute = schedule._maybe_compute_loss

        def maybe_compute_loss(*args: Any, **kwargs: Any) -> Any:
            result = compute(*args, **kwargs)
            if self._awaits_loss:
                self._awaits_loss = False
                self._end()
            return result

        self.replace(schedule, "_maybe_compute_loss", maybe_compute_loss)

    def replace(self, of: Any, name: str, function: Callable[..., Any]) -> None:
        """Give an object another function, until `release`."""
        self._replaced.enter_context(replaced(of, **{name: function}))

    def _around(self, stage: Any, chunk: int, name: str) -> Callable[..., Any]:
        own = getattr(stage, name)
        forward = name == _ORDINARY[0]

        def unit(microbatch: int, *args: Any, **kwargs: Any) -> Any:
            if self.reporter is None:
                return own(microbatch, *args, **kwargs)
            whole = args[1] if len(args) > 1 else kwargs.get("full_backward", True)
            kinds = _KINDS.get(name) or self._backward(whole=whole)
            for kind in kinds[:-1]:
                self.reporter.begin(SeenUnit(kind, microbatch, chunk, combined=True))
                self.reporter.end()
            self.reporter.begin(SeenUnit(kinds[-1], microbatch, chunk))
            if self.seen is None:
                result = own(microbatch, *args, **kwargs)
            else:
                if name == _ORDINARY[1] and self.why_whole is not None:
                    loss = args[0] if args else kwargs.get("loss")
                    self._look_at_parts(stage, chunk, microbatch, loss)
                run = partial(own, microbatch, *args, **kwargs)
                result = self._watched(stage, chunk, run, forward=forward)
            if forward and stage.is_last:
                self._awaits_loss = True
            else:
                self._end()
            return result

        return unit

    def _watched(self, stage: Any, chunk: int, run: Callable[[], Any], *, forward: bool) -> Any:
        """Run a unit, and look at what it changes beside its outputs and gradients."""
        assert self.seen is not None
        before, versions = _random_states(stage.device), _versions(stage)
        with contextlib.ExitStack() as watching:
            called = [] if forward else watching.enter_context(parts.calls_of_modules())
            result = run()
        if before != _random_states(stage.device):
            self.seen.add(DRAWN_BY_FORWARDS if forward else DRAWN_BY_BACKWARDS)
        if not forward and versions != _versions(stage):
            self.seen.add(BUFFERS_BY_BACKWARDS)
        if called and self.why_whole is not None and not stage.is_first:
            self.why_whole[chunk] = f"torch would compute {called[0]} again for each of its weights"
        return result

    def _look_at_parts(self, stage: Any, chunk: int, microbatch: int, loss: Any) -> None:
        """Find out why a chunk's backwards stay whole: the first backward shows what they do."""
        assert self.seen is not None
        assert self.why_whole is not None
        effects = self.seen - {DRAWN_BY_FORWARDS}
        if chunk not in self.why_whole:
            self.why_whole[chunk] = _NOT_TRIED
        elif self.why_whole[chunk] is _NOT_TRIED and not effects:
            self.why_whole[chunk] = parts.seen_reason(stage, microbatch, loss)

    def _backward(self, *, whole: bool) -> tuple[Kind, ...]:
        """Return the units of torch's backward, which run as one."""
        if not whole:
            return (Kind.INPUT_GRADIENT,)
        return (Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT) if self.split else (Kind.BACKWARD,)

    def _end(self) -> None:
        if self.reporter is not None:
            self.reporter.end()


def _random_states(device: torch.device) -> tuple[object, ...]:
    """Return the states of all generators that a unit may use; a GPU is not waited for."""
    tensors = [torch.get_rng_state()]
    if torch.device(device).type == "cuda":
        tensors.append(torch.cuda.get_rng_state(device))
    numpys: Any = np.random.get_state()
    _, key, *rest = numpys
    arrays = [key, *(state.numpy() for state in tensors)]
    return (random.getstate(), *rest, *(array.tobytes() for array in arrays))


def _versions(stage: Any) -> list[int]:
    """Return counts of writes in place, as a recomputed forward of a BatchNorm makes them."""
    return [each._version for each in stage.submod.buffers() if not each.is_inference()]


#: Functions of a schedule that make its order, or no step. One that replaces others has to be
#: called as it is.
_HARMLESS = {"eval", "_get_pipeline_order", "_calculate_single_rank_operations"}


def limits_of(
    schedule: Any, order: Schedule | None, why_not: str, stages: Sequence[Any]
) -> list[Limit]:
    """Return limits by a schedule's order, by what stages share, and by functions of the user's.

    Args:
        order: None if it is not known, for the reason `why_not`.
        stages: of this rank.
    """
    if order is None:
        return [Limit("this schedule", Level.UNIFORM, why_not)]
    missing, own, name = _missing(order), _user_functions(schedule)[:1], order.name
    in_v = order.placement is Placement.V and order.num_chunks > 2
    own_kinds = getattr(schedule, "_comp_type_to_function_map", None)
    shared, why_shared = _share_parameters(stages), "gradients add up in the order of the units"
    return [
        *limits_where(
            Level.UNIFORM,
            (order.num_stages == 1, "one rank", "there is no pipeline"),
            (missing, name, f"not every stage has a {missing} to be measured"),
            (own_kinds, "a function of the user's for units", "it may run several units at once"),
        ),
        *limits_where(
            Level.UNITS,
            (in_v, name, "more than two stages of a rank lie in a V"),
            (order.out_of_turn, name, f"in it, {order.out_of_turn}"),
            (own, f"{' '.join(own)} of the user's", "torch's runtime of tables does not have it"),
            (shared, "parameters of several stages on a rank", why_shared),
        ),
    ]


def limits_seen(
    order: Schedule,
    stages: Sequence[Any],
    *,
    in_order: bool,
    seen: Collection[str],
    why_whole: str = "",
) -> list[Limit]:
    """Return limits by the first step: whether it ran in order, and what its units changed.

    The stages know by then what they receive. An order that splits backwards is kept where those of
    others would stay whole.
    """
    counts = {*seen} - ({DRAWN_BY_FORWARDS} if order.num_chunks == 1 else set())
    skips = any(abs(s - stage.stage_index) > 1 for stage in stages for s in _sources(stage))
    why_not = "its units did not run one by one as the schedule says"
    return [
        *limits_where(Level.UNIFORM, (not in_order, order.name, why_not)),
        *limits_where(
            Level.UNITS,
            *((effect in counts, effect, why) for effect, why in _EFFECTS.items()),
            (skips, "messages that skip a stage", "torch's runtime of tables has none"),
            (order.split and why_whole, f"split backwards of {order.name}", why_whole),
        ),
    ]


def _user_functions(schedule: Any) -> list[str]:
    """Return functions that a schedule, or its class if not torch's, has in place of torch's."""
    classes = type(schedule).__mro__
    torchs = [each for each in classes if each.__module__.startswith("torch.")]
    own = {name for each in (schedule, *classes) if each not in torchs for name in vars(each)}
    return sorted(
        name
        for name in own - _HARMLESS
        if not name.startswith("__") and any(callable(vars(each).get(name)) for each in torchs)
    )


def _missing(order: Schedule) -> Kind | None:
    """Return a kind of units that some chunk of a stage has and another lacks."""
    kinds = profiled_kinds(order)
    parts = order.num_stages * order.num_chunks
    found = Counter(order.unit_keys(order.num_chunks, (*kinds, Kind.NOTHING)).ravel().tolist())
    for part in range(parts):
        for place, kind in enumerate(kinds):
            if not found[part * (len(kinds) + 1) + place]:
                return kind
    return None


def _share_parameters(stages: Sequence[Any]) -> bool:
    seen = [id(each) for stage in stages for each in set(stage.submod.parameters())]
    return len(set(seen)) < len(seen)


def _sources(stage: Any) -> Iterator[int]:
    """Yield the stages whose outputs a stage receives."""
    for info in stage.args_recv_info.get(0, ()):
        if getattr(info, "source", None) is not None:
            yield info.source
