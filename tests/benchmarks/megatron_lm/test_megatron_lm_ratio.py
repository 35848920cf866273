"""The ratio of times, what units predict, and energies."""

import math
import signal
import sys
from dataclasses import replace
from decimal import Decimal
from types import SimpleNamespace

import click
import numpy as np
import pytest

from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.orders.builders import split_in_place, zero_bubble
from envpipe_megatron.core.timeline import Timeline

pytest.importorskip("torch")
pytest.importorskip("megatron.core")
from benchmarks.evidence import Figure, read_rows
from benchmarks.megatron_lm import prove, ratio, unit_times
from benchmarks.megatron_lm.models import (
    ENVPIPE,
    IN_PLACE,
    ONE_F_ONE_B,
    ORDER_ARMS,
    SERIAL,
    SPLIT,
    STOCK,
    UNITS,
)
from benchmarks.megatron_lm.running import entry, rest
from benchmarks.megatron_lm.running.jobs import State
from benchmarks.megatron_lm.running.rest import RESTING
from benchmarks.megatron_lm.running.rounds import Keeper, Rounds, measured, ratio_rows
from benchmarks.megatron_lm.running.turns import Block
from benchmarks.outputs import ROWS_FILE
from envpipe_megatron.integrations.megatron.core import ForwardBackward
from envpipe_megatron.integrations.megatron.training import Training
from envpipe_megatron.integrations.torch_pipelining import AttachedPipeline
from envpipe_megatron.runtime.clocks.watch import ClockWatch
from envpipe_megatron.runtime.energy.meter import EnergyMeter
from envpipe_megatron.runtime.job.session import Session


def test_ratio_and_its_bound(state):
    arms = STOCK, ONE_F_ONE_B, ENVPIPE, UNITS
    keeper = Keeper(state, Rounds(5, 2, 25, 12), arms)
    times = [(30.0, 30.03), (31.0, 31.062), (30.5, 30.5), (30.2, 30.1698), (30.0, 30.06)]
    for number, (stock, own) in enumerate(times):
        blocks = {STOCK: stock, ONE_F_ONE_B: own, ENVPIPE: own * 1.02, UNITS: own * 1.001}
        for turn, share in ((2 * number + 1, 0.6), (2 * number + 2, 0.4)):
            for arm, time_s in blocks.items():
                # A host that was held up in each turn of one arm, which no median knows.
                median_s = blocks[STOCK] * 1.002 / 50 if arm == UNITS else time_s / 50
                block = Block(turn, share * time_s, (), median_s)
                keeper(f"ratio/gpt-pp4-m14 start 1/{arm}", block)
    keeper("ratio/gpt-pp4-m14 start 1/stock", Block(0, 5.0, (), 0.5))
    keeper("energy/envpipe", Block(1, 5.0, (), 0.5))
    found, slower, units = ratio_rows(State(state.path))
    logs = [math.log(b / a) for a, b in times]
    mean = sum(logs) / 5
    error = math.sqrt(sum((x - mean) ** 2 for x in logs) / 4 / 5)
    assert found["ratio"] == pytest.approx(math.exp(mean))
    assert found["upper"] == pytest.approx(math.exp(mean + 2.13185 * error), rel=1e-6)
    assert found["high"] == pytest.approx(math.exp(mean + 2.77645 * error), rel=1e-6)
    assert found["stock (s)"] == pytest.approx(30.2 / 50)
    assert (found["arm"], slower["arm"]) == (ONE_F_ONE_B, ENVPIPE)
    assert (found["target met"], slower["target met"]) == (True, False)
    assert 1.003 < units["upper"] < 1.005
    assert units["ratio of medians"] == pytest.approx(1.002)
    assert units["target met"]
    assert found["setting"] == "gpt-pp4-m14"
    assert not measured(state, "gpt-pp4-m22")


