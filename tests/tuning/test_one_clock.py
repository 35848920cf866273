"""Which clock is kept for a whole job, how few are measured, and when it is kept no longer."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from window_reports import report_of

from envpipe_megatron.core.kinds import Kind
from envpipe_megatron.core.orders import builders
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.formats.energy import Phase
from envpipe_megatron.formats.steps import StepEnergy
from envpipe_megatron.formats.wishes import read_power_budget
from envpipe_megatron.gpu.presets import load_preset, override_for, sweep_range
from envpipe_megatron.runtime.job.options import JobOptions
from envpipe_megatron.tuning.commands import Window
from envpipe_megatron.tuning.one_clock import ONE_CLOCK_STEP, ClockSearch, OneClock

#: Time in s and energy in J of a step at a clock in MHz.
Model = Callable[[int], tuple[float, float]]


def model_of(preset: str) -> tuple[list[int], Model]:
    """The clocks of a kind of GPU, and steps on it: a forward, and a backward twice as long."""
    gpu = load_preset(preset)
    clocks = sweep_range(gpu.supported_frequencies_mhz, override_for(gpu.gpu), ONE_CLOCK_STEP)

    def step(clock: int) -> tuple[float, float]:
        units = [
            (gpu.unit_time_s(kind.value, clock, time_s), gpu.busy_power_w(kind.value, clock))
            for kind, time_s in ((Kind.FORWARD, 1.0), (Kind.BACKWARD, 2.0))
        ]
        return sum(time_s for time_s, _ in units), math.fsum(t * watts for t, watts in units)

    return list(clocks), step


def found(clocks: list[int], model: Model, allowed: float) -> tuple[int, list[int]]:
    """The clock that is kept, and those that were measured."""
    search = ClockSearch(clocks, allowed)
    measured: list[int] = []
    while (clock := search.next_mhz()) is not None:
        measured.append(clock)
        search.windows[clock].append(None)
        time_s, energy_j = model(clock)
        search.tried[clock] = StepEnergy(5 * measured.count(clock), time_s, 0.0, energy_j, 0.0)
    return search.best_mhz(), measured


@pytest.mark.parametrize("allowed", [0.0, 1.0, 3.0, 5.0, 20.0, 1000.0])
@pytest.mark.parametrize("preset", ["a100-sxm", "a100-pcie", "a40", "h100", "v100"])
def test_the_best_clock_is_found_with_few_measurements(preset, allowed):
    clocks, model = model_of(preset)
    top_s = model(clocks[0])[0]
    allowed_s = top_s * (1 + allowed / 100) * (1 + 1e-9)
    best, measured = found(clocks, model, allowed)
    fast_enough = [clock for clock in clocks if model(clock)[0] <= allowed_s]
    least_j = min(model(clock)[1] for clock in fast_enough)
    assert model(best)[1] == pytest.approx(least_j, rel=1e-9)
    assert best in fast_enough
    assert measured[0] == clocks[0]
    assert len(measured) <= 16
    # At most a sixth of the highest clock below what is fast enough.
    assert min(measured) >= min(fast_enough) - 0.2 * clocks[0]
    if best != clocks[0]:
        assert measured[-2:] == [clocks[0], best]
        assert measured.count(best) == 2


STAGES, REPLICAS = 2, 3
CLOCKS = (1400, 1300, 1200, 1100)
#: At each clock the time of a step in s, and the power of a GPU in W.
Costs = dict[int, tuple[float, float]]
SLOW_AT_1100: Costs = {
    1400: (0.5, 400.0),
    1300: (0.5, 350.0),
    1200: (0.5, 300.0),
    1100: (0.6, 200.0),
}


class Job:
    """Runs what a tuner says, and tells it what steps take, by `costs`.

    Attributes:
        metered: [STAGES, REPLICAS] whose meters work.
        held_up: so many times as long as the others the second step of a window takes.
        kept: what the tuner had kept.
    """

    def __init__(self, costs: Costs, budget: float | str | None = None, **options: Any) -> None:
        self.costs, self.metered = costs, np.ones((STAGES, REPLICAS), bool)
        self.held_up, self.wishes = 1.0, read_power_budget(budget)
        self.kept: list[tuple[int, Mapping[int, StepEnergy]]] = []
        given: dict[str, Any] = {
            "slowdown_percent": 1.0,
            "steps_at_clock": JobOptions().steps_at_clock,
            "follows": True,
            "found_mhz": None,
            "keep": lambda *kept: self.kept.append(kept),
        }
        order = builders.whole_iteration(STAGES)
        tuner = OneClock(order, CLOCKS, **{**given, **options})
        self._run = tuner.run(self._window(CLOCKS[0], 3))
        self.command = next(self._run)
        self._billed = ""

    @property
    def clock_mhz(self) -> int:
        """The clock of the command that runs."""
        (clocked,) = self.command.orders
        assert clocked.frequency_mhz.shape == (STAGES, 1)
        (clock,) = set(clocked.frequency_mhz.ravel().tolist())
        return clock

    def go_on(self, count: int = 1) -> list[tuple[Phase, int, int]]:
        """Run commands: phase, clock and iterations to settle of each."""
        ran = []
        for _ in range(count):
            ran.append((self.command.phase, self.clock_mhz, self.command.settle))
            self.command = self._run.send(self._window(self.clock_mhz, self.command.iterations))
            self._billed = self.command.billed or self._billed
        return ran

    def until(self, phase: Phase) -> None:
        """Run commands up to one of a phase."""
        while self.command.phase is not phase:
            self.go_on()

    def ask(self, budget: float | str | None) -> None:
        """An operator asks for a power budget."""
        self.wishes = read_power_budget(budget)

    def bill(self) -> list[str]:
        """Return what the bill says."""
        return self._billed.splitlines()

    def _window(self, clock_mhz: int, iterations: int) -> Window:
        step_s, power_w = self.costs[clock_mhz]
        steps_s = np.full((REPLICAS, iterations), step_s)
        steps_s[:, -1] = np.nan
        steps_s[:, 1] *= self.held_up
        unit_s, ends_s = np.full((REPLICAS, 1), step_s), np.full((REPLICAS, iterations), step_s)
        report = report_of(unit_s, ends_s, steps_s)
        powers = np.where(self.metered[..., np.newaxis], (power_w, 1.0), np.nan)
        stages = (replace(report, power_w=of_stage) for of_stage in powers)
        return Window(tuple(stages), self.wishes)


@pytest.fixture
def steady() -> Job:
    """A job that has found 1200 MHz."""
    job = Job(SLOW_AT_1100)
    job.until(Phase.STEADY)
    return job


KEPT = [(Phase.STEADY, 1200, 1000), (Phase.BASELINE, 1400, 1)]


def test_a_clock_that_is_found_is_kept_and_compared_now_and_then(steady):
    choice, *clocks = steady.command.billed.splitlines()
    assert choice == "One clock for the whole job: 1200 MHz; at most 1 % slower was allowed"
    assert [int(line.split(" MHz: ")[0]) for line in clocks] == [*CLOCKS]
    assert clocks[2].split(": ", 1)[1] == (
        "0.5000 s and 150.0 J a step on an average GPU, 0.00 +- 0.00 % less time, within "
        "noise, 25.00 +- 0.18 % less energy"
    )
    assert steady.command.note == steady.command.billed
    ((clock, steps),) = steady.kept
    assert (clock, list(steps)) == (1200, [*CLOCKS])
    assert steps[1200].iterations == 10, "of two rounds"
    # 0.5 s of 1 W, on six GPUs twice.
    assert steps[1200].metering_uncertainty_j == pytest.approx(0.5 / math.sqrt(12))
    assert steady.go_on(4) == KEPT * 2
    assert len(steady.kept) == 1


def test_a_power_budget_is_kept_by_the_highest_clock_that_keeps_it():
    job = Job({clock: (0.5 if clock > 1200 else 600 / clock, clock / 4) for clock in CLOCKS})
    job.until(Phase.STEADY)
    kept = job.clock_mhz
    for budget, clock in (("88%", 1200), (320.0, 1200), (280.0, 1100), ("95%", 1300)):
        job.ask(budget)
        job.go_on(3)
        assert job.clock_mhz == min(clock, kept)
        assert job.command.settle <= 1, "it hears of the next one soon"
    job.ask(100.0)
    job.go_on(3)
    assert job.clock_mhz == CLOCKS[-1]
    assert job.command.power["exceeded_s"] > 0
    (short,) = (line for line in job.bill() if "reachable" in line)
    job.ask(300.0)
    job.go_on(3)
    assert f"{short}, until it was changed" in job.bill()
    job.ask(90.0)
    job.go_on(3)
    assert any(line.startswith("The power budget of 90.0 W") for line in job.bill()), (
        "the next, too"
    )
    job.ask(None)
    job.go_on()
    assert job.bill()[-1].endswith("until it was changed")
    assert (job.clock_mhz, job.command.settle) == (kept, 1000)
    assert "lifted" in job.command.note


@pytest.mark.parametrize(("step_s", "steps", "settle"), [(0.5, 5, 1000), (0.02, 50, 5000)])
def test_measurements_last_long_enough_and_are_seldom(step_s, steps, settle):
    job = Job({clock: (step_s, float(clock)) for clock in CLOCKS})
    assert job.command.iterations == steps + 1
    job.until(Phase.STEADY)
    assert (job.clock_mhz, job.command.settle) == (1100, settle)


def test_the_highest_clock_is_compared_with_none():
    job = Job({clock: (700 / clock, 300.0) for clock in CLOCKS})
    job.until(Phase.STEADY)
    assert job.go_on(3) == [(Phase.STEADY, 1400, 1000)] * 3


def test_a_clock_that_was_found_before_waits_with_no_power_budget():
    job = Job(SLOW_AT_1100, "70%", found_mhz=1200)
    budget, choice = job.command.note.splitlines()
    assert budget == "power budget: 70%; full clock is not metered yet"
    assert choice.endswith("1200 MHz, as found before")
    assert job.go_on(4)[0] == (Phase.BASELINE, 1400, 1)
    assert job.clock_mhz == 1100


def test_what_speaks_against_a_clock_must_do_so_twice(steady):
    steady.costs = {**SLOW_AT_1100, 1200: (0.51, 300.0)}
    assert steady.go_on(2) == KEPT
    assert (steady.command.phase, steady.command.settle) == (Phase.STEADY, 1)
    steady.costs = {**SLOW_AT_1100, 1200: (0.499, 300.0)}
    steady.go_on(2)
    assert steady.command.settle == 1000
    steady.costs = {**SLOW_AT_1100, 1200: (0.51, 300.0)}
    steady.go_on(4)
    assert steady.command.phase is Phase.PROFILE
    why, search = steady.command.note.splitlines()
    assert why.startswith("one clock: not right any more, 1200 MHz: 0.5100 s and 153.0 J a step")
    assert search == "one clock: measuring 1400 MHz"
    steady.until(Phase.STEADY)
    assert (steady.clock_mhz, steady.kept[-1][0]) == (1300, 1300)


def test_a_step_that_was_held_up_says_nothing_of_its_clock(steady):
    steady.held_up = 1.5
    assert steady.go_on() == KEPT[:1]
    steady.held_up = 1.0
    assert steady.go_on(2) == [KEPT[1], KEPT[0]]


def test_a_gpu_without_a_meter_is_like_the_others_of_its_stage():
    job = Job(SLOW_AT_1100)
    job.metered[1, :2] = False
    job.until(Phase.STEADY)
    ((_, steps),) = job.kept
    assert steps[1200].energy_j == pytest.approx(150.0)
    # Twice three GPUs that count for a sixth, and one that counts for a half.
    error_j = 0.5 * math.sqrt((3 / 36 + 1 / 4) / 2)
    assert steps[1200].metering_uncertainty_j == pytest.approx(error_j)


def test_without_a_meter_on_a_stage_no_clock_is_found():
    job = Job(SLOW_AT_1100)
    job.metered[1] = False
    with pytest.raises(EnvPipeError, match="energy counter failed while clocks were measured"):
        job.go_on()


def test_where_a_meter_fails_later_times_tell_whether_a_clock_is_right(steady):
    steady.metered[:] = False
    assert steady.go_on(4) == KEPT * 2
    steady.costs = {**SLOW_AT_1100, 1200: (0.51, 300.0)}
    steady.go_on(4)
    assert "1200 MHz: 0.5100 s and unknown energy a step" in steady.command.note


def test_in_a_dry_run_the_highest_clock_is_kept():
    job = Job(SLOW_AT_1100, follows=False)
    job.until(Phase.STEADY)
    assert job.kept[0][0] == job.clock_mhz == 1400
    assert "a dry run changes no clock" in job.command.billed
