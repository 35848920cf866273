"""Measured runs and their prediction, on workload folders with known conditions."""

import csv
import json
import random

import numpy as np
import pytest
from core_cases import like_a_gpu

from benchmarks.planner.measured_runs import validate
from envpipe_megatron.core.conditions import Conditions
from envpipe_megatron.core.kinds import WHOLE
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.plan import Plan

STAGES, MICROBATCHES = 4, 12
CLOCKS = (1400, 1300, 1200, 1100, 1000)
SCHEDULE = builders.one_f_one_b(STAGES, MICROBATCHES)
KNOWN_POWER_W = 80.0


PROFILE = like_a_gpu(STAGES, CLOCKS)


def _plans(num_runs, clocks):
    """The all-maximum plan, then a random clock for each stage and kind of each run."""
    rng = random.Random(0)

    def stage(choose):
        return {kind.value: [choose(clocks)] * MICROBATCHES for kind in WHOLE}

    others = [[stage(rng.choice) for _ in range(STAGES)] for _ in range(num_runs - 1)]
    return [[stage(max)] * STAGES, *others]


def _write_folder(folder, conditions, *, num_runs=16, clocks=CLOCKS, gpus=1):
    """A workload whose runs took what the evaluator says under the conditions."""
    plans = _plans(num_runs, clocks)
    rows = []
    for number, plan in enumerate(plans):
        frequency_mhz = np.array(
            [
                [plan[stage][unit.kind.value][unit.microbatch] for unit in order]
                for stage, order in enumerate(SCHEDULE.stages)
            ]
        )
        measured = Plan("measured", SCHEDULE, frequency_mhz, PROFILE, conditions)
        rows.append(
            {
                "system": "made-up",
                "plan": number,
                "iteration_time_s": measured.cost.iteration_time_s,
                "energy_j": measured.cost.energy_j,
                "ranks": STAGES * gpus,
            }
        )
    meta = {
        "num_stages": STAGES,
        "num_microbatches": MICROBATCHES,
        "schedule": "1f1b",
        "blocking_power_w": KNOWN_POWER_W,
    }
    folder.mkdir()
    (folder / "meta.json").write_text(json.dumps(meta))
    names = {f"made-up-{number}": plan for number, plan in enumerate(plans)}
    (folder / "plans.json").write_text(json.dumps(names))
    (folder / "profile.csv").write_text(PROFILE.to_csv())
    _write_runs(folder, rows)
    return folder


def _write_runs(folder, rows):
    with (folder / "runs.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def _read_runs(folder):
    with (folder / "runs.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def _conditions(**given):
    return Conditions(**{"blocking_power_w": (KNOWN_POWER_W,) * STAGES} | given)


@pytest.mark.parametrize(
    "latency_s", [(0.0, 0.0, 0.0), (0.0, 0.03, 0.0)], ids=["tail", "one slow hop"]
)
def test_each_half_finds_the_conditions_of_the_runs(tmp_path, latency_s):
    true = _conditions(
        blocking_power_w=(95.0,) * STAGES,
        latency_s=latency_s,
        tail_time_s=(0.3,) * STAGES,
    )
    validation = validate(_write_folder(tmp_path / "w", true))
    errors = validation.errors
    assert errors.time_unfitted > 5
    assert errors.energy_unfitted > 2
    assert errors.time_held_out < 0.1
    assert errors.energy_held_out < 0.1
    for fitted in validation.fitted:
        assert fitted.latency_s == pytest.approx(latency_s, abs=1e-3)
        assert fitted.tail_time_s == pytest.approx(true.tail_time_s, abs=5e-3)
        assert fitted.blocking_power_w == pytest.approx(true.blocking_power_w, rel=0.01)


def test_noise_is_not_explained_by_latencies(tmp_path):
    folder = _write_folder(tmp_path / "w", _conditions(tail_time_s=(0.3,) * STAGES), num_runs=24)
    rng = np.random.default_rng(1)
    rows = _read_runs(folder)
    for row in rows:
        row["iteration_time_s"] = float(row["iteration_time_s"]) * rng.normal(1, 0.003)
    _write_runs(folder, rows)
    validation = validate(folder)
    assert all(set(fitted.latency_s) == {0.0} for fitted in validation.fitted)
    assert validation.errors.time_held_out < 0.6


def test_a_run_has_no_part_in_its_own_prediction(tmp_path):
    folder = _write_folder(tmp_path / "w", _conditions(tail_time_s=(0.3,) * STAGES))
    before = validate(folder).predictions
    rows = _read_runs(folder)
    for row in rows[1::2]:
        row["iteration_time_s"] = 1.5 * float(row["iteration_time_s"])
        row["energy_j"] = 1.5 * float(row["energy_j"])
    _write_runs(folder, rows)
    after = validate(folder).predictions
    assert [p.half for p in after] == [0, 1] * 8
    assert [p.held_out for p in after[1::2]] == [p.held_out for p in before[1::2]]
    assert all(
        new.held_out.iteration_time_s > old.held_out.iteration_time_s
        for new, old in zip(after[::2], before[::2], strict=True)
    )
