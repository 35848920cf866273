"""Iterations of megatron-core's own function and of other orders on the same data, compared.

Runs inside the ranks of a pool; there is no plan, no clock and no step of an optimizer.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from jobs import Job, Ours, Result

from envpipe_megatron.core.kinds import SPLIT, Kind, Unit, unit
from envpipe_megatron.core.schedule import Schedule


def random_order(rng: random.Random, stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """An order of split backwards, some of them whole: each unit at random one that can run."""
    orders: list[list[Unit]] = [[] for _ in range(stages)]
    #: By stage, kind and chunk, how many have run: microbatches come in their order.
    done: Counter[tuple[int, Kind, int]] = Counter()
    eager, share_whole = rng.choice((0.2, 1, 5)), rng.choice((0, 0.3))
    ahead = [rng.randint(1, microbatches * chunks) for _ in range(stages)]

    def needed(stage: int, kind: Kind, chunk: int) -> int:
        """How many microbatches the unit of the same chunk or its neighbour has done."""
        last = stages * chunks - 1
        place = chunk * stages + stage
        if kind is Kind.WEIGHT_GRADIENT:
            return done[stage, Kind.INPUT_GRADIENT, chunk]
        if place == (0 if kind is Kind.FORWARD else last):
            return microbatches if kind is Kind.FORWARD else done[stage, Kind.FORWARD, chunk]
        source, neighbour = divmod(place + (-1 if kind is Kind.FORWARD else 1), stages)
        return done[neighbour, kind, source]

    while done.total() < 3 * stages * microbatches * chunks:
        can: dict[tuple[int, Kind, int], float] = {}
        for each in itertools.product(range(stages), SPLIT, range(chunks)):
            stage, kind, chunk = each
            if done[each] < needed(*each):
                held = sum(
                    done[stage, Kind.FORWARD, c] - done[stage, Kind.WEIGHT_GRADIENT, c]
                    for c in range(chunks)
                )
                slow = kind is Kind.FORWARD and held >= ahead[stage]
                can[each] = 0.01 if slow else eager if kind is Kind.WEIGHT_GRADIENT else 1
        stage, kind, chunk = each = rng.choices([*can], [*can.values()])[0]
        m, late = done[each], (stage, Kind.WEIGHT_GRADIENT, chunk)
        whole = kind is Kind.INPUT_GRADIENT and done[late] == m and rng.random() < share_whole
        orders[stage].append(unit(kind, m, chunk, combined=whole))
        done[each] += 1
        if whole:
            orders[stage].append(unit(Kind.WEIGHT_GRADIENT, m, chunk))
            done[late] += 1
    return Schedule("random", microbatches, chunks, tuple(map(tuple, orders)))


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

    def finish_grads(work: Any, *, broken_off: bool) -> None:
        assert not work._inputs
        assert not work._outputs
        assert not any(work._put_off.values())
        finish(work, broken_off=broken_off)

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
