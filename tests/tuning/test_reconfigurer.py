"""What reconfiguring takes for a wait, over replicas that have hiccups; and its loop."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from core_cases import uniform_profile

from envpipe_megatron.core.conditions import Conditions
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.plan import Plan
from envpipe_megatron.core.timeline import Timeline
from envpipe_megatron.policies.frequencies import RECONFIGURE_POLICIES, Ended, envelope
from envpipe_megatron.tuning import sweep
from envpipe_megatron.tuning.commands import Report, Window
from envpipe_megatron.tuning.sweep import no_bubble_threshold_s, reconfigured

# From the README of EnvPipe (casys-kaist/EnvPipe): its only sample, four stages and GPipe's order
# but for the last stage.


def window_of(*stages: tuple[Any, Any]) -> Window:
    """Return what stages measured: waits [replicas, iterations, units], and times of units."""
    return Window(
        tuple(
            Report(
                unit_s=np.array(unit_s),
                waits_s=np.array(waits_s),
                **dict.fromkeys(("ends_s", "steps_s", "power_w"), np.zeros((1, 1))),
                meter=np.zeros((3, 3)),
            )
            for waits_s, unit_s in stages
        )
    )


def test_the_threshold_is_the_least_wait_and_what_it_varies_by():
    """A unit without a receive, and the first of a stage, say nothing of a message."""
    schedule = builders.one_f_one_b(2, 2)
    # Of what is looked at, F1 on stage 1 waits least: by median 3 ms, off it by 0, 1, 2, 1, 7 ms.
    least_s = [3e-3, 2e-3, 1e-3, 4e-3, 10e-3]
    more_s = [9e-3, 9e-3, 8e-3, 7e-3, 9e-3]
    first = [[0.0, 0.0, more, more] for more in more_s]
    last = [[1e-3, 0.0, least, 0.0] for least in least_s]
    hiccup = [[1e-3, 0.0, 5.0, 0.0]] * 5
    unit_s = [[0.5, 0.75, 0.375, 1.0], [0.5, 0.625, 0.75, 1.0], [0.5, np.nan, 0.75, 1.0]]
    window = window_of(
        ([first, first, first], np.full((3, 4), 0.5)), ([last, hiccup, last], unit_s)
    )
    found_s = no_bubble_threshold_s(schedule, window)
    assert found_s == pytest.approx(3e-3 + 4 * 1.4826 * 1e-3 + 0.01 * 0.375)


def test_a_single_stage_has_no_wait_that_counts():
    window = window_of(([[[0.0, 0.0]]], [[0.5, 1.0]]))
    assert no_bubble_threshold_s(builders.one_f_one_b(1, 1), window) == 0.0


FRAMEWORKS = builders.one_f_one_b(2, 2)


def warm_up(threshold_s: float) -> Window:
    """By which a wait counts from there on, where no unit takes time."""
    waits_s = np.full((2, 1, 4), threshold_s)
    return window_of(*[(waits_s, np.zeros((2, 4)))] * 2)


class Pipeline:
    """A job of four stages that differ, in its place: each iteration is a timeline.

    Args:
        seconds: from the profile's times of units and their clocks, [num_stages, units_per_stage],
            what they take.
        held_up_s: by how much waits and units of one of three replicas are longer.
    """

    THRESHOLD_S = 0.004
    WAYS = ("greedy", "balanced")

    def __init__(
        self, seconds: Any = lambda profiled_s, clocks: profiled_s, held_up_s: float = 0.0
    ) -> None:
        curve = {f: (0.1 * (1 + (1410 - f) / 900), f / 100) for f in range(1050, 1411, 30)}
        self.profile = uniform_profile(4, curve, slowness=[1.0, 0.7, 0.8, 1.0])
        self.schedule = builders.one_f_one_b(4, 8)
        clocks = envelope(self.schedule, self.profile)
        self.plan = Plan("envelope", self.schedule, clocks, self.profile, Conditions((30.0,) * 4))
        self.ran: list[np.ndarray] = []
        self._seconds, self._held_up_s = seconds, held_up_s

    def cost(self, clocks: np.ndarray) -> Any:
        """By the profile."""
        return replace(self.plan, frequency_mhz=clocks).cost

    def reconfigured(self, name: str, max_steps: int = 3000) -> tuple[Plan, int, Ended]:
        policy = replace(RECONFIGURE_POLICIES[name], max_steps=max_steps)
        known = [range(1050, 1411, 30)] * 4
        first, window = warm_up(self.THRESHOLD_S), None
        run = reconfigured(self.plan, policy, FRAMEWORKS, known, first)
        while True:
            try:
                command = run.send(window)  # type: ignore[arg-type]  # None begins it
            except StopIteration as ended:
                return ended.value
            (clocked,) = command.orders
            self.ran.append(clocked.frequency_mhz.copy())
            profiled_s, _ = self.profile.lookup(self.schedule, clocked.frequency_mhz)
            timeline = Timeline(self.schedule, self._seconds(profiled_s, clocked.frequency_mhz))
            waits_s = timeline.start_s
            waits_s[:, 1:] -= timeline.end_s[:, :-1]
            units = zip(waits_s, timeline.duration_s, strict=True)
            window = window_of(
                *[
                    (
                        [[waits], [waits + self._held_up_s], [waits]],
                        [times, times + self._held_up_s, times],
                    )
                    for waits, times in units
                ]
            )

    def moves(self) -> list[str]:
        """For each unit, how its clock moved: `+` for up and `-` for down, runs as one."""
        ran = np.array([clocks.ravel() for clocks in self.ran])
        signs = np.sign(np.diff(ran, axis=0)).T
        words = ["".join("-0+"[sign + 1] for sign in own if sign) for own in signs]
        return [re.sub(r"(.)\1+", r"\1", word) for word in words]


def without_lowering(name: str, **options: Any) -> tuple[Pipeline, tuple[Plan, int, Ended]]:
    pipeline = Pipeline(**options)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sweep, "lower", lambda *arguments: {})
        return pipeline, pipeline.reconfigured(name)


@pytest.mark.parametrize("name", Pipeline.WAYS)
def test_what_was_raised_early_and_has_slack_in_the_end_is_lowered(name):
    _, (raised, *seen) = without_lowering(name)
    pipeline = Pipeline()
    made, *ended = pipeline.reconfigured(name)
    assert ended == seen
    assert "+-" in pipeline.moves()
    assert (made.frequency_mhz >= pipeline.plan.frequency_mhz).all()
    before, after = pipeline.cost(raised.frequency_mhz), pipeline.cost(made.frequency_mhz)
    assert after.iteration_time_s == pytest.approx(before.iteration_time_s)
    assert after.energy_j < 0.996 * before.energy_j
    # All together, and two looks more at the end.
    both = [clocks.tolist() for clocks in pipeline.ran]
    assert both[-1] == both[-2] == made.frequency_mhz.tolist()
    assert both[-3] == both[-4] == raised.frequency_mhz.tolist()


@pytest.mark.parametrize("name", Pipeline.WAYS)
def test_a_unit_lowered_wrongly_is_raised_again_and_left_alone(name):
    """A unit that comes down takes half as long again as the profile says."""
    highest = np.zeros((4, 16), dtype=int)

    def seconds(profiled_s: np.ndarray, clocks: np.ndarray) -> np.ndarray:
        np.maximum(highest, clocks, out=highest)
        return np.where(clocks < highest, 1.5, 1.0) * profiled_s

    pipeline = Pipeline(seconds)
    made, _, why = pipeline.reconfigured(name)
    assert why is not Ended.STEP_LIMIT
    assert "+-+" in pipeline.moves()
    assert all(re.fullmatch(r"\+?-?\+?", own) for own in pipeline.moves())
    _, (raised, *_) = without_lowering(name)
    profiled_s, _ = pipeline.profile.lookup(pipeline.schedule, made.frequency_mhz)
    now_s = Timeline(pipeline.schedule, seconds(profiled_s, made.frequency_mhz)).iteration_time_s
    assert now_s <= pipeline.cost(raised.frequency_mhz).iteration_time_s + pipeline.THRESHOLD_S


@pytest.mark.parametrize("name", Pipeline.WAYS)
@pytest.mark.parametrize("noise", [0.002, 0.02, 0.2])
def test_raising_and_lowering_end_whatever_is_measured(name, noise):
    rng = np.random.default_rng(1)
    pipeline = Pipeline(lambda profiled_s, clocks: profiled_s * rng.lognormal(0, noise, (4, 16)))
    _, _, why = pipeline.reconfigured(name)
    assert why is not Ended.STEP_LIMIT
    assert all(re.fullmatch(r"\+?-?\+?", own) for own in pipeline.moves())


def test_a_hiccup_of_one_unit_is_no_slack_of_all_others():
    _, (raised, *_) = without_lowering("balanced")
    late: list[float] = []

    def seconds(profiled_s: np.ndarray, clocks: np.ndarray) -> np.ndarray:
        if late or (clocks != raised.frequency_mhz).any():
            return profiled_s
        late.append(0.2)  # the last stage's last unit, where the end is first seen
        return profiled_s + late[0] * (np.arange(64).reshape(4, 16) == 63)

    made, *_ = Pipeline(seconds).reconfigured("balanced")
    assert late
    smooth, *_ = Pipeline().reconfigured("balanced")
    assert made.frequency_mhz.tolist() == smooth.frequency_mhz.tolist()


def test_a_replica_that_is_held_up_tells_of_no_wait_and_no_time():
    alone, pipeline = Pipeline().reconfigured("balanced"), Pipeline(held_up_s=5.0)
    made, *ended = pipeline.reconfigured("balanced")
    assert ended == [*alone[1:]]
    assert made.frequency_mhz.tolist() == alone[0].frequency_mhz.tolist()
    assert (made.policy, made.profile.interpolates) == ("envelope-balanced", True)
    assert (made.schedule, made.conditions) == (pipeline.schedule, pipeline.plan.conditions)


def test_an_iteration_that_did_not_run_whole_tells_nothing():
    pipeline = Pipeline()
    run = reconfigured(
        pipeline.plan,
        replace(RECONFIGURE_POLICIES["balanced"], max_steps=2),
        FRAMEWORKS,
        [range(1050, 1411, 30)] * 4,
        warm_up(0.004),
    )
    unknown = window_of(*[(np.full((1, 1, 16), 9.0), np.full((1, 16), np.nan))] * 4)
    first, second = next(run), run.send(unknown)
    assert np.array_equal(first.orders[0].frequency_mhz, second.orders[0].frequency_mhz)
    with pytest.raises(StopIteration) as ended:
        run.send(unknown)
    plan, *found = ended.value.value
    assert np.array_equal(plan.frequency_mhz, pipeline.plan.frequency_mhz)
    assert found == [0, Ended.STEP_LIMIT]
