"""Orders of units in any sequence that can run: each stage starts whichever unit is ready."""

import itertools
import random
from collections import Counter
from collections.abc import Iterator

from envpipe_megatron.core.kinds import Kind, ScheduleError, Unit, unit
from envpipe_megatron.core.schedule import Schedule


def random_order(
    rng: random.Random,
    num_stages: int,
    num_microbatches: int,
    num_chunks: int = 1,
    *,
    split: bool = False,
    in_turn: bool = False,
) -> Schedule:
    """One such order; of split backwards some are whole. It can run by how it is made.

    `in_turn`: microbatches of a chunk come one after another, so that sums are the same.
    """
    ready: list[list[Unit]] = [[] for _ in range(num_stages)]
    ready[0] = [unit(Kind.FORWARD, m) for m in range(num_microbatches)]
    orders: list[list[Unit]] = [[] for _ in range(num_stages)]
    backward = Kind.INPUT_GRADIENT if split else Kind.BACKWARD
    ran: Counter[tuple[int, Kind, int]] = Counter()

    def may_run(stage: int, own: Unit) -> bool:
        return not in_turn or own.microbatch == ran[stage, own.kind, own.chunk]

    bias = [rng.random() for _ in range(num_stages)]  # how soon a stage turns to what is not F
    while any(ready):
        stage = rng.choice([stage for stage in range(num_stages) if ready[stage]])
        some = [own for own in ready[stage] if may_run(stage, own)]
        later = [own for own in some if own.kind is not Kind.FORWARD]
        if not some:
            continue
        own = rng.choice(later if later and rng.random() < bias[stage] else some)
        ready[stage].remove(own)
        ran[stage, own.kind, own.chunk] += 1
        weights = unit(Kind.WEIGHT_GRADIENT, own.microbatch, own.chunk)
        whole = own.kind is Kind.INPUT_GRADIENT and rng.random() < 0.3 and may_run(stage, weights)
        orders[stage].append(unit(own.kind, own.microbatch, own.chunk, whole))
        if own.kind is Kind.WEIGHT_GRADIENT:
            continue
        if own.kind is Kind.INPUT_GRADIENT:
            (orders if whole else ready)[stage].append(weights)
            ran[stage, weights.kind, own.chunk] += whole
        way = 1 if own.kind is Kind.FORWARD else -1
        chunk, to = divmod(own.chunk * num_stages + stage + way, num_stages)
        if 0 <= chunk < num_chunks:
            ready[to].append(unit(own.kind, own.microbatch, chunk))
        elif way > 0:
            ready[stage].append(unit(backward, own.microbatch, own.chunk))
    return Schedule("random", num_microbatches, num_chunks, tuple(map(tuple, orders)))


def all_orders(
    num_stages: int,
    num_microbatches: int,
    num_chunks: int = 1,
    *,
    split: bool = False,
    every: int = 1,
) -> Iterator[Schedule]:
    """All orders that can run; or of all sequences of each stage's units every so many-th."""
    last = [Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT] if split else [Kind.BACKWARD]
    ways = [(Kind.FORWARD, c) for c in range(num_chunks)]
    ways += [(kind, c) for c in reversed(range(num_chunks)) for kind in last]
    of_one_stage = list(
        _merged([[unit(k, m, c) for k, c in ways] for m in range(num_microbatches)])
    )
    product = itertools.product(of_one_stage, repeat=num_stages)
    for stages in itertools.islice(product, 0, None, every):
        try:
            yield Schedule("any", num_microbatches, num_chunks, stages)
        except ScheduleError:  # stages would wait in circles
            continue


def _merged(chains: list[list[Unit]]) -> Iterator[tuple[Unit, ...]]:
    """Every sequence of all units that keeps the order of each chain."""
    if not any(chains):
        yield ()
    for at, chain in enumerate(chains):
        if chain:
            for rest in _merged([*chains[:at], chain[1:], *chains[at + 1 :]]):
                yield (chain[0], *rest)
