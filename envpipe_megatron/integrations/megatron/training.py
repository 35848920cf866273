"""Runs a rank's training by megatron-core's functions, for the hooks of each framework on it."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from functools import cache, partial
from typing import Any

import torch.distributed as dist
from megatron.core import num_microbatches_calculator
from megatron.core.models.gpt import GPTModel
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import get_model_config, unwrap_model

from envpipe_megatron.core.kinds import Kind, ScheduleError
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.core.sidecar import Sidecar
from envpipe_megatron.integrations.framework_units import SeenUnit, UnitFollower
from envpipe_megatron.integrations.hooking import replaced, same_job
from envpipe_megatron.integrations.job import FrameworkJob, limits_of_ranks, say_line
from envpipe_megatron.integrations.leveled import LeveledJob
from envpipe_megatron.integrations.levels import (
    ArgumentLimit,
    Level,
    Limit,
    limits_of_arguments,
    limits_where,
)
from envpipe_megatron.integrations.megatron.core import ForwardBackward
from envpipe_megatron.integrations.megatron.limits import (
    NOT_PROVEN,
    against_order,
    keep_sequence,
)
from envpipe_megatron.integrations.megatron.self_check import SelfCheck
from envpipe_megatron.integrations.megatron.split_backward import why_whole
from envpipe_megatron.runtime.channel.collectives import of_all_ranks
from envpipe_megatron.runtime.job.options import JobOptions
from envpipe_megatron.runtime.memory.peak import MemoryFullError

#: Megatron's function that runs a forward, a backward, or both as one.
_COMBINED = "combined_1f1b_schedule_for_interleaved_pipelining"
#: Takes as long as several units' events.
_signature = cache(inspect.signature)

#: Packages whose layers were proven to give the same result in any order.
_KNOWN_PACKAGES = ("megatron", "transformer_engine", "torch", "apex")


class Training(LeveledJob):
    """Runs a rank from before its first step to after its last, at the job's level.

    Args:
        args: the job's arguments, by the names that Megatron-LM has for them.
        table: the framework's limits by arguments; those of the model come to them.
        model: the chunks of this rank.
        pipeline_group: the ranks of its pipeline.

    Raises JobError and EnvPipeError as `LeveledJob` does.
    """

    #: Why the job goes on at a lower level after this step.
    _why_lower: str | None = None

    def __init__(
        self,
        args: argparse.Namespace,
        options: JobOptions,
        table: Iterable[ArgumentLimit],
        model: Sequence[Any],
        pipeline_group: dist.ProcessGroup,
    ) -> None:
        self._args, self._model, self._microbatches = args, model, num_microbatches_of(args)
        self._order_of = cache(partial(megatron_order, args, model))
        config = get_model_config(model[0])
        options = keep_sequence(options, len(model), config)
        whole = why_whole(model, config)
        own = None
        with suppress(ScheduleError):  # lower levels need none
            own = self._order_of(self._microbatches)
        framework = FrameworkJob(
            pipeline_group,
            self._microbatches,
            messages_vary=config.variable_seq_lengths,
            why_whole=next(filter(None, of_all_ranks(whole)), ""),
            framework_order=own,
            group_size=config.microbatch_group_size_per_vp_stage,
            **facts_of(args),
        )
        super().__init__(
            options,
            framework,
            say_line,
            # Some arguments' limits are by variables, which nodes may have different ones of.
            limits_of_ranks((*limits_of_arguments(args, table), *limits_of(model))),
        )
        self._checked = bool(self.decision.to_check) or options.self_check == "always"
        #: What runs at level `order`, once Megatron's own function is known.
        self._replacement: ForwardBackward | None = None
        self._framework_function: Callable[..., Any] | None = None
        #: Numbers of microbatches whose units were followed.
        self._followed_counts: set[int] = set()
        if self.job is not None and self.level is Level.ORDER:
            capacity = self.session.parts.channel.capacity  # the same on all ranks
            if why := against_order(self.decision, self._order_of(self._microbatches), capacity):
                self._lower_order(why, options.level)
        if args.train_iters is not None and args.train_iters <= options.baseline_steps:
            self.say("training ends within its baseline steps, so nothing will be planned")

    def in_place_of(self, framework_function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function to call in place of Megatron's forward-backward function.

        The first such function is that of the model that is trained; another one stays.
        """
        if self._framework_function is None:
            self._framework_function = framework_function
            if self.job is not None and self.level is Level.ORDER:
                self._replacement = self._make_replacement(framework_function)
        if framework_function is self._framework_function:
            return self._forward_backward
        return framework_function

    def begin_step(self, iteration: int | None = None) -> None:
        """Begin the training step of this iteration; the first is 0."""
        super().begin_step(iteration)
        if self.job is None or self.decision.sees_units:
            return
        if get_num_microbatches() == self._microbatches:
            self.follow_whole()
        else:
            self.session.highest_clock()

    def end_step(self, *, skipped: bool = False) -> None:
        """End the step after its optimizer, which may have skipped: gradients overflowed.

        Raises SystemExit if only the profile was asked for, and it is written.
        """
        super().end_step()
        if self._replacement is not None:
            self._why_lower = self._replacement.end_step(skipped=skipped) or self._why_lower
        why, self._why_lower = self._why_lower, None
        if why is not None:
            self._lower_order(why)

    def _lower_order(self, why: str, asked: Level | None = None) -> None:
        """Go on at the next level; a JobError if level `order` is `asked`."""
        features = ", ".join(limit.feature for limit in self.decision.to_check) or "this job"
        highest = Level.UNITS if self.level is Level.ORDER else Level.UNIFORM
        if self.lower([Limit(features, highest, why)], asked):
            self._replacement = None

    def _make_replacement(self, framework_function: Callable[..., Any]) -> ForwardBackward:
        session, check = self.session, None
        if self._checked or session.may_split:
            regroups = session.options.scheduling == "auto"
            orders_of = partial(orders_to_try, self._args, self._model, regroups=regroups)
            check = SelfCheck(session, orders_of, needed=self._checked)
        return ForwardBackward(
            session,
            framework_function=framework_function,
            check=check,
            seq_length=self._args.seq_length,
        )

    def _forward_backward(self, **arguments: Any) -> Any:
        """Run an iteration by what now takes the place of Megatron's function.

        Forwards without backwards are Megatron's at every level: evaluation loads kernels of its
        own, and a kernel that is loaded while a posted receive spins hangs.
        """
        assert self._framework_function is not None
        if arguments.get("forward_only"):
            if self._followed is None:  # else they are part of a step that is measured as one
                self.pause()
            return self._framework_function(**arguments)
        if self._replacement is None:
            sees_units = self.job is not None and self.decision.sees_units
            run = self._follow_units if sees_units else self._framework_function
            return run(**arguments)
        try:
            return self._replacement(**arguments)
        except MemoryFullError as error:  # on all ranks, and no unit has run
            self._why_lower = str(error)
            return self._framework_function(**arguments)

    def _follow_units(self, **arguments: Any) -> Any:
        """Run Megatron's own function, and follow its units.

        The level is lowered after this step if they come otherwise than planned in the first
        iteration of a number of microbatches.
        """
        assert self._framework_function is not None
        count = arguments["num_microbatches"]
        followed = self.follow(self._order_of(count))
        with reported_units(followed):
            losses = self._framework_function(**arguments)
        followed.complete()
        self._followed = None
        if count not in self._followed_counts:
            self._followed_counts.add(count)
            found = self.session.parts.collectives.first(followed.against)
            self._why_lower = self._why_lower or (found and found[1])
        return losses


