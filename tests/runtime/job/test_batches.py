"""Jobs of ranks that plan for themselves: batches that grow or shrink, and the closed loop."""

import json
import re
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import step_ranks
from energy_lines import bill_of_ranks
from presets import preset_profile

from envpipe_megatron.core.conditions import known_conditions
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.plan import Plan, read_plan
from envpipe_megatron.core.profile import Profile, read_profile
from envpipe_megatron.formats.bill import Bill
from envpipe_megatron.formats.energy import Phase, read_energy_logs, split_phase
from envpipe_megatron.policies.planner import make_plan
from envpipe_megatron.policies.request import PlanRequest
from envpipe_megatron.report.run_folder import read_run_folder
from envpipe_megatron.runtime.execution.stage_run import constant_order
from envpipe_megatron.runtime.job import iterations
from envpipe_megatron.runtime.job.options import JobOptions
from envpipe_megatron.runtime.job.parts import PhaseParts, SessionState

pytestmark = pytest.mark.xdist_group("pipeline")

WARMUP = 3  # of `step_ranks.config`
#: More steps than a profile takes.
PROFILE = 14
FILES = {2: "plan-m2.json", 3: "plan-m3.json", 4: "plan.json"}


def planned(profile: Profile, count: int) -> Plan:
    order = builders.one_f_one_b(3, count)
    conditions = known_conditions(profile)
    request = PlanRequest(count, policy="optimal", conditions=conditions, order=order)
    return make_plan(profile, request).plan


def phases(told: dict[str, Any], counts: list[int], count: int) -> list[str]:
    return [phase for (phase, _), of in zip(told["steps"], counts, strict=True) if of == count]


def test_each_size_has_its_plan_and_a_restart_finds_it(three_ranks, tmp_path):
    # Cut short in its warm-up, cut short in its profile, profiled, and then each size once more.
    counts = [2] * 2 + [3] * (WARMUP + 4) + [2] * (WARMUP + PROFILE) + [3] * 2 + [4] * (WARMUP + 2)
    counts += [2, 3, 4, 2]
    ranks = three_ranks.run(step_ranks.train_kept, tmp_path, counts, {})
    profile = read_profile(tmp_path / "output" / "profile.csv")
    plans = {count: planned(profile, count) for count in FILES}
    for stage, told in enumerate(ranks):
        assert [phase for phase, _ in told["steps"]] == [phase for phase, _ in ranks[0]["steps"]]
        assert told["profile"].to_csv() == profile.to_csv()
        for count, most_warm in ((2, WARMUP), (3, WARMUP + 2), (4, WARMUP)):
            own = phases(told, counts, count)
            assert own.count("warm-up") == most_warm
            assert own[-1] == "steady"
        assert phases(told, counts, 3).count("profile") == 4
        assert "profile" not in phases(told, counts, 4)
        for (phase, clocks), count in zip(told["steps"], counts, strict=True):
            if phase == "warm-up":
                assert set(clocks) == {1410}
            elif phase == "steady":
                assert clocks == tuple(plans[count].frequency_mhz[stage])
        assert [phase for phase, _ in told["steps"][-4:]] == ["steady"] * 4
    assert all(len(set(plan.frequency_mhz.ravel().tolist())) > 1 for plan in plans.values())

    output = tmp_path / "output"
    kept = {name: (output / name).read_bytes() for name in (*FILES.values(), "profile.csv")}
    for count, name in FILES.items():
        found = read_plan(output / name, profile)
        assert (found.frequency_mhz == plans[count].frequency_mhz).all()
    job = json.loads((output / "job.json").read_text())
    assert set(job["baselines"]) == {"", "m2", "m3"}

    again = [3] * 8 + [4] * 8 + [2] * 8
    for stage, told in enumerate(three_ranks.run(step_ranks.train_kept, tmp_path, again, {})):
        for place, count in enumerate((3, 4, 2)):  # plans are made again, from the same profile
            own = told["steps"][8 * place : 8 * place + 8]
            assert [phase for phase, _ in own].count("warm-up") == 2
            assert "profile" not in [phase for phase, _ in own]
            assert own[-1] == ("steady", tuple(plans[count].frequency_mhz[stage]))
        before = {name: b.mean for name, b in ranks[stage]["baselines"].items()}
        assert {name: b.mean for name, b in told["baselines"].items()} == before
    assert {name: (output / name).read_bytes() for name in kept} == kept


