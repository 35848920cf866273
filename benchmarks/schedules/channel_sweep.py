"""Every falling vector of extra forwards, on channels of every capacity: which orders finish?

    python benchmarks/schedules/channel_sweep.py

Runs EnvPipe's order for all non-increasing extra forwards (the last stage has none) of p = 2..8
stages and M = p..24 microbatches: 1,271,601 vectors. Prints how many finish as they are, how many
`OrderLimits.fit` must lower, and checks that all finish after it. The simulation is the one of
`channel_model`, for many vectors at once; it is compared with that on a random sample.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import combinations_with_replacement, islice

import click
import numpy as np
from numpy.typing import NDArray

from benchmarks.outputs import make_console, make_table
from envpipe_megatron.core.channel_model import completes, max_falling_step
from envpipe_megatron.core.orders.builders import envpipe
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.policies.problem import order_limits

Vectors = NDArray[np.int8]

CAPACITIES = (None, 1, 2)
#: Of vectors: those that finish as they are, those lowered to fit and their extra forwards taken
#: away, those that finish then, and those compared with `channel_model`.
_COUNTS = ("vectors", "finish", "lowered", "forwards", "finish after", "compared")
BATCH = 20_000
MOST_MICROBATCHES = 126  # counters are int8


@dataclass(frozen=True)
class Batch:
    """Vectors `first` to `first + BATCH` of a job."""

    num_stages: int
    num_microbatches: int
    first: int
    sample: int


def falling_vectors(num_stages: int, num_microbatches: int) -> Iterator[tuple[int, ...]]:
    """All non-increasing extra forwards with none on the last stage."""
    most = num_microbatches - num_stages  # of the first stage, so of all
    for falling in combinations_with_replacement(range(most, -1, -1), num_stages - 1):
        yield (*falling, 0)


def finishes(extra: Vectors, num_microbatches: int, capacity: int | None) -> NDArray[np.bool_]:
    """[n] whether the order with each row of extra forwards finishes.

    A stage's state is how many forwards and backwards it has done, with their messages: after its
    warm-up it runs a forward whenever it holds no more activations than that. It stands behind a
    send while that message's channel holds more than `capacity`, and the other channel, which it
    has got past, can only have become emptier: so both may be asked each time.
    """
    count, num_stages = extra.shape
    warmup = (extra + np.arange(num_stages - 1, -1, -1, dtype=np.int8)).T.copy()
    # Stages are rows 1..p. The border rows give the first stage its data and the last stage its
    # gradients without end (its own forward stands earlier in its order), and take at once what
    # the last forward and the first backward put out.
    forwards = np.zeros((num_stages + 2, count), dtype=np.int8)
    backwards = np.zeros_like(forwards)
    limit = num_microbatches if capacity is None else capacity
    result = np.zeros(count, dtype=np.bool_)
    running = np.arange(count)
    forwards[0] = backwards[-1] = num_microbatches
    while running.size:
        forwards[-1], backwards[0] = forwards[-2], backwards[1]
        done_forward, done_backward = forwards[1:-1], backwards[1:-1]
        at_forward = (done_forward < num_microbatches) & (done_forward - done_backward <= warmup)
        has_input = np.where(
            at_forward, forwards[:-2] > done_forward, backwards[2:] > done_backward
        )
        free = (done_forward - forwards[2:] <= limit) & (done_backward - backwards[:-2] <= limit)
        step = has_input & free & (done_backward < num_microbatches)
        forwards[1:-1] += step & at_forward
        backwards[1:-1] += step & ~at_forward
        moved = step.any(axis=0)
        if moved.all():
            continue
        stopped = ~moved
        result[running[stopped]] = (backwards[1:-1, stopped] == num_microbatches).all(axis=0)
        running, warmup = running[moved], warmup[:, moved]
        forwards, backwards = forwards[:, moved], backwards[:, moved]
    return result


def lower(extra: Vectors, capacity: int) -> Vectors:
    """`OrderLimits.fit` for many vectors that all need it."""
    step = max_falling_step(capacity)
    assert step is not None
    fitted = extra.copy()
    for stage in range(extra.shape[1] - 2, -1, -1):
        np.minimum(fitted[:, stage], fitted[:, stage + 1] + step, out=fitted[:, stage])
    return fitted


def run_batch(batch: Batch) -> Counter[tuple[int | None, str]]:
    """Counts of one batch: by capacity the vectors that finish, are lowered, finish after it.

    Raises EnvPipeError if `channel_model` says otherwise about a vector of the sample.
    """
    p, m = batch.num_stages, batch.num_microbatches
    rows = list(islice(falling_vectors(p, m), batch.first, batch.first + BATCH))
    extra = np.array(rows, dtype=np.int8)
    counts: Counter[tuple[int | None, str]] = Counter()
    chosen = random.Random(f"{p} {m} {batch.first}").sample(
        range(len(rows)), min(batch.sample, len(rows))
    )
    for capacity in CAPACITIES:
        ok = finishes(extra, m, capacity)
        fitted = extra.copy()
        if capacity is not None and not ok.all():
            fitted[~ok] = lower(extra[~ok], capacity)
        after = ok.copy()
        after[~ok] = finishes(fitted[~ok], m, capacity)
        counts[capacity, "vectors"] += len(rows)
        counts[capacity, "finish"] += int(ok.sum())
        counts[capacity, "lowered"] += int((fitted != extra).any(axis=1).sum())
        counts[capacity, "forwards"] += int((extra - fitted).sum(dtype=np.int64))
        counts[capacity, "finish after"] += int(after.sum())
        for row in chosen:
            single = completes(envpipe(p, m, rows[row]), capacity)
            fit = order_limits(p, m, channel_capacity=capacity).fit(rows[row])
            if single != ok[row] or fit != tuple(fitted[row].tolist()):
                raise EnvPipeError(
                    f"The batch and channel_model disagree on p={p} M={m}, capacity {capacity}",
                    value=(rows[row], single, bool(ok[row]), fit, fitted[row].tolist()),
                    remedy="One of the two simulations is wrong.",
                )
            counts[capacity, "compared"] += 1
    return counts


def batches(max_stages: int, max_microbatches: int, sample: int) -> Iterator[Batch]:
    """All jobs, cut into batches."""
    for p in range(2, max_stages + 1):
        for m in range(p, max_microbatches + 1):
            total = sum(1 for _ in falling_vectors(p, m))
            yield from (Batch(p, m, first, sample) for first in range(0, total, BATCH))


@click.command()
@click.option("--max-stages", default=8, show_default=True, type=click.IntRange(2))
@click.option(
    "--max-microbatches", default=24, show_default=True, type=click.IntRange(2, MOST_MICROBATCHES)
)
@click.option("--workers", default=2, show_default=True, type=click.IntRange(1))
@click.option("--sample", default=50, show_default=True, help="Vectors of a batch to compare.")
def main(max_stages: int, max_microbatches: int, workers: int, sample: int) -> None:
    """Count the orders that finish on channels of capacity None, 1 and 2.

    Example: python benchmarks/schedules/channel_sweep.py --max-stages 4 --max-microbatches 12
    """
    start_s = time.perf_counter()
    jobs = list(batches(max_stages, max_microbatches, sample))
    total: Counter[tuple[int | None, str]] = Counter()
    with ProcessPoolExecutor(workers) as pool:
        for counts in pool.map(run_batch, jobs):
            total.update(counts)
    title = (
        f"EnvPipe's order, p = 2..{max_stages}, M = p..{max_microbatches}, "
        f"{time.perf_counter() - start_s:.0f} s"
    )
    rows = [
        {"capacity": str(capacity), **{name: total[capacity, name] for name in _COUNTS}}
        for capacity in CAPACITIES
    ]
    make_console().print(make_table(title, rows))
    unfinished = [c for c in CAPACITIES if total[c, "finish after"] < total[c, "vectors"]]
    if unfinished:
        raise click.ClickException(f"Orders stall after fitting at capacities {unfinished}.")


if __name__ == "__main__":
    main()