def limits_of(model: Sequence[Any]) -> list[Limit]:
    """Return the limits of the model that was built."""
    config, own = get_model_config(model[0]), type(unwrap_model(model[0]))
    others = {type(m) for chunk in model for m in chunk.modules() if not _is_known(type(m))}
    names = ", ".join(sorted(f"{each.__module__}.{each.__name__}" for each in others))
    is_gpt = issubclass(own, GPTModel)
    return limits_where(
        Level.ORDER,
        (not is_gpt, f"models other than GPTModel: {own.__name__}", NOT_PROVEN),
        (is_gpt and names, f"layers of the user's: {names}", NOT_PROVEN),
        (config.variable_seq_lengths, "sequences of varying length", NOT_PROVEN),
    )


def facts_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return what Megatron's arguments say of the job, as `FrameworkJob` has it."""
    # Where images are read too, `seq_length` is what one of them becomes.
    sequence_length = max(args.seq_length, getattr(args, "decoder_seq_length", None) or 0)
    bill = {
        "model": f"GPT, {args.num_layers} layers, width {args.hidden_size}",
        "samples_per_iteration": _full_batch(args),
        "microbatch_size": args.micro_batch_size,
    }
    if not getattr(args, "lengths_vary", False):  # else that is the most
        bill["tokens_per_iteration"] = _full_batch(args) * sequence_length
    return {
        "sidecar": Sidecar(
            tensor_parallel=args.tensor_model_parallel_size,
            microbatch_size=args.micro_batch_size,
            sequence_length=sequence_length,
        ),
        "bill": bill,
        "same_job": same_job(args),
    }


