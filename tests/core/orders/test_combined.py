"""Combined units: a forward and a backward of other activations that a stage runs as one."""

import itertools
import random
import re

import numpy as np
import pytest
from combined_cases import CLOCKS_MHZ, combined_profile, paired
from core_cases import B, F, I, W, naive_steps, parse_stages, random_orders, steps_of
from hypothesis import given, settings
from hypothesis import strategies as st
from on_request import examples

from envpipe_megatron.core.channel_model import find_stall
from envpipe_megatron.core.conditions import Conditions
from envpipe_megatron.core.kinds import Kind, ScheduleError, parse_unit
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.orders.builders import framework_schedule
from envpipe_megatron.core.plan import Plan, read_plan
from envpipe_megatron.core.profile import make_profile, read_profile
from envpipe_megatron.core.profile_rows import ProfileError
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.core.timeline import LongestPath, Timeline
from envpipe_megatron.errors import EnvPipeError

SEEDS = st.integers(0, 2**32)


def can_pair(order, wholes=()):
    """Positions of forwards that the whole backward behind them does not need."""
    return [
        at
        for at, (unit, after) in enumerate(itertools.pairwise(order))
        if unit.kind is F
        and (after.kind is B or at + 1 in wholes)
        and (unit.microbatch, unit.chunk) != (after.microbatch, after.chunk)
    ]


def can_be_whole(order):
    """Positions of gradients of an input with that of the weights behind them."""
    return [
        at
        for at, (unit, after) in enumerate(itertools.pairwise(order))
        if (unit.kind, after.kind) == (I, W)
        and (unit.microbatch, unit.chunk) == (after.microbatch, after.chunk)
    ]


def random_case(seed):
    """A pipeline whose orders run without pairs, some of its units paired, and durations."""
    rng = random.Random(seed)
    stages, microbatches, chunks = rng.randint(1, 4), rng.randint(1, 4), rng.randint(1, 2)
    orders = random_orders(rng, stages, microbatches, chunks, split=rng.random() < 0.5)
    chosen = set()
    for stage, order in enumerate(orders):
        wholes = [at for at in can_be_whole(order) if rng.random() < 0.6]
        pairs = [at for at in can_pair(order, wholes) if rng.random() < 0.6]
        chosen |= {(stage, at) for at in (*wholes, *pairs)}
    orders = paired(orders, chosen)
    # Steps are priced; a forward of a pair takes no time beside its backward.
    times = {
        (s, number): rng.choice([0.5, rng.uniform(0.1, 3)])
        for s, own in enumerate(steps_of(orders))
        for number in range(len(own))
    }
    latency = [rng.choice([0.0, rng.uniform(0, 1)]) for _ in range(stages - 1)]
    return rng, microbatches, chunks, orders, times, latency


def by_unit(orders, times):
    """[num_stages, units_per_stage] durations of units from those of steps."""
    rows = []
    for stage, own in enumerate(steps_of(orders)):
        rows.append([])
        for number, step in enumerate(own):
            rows[-1] += [0.0] * (len(step) - 1) + [times[stage, number]]
    return rows


@settings(max_examples=examples(300), deadline=None)
@given(SEEDS)
def test_pairs_begin_with_both_inputs_and_their_outputs_leave_at_their_end(seed):
    rng, microbatches, chunks, orders, times, latency = random_case(seed)
    naive = naive_steps(orders, chunks, times, latency)
    if naive is None:
        with pytest.raises(ScheduleError, match="would deadlock"):
            Schedule("x", microbatches, chunks, orders)
        return
    schedule = Schedule("x", microbatches, chunks, orders)
    duration = by_unit(orders, times)
    timeline = Timeline(schedule, duration, latency)
    for stage, own in enumerate(steps_of(orders)):
        last = -1
        for number, step in enumerate(own):
            last += len(step)
            start, end = naive[stage, number]
            assert timeline.start_s[stage, last] == pytest.approx(start, abs=1e-9)
            assert timeline.end_s[stage, last] == pytest.approx(end, abs=1e-9)
    # Slack is what a step can be delayed by, and one change moves what a whole sweep would.
    slack = timeline.slack_s
    path = LongestPath(schedule, np.array(duration).ravel().tolist(), latency)
    path.find_ends()
    path.find_latest_ends(timeline.iteration_time_s)
    position = rng.randrange(schedule.units_per_stage)
    stage = rng.randrange(schedule.num_stages)
    if not schedule.combined[stage, position]:
        node = stage * schedule.units_per_stage + position
        longer = duration[stage][position] + slack[stage, position] + 0.125
        path.change(node, longer)
        duration[stage][position] = longer
        late = Timeline(schedule, duration, latency)
        assert late.iteration_time_s == pytest.approx(timeline.iteration_time_s + 0.125)
        assert path.end_s == pytest.approx(late.end_s.ravel().tolist())
        for sender, waits in enumerate(schedule.waiting):
            assert all(schedule.cross_dependency[node] == sender for node in waits)
    critical = timeline.critical_path()
    assert slack.ravel()[critical].max() < 1e-7


@pytest.mark.parametrize(
    ("order", "told"),
    [
        ("F0 F1 B1+ B0", "'B1+'"),
        ("F0 F1+ B1 B0", "'F1+'"),
        ("F0+ F1 B1 B0", "'F0+'"),
        ("F0 F1 B0 B1+", "'B1+'"),
    ],
)
def test_what_cannot_be_combined_is_named(order, told):
    units = tuple(map(parse_unit, order.split()))
    with pytest.raises(ScheduleError, match=f"combined .*got {re.escape(told)}"):
        Schedule("x", 2, 1, (units,))


