"""Iterations of megatron-core's own function and of other orders on the same data, compared.

Runs inside the ranks of a pool; there is no plan, no clock and no step of an optimizer.
"""

import contextlib
import random
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from jobs import Job, Ours

from envpipe_megatron.core.schedule import Schedule


@contextlib.contextmanager
def _nothing_left() -> Iterator[None]:
    """Check at the end of each iteration that no tensor waits for a unit."""
    from envpipe_megatron.integrations.megatron.work import MegatronWork

    finish = MegatronWork.finish_grads

    def finish_grads(work: Any, *, broken_off: bool) -> None:
        assert not work._kept
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
    """Return what megatron-core's own function has otherwise: number of the order, name, a sum."""
    import training
    from megatron.core.pipeline_parallel import get_forward_backward_func

    found = []
    with training.prepared(job) as ready, contextlib.ExitStack() as stack:
        if ready is None:
            return None
        result, collectives = ready
        session = training._session(rank, job, Ours(), root, result, collectives)
        stack.callback(session.close)
        chunks, clear_grads, _ = training._build(job)
        config = training.get_model_config(chunks[0])
        config.around = []
        turns = iter(orders)
        session.run_iteration = lambda count, *what, **_: session.rehearse(next(turns), *what)
        ours = training.ForwardBackward(session, framework_iterations=0)
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
        for number in range(len(orders)):
            got = outcome(lambda data: ours(**arguments, data_iterator=data))
            found += [
                f"order {number}: {name} ({zlib.crc32(got[name])})"
                for name in expected
                if got[name] != expected[name]
            ]
    return found