def test_steps_are_compared_with_the_baseline_of_their_size(three_ranks, tmp_path):
    counts = [2] * (WARMUP + PROFILE) + [4] * (WARMUP + 3) + [2] * 2
    ranks = three_ranks.run(step_ranks.train_kept, tmp_path, counts, {})
    told = ranks[0]
    times_s = {name: baseline.mean.time_s for name, baseline in told["baselines"].items()}
    assert 1.3 < times_s[""] / times_s["m2"] < 2
    steady = [
        (count, report)
        for count, (phase, _), report in zip(counts, told["steps"], told["reports"], strict=True)
        if phase == "steady"
    ]
    # The baseline is known one step later, when the counter has been seen after its end.
    assert [count for count, report in steady if report.saved is None] == [4]
    for _, report in steady:
        if report.saved is not None:
            assert report.saved.saving_percent > 3
            assert abs(report.saved.slowdown_percent) < 8  # steps are of whole 0.1 s
    summary = bill_of_ranks(rank["sums"] for rank in ranks).comparison_facts()
    assert set(summary["other_batches"]) == {"m2"}
    for compared in (summary["comparison"], summary["other_batches"]["m2"]):
        assert compared["saving_percent"] > 3
        assert abs(compared["slowdown_percent"]) < 8
    # The log has them apart, and so has whoever reads it.
    logs = read_energy_logs([tmp_path / "output" / "energy.jsonl"])
    sizes = {split_phase(window.phase)[1] for window in logs.windows}
    assert sizes == {"", "m2"}
    bill = Bill(logs.lines)
    in_bill, in_log = bill.comparison(), summary["comparison"]
    assert in_bill.saving_percent == pytest.approx(in_log["saving_percent"], abs=0.1)
    assert in_bill.slowdown_percent == pytest.approx(in_log["slowdown_percent"])
    assert bill.steps("steady").iterations == 3
    assert bill.steps("warm-up m2").iterations == WARMUP
    bill.facts |= {"tokens_per_iteration": 100}
    assert set(bill.per_unit()) == {"iteration"}
    folder = read_run_folder(tmp_path / "output")
    assert folder.plan is not None
    assert folder.plan.schedule.num_microbatches == 4


def test_a_plan_of_the_users_is_for_the_full_batch(three_ranks, tmp_path):
    profile = preset_profile("a100-sxm", 3, step_ranks.TIMES_S, (1305, 1200, 1095))
    mine = planned(profile, 4)
    clocks = np.full_like(mine.frequency_mhz, 1200)
    mine = replace(mine, frequency_mhz=clocks, energy_lower_bound_j=None)
    files = {"profile": tmp_path / "mine.csv", "plan": tmp_path / "plan_mine.json"}
    profile.write(files["profile"])
    mine.write(files["plan"])
    counts = [2] * (WARMUP + 1) + [4] * (WARMUP + 1)
    of_two_mhz = planned(profile, 2).frequency_mhz
    for stage, told in enumerate(
        three_ranks.run(step_ranks.train_kept, tmp_path, counts, {}, files)
    ):
        assert [phase for phase, _ in told["steps"]] == [*["warm-up"] * WARMUP, "steady"] * 2
        of_two, of_four = told["steps"][WARMUP], told["steps"][-1]
        assert of_two[1] == tuple(of_two_mhz[stage])
        assert set(of_four[1]) == {1200}