def test_megatrons_order_of_2_by_4_by_2():
    schedule = builders.interleaved(2, 4, 2, combined=True)
    stages = parse_stages(
        "F0.0 F1.0 F0.1 F1.1 F2.0 F3.0 B0.1 F2.1 B1.1 F3.1 B0.0 B1.0 B2.1 B3.1 B2.0 B3.0",
        "F0.0 F1.0 F0.1 F1.1 B0.1 F2.0 B1.1 F3.0 B0.0 F2.1 B1.0 F3.1 B2.1 B3.1 B2.0 B3.0",
    )
    assert [" ".join(row) for row in schedule.labels()] == [
        "F0.0 F1.0 F0.1 F1.1 F2.0 F3.0+ B0.1 F2.1+ B1.1 F3.1+ B0.0 B1.0 B2.1 B3.1 B2.0 B3.0",
        "F0.0 F1.0 F0.1 F1.1+ B0.1 F2.0+ B1.1 F3.0+ B0.0 F2.1+ B1.0 F3.1+ B2.1 B3.1 B2.0 B3.0",
    ]
    assert paired(schedule.stages, set()) == stages
    # A pair holds the activations of both; without pairs it would be the same order's peak.
    assert schedule.peak_in_flight == (6, 4)
    assert framework_schedule(schedule) == schedule
    with pytest.raises(EnvPipeError, match="cannot run itself"):
        find_stall(schedule, None)


def test_profiles_of_pairs_are_written_and_read(tmp_path):
    profile = combined_profile()
    assert (profile.num_stages, profile.listed_chunks) == (2, 2)
    profile.write(tmp_path / "job.csv")
    lines = (tmp_path / "job.csv").read_text().splitlines()
    assert len(lines) == 1 + 2 * 2 * 3 * len(CLOCKS_MHZ)
    assert sum(",combined," in line for line in lines) == 2 * 2 * len(CLOCKS_MHZ)
    read = read_profile(tmp_path / "job.csv")
    assert (read.rows, read.sidecar, read.kinds) == (profile.rows, profile.sidecar, profile.kinds)
    (tmp_path / "short.csv").write_text("\n".join(lines[:-3]))
    with pytest.raises(ProfileError, match="no row for stage 1 chunk 1 combined"):
        read_profile(tmp_path / "short.csv")
    (tmp_path / "twice.csv").write_text("\n".join([*lines, lines[-1]]))
    with pytest.raises(ProfileError, match="a second row for stage 1 chunk 1 combined at"):
        read_profile(tmp_path / "twice.csv")
    without = [",".join(line.split(",")[:5]) for line in lines if line.endswith((",0", "chunk"))]
    (tmp_path / "whole.csv").write_text("\n".join(without))
    with pytest.raises(ProfileError, match="only pipelines with chunks"):
        read_profile(tmp_path / "whole.csv")


def test_a_pair_costs_its_own_row_and_has_one_clock():
    profile = combined_profile()
    schedule = builders.interleaved(2, 4, 2, combined=True)
    clocks = np.random.default_rng(0).choice(CLOCKS_MHZ, schedule.is_backward.shape)
    plan = Plan("custom", schedule, clocks, profile, Conditions((40.0, 50.0)))
    units_j = np.zeros(2)
    duration = np.zeros(clocks.shape)
    for stage, order in enumerate(schedule.stages):
        for at, unit in enumerate(order):
            if unit.combined:
                assert plan.frequency_mhz[stage, at] == clocks[stage, at + 1]
                continue
            assert plan.frequency_mhz[stage, at] == clocks[stage, at]
            pair = at > 0 and order[at - 1].combined
            kind = Kind.COMBINED if pair else unit.kind
            row = profile.row(2 * stage + unit.chunk, kind, clocks[stage, at])
            duration[stage, at] = row.time_s
            units_j[stage] += row.energy_j
    timeline = Timeline(schedule, duration)
    assert plan.cost.iteration_time_s == pytest.approx(timeline.iteration_time_s, rel=1e-7)
    waits_s = plan.cost.iteration_time_s - duration.sum(axis=1)
    assert plan.energy_by_stage_j == pytest.approx(units_j + (40, 50) * waits_s, rel=1e-7)
    assert plan.baseline.schedule == schedule


def test_plans_of_pairs_are_written_and_read(tmp_path):
    profile = combined_profile()
    schedule = builders.interleaved(2, 4, 2, combined=True)
    clocks = np.random.default_rng(1).choice(CLOCKS_MHZ, schedule.is_backward.shape)
    plan = Plan("custom", schedule, clocks, profile, Conditions((40.0, 50.0)))
    plan.write(tmp_path / "plan.json")
    read = read_plan(tmp_path / "plan.json", profile)
    assert read.schedule == schedule
    assert read.to_json() == plan.to_json()
    alone = make_profile(
        [
            (2 * stage + chunk, kind, row)
            for stage, chunk, kind in itertools.product(range(2), range(2), (F, B))
            for row in profile.rows[2 * stage + chunk][kind]
        ],
        source="without pairs",
        listed_chunks=2,
    )
    with pytest.raises(ProfileError, match="of the kind combined, and without pairs no rows"):
        read_plan(tmp_path / "plan.json", alone)
    # Orders without pairs are priced by the other rows alone.
    usual = builders.interleaved(2, 4, 2)
    costs = [Plan("x", usual, clocks, p, Conditions((40.0, 50.0))).cost for p in (profile, alone)]
    assert costs[0] == costs[1]