def orders_to_try(
    args: argparse.Namespace, model: Sequence[Any], count: int, *, regroups: bool
) -> list[Schedule]:
    """Return Megatron's order, then others that a self-check may try, the most different first.

    With `regroups`, a plan's order may take chunks in another turn, so that forwards come in
    another sequence; else it may have more of them in flight.
    """
    stages = args.pipeline_model_parallel_size
    orders = [megatron_order(args, model, count)]
    if regroups and len(model) > 1:
        for size in (stages, stages + stages // 2, 2 * stages):
            with suppress(ScheduleError):
                orders.append(builders.interleaved(stages, count, len(model), size))
    with suppress(ScheduleError):
        orders.append(megatron_order(args, model, count, [1] * (stages - 1) + [0]))
    return list({order.stages: order for order in orders}.values())


def megatron_order(
    args: argparse.Namespace, model: Sequence[Any], count: int, more: Sequence[int] = ()
) -> Schedule:
    """Return Megatron's order of `count` microbatches, or with more forwards in warm-ups."""
    stages, config = args.pipeline_model_parallel_size, get_model_config(model[0])
    if len(model) == 1:
        own = builders.one_f_one_b(stages, count)
        return builders.envpipe(stages, count, more) if more else own
    return builders.interleaved(
        stages,
        count,
        len(model),
        config.microbatch_group_size_per_vp_stage,
        combined=config.overlap_moe_expert_parallel_comm,
        extra_warmup=more,
    )


def _is_known(module: type) -> bool:
    """Return whether a module is of a known package; adapters of Bridge's are not."""
    package = module.__module__
    return package.split(".")[0] in _KNOWN_PACKAGES and not package.startswith("megatron.bridge")


def num_microbatches_of(args: argparse.Namespace) -> int:
    """Return M of a batch of full size."""
    # From 0.19 on, ranks that share out weights have data of their own, too.
    replicas = args.data_parallel_size * (getattr(args, "gtp_weight_remat_size", None) or 1)
    num_microbatches: int = _full_batch(args) // (args.micro_batch_size * replicas)
    return num_microbatches


def _full_batch(args: argparse.Namespace) -> int:
    """Return the samples of a batch of full size, to which ramp-up and step schedules lead.

    With a step schedule, `global_batch_size` is a default that nothing uses.
    """
    calculator = num_microbatches_calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR
    full: int = getattr(calculator, "global_batch_size", args.global_batch_size)
    return full


def reported_units(followed: UnitFollower) -> AbstractContextManager[None]:
    """Within, each unit that a function of Megatron's runs is reported.

    Those functions call `forward_step` and `backward_step` as names of
    `megatron.core.pipeline_parallel.schedules`, so that putting others there for the time of a call
    reaches every unit (seen in 0.16 to 0.19). Where the communication of experts is overlapped, the
    interleaved function calls one of other name for a forward, a backward, or both as one.
    """

    def around(kind: Kind, step: Callable[..., Any]) -> Callable[..., Any]:
        def unit(*args: Any, **kwargs: Any) -> Any:
            followed.begin(SeenUnit(kind, kwargs.get("current_microbatch"), kwargs.get("vp_stage")))
            result = step(*args, **kwargs)
            followed.end()
            return result

        return unit

    reported = {
        "forward_step": around(Kind.FORWARD, schedules.forward_step),
        "backward_step": around(Kind.BACKWARD, schedules.backward_step),
        _COMBINED: _reported_pairs(getattr(schedules, _COMBINED), followed),
    }
    return replaced(schedules, **reported)


def _reported_pairs(step: Callable[..., Any], followed: UnitFollower) -> Callable[..., Any]:
    """Return Megatron's combined function, which reports what it runs: F, B, or both as a pair.

    A pair may wait for its inputs within the call, in `pre_forward` and `pre_backward`, which come
    in this order: its units begin after these.
    """

    def units(*args: Any, **kwargs: Any) -> Any:
        given = _signature(step).bind(*args, **kwargs)
        of = given.arguments
        forward, backward = of.get("f_virtual_microbatch_id"), of.get("b_virtual_microbatch_id")
        pair = forward is not None and backward is not None

        def begin_forward() -> None:
            microbatch = of["get_microbatch_id_in_model_chunk"](forward, forward=True)
            chunk = of["get_model_chunk_id"](forward, forward=True)
            followed.begin(SeenUnit(Kind.FORWARD, microbatch, chunk, combined=pair))
            if pair:
                followed.end()

        def begin_backward() -> None:
            chunk = of["get_model_chunk_id"](backward, forward=False)
            followed.begin(SeenUnit(Kind.BACKWARD, None, chunk))

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
        followed.end()
        return result

    return units
