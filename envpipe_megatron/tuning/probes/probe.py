"""Probes: generators that say which iterations to run next, so that the store learns unit times.

`first_probe` is what a job without a profile begins with: the one of another package, or else
`slack_probe`, which looks at clocks at little cost. A unit that others wait for only later has
slack: it is slowed first, as far as its slack goes, and the iteration keeps its time. Where a stage
has no such units, as the last one of 1F1B, as few as show enough are slowed, at the same time on
all these stages: they lose what one of them does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from envpipe_megatron.core.arrays import BoolArray, FloatArray, IntArray
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.core.timeline import LongestPath
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.policies.frequencies import added_functions
from envpipe_megatron.tuning.commands import Clocked
from envpipe_megatron.tuning.measured.store import Store

#: Entry points of packages that add a probe: functions of the order that runs and the store, which
#: yield looks; the store has what a look measured when the next one is asked for.
_GROUP = "envpipe_megatron.probes"
#: Each kind of unit is seen for so long at a clock, s: three refreshes of the counter. With a tenth
#: of one, a job with late plans in which a GPU becomes slow saves 7.3 points less.
_ENOUGH_S = 0.3
#: No look is for units that take less of an iteration than this share, as those of a stage that has
#: nothing to do: a job with such a stage profiles for thousands of iterations.
_LEAST_SEEN = 1e-3
#: A probe that would lose less time than this share of the iteration loses none. Without it three
#: stages of which two come under a power cap save 1.5 points less.
_NOTHING_LOST = 1e-4
#: Looks go on until this many clocks below the bottom of all energy valleys were seen. With all
#: clocks, a job that starts again on another GPU loses 9.7 iterations more.
_BELOW_VALLEY = 1


@dataclass(frozen=True)
class Look:
    """Iterations by which to learn what units take.

    Attributes:
        clocked: the order and its clocks, of the framework's kinds of units.
        iterations: how many are measured, one at least.
        note: what the log says.
        settle: how many run before, and are not.
    """

    clocked: Clocked
    iterations: int
    note: str
    settle: int = 0


def first_probe(own: Schedule, store: Store) -> Iterator[Look]:
    """Return what a job without a profile looks at its clocks by, in the order `own`.

    That is the probe of an installed package, if one adds it, or else `slack_probe`. Raises
    EnvPipeError if several do, or it cannot be imported.
    """
    added = added_functions(_GROUP, known=())
    if len(added) > 1:
        raise EnvPipeError(
            f"Several installed packages add an entry point of {_GROUP}",
            value=sorted(added),
            remedy="Remove all but one of them.",
        )
    for make in added.values():
        return _checked(make(own, store), own, store)
    return slack_probe(store, at_cost=True)


def _checked(looks: Iterator[Look], own: Schedule, store: Store) -> Iterator[Look]:
    """Yield looks of another package; EnvPipeError for an order or clocks that the job lacks."""
    for look in looks:
        clocks_mhz = look.clocked.frequency_mhz
        shape = own.num_stages, own.units_per_stage
        if look.clocked.schedule.stages != own.stages or clocks_mhz.shape != shape:
            raise EnvPipeError(
                "A probe looks at another order than the one that runs, or has no clock for each "
                "unit",
                value=(look.clocked.schedule.name, clocks_mhz.shape),
                remedy=f"Look at '{own.name}', with clocks of shape {shape}.",
            )
        lacking = np.setdiff1d(clocks_mhz, store.clocks_mhz)
        if lacking.size:
            raise EnvPipeError(
                "A probe looks at clocks (MHz) that plans may not use",
                value=lacking.tolist(),
                remedy="Take clocks of `store.clocks_mhz`.",
            )
        yield look


def slack_probe(store: Store, *, at_cost: bool) -> Iterator[Look]:
    """Look at one clock after the other, from the highest down, by units that have time to spare.

    Ends below the bottom of all energy valleys, and where no time is left to look in.

    Args:
        store: what is known of units; looks are at its order.
        at_cost: whether units without slack are looked at too, as few as show enough.
    """
    #: How many looks were below their own valley, and below that of units with slack.
    below = below_all = 0
    for clock_mhz in probe_clocks_mhz(store.clocks_mhz.astype(int).tolist()):
        # Below its own valley, a unit without slack never pays.
        clocks_mhz = probe(store, clock_mhz, at_cost=at_cost and below <= _BELOW_VALLEY)
        count = repeats(store, clocks_mhz, clock_mhz)
        if not count:
            return
        note = f"profile: looking at {clock_mhz} MHz in {count} iteration(s)"
        yield Look(Clocked(store.schedule, clocks_mhz), count, note)
        below += store.valley_mhz(waiting=False) > clock_mhz
        below_all += store.valley_mhz(waiting=True) > clock_mhz
        if below_all > _BELOW_VALLEY:
            return


def probe_clocks_mhz(clocks_mhz: Sequence[int], step: float = 0.1) -> list[int]:
    """Return clocks to look at one after the other, each about a step below the last.

    The step is a share of the highest clock, which is not among them; the lowest is.
    """
    rising = sorted(clocks_mhz)
    wanted = np.arange(1 - step, rising[0] / rising[-1], -step) * rising[-1]
    nearest = [min(rising[:-1], key=lambda clock: abs(clock - mhz)) for mhz in wanted]
    return list(dict.fromkeys([*nearest, rising[0]]))


def probe(store: Store, clock_mhz: int, *, at_cost: bool) -> IntArray:
    """Return clocks of an iteration that looks at one clock, [num_stages, units_per_stage].

    All units are at the highest clock or at this one. Times at this one are those that are known;
    where none is, all of a unit's time is taken to follow the clock, which no unit exceeds.
    Without `at_cost`, only units with slack are slowed.
    """
    schedule, top_mhz = store.schedule, int(store.clocks_mhz[-1])
    keys = store.keys(schedule)
    frequency = np.full(keys.shape, top_mhz, dtype=np.int64)
    own_s = store.durations_s(schedule, frequency)
    slow_s = store.durations_s(schedule, np.full_like(frequency, clock_mhz))
    enough = _units_needed(keys, slow_s)
    path = LongestPath(schedule, own_s.ravel().tolist(), tail_s=store.tail_s)
    path.find_ends()
    middle_s = np.array(path.end_s).reshape(keys.shape) - own_s / 2
    slowed = _within_slack(path, slow_s, keys, enough)
    for stage, own_keys in enumerate(keys if at_cost else ()):
        lacking = {
            key: count
            for key, count in enough.items()
            if (own_keys == key).any() and (own_keys[slowed[stage]] == key).sum() < count
        }
        slowed[stage, _in_the_middle(middle_s[stage], own_keys, lacking)] = True
    return schedule.pair_clocks(np.where(slowed, clock_mhz, frequency))


def lifted(schedule: Schedule, frequency_mhz: IntArray, store: Store) -> IntArray:
    """Return a plan's clocks, with a unit of each kind on each stage at the highest clock.

    By these the job learns what units take at the highest clock today, and loses no time. The unit
    before each is lifted too, as changes of the clock come late. They are those whose clocks are
    nearest to the highest anyway; where a stage has such pairs in its plan, nothing is changed.
    """
    keys, clocks = store.keys(schedule), frequency_mhz.copy()
    for own_keys, own, own_combined in zip(keys, clocks, schedule.combined, strict=True):
        for key in np.unique(own_keys[own_keys >= 0]):
            there = np.flatnonzero(own_keys[2:] == key) + 2  # the first runs at the plan's clock
            if there.size:
                best = there[(own[there] + own[there - 1]).argmax()]
                own[best - 1 - own_combined[best - 1] : best + 1] = int(store.clocks_mhz[-1])
    return schedule.pair_clocks(clocks)


def repeats(store: Store, clocked: IntArray, clock_mhz: int) -> int:
    """Return how many iterations at a probe's clocks see what they look at for long enough.

    None where they would hardly see it.
    """
    keys, times_s = store.keys(store.schedule), store.durations_s(store.schedule, clocked)
    there = clocked == clock_mhz
    looked_at = np.unique(keys[there & (keys >= 0)])
    seen_s = max((float(times_s[there & (keys == key)].sum()) for key in looked_at), default=0.0)
    if seen_s <= min(_ENOUGH_S, _LEAST_SEEN * store.iteration_s(store.schedule, clocked)):
        return 0
    return math.ceil(0.99 * _ENOUGH_S / seen_s)


def _units_needed(keys: IntArray, slow_s: FloatArray) -> dict[int, int]:
    needed = {}
    for key in np.unique(keys[keys >= 0]).tolist():
        of_key = keys == key
        enough = math.ceil(_ENOUGH_S / float(slow_s[of_key].mean()))
        needed[key] = min(enough, int(of_key.sum()))
    return needed


def _within_slack(
    path: LongestPath, slow_s: FloatArray, keys: IntArray, enough: dict[int, int]
) -> BoolArray:
    """Return which units may be slowed at no loss of time, [num_stages, units_per_stage]."""
    own_s, until_s = np.array(path.duration_s), max(path.stage_end_s)
    allowed_s = _NOTHING_LOST * until_s
    path.find_latest_ends(until_s)
    slack_s = np.array(path.latest_end_s) - np.array(path.end_s)
    slowed = np.zeros(keys.size, dtype=bool)
    left = dict(enough)
    longer_s = slow_s.ravel() - own_s
    for node in np.flatnonzero(slack_s + allowed_s >= longer_s).tolist():
        key = int(keys.flat[node])
        if key < 0 or not left[key]:
            continue
        if path.latest_end_s[node] - path.end_s[node] + allowed_s >= longer_s[node]:
            path.change(node, float(slow_s.flat[node]))
            slowed[node] = True
            left[key] -= 1
    return slowed.reshape(keys.shape)


def _in_the_middle(middle_s: FloatArray, keys: IntArray, lacking: Mapping[int, int]) -> slice:
    """Return consecutive units of a stage, half-way through, with enough of what is lacking."""
    first = after = int(np.searchsorted(middle_s, middle_s[-1] / 2))
    while any((keys[first:after] == key).sum() < count for key, count in lacking.items()):
        if after - first >= len(keys):
            break
        first, after = max(first - 1, 0), after + 1
    return slice(first, after)
