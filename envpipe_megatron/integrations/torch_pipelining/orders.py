"""Reads and runs the orders of torch's schedules, and says by what a job of them is limited.

Torch's `_PipelineScheduleRuntime` runs any table of units: it adds sends and receives, and for FSDP
when to gather and reduce, so that all ranks come to them in one order and none waits for another
forever. It has no public name; torch's documentation and torchtitan use it by this one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    _Action,
    _PipelineScheduleRuntime,
)

from envpipe_megatron.core.kinds import Kind, ScheduleError
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.schedule import Placement, Schedule, profiled_kinds
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.formats.torch_csv import order_of_rows, table_rows
from envpipe_megatron.integrations.levels import Level, Limit, limits_where
from envpipe_megatron.integrations.torch_pipelining.units import DRAWN_BY_FORWARDS, EFFECTS
from envpipe_megatron.runtime.channel.carrier import TensorSpec

#: Attributes that a step uses besides its order.
_HANDED_ON = (
    "_loss_fn",
    "scale_grads",
    "_args_chunk_spec",
    "_kwargs_chunk_spec",
    "_output_merge_spec",
)
#: Schedules whose tables do not say what they run, in torch 2.13 and before.
_WITHOUT_TABLE = {Schedule1F1B: builders.one_f_one_b, ScheduleGPipe: builders.gpipe}


class AttachError(EnvPipeError):
    """A schedule that EnvPipe cannot be attached to."""


def stages_of(schedule: Any) -> list[Any]:
    """Return the stages of this rank, by their place in the model."""
    stages = schedule._stages if hasattr(schedule, "_stages") else [schedule._stage]
    return sorted(stages, key=lambda stage: stage.stage_index)


def stages_trained_by(schedule: Any) -> list[Any]:
    """Return this rank's stages; an AttachError if this is no schedule of torch's that trains."""
    try:
        stages = stages_of(schedule)
        trains = schedule._loss_fn is not None and callable(schedule.step)
    except AttributeError:
        raise AttachError(
            "This is no schedule of torch.distributed.pipelining, or of another version of torch",
            value=f"{type(schedule).__name__}, torch {torch.__version__}",
            remedy="Attach to what torch's Schedule1F1B and others make.",
        ) from None
    if not trains:
        raise AttachError(
            "The schedule has no loss function, so it does not train",
            value=type(schedule).__name__,
            remedy="Attach to the schedule of training, made with loss_fn.",
        )
    return stages


def torch_order(schedule: Any) -> Schedule:
    """Return the order that a schedule of torch's runs, of all ranks, the same on each.

    A forward and a backward that torch lists as one are two units, which it runs one after the
    other. Orders that have a name here get that. A user's class has the order of torch's class
    below it, and the first step shows whether it keeps it. ScheduleError if the schedule does not
    say its order, or it is not one of a training step.
    """
    stage, count = stages_of(schedule)[0], int(schedule._n_microbatches)
    for kind, build in _WITHOUT_TABLE.items():
        if isinstance(schedule, kind):
            return build(stage.num_stages, count)
    name = type(schedule).__name__
    table = schedule.pipeline_order
    if not table:
        raise ScheduleError("The schedule does not say its order", value=name)
    rows = [
        [str(action) for action in table[rank] if action is not None and action.is_compute_op]
        for rank in sorted(table)
    ]
    found = _apart(order_of_rows(rows, name, source=name))
    for known in _known(found):
        if known.stages == found.stages and known.placement is found.placement:
            return known
    return found


def known_order(schedule: Any) -> tuple[Schedule | None, str]:
    """Return the order of a schedule, or why it is not known."""
    try:
        return torch_order(schedule), ""
    except ScheduleError as error:
        return None, str(error)


def _apart(order: Schedule) -> Schedule:
    """Return an order in which no forward is one with a backward."""
    stages = tuple(
        tuple(
            replace(unit, combined=False) if unit.kind is Kind.FORWARD else unit for unit in units
        )
        for units in order.stages
    )
    return replace(order, stages=stages)


def _known(found: Schedule) -> Sequence[Schedule]:
    stages, count, chunks = found.num_stages, found.num_microbatches, found.num_chunks
    if chunks == 1:
        return builders.one_f_one_b(stages, count), builders.gpipe(stages, count)
    return (builders.interleaved(stages, count, chunks, group_size(stages, count)),)


def group_size(num_stages: int, num_microbatches: int) -> int:
    """Return how many microbatches pass a chunk before the next: torch takes about one a stage."""
    return num_microbatches // max(1, num_microbatches // num_stages)


class Runner:
    """Runs other orders of a schedule's units in its place, by a runtime of tables beside it.

    Args:
        schedule: whose `step` this takes the place of; it stays as it is.
        own: the order of that.
    """

    def __init__(self, schedule: Any, own: Schedule) -> None:
        self._schedule, self._own = schedule, own
        self._runtime: Any = None
        #: The order of the last step, and what runs it: to compare all units takes long.
        self._turned: tuple[Schedule, Any] | None = None

    def turn_to(self, order: Schedule) -> Any:
        """Return the schedule to call for the next step, so that it runs this order of the units.

        Raises what torch raises if its runtime does not take the order.
        """
        if self._turned is None or self._turned[0] is not order:
            self._turned = None  # torch may refuse this one
            own = order.stages == self._own.stages
            self._turned = order, self._schedule if own else self._runtime_of(order)
        return self._turned[1]

    def _runtime_of(self, order: Schedule) -> Any:
        """Return the runtime with the table of an order; the stages are prepared by then."""
        if self._runtime is None:
            stages = stages_of(self._schedule)
            ranks = stages[0].stage_index_to_group_rank
            self._runtime = _PipelineScheduleRuntime(  # type: ignore[no-untyped-call]  # torch's
                stages,
                self._own.num_microbatches,
                loss_fn=self._schedule._loss_fn,
            )
            for stage in stages:  # torch has put them as if they did not lie in a V
                stage.stage_index_to_group_rank = ranks
            self._runtime._backward_requires_autograd = getattr(
                self._schedule, "_backward_requires_autograd", True
            )
            self._runtime._stages_forward_initialized = True
            self._runtime._stages_backward_initialized = True
        rows = enumerate(table_rows(order))
        table = {rank: [_Action.from_str(cell) for cell in row] for rank, row in rows}
        self._runtime._prepare_schedule_with_comms(table)  # some 10 ms, at a turn only
        self._runtime.pipeline_order = table
        return self._runtime

    def step(self, runs: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Run a step by what `turn_to` returned, if that is not the schedule itself.

        The schedule is the user's, who may change it between two steps.
        """
        for name in _HANDED_ON:
            setattr(runs, name, getattr(self._schedule, name))
        return runs.step(*args, **kwargs)


