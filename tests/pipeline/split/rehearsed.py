"""Iterations of megatron-core's own function and of other orders on the same data, compared.

Runs inside the ranks of a pool; there is no plan, no clock and no step of an optimizer.
"""

from __future__ import annotations

import contextlib
import random
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from jobs import Job, Ours, Result

from envpipe_megatron.core.kinds import Kind, unit
from envpipe_megatron.core.schedule import Schedule


def random_order(rng: random.Random, stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """An order of split backwards, some of them whole, that a job can run.

    All stages take turns between chunks alike, as messages between them do.
    """
    forwards, backwards = (_turns(rng, microbatches, chunks) for _ in range(2))
    backwards = [(m, chunks - 1 - c) for m, c in backwards]
    orders: list[list[Any]] = [[] for _ in range(stages)]
    made: set[tuple[Kind, int, int, int]] = set()
    waiting: list[list[tuple[int, int]]] = [[] for _ in range(stages)]
    share_whole, eager = rng.choice((0, 0.3)), rng.choice((0.2, 1, 5))
    ahead = [rng.randint(stages - s, microbatches * chunks) for s in range(stages)]

    def source(kind: Kind, stage: int, m: int, c: int) -> tuple[Kind, int, int, int] | None:
        if kind is Kind.FORWARD:
            return None if stage + c == 0 else (kind, (stage - 1) % stages, m, c - (stage == 0))
        if stage == stages - 1 and c == chunks - 1:
            return Kind.FORWARD, stage, m, c
        return kind, (stage + 1) % stages, m, c + (stage == stages - 1)

    done = [[0, 0] for _ in range(stages)]
    while sum(map(len, orders)) < 3 * stages * microbatches * chunks:
        choices = []
        for stage, (f, b) in enumerate(done):
            for kind, at, turns in (
                (Kind.FORWARD, f, forwards),
                (Kind.INPUT_GRADIENT, b, backwards),
            ):
                if at < len(turns):
                    m, c = turns[at]
                    needs = source(kind, stage, m, c)
                    if needs is None or needs in made:
                        held = kind is Kind.FORWARD and f - b >= ahead[stage]
                        choices.append((0.01 if held else 1, stage, kind, m, c))
            firsts = {c: m for m, c in reversed(waiting[stage])}
            choices += [(eager, stage, Kind.WEIGHT_GRADIENT, m, c) for c, m in firsts.items()]
        _, stage, kind, m, c = rng.choices(choices, [weight for weight, *_ in choices])[0]
        own = orders[stage]
        if kind is Kind.WEIGHT_GRADIENT:
            waiting[stage].remove((m, c))
            own.append(unit(kind, m, c))
            continue
        made.add((kind, stage, m, c))
        done[stage][kind is not Kind.FORWARD] += 1
        if kind is Kind.FORWARD:
            own.append(unit(kind, m, c))
        elif all(c != other for _, other in waiting[stage]) and rng.random() < share_whole:
            own += [unit(kind, m, c, combined=True), unit(Kind.WEIGHT_GRADIENT, m, c)]
        else:
            own.append(unit(kind, m, c))
            waiting[stage].append((m, c))
    return Schedule("random", microbatches, chunks, tuple(map(tuple, orders)))


def _turns(rng: random.Random, microbatches: int, chunks: int) -> list[tuple[int, int]]:
    """Microbatches and chunks, each microbatch's in turn."""
    counts, turns = [0] * chunks, []
    while len(turns) < microbatches * chunks:
        can = [c for c in range(chunks) if counts[c] < (microbatches if c == 0 else counts[c - 1])]
        c = rng.choice(can)
        turns.append((counts[c], c))
        counts[c] += 1
    return turns


class _Rehearsing:
    """A session that runs given orders in place of its phases' own."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self.order: Schedule | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def run_iteration(self, count: int, specs: Any, make_work: Any, **_: Any) -> None:
        self._session.rehearse(self.order, specs, make_work)


@contextlib.contextmanager
def _nothing_left() -> Iterator[None]:
    """Check at the end of each iteration that no tensor waits for a unit."""
    from envpipe_megatron.integrations.megatron.work import MegatronWork

    finish = MegatronWork.finish_grads

    def finish_grads(work: Any) -> None:
        assert not work._inputs
        assert not work._outputs
        assert not any(work._put_off.values())
        finish(work)

    with patch.object(MegatronWork, "finish_grads", finish_grads):
        yield


@contextlib.contextmanager
def _delays(rng: random.Random) -> Iterator[None]:
    """Units that take up to some milliseconds longer, one in ten far longer."""
    from envpipe_megatron.integrations.megatron.work import MegatronWork

    def late(function: Any) -> Any:
        def run(self: Any, *args: Any) -> Any:
            time.sleep(rng.random() * (0.02 if rng.random() < 0.1 else 0.001))
            return function(self, *args)

        return run

    names = ("forward", "backward", "weight_gradient")
    with patch.multiple(MegatronWork, **{n: late(getattr(MegatronWork, n)) for n in names}):
        yield


def differences(
    rank: int, job: Job, orders: Sequence[Schedule], root: Path, delayed: bool = False
) -> list[str] | None:
    """What is not as megatron-core's own function has it, with the number of the order and a sum.

    Replicas that nothing connects would show the same: all but the first rest, without a result.
    """
    import training
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func, schedules

    training.use_cpu()
    training._use_parallel_state(job)
    collectives = training._collectives(job.stages)
    result = Result(training._stage(), parallel_state.get_data_parallel_rank())
    if not job.connected:
        if result.replica:
            return None
        collectives = training.Collectives(result.stage, collectives.pipeline, (), 1)
    training.tensor_parallel.random.initialize_rng_tracker(
        inference_rng_tracker=True, force_reset=True
    )
    found = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(training.cuda_on_cpu())
        stack.enter_context(patch.object(schedules, training.COMBINED, training.in_turn))
        session = training._session(rank, job, Ours(), root, result, collectives)
        stack.callback(session.close)
        chunks, clear_grads, _ = training._build(job)
        config = training.get_model_config(chunks[0])
        config.around = []
        rehearsing = _Rehearsing(session)
        ours = training.ForwardBackward(rehearsing, framework_iterations=0)
        arguments = {
            "forward_step_func": training._forward_step,
            "model": chunks if len(chunks) > 1 else chunks[0],
            "num_microbatches": job.microbatches,
            "seq_length": training.SEQUENCE,
            "micro_batch_size": training.MICROBATCH,
        }

        def outcome(function: Any) -> dict[str, bytes]:
            clear_grads()
            training.torch.manual_seed(rank)  # for dropout
            data = training._data(job, 0, result.replica, job.microbatches)
            losses = function(data)
            return {
                **training._named_bits(chunks, training._gradient),
                "losses": b"".join(training._bits(entry["loss"]) for entry in losses),
            }

        own = get_forward_backward_func()
        expected = outcome(lambda data: own(**arguments, data_iterator=data))
        if delayed:
            stack.enter_context(_delays(random.Random(rank)))
        stack.enter_context(_nothing_left())
        for number, order in enumerate(orders):
            rehearsing.order = order
            got = outcome(lambda data: ours(**arguments, data_iterator=data))
            found += [
                f"order {number}: {name} ({zlib.crc32(got[name])})"
                for name in expected
                if got[name] != expected[name]
            ]
    return found
