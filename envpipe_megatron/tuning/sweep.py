"""A job that sweeps: what units cost at each clock is seen before its one plan is made.

All units run at one clock after the other, from the highest downwards, until every stage is past
the bottom of its energy valley. Such iterations show the energy of all kinds of units together.
Then each kind but one runs at these clocks by itself, and all others at the highest: that keeps
them apart. Still lower clocks, which pay in place of waiting only, are seen by units that have time
for them. Clocks between are fitted, so that few are run.

The plan may be corrected by EnvPipe's reconfiguring in training: what an iteration measures moves
the next one's clocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial

import numpy as np

from envpipe_megatron.core.arrays import FloatArray, IntArray
from envpipe_megatron.core.kinds import Kind
from envpipe_megatron.core.plan import Plan
from envpipe_megatron.core.profile import Profile
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.core.timeline import critical_path
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.formats.energy import Phase
from envpipe_megatron.policies.frequencies import (
    Ended,
    Ladders,
    ReconfigurePolicy,
    lower,
    step,
)
from envpipe_megatron.policies.planner import solve
from envpipe_megatron.policies.problem import Problem
from envpipe_megatron.tuning.background import Background
from envpipe_megatron.tuning.command_maker import CommandMaker
from envpipe_megatron.tuning.commands import Clocked, Command, Run, Window
from envpipe_megatron.tuning.measured.store import Store
from envpipe_megatron.tuning.probes.probe import Look, probe, probe_clocks_mhz

#: From one clock to the next, as a share of the highest. On emulated A100 and A40, plans of such a
#: sweep save what plans of all clocks do, to 0.1 points; with a tenth, to 0.8.
_STEP = 0.075
#: This many times as long is measured where a counter said nothing: after a pause, or with a slow
#: counter, fewer than two of its refreshes are seen.
_LONGER = (1, 2, 4)
#: The end must be seen in this many iterations in a row: one iteration's waits are noisy.
_CONFIRMATIONS = 2
#: A wait shorter than this share of the shortest unit is no bubble worth a clock.
_LEAST_BUBBLE = 0.01


def sweep_probe(store: Store, steps_at_clock: Callable[[float], int]) -> Iterator[Look]:
    """Look at units of all kinds, then of each kind, then at lower clocks by those with time.

    Args:
        store: what is known of units; looks are at its order.
        steps_at_clock: returns how many iterations of a length in s are measured at each clock.
    """
    own, top_mhz = store.schedule, int(store.clocks_mhz[-1])
    keys = store.keys(own)

    def look(clocks_mhz: IntArray, what: str) -> Look:
        count = steps_at_clock(store.iteration_s(own, clocks_mhz))
        clocked = Clocked(own, clocks_mhz)
        return Look(clocked, count, f"profile: {what}", settle=1)

    def look_at(name: str, kinds: Sequence[Kind], clock_mhz: int) -> Look:
        places = [store.kinds.index(kind) for kind in kinds]
        there = (keys >= 0) & np.isin(keys % len(store.kinds), places)
        clocks_mhz = own.pair_clocks(np.where(there, clock_mhz, top_mhz))
        return look(clocks_mhz, f"each {name} at {clock_mhz} MHz")

    # Sums of meters know no lower clocks.
    known = store.clocks_mhz[store.clocks_mhz >= store.powers.nodes_mhz[0]].astype(int).tolist()
    left = [top_mhz, *probe_clocks_mhz(known, _STEP)]
    seen: list[int] = []
    while left and (len(seen) < 2 or store.valley_mhz(waiting=False) <= seen[-1]):
        seen.append(left.pop(0))
        yield look_at("unit", store.kinds, seen[-1])
    for kind in store.kinds[:-1]:
        for clock_mhz in seen[1:]:
            yield look_at(kind, (kind,), clock_mhz)
    while left and store.valley_mhz(waiting=True) <= seen[-1]:
        seen.append(left.pop(0))
        clocks_mhz = probe(store, seen[-1], at_cost=False)
        if (clocks_mhz == top_mhz).all():
            return
        yield look(clocks_mhz, f"units that have time at {seen[-1]} MHz")


def measured_profile(
    store: Store, steps_at_clock: Callable[[float], int], first: Window
) -> Run[Profile]:
    """Sweep, and return the profile that this makes.

    Args:
        store: empty.
        steps_at_clock: as for `sweep_probe`.
        first: iterations of the store's order at the highest clock.

    Raises EnvPipeError if the counters of a stage fail.
    """
    commands = CommandMaker(store)
    commands.learn(store.at_top(store.schedule), first)
    for look in sweep_probe(store, steps_at_clock):
        commands.note(look.note)
        for longer in _LONGER:
            # Waiting for the counter, so that what it has seen of a short window is there.
            count = longer * look.iterations
            window = yield commands.metered(Phase.PROFILE, look.clocked, count, look.settle)
            if all(report.metered for report in window.stages):
                break
        for stage, report in enumerate(window.stages):
            if not report.metered:
                raise EnvPipeError(
                    f"Stage {stage}: The energy counter failed while profiling: it said nothing",
                    remedy="Look at the driver's log. Steps that are short want more of them at "
                    "each clock; a profile by file needs no counter.",
                )
        commands.learn(look.clocked, window)
    store.align()
    return store.profile(careful=False)


def planned(problem: Problem) -> tuple[Plan, tuple[str, ...]]:
    """Make a plan, and say what the user should know of it; errors as of `make_plan`."""
    made = solve(problem)
    return made.plan, (*made.notes, *problem.notes)


def planned_beside(
    background: Background[tuple[Plan, tuple[str, ...]]], problem: Problem
) -> Run[tuple[Plan, tuple[str, ...]]]:
    """Have one plan made by `background` while training goes on as it ran last.

    Returns what `planned` does; raises what that raises, EnvPipeError if it is ended.
    """
    with closing(background):
        background.start(partial(planned, problem))
        while (made := background.take()) is None:
            yield Command(Phase.PROFILE, 1)
    return made


def no_bubble_threshold_s(schedule: Schedule, window: Window) -> float:
    """Return the longest receive wait that still counts as none, from iterations at full clock.

    Somewhere in such a pipeline an input is always there before it is needed; that receive's wait
    is pure overhead. The threshold is its median plus what it varies by.
    """
    receives = schedule.receives.copy()
    receives[:, 0] = False  # waits for the pipeline to fill
    if not receives.any():
        return 0.0  # a single stage never waits
    waits_s = window.waits_s[:, receives]
    median_s = np.median(waits_s, axis=0)
    least = int(median_s.argmin())
    deviation_s = np.median(np.abs(waits_s[:, least] - median_s[least]))
    timed = zip(window.stages, ~schedule.combined, strict=True)
    shortest_s = min(np.nanmin(stage.unit_s[:, units]) for stage, units in timed)
    return float(median_s[least] + 4 * 1.4826 * deviation_s + _LEAST_BUBBLE * shortest_s)


def reconfigured(
    plan: Plan,
    policy: ReconfigurePolicy,
    own: Schedule,
    clocks_mhz: Sequence[Iterable[int]],
    first: Window,
) -> Run[tuple[Plan, int, Ended]]:
    """Run a policy's steps on measured waits until one of its ends, and nothing can be lowered.

    Units rise through all clocks that the GPUs of their stage have, also through those that were
    not profiled: waits show enough of them. Where an end is seen, measured times of units say who
    has slack, the profile how much longer these take at lower clocks; a unit that then turns up on
    the path is raised as any.

    Args:
        plan: what is reconfigured.
        policy: what a step raises, and how many steps there are at most.
        own: the order that the warm-up ran at full clock.
        clocks_mhz: for each stage, all that its GPUs have.
        first: the warm-up.

    Returns:
        The reconfigured plan, how many steps raised a clock, and why the loop ended.
    """
    threshold_s, schedule = no_bubble_threshold_s(own, first), plan.schedule
    ladders = Ladders(schedule, plan.profile, clocks_mhz)
    frequency_mhz = plan.frequency_mhz.copy()
    steps, ended, lowered = 0, Ended.STEP_LIMIT, dict[int, int]()
    #: What units took in each of the last iterations, which all showed an end.
    times_s: list[FloatArray] = []
    for _ in range(policy.max_steps):
        clocked = Clocked(schedule, schedule.pair_clocks(frequency_mhz))
        window = yield Command(Phase.RECONFIGURE, 1, orders=(clocked,))
        if not window.whole:
            continue
        waits_s, clocks = window.waits_s[0].ravel(), frequency_mhz.ravel().tolist()
        path = critical_path(schedule, waits_s.tolist(), threshold_s)
        changes, seen = step(schedule, clocks, path, policy, ladders)
        steps += bool(changes)
        times_s = [*times_s, _busy_s(window, threshold_s)] if seen else []
        if seen and len(times_s) == _CONFIRMATIONS:
            # The least of them: a hiccup of one unit would look like slack of all others.
            least_s = np.min(times_s, axis=0)
            changes = lower(plan, clocks, least_s, threshold_s, ladders, lowered)
            if not changes:
                ended = seen
                break
            lowered |= changes
            times_s = []
        for node, target in changes.items():
            frequency_mhz.flat[node] = target
    reconfigured = replace(
        plan,
        policy=f"{plan.policy}-{policy.name}",
        frequency_mhz=frequency_mhz,
        profile=replace(plan.profile, interpolates=True),
    )
    return reconfigured, steps, ended


def _busy_s(window: Window, threshold_s: float) -> FloatArray:
    """Return times of units, with waits that are no bubble, [num_stages, units_per_stage].

    Medians over replicas.
    """
    busy_s = [
        stage.unit_s + np.where(stage.waits_s[:, 0] <= threshold_s, stage.waits_s[:, 0], 0.0)
        for stage in window.stages
    ]
    return np.median(busy_s, axis=1)