def facts_of(schedule: Any) -> tuple[object, ...]:
    """Return a key of all that a step uses besides its inputs and `_HANDED_ON`."""
    named = vars(schedule).items()
    apart = (*_HANDED_ON, "step", "eval")
    functions = {name: value for name, value in named if callable(value) and name not in apart}
    names = "_comp_type_to_function_map", "pipeline_order", "pipeline_order_with_comms"
    others = [copy(getattr(schedule, name, None)) for name in names]
    return schedule._n_microbatches, functions, others


def is_prepared(schedule: Any) -> bool:
    """Return whether shapes are known; else, as after an evaluation, the next step infers them."""
    stages = "_stages" if isinstance(schedule, PipelineScheduleMulti) else "_stage"
    return all(getattr(schedule, f"{stages}_{way}_initialized") for way in ("forward", "backward"))


def message_of(stages: Sequence[Any]) -> TensorSpec:
    """Return what a message to this rank carries: a microbatch in flight holds as much at least."""
    for stage in stages:
        for infos in (stage.args_recv_info.get(0, ()), stage.grad_recv_info.get(0, ())):
            tensors = [info.buffer for info in infos if getattr(info, "buffer", None) is not None]
            if tensors:
                return TensorSpec.of(tensors)
    return TensorSpec.of([torch.empty(1, dtype=torch.uint8)])


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
            *((effect in counts, effect, why) for effect, why in EFFECTS.items()),
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
