"""Sessions and the rights to change clocks: all ranks or none, and clocks that come back."""

import json
from dataclasses import replace
from pathlib import Path

import controlled_ranks
import pytest
import session_ranks
from energy_lines import json_lines
from presets import preset_profile
from rank_pool import RankPool

from envpipe_megatron.core.plan import read_plan
from envpipe_megatron.core.profile import read_profile
from envpipe_megatron.formats.timeline import read_timelines
from envpipe_megatron.gpu.clock.page import ClockPage
from envpipe_megatron.gpu.emulated.emulated_gpu import EmulatedGpu
from envpipe_megatron.gpu.guard.hold import hold_gpu
from envpipe_megatron.gpu.guard.lease import list_leases
from envpipe_megatron.gpu.presets import load_preset
from envpipe_megatron.policies.frequencies import RECONFIGURE_POLICIES, envelope, reconfigure
from envpipe_megatron.runtime.job.options import Level

pytestmark = pytest.mark.xdist_group("pipeline")


@pytest.fixture
def guards(tmp_path, monkeypatch) -> Path:
    """The folder of guards and leases, for this process too."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("ENVPIPE_LEASE_DIR", str(tmp_path / "leases"))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "another job")
    (tmp_path / "run").mkdir(mode=0o700)
    return tmp_path


def requested_mhz(root: Path, count: int) -> list[int | None]:
    return [EmulatedGpu.open(root, index).requested_frequency_mhz for index in range(count)]


def test_a_guarded_session_holds_its_gpu_and_gives_it_back(three_ranks, guards):
    told = three_ranks.run(controlled_ranks.train_guarded, guards, False)
    for leases, locked_mhz, forked_mhz, after_mhz, error in told:
        assert leases == [f"{guards}#{index}" for index in range(3)]
        assert locked_mhz is not None
        assert forked_mhz == locked_mhz
        assert after_mhz is not None
        assert error is None
    assert requested_mhz(guards, 3) == [None] * 3
    assert not list_leases()
    lines = json_lines(guards / "clocks.jsonl")
    assert sorted(line["rank"] for line in lines) == [0, 1, 2]
    assert all(line["changes"] and line["error"] is None for line in lines)


def test_training_goes_on_at_baseline_clocks_when_the_guard_dies(three_ranks, guards):
    told = three_ranks.run(controlled_ranks.train_guarded, guards, True)
    for _, locked_mhz, _, after_mhz, error in told:
        assert locked_mhz is not None
        assert after_mhz is None
        assert "guard" in error
    assert not list_leases()
    lines = json_lines(guards / "clocks.jsonl")
    assert all("guard" in line["error"] for line in lines)


def test_a_gpu_of_another_job_is_only_read_and_so_are_all_others(three_ranks, guards):
    other = EmulatedGpu.create("a100-sxm", 1, guards)
    hold = hold_gpu(other.address, ClockPage.create())
    other.lock_frequency(1005)
    try:
        for phase, notes, requested, energy_j in three_ranks.run(
            controlled_ranks.be_refused, guards, False
        ):
            assert phase == "steady"
            assert "reading only" in notes[0]
            assert "run another job" in notes[1]
            assert requested is None
            assert energy_j > 0
        ran = read_timelines([guards / "timeline.jsonl"]).iterations
        assert {of.frequency_mhz for of in ran} == {None}, "no clock is said that nobody set"
        told = three_ranks.run(controlled_ranks.be_refused, guards, True)
        assert "GuardError" in told[1]
        assert all("CollectivesError" in told[rank] for rank in (0, 2))
        assert other.requested_frequency_mhz == 1005
        assert [record.address.uid for record in list_leases()] == [f"{guards}#1"]
    finally:
        hold.release()
    assert other.requested_frequency_mhz is None


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_without_a_folder_costs_its_files_alone(three_ranks, guards, victim):
    (guards / "file").touch()
    told = three_ranks.run(controlled_ranks.be_without_a_folder, guards, victim)
    assert told == [("profile", True)] * 3
    assert not list_leases()


def test_a_power_profile_on_one_gpu_leaves_the_clocks_of_all_alone(
    fake_nvml_library, fake_nvml_node, tmp_path
):
    node = fake_nvml_node("b200", "b200", "b200")
    node.set_fault(node.uuids[1], "enforced_profiles", 1 << 7)
    arguments = controlled_ranks.choose, str(fake_nvml_library)
    environment = {
        **node.environment,
        "ENVPIPE_SITE_CONFIG": str(tmp_path / "site.toml"),
        "ENVPIPE_LEASE_DIR": str(tmp_path / "leases"),
    }
    site = 'format = "envpipe-site/1"\n[gpu_control]\nbackends = ["nvml"]\n'
    (tmp_path / "site.toml").write_text(site)
    with RankPool(3) as pool:  # its own: a library stays loaded
        for told in pool.run(*arguments, environment, "auto", -1, False):
            assert told[0] == "none"
            assert f"NVIDIA B200 ({node.uuids[1]}) enforces power profiles" in told[1]
            assert "LLM training. Training runs at baseline clocks" in told[1]
        for rank, told in enumerate(pool.run(*arguments, environment, "auto", -1, True)):
            assert told.startswith("GpuPermissionError" if rank == 1 else "CollectivesError")
            assert "LLM training" in told
            assert "allow_power_profiles" in told
        assert pool.run(*arguments, environment, "dry_run", -1, False)[1][0] == "dry_run"
        assert node.changes() == []
        (tmp_path / "site.toml").write_text(f"{site}allow_power_profiles = true\n")
        for told in pool.run(*arguments, environment, "auto", -1, True):
            assert told == ("nvml", "")
    assert set(resets(node)) == set(node.uuids)


def resets(node):
    """The GPUs that were reset, and nothing else changed."""
    calls = node.changes()
    assert {call.function for call in calls} <= {"nvmlDeviceResetGpuLockedClocks"}
    return sorted(call.uuid for call in calls)


@pytest.mark.parametrize(
    ("without", "said"),
    [
        (None, ""),
        (2, "ENVPIPE_FORBID_CLOCK_CONTROL"),
        (1, "Cannot reset the clock of {}"),
    ],
    ids=["all may", "one is forbidden", "one could not reset"],
)
def test_all_ranks_control_clocks_or_none(fake_nvml_library, fake_nvml, tmp_path, without, said):
    environment = {**fake_nvml.environment, "ENVPIPE_LEASE_DIR": str(tmp_path / "leases")}
    if without == 1:
        fake_nvml.set_fault(fake_nvml.uuids[1], "no_permission")
    forbidden, said = 2 if without == 2 else -1, said.format(fake_nvml.uuids[1])
    arguments = controlled_ranks.choose, str(fake_nvml_library), environment, "auto", forbidden
    with RankPool(3) as pool:  # its own: a library stays loaded
        chosen, required = pool.run(*arguments, False), pool.run(*arguments, True)
    if without is None:
        assert chosen == required == [("nvml", "")] * 3
    else:
        for backend, why in chosen:
            assert backend == "none"
            assert said in why
        own = "GpuPermissionError" if without == 2 else "GuardError"
        for rank, told in enumerate(required):
            assert told.startswith(own if rank == without else "CollectivesError")
            assert said in told
    if without != 1:
        assert set(resets(fake_nvml)) == set(fake_nvml.uuids[:3] * (without is None))
    assert not [*(tmp_path / "leases").glob("*")]


def test_reconfiguring_raises_clocks_between_those_that_were_profiled(three_ranks, tmp_path):
    preset = load_preset("a100-sxm")
    swept = preset.supported_frequencies_mhz[6:90:6]  # 90 MHz apart
    profile = preset_profile("a100-sxm", 3, session_ranks.LONG_UNITS_S, swept)
    profile.write(tmp_path / "profile.csv")
    three_ranks.run(session_ranks.train_with_reconfiguring, tmp_path)
    plan = read_plan(tmp_path / "plan.json", profile)
    assert set(plan.frequency_mhz.ravel().tolist()) - {1410, *swept}
    assert plan.cost.slowdown_percent(plan.baseline.cost) < 1
    # Steps of the sweep alone overshoot.
    start = replace(plan, frequency_mhz=envelope(plan.schedule, profile), profile=profile)
    coarse = reconfigure(start, RECONFIGURE_POLICIES["balanced"]).frequency_mhz
    assert plan.cost.energy_j < replace(start, frequency_mhz=coarse).cost.energy_j


@pytest.mark.parametrize(
    ("schedule", "then"),
    [
        (
            "auto",
            ["After a failure, the closed loop was begun anew", "The framework's own order: no"],
        ),
        ("1f1b", []),
    ],
)
def test_a_closed_loop_whose_control_ends_looks_for_the_shortest_order(
    three_ranks, tmp_path, schedule, then
):
    """What it finds then is kept for no start that has control again."""
    for notes in three_ranks.run(session_ranks.lose_control, tmp_path, 2, {"scheduling": schedule}):
        assert "clock: Stage 2: Clock control ended: the driver of a test" in notes[0]
        assert len(notes) == 1 + len(then)
        assert all(note.startswith(each) for note, each in zip(notes[1:], then, strict=True))
    assert json.loads((tmp_path / "job.json").read_text())["profile"] is None


@pytest.mark.parametrize("asked", [{"sweep": True}, {"level": Level.UNIFORM}])
def test_of_clocks_that_are_not_controlled_any_more_nothing_is_measured(
    three_ranks, tmp_path, asked
):
    for (note,) in three_ranks.run(session_ranks.lose_control, tmp_path, 2, asked):
        why = "Stage 2: Clock control ended: the driver of a test"
        assert note == f"The framework's own order, at the highest clock: {why}"


def test_a_restart_without_control_has_its_baseline_and_looks_for_the_order_again(
    three_ranks, tmp_path
):
    for length in (6, 2):
        for notes, phases in three_ranks.run(session_ranks.look_for_the_shortest, tmp_path):
            assert "only: the shortest order" in notes[0]
            assert "% less time (predicted" in notes[-1]
            assert phases.count("warm-up") == length
            assert phases[-1] == "steady"


def test_a_profile_holds_what_units_cost_and_what_surrounds_them(three_ranks, tmp_path):
    """Waiting power over the clock, hops, tails and changes; on every rank and in the file."""
    tails_s = (0.03, 0.05, 0.01)
    profiles = three_ranks.run(session_ranks.measure_a_job, tmp_path, tails_s)
    preset = load_preset("a100-sxm")
    profile = profiles[0]
    assert all(other.sidecar == profile.sidecar for other in profiles)
    assert all(other.to_csv() == profile.to_csv() for other in profiles)
    assert read_profile(tmp_path / "profile.csv").sidecar == profile.sidecar
    for kind, at_max_s in session_ranks.LONG_UNITS_S.items():
        for row in profile.rows[0][kind]:
            time_s = preset.unit_time_s(kind.value, row.frequency_mhz, at_max_s)
            power_w = preset.busy_power_w(kind.value, row.frequency_mhz)
            assert row.time_s == pytest.approx(time_s, rel=0.02)
            assert row.energy_j == pytest.approx(time_s * power_w, rel=0.03)
    facts = profile.sidecar
    for curve in facts.wait_power_w:
        assert max(curve) == preset.max_frequency_mhz
        assert list(curve.values()) == pytest.approx([preset.wait_power_w] * len(curve), rel=0.01)
    assert facts.p2p_latency_s == pytest.approx((session_ranks.SLOW_MESSAGE_S,) * 2)
    # The next iteration begins when the slowest is ready: that is what a planner must add.
    assert facts.tail_time_s == pytest.approx((0.05,) * 3, abs=1e-9)
    assert facts.frequency_change_s == pytest.approx(preset.frequency_change_s, rel=0.3)