def test_a_closed_loop_knows_sizes_that_take_turns(three_ranks, tmp_path):
    """Its probes may be apart, so what one size has learnt is not lost to another."""
    counts = [4, 2] * 16
    ranks = three_ranks.run(step_ranks.train_kept, tmp_path, counts, {}, {"sweep": False})
    for told in ranks:
        for count in (2, 4):
            own = phases(told, counts, count)
            assert own[-1] == "steady"
            assert own == sorted(own, key=list(dict.fromkeys(own)).index)


@pytest.mark.parametrize(("swept", "begun"), [(True, [4, 2, 4]), (False, [4, 2])])
def test_what_another_size_interrupts_goes_on_unless_it_is_a_sweep(monkeypatch, swept, begun):
    own = builders.one_f_one_b(2, 4)
    order = constant_order(Phase.PROFILE, own, 1410)
    found = []

    def run_phases(parts):
        found.append(parts.num_microbatches)
        while True:
            yield order

    monkeypatch.setattr(iterations, "run_phases", run_phases)
    parts = dict.fromkeys((field.name for field in fields(PhaseParts)), None)
    # While a plan is being made, there is a profile.
    known: Any = None if swept else "a profile"
    state = SessionState(profile=known)
    parts |= {"state": state, "options": JobOptions(type="baseline")}
    parts["gpu"] = SimpleNamespace(supported_frequencies_mhz=(1410,))
    parts["folder"] = SimpleNamespace(path=None)
    job = PhaseParts(**parts)
    batches = iterations.Batches(job, lambda facts: None)
    for count in (4, 2, 4):
        own = builders.one_f_one_b(1, count)
        assert batches.next_order(None, count, None, own) is order
    assert found == begun


LOOP = {"sweep": False}


def test_ranks_turn_to_plans_together_and_a_restart_looks_at_no_clock_twice(three_ranks, tmp_path):
    ranks = three_ranks.run(step_ranks.train_kept, tmp_path, [4] * 24, {}, LOOP)
    phases = [phase for phase, _ in ranks[0]["steps"]]
    assert list(dict.fromkeys(phases)) == ["warm-up", "profile", "reconfigure", "steady"]
    profile = read_profile(tmp_path / "output" / "profile.csv")
    plan = read_plan(tmp_path / "output" / "plan.json", profile)
    assert plan.cost.saving_percent(plan.baseline.cost) > 2
    assert plan.cost.slowdown_percent(plan.baseline.cost) < 0.5
    for stage, told in enumerate(ranks):
        assert [phase for phase, _ in told["steps"]] == phases
        *_, before, last = (clocks for _, clocks in told["steps"])
        planned = tuple(plan.frequency_mhz[stage].tolist())
        assert planned in (before, last)  # one of them may look at the highest clock
        assert all(mhz >= own_mhz for mhz, own_mhz in zip(last, planned, strict=True))
        assert told["profile"].to_csv() == profile.to_csv()
    assert any("looking at" in text for text in ranks[0]["said"])
    loop = [json.loads(line) for line in (tmp_path / "output/loop.jsonl").read_text().splitlines()]
    assert any("looking at" in entry["note"] for entry in loop)
    last = [entry for entry in loop if entry["time_s"] is not None][-1]
    assert last["time_s"] == pytest.approx(plan.cost.iteration_time_s)
    assert last["energy_j"] == pytest.approx(plan.cost.energy_j)

    again = three_ranks.run(step_ranks.train_kept, tmp_path, [4] * 12, {}, LOOP)
    phases = [phase for phase, _ in again[0]["steps"]]
    assert "reconfigure" in phases
    assert not any("looking at" in text for text in again[0]["said"])

    slower = three_ranks.run(step_ranks.train_kept, tmp_path, [4] * 12, {}, LOOP, 1.1)
    said = "".join(slower[0]["said"])
    # All kinds of units are as much slower: which of them is the worst is noise.
    told = re.search(r"is not used: at 1410 MHz stage \d \w+ takes [\d.]+ ms, \+([\d.]+) %", said)
    assert told
    assert float(told[1]) == pytest.approx(10, abs=1)
    assert "looking at" in said
