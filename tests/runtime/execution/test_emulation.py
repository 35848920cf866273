"""Emulated iterations take exactly the longest path, and leave their timelines."""

import random
from pathlib import Path

import numpy as np
import pytest
import session_ranks
from presets import write_changed_preset

from envpipe_megatron.core.conditions import Conditions
from envpipe_megatron.core.kinds import WHOLE
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.orders.builders import split_in_place, zero_bubble
from envpipe_megatron.core.plan import Plan
from envpipe_megatron.core.profile import Profile, make_profile
from envpipe_megatron.core.profile_rows import ProfileRow, SplitBackward
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.core.timeline import Timeline
from envpipe_megatron.formats.timeline import read_timelines
from envpipe_megatron.gpu.presets import load_preset

pytestmark = pytest.mark.xdist_group("pipeline")

STAGES = 3
SCHEDULES = {
    "1f1b": builders.one_f_one_b(STAGES, 5),
    "gpipe": builders.gpipe(STAGES, 4),
    "envpipe": builders.envpipe(STAGES, 6, [3, 2, 0]),
    "fewer microbatches than stages": builders.envpipe(STAGES, 2, [0, 0, 0]),
    "split": zero_bubble(STAGES, 5),
    "split, some not": split_in_place(builders.one_f_one_b(STAGES, 6), 3),
}


@pytest.fixture
def instant_preset(tmp_path) -> str:
    """An A100 whose clock changes take no time, so that units have the model's time exactly."""
    return str(write_changed_preset(tmp_path / "instant.toml", {"frequency_change_s": 0.0}))


def write_plan(
    folder: Path, schedule: Schedule, preset: str, seed: int
) -> tuple[np.ndarray, list, Profile]:
    """A plan of random frequencies for stages of random times; these, and its profile."""
    rng = random.Random(seed)
    model = load_preset(preset)
    times_s = [(rng.uniform(0.01, 0.03), rng.uniform(0.02, 0.06)) for _ in range(STAGES)]
    clocks = [model.max_frequency_mhz, *rng.sample(model.supported_frequencies_mhz[1:], 6)]
    rows = [
        (stage, kind, ProfileRow(clock, model.unit_time_s(kind.value, clock, time_s), 1.0))
        for stage in range(STAGES)
        for kind, time_s in zip(WHOLE, times_s[stage], strict=True)
        for clock in clocks
    ]
    profile = make_profile(rows, source="random")
    profile.write(folder / "profile.csv")
    if schedule.split:
        profile = profile.with_split_backwards(SplitBackward(0.5, 0.01))
    drawn = np.random.default_rng(seed).choice(clocks, schedule.is_backward.shape)
    frequency = schedule.pair_clocks(drawn)
    Plan("custom", schedule, frequency, profile, Conditions((80.0,) * STAGES)).write(
        folder / "plan.json"
    )
    return frequency, times_s, profile


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", SCHEDULES)
def test_iteration_is_the_longest_path(three_ranks, tmp_path, instant_preset, name, seed):
    schedule = SCHEDULES[name]
    frequency, times_s, profile = write_plan(tmp_path, schedule, instant_preset, seed)
    runs = three_ranks.run(
        session_ranks.run_plan, tmp_path, instant_preset, schedule.num_microbatches, 1, times_s, 3
    )
    warmup = builders.one_f_one_b(STAGES, schedule.num_microbatches)
    top = np.full(warmup.is_backward.shape, frequency.max())
    for iteration, (order, clocks) in enumerate([(warmup, top), *[(schedule, frequency)] * 2]):
        timeline = Timeline(order, profile.lookup(order, clocks)[0])
        for stage, records in enumerate(runs):
            seen = records[iteration]
            assert seen["iteration_time_s"] == pytest.approx(timeline.iteration_time_s, abs=1e-9)
            assert seen["start_s"] == pytest.approx(timeline.start_s[stage].tolist(), abs=1e-9)
            waits = timeline.start_s[stage] - np.array([0.0, *timeline.end_s[stage][:-1]])
            assert seen["receive_wait_s"] == pytest.approx(waits.tolist(), abs=1e-9)


def test_iteration_is_the_longest_path_of_its_units(three_ranks, tmp_path):
    """Also where a clock settles within a unit: the path of the times that the units then took."""
    schedule = SCHEDULES["envpipe"]
    frequency, times_s, _ = write_plan(tmp_path, schedule, "a100-sxm", 7)
    runs = three_ranks.run(session_ranks.run_plan, tmp_path, "a100-sxm", 6, 1, times_s, 3)
    again = three_ranks.run(session_ranks.run_plan, _fresh(tmp_path), "a100-sxm", 6, 1, times_s, 3)
    assert again == runs  # to the bit, whatever the host did meanwhile
    for iteration in (1, 2):
        taken_s = np.array(
            [np.subtract(run[iteration]["end_s"], run[iteration]["start_s"]) for run in runs]
        )
        longest_s = Timeline(schedule, taken_s).iteration_time_s
        for run in runs:
            assert run[iteration]["iteration_time_s"] == pytest.approx(longest_s, abs=1e-9)
    assert_recorded(tmp_path / "output" / "timeline.jsonl", schedule, frequency)


def assert_recorded(path: Path, schedule: Schedule, frequency: np.ndarray) -> None:
    """A session leaves the timelines of all its ranks."""
    read = read_timelines([path])
    assert not read.unreadable
    ran = sorted((one.iteration, one.labels.rank, one.phase) for one in read.iterations)
    phases = ["warm-up", "steady", "steady"]
    assert ran == [(i, rank, phases[i]) for i in range(3) for rank in range(STAGES)]
    # Emulated GPUs of a pipeline share one time base, and begin together.
    assert len({(one.iteration, one.begin_s) for one in read.iterations}) == 3
    for one in read.iterations:
        stage, top = one.labels.stage, frequency.max()
        clocks = frequency[stage] if one.iteration else np.full_like(frequency[stage], top)
        assert one.frequency_mhz.tolist() == clocks.tolist()
        if one.iteration:
            assert one.order.split() == [str(unit) for unit in schedule.stages[stage]]


def _fresh(folder: Path) -> Path:
    """The same job on GPUs that have done nothing yet."""
    fresh = folder / "again"
    fresh.mkdir()
    for name in ("profile.csv", "profile.json", "plan.json"):
        if (folder / name).exists():
            (fresh / name).write_bytes((folder / name).read_bytes())
    return fresh