def test_a_report_leaves_rows_of_evidence(site, state, tmp_path):
    keeper = Keeper(state, Rounds(2, 1, 10, 12), (STOCK, UNITS))
    for turn, (arm, time_s) in enumerate(((STOCK, 5.0), (UNITS, 5.01), (UNITS, 5.0), (STOCK, 5.0))):
        block = Block(1 + turn // 2, time_s, (), time_s / 10)
        keeper(f"ratio/gpt-pp4-m14 start 1/{arm}", block)
    state.machine["gpus"] = ["NVIDIA H200, 580.95, 143771 MiB"] * 4
    prove.write_report(state, replace(site, num_gpus=4), tmp_path)
    (row,) = read_rows(tmp_path / ROWS_FILE)
    assert (row.table, row.basis, row.gpus) == ("ratio", "GPUs", "4 NVIDIA H200")
    assert row.setting == {"job": "gpt-pp4-m14", "arm": UNITS}
    assert str(row.measured["time"]).startswith("1.0010 (1.0")
    assert row.measured["stock (s)"] == Figure(Decimal("0.5"))
    assert row.command.startswith("python ")


def test_rounds_that_are_missing_are_measured_later(site, state):
    machine, rounds = replace(site, num_gpus=4), Rounds(5, 2, 25, 12)
    own, other = ratio.setting(machine), ratio.setting(machine, microbatches=22)
    first = ratio.jobs(machine, state, own, rounds)
    assert first[0].turns == (12, *[25] * 10)
    state.runs.update({job.name: {"status": "out of time"} for job in first})
    kept = {"setting": own.name, "iteration_time_s": dict.fromkeys(own.like.arms, 1.0)}
    state.rounds.extend([kept] * 3 + [{**kept, "setting": other.name}, {}])
    second = ratio.jobs(machine, state, own, rounds)
    assert second[0].turns == (12, *[25] * 4)
    assert ratio.jobs(machine, state, other, rounds)[0].turns == (12, *[25] * 8)
    assert not {job.name for job in first} & {job.name for job in second}
    state.rounds.extend([{**kept, "iteration_time_s": {STOCK: 1.0, UNITS: 1.0}}] * 2)
    assert ratio.jobs(machine, state, own, rounds)[0].turns == second[0].turns
    units = ratio.setting(machine, only=[UNITS])
    assert [job.name.split("/")[-1] for job in ratio.jobs(machine, state, units, rounds)] == []
    assert units.like.arms == (STOCK, UNITS)
    state.rounds.extend([kept] * 2)
    assert not ratio.jobs(machine, state, own, rounds)
    pair = ratio.setting(replace(site, num_gpus=2), microbatches=22)
    (mapping,) = {job.num_ranks for job in ratio.jobs(site, state, pair, rounds)}
    assert (pair.name, mapping) == ("gpt-pp2-m22", 2)


def test_a_job_in_which_envpipe_rests_is_compared_with_itself(site, state):
    machine, rounds = replace(site, num_gpus=4), Rounds(3, 1, 25, 12)
    resting = ratio.setting(machine, like="gpt-pp4vp2", rests=True)
    (job,) = ratio.jobs(machine, state, resting, rounds)
    assert (job.rests, job.turns) == (True, (12, *[25] * 6))
    keeper = Keeper(state, rounds, resting.arms)
    for turn, time_s in enumerate((90.0, 25.0, 25.1, 25.3, 25.2, 25.4, 25.5)):
        keeper(job.name, Block(turn, time_s, (), time_s / 25))
    (row,) = ratio_rows(state)
    assert (row["setting"], row["arm"]) == ("gpt-pp4vp2-m16-resting", UNITS)
    assert row["of the rounds"] == "1.0040, 1.0040, 1.0039"
    assert row["stock (s)"] == pytest.approx(25.2 / 25)
    assert not ratio.jobs(machine, state, resting, rounds)
    assert ratio.jobs(machine, state, ratio.setting(machine, like="gpt-pp4vp2"), rounds)
    assert row["target met"] is None
    with pytest.raises(click.UsageError, match="has no arm units"):
        ratio.setting(machine, like="llama-pp4", rests=True)
    another = ratio.setting(machine, like="gpt-pp4vp2", only=[ENVPIPE], rests=True)
    (job,) = ratio.jobs(machine, state, another, rounds)
    assert job.name.endswith(f"-resting start 1/{ENVPIPE}")
    for several in ([ENVPIPE, UNITS], [SERIAL]):
        with pytest.raises(click.UsageError, match="one arm of its own"):
            ratio.setting(machine, like="gpt-pp4vp2", only=several, rests=True)


def test_rounds_in_which_a_host_was_held_up_do_not_count(state):
    arms = RESTING, UNITS
    keeper = Keeper(state, Rounds(10, 1, 1, 6), arms)
    for number in range(10):
        own_s = 1.001 + 1e-4 * number
        own_s, rested_s = {3: (1.8, 1.0), 6: (own_s, 1.5)}.get(number, (own_s, 1.0))
        turns = (own_s, rested_s) if number % 2 else (rested_s, own_s)
        for turn, time_s in enumerate(turns, 2 * number + 1):
            keeper("ratio/gpt-pp2-m14-resting start 1/units", Block(turn, time_s, (), time_s))
    (row,) = ratio_rows(state)
    assert row["ratio"] == pytest.approx(1.02, abs=0.01)
    assert row["upper"] > 1.1
    assert row["ratio of medians"] == pytest.approx(1.0015, abs=1e-4)
    assert row["ratio of medians"] < row["upper of medians"] < 1.002


def test_a_job_ends_well_when_its_turns_are_over_and_says_so_if_none_was_had():
    returned = entry._asking_to_exit(({"loss": 1.0}, 0, False, False, 0, 1.5, None))
    assert returned == ({}, 0, False, True, 0, 1.5, None)
    with pytest.raises(TimeoutError, match="No time was left for this job's first turn"):
        entry._asking_to_exit(())


class Turns(entry.Turns):
    """Of two iterations each; nobody else takes turns."""

    def __init__(self):
        self._boundaries, self.begun = [0, 2, 4, 6, 8, 10], 0


@pytest.fixture
def calls(monkeypatch):
    """Return what a job's parts are called for, while they can be replaced."""
    made = []

    def say(name):
        return lambda self, *_, **__: made.append(name)

    for of, name in (
        (Session, "begin_step"),
        (Session, "end_step"),
        (Session, "pause"),
        (EnergyMeter, "_try_sample"),
        (ClockWatch, "sample"),
        (Training, "_follow_units"),
        (ForwardBackward, "__call__"),
        (AttachedPipeline, "_step"),
        (AttachedPipeline, "pause"),
    ):
        monkeypatch.setattr(of, name, say(name))
    before_s = sys.getswitchinterval()
    yield made
    sys.setswitchinterval(before_s)


WORKING = ["begin_step", "_follow_units", "_try_sample", "sample", "end_step"]


@pytest.mark.parametrize("own_s", [1e-4, 5e-3])
def test_megatron_is_alone_while_envpipe_rests(calls, own_s):
    """A step is begun before its turn is, and closed between that turn and a rest.

    A job whose thread sets the clock makes Python's switch interval shorter at its first request.
    """
    turns, session = Turns(), object.__new__(Session)
    told: list[object] = []
    process = SimpleNamespace(send_signal=told.append)
    meter = SimpleNamespace(_reader=SimpleNamespace(_process=process))
    session.parts = SimpleNamespace(meter=meter)  # type: ignore[assignment]
    job = object.__new__(Training)
    job._framework_function = lambda **given: calls.append(given)
    between = rest.let_megatron_rest(
        lambda: rest.rests_in(turns.turn), lambda: rest.rests_in(turns.next_turn)
    )
    by_iteration, intervals_s = [], []
    for number in range(10):
        calls.clear()
        session.begin_step(number)
        turns.begun += 1
        Training._follow_units(job, number=number)
        if number == 0:
            sys.setswitchinterval(own_s)
        intervals_s.append(sys.getswitchinterval())
        EnergyMeter._try_sample(None)
        ClockWatch.sample(None)
        session.end_step()
        assert "pause" not in calls
        between()
        by_iteration.append([*calls])
    assert told == [signal.SIGSTOP, signal.SIGCONT, signal.SIGSTOP]
    assert by_iteration[:4] == [WORKING, [*WORKING, "pause"], [{"number": 2}], [{"number": 3}]]
    assert by_iteration[4:] == [WORKING, WORKING, WORKING, [*WORKING, "pause"], *by_iteration[8:]]
    assert by_iteration[8:] == [[{"number": 8}], [{"number": 9}]]
    as_set = [own_s] * 2 + [5e-3] * 2 + [own_s] * 4 + [5e-3] * 2
    assert intervals_s == pytest.approx(as_set, abs=1.1e-6)  # it is cut to whole us


def test_torchtitan_is_alone_while_envpipe_rests(calls):
    turns, pipeline = Turns(), object.__new__(AttachedPipeline)
    pipeline._begin_again, pipeline._torch_step = print, calls.append
    rest.let_torchtitan_rest(lambda: rest.rests_in(turns.turn))
    for number in range(6):
        turns.begun += 1
        AttachedPipeline._step(pipeline, number)
        pipeline._begin_again = None if number == 2 else print
    assert calls == ["_step", "_step", "pause", 2, 3, "_step", "_step"]


#: Forward and backward of each stage, the boundaries' latencies, and what clocks differ by; s.
UNITS_S, HOPS_S, OFF_S = np.array([[3.0, 6.0], [4.0, 8.0], [2.0, 5.0]]), (0.25, 0.5), (0, 0.1, -0.2)
#: Forward, and both parts of a backward.
PARTS_S = UNITS_S[:, [0, 1, 1]] * (1.0, 0.6, 0.45)


def _recorded(schedule, factor):
    """Return what ranks of a pipeline report of three iterations, each later and slower."""
    kind = schedule.places // schedule.num_microbatches
    unit_s = np.take_along_axis(PARTS_S if schedule.split else UNITS_S, kind, axis=1) * factor
    made = [Timeline(schedule, slower * unit_s, HOPS_S) for slower in (0.9, 1.0, 1.7)]
    return [
        {
            "executed": schedule.labels()[stage],
            "times": [
                (
                    100.0 * n - 0.5 * stage + OFF_S[stage],
                    *(
                        (times_s[stage] + 0.5 * stage).tolist()
                        for times_s in (one.start_s, one.end_s)
                    ),
                )
                for n, one in enumerate(made)
            ],
        }
        for stage in range(3)
    ]


def test_the_times_of_1f1bs_units_predict_the_other_order(state):
    schedules = {
        ONE_F_ONE_B: builders.one_f_one_b(3, 6),
        ENVPIPE: builders.envpipe(3, 6, (2, 1, 0)),
        IN_PLACE: split_in_place(builders.one_f_one_b(3, 6), 6),
        SPLIT: zero_bubble(3, 6),
    }
    times = {
        arm: unit_times.median_times(_recorded(schedule, 1.25 if arm == ENVPIPE else 1.0))
        for arm, schedule in schedules.items()
    }
    assert unit_times.latencies_s(schedules[ONE_F_ONE_B], times[ONE_F_ONE_B]) == pytest.approx(
        HOPS_S
    )
    plain, own, *parts = unit_times.prediction_rows(times, schedules)
    for row in parts:  # by what both parts take in place
        assert row["error (%)"] == pytest.approx(0, abs=1.0)
    assert plain["error (%)"] == pytest.approx(0, abs=1.0)  # by the clocks' difference alone
    without = own["measured (s)"] / 1.25
    assert without < own["predicted (s)"] < 1.02 * without  # latencies are not longer
    assert own["planned order"]
    for row in unit_times.unit_rows(times, schedules):
        stage = row["stage"]
        assert row["F, 1F1B (ms)"] == pytest.approx(1e3 * UNITS_S[stage, 0])
        assert row["B, EnvPipe (ms)"] == pytest.approx(1250 * UNITS_S[stage, 1])
        assert row["F longer (%)"] == pytest.approx(25)
    assert unit_times.median_times([{"times": []}]) is None

    for number, name in enumerate(("gpt-pp4-m6 start 1", "gpt-pp4-m6 start 2")):
        for arm in (*ORDER_ARMS, SPLIT, IN_PLACE):
            run = {"status": "ok", "times": times.get(arm)}
            state.runs[f"ratio/{name}/{arm}"] = run | ({"status": "hung"} if number else {})
    rows = ratio.rows_of_units(state, lambda found, orders: [{"same": found == times}])
    assert rows == [{"start": "gpt-pp4-m6 start 1", "same": True}]


def test_energies_of_whole_intervals_are_compared(state):
    lines = [
        {"iteration": n, "megatron_j": m, "envpipe_j": e, "iteration_ms": 600.0}
        for n, m, e in ((1, 900.0, 1.0), (10, 500.0, 1.0), (20, 100.0, 100.5), (30, 102.0, 102.5))
    ]
    state.runs[prove.ENERGY_RUN] = {"status": "ok", "energies": lines}
    (found,) = prove.energy_rows(state)
    assert found["difference (%)"] == pytest.approx(100 / 202)
    assert found["duration (s)"] == pytest.approx(12.0)
    assert found["iterations"] == 20
