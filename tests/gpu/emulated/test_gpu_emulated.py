"""Arithmetic, meters and files of emulated GPUs, within one process."""

import math
import os
import socket
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from on_request import examples
from open_files import open_files

from envpipe_megatron.gpu.base import EnergyReading, GpuAddress, GpuError
from envpipe_megatron.gpu.emulated.emulated_gpu import EmulatedGpu
from envpipe_megatron.gpu.emulated.store import (
    ROOT_VARIABLE,
    EmulatedState,
    StateFile,
    default_root,
    list_emulated,
    tick_number,
)
from envpipe_megatron.gpu.presets import load_preset


@pytest.fixture
def gpu(tmp_path, round_preset):
    return EmulatedGpu.create(round_preset, 0, tmp_path / "node")


def anchored(gpu, wall_minus_virtual_s=100.0):
    """The same GPU read with a clock that the test turns; virtual = clock - 100."""
    gpu.anchor(wall_minus_virtual_s)
    clock = SimpleNamespace(now_s=0.0)
    return EmulatedGpu(gpu.index, gpu._file, gpu.preset, lambda: clock.now_s), clock


# --- settle arithmetic ---------------------------------------------------------------------------


F, B = ("run_unit", "forward", 1.0, 0.0), ("run_unit", "backward", 0.5, 0.25)
LOCK, RESET = ("lock_frequency", 400), ("reset_frequency",)


@pytest.mark.parametrize(
    ("steps", "ran_s", "energy_j"),
    [
        # At the default clock, 300 W (capped): as soon as it is ready, and not before the last end.
        ([("run_unit", "forward", 1.0, 0.5)], (0.5, 1.5), 0.5 * 50 + 300),
        ([F, B], (1.0, 1.5), 300 + 250),
        # Asked for at 0, in force at 0.25: a quarter is done, the rest takes twice as long, 200 W.
        ([LOCK, F], (0.0, 1.75), 0.25 * 300 + 1.5 * 200),
        ([LOCK, F, F], (1.75, 3.75), 75 + 300 + 400),
        # In force as a unit starts, or a millisecond later, or as it ends.
        ([LOCK, (*F[:3], 0.25)], (0.25, 2.25), 0.25 * 50 + 400),
        ([LOCK, (*F[:3], 0.249)], (0.249, 0.25 + 0.999 * 2), 0.249 * 50 + 0.3 + 0.999 * 400),
        ([LOCK, (*F[:2], 0.25, 0.0)], (0.0, 0.25), 75),
        # A later request supersedes one that has not settled: 200 never comes into force.
        (
            [("lock_frequency", 200), ("advance_to", 0.125), LOCK, F],
            (0.125, 1.875),
            0.125 * 50 + 0.25 * 300 + 1.5 * 200,
        ),
        # The same again changes nothing, and going back leaves the clock.
        ([LOCK, ("advance_to", 0.125), LOCK, F], (0.125, 2.0), 6.25 + 0.125 * 300 + 1.75 * 200),
        ([LOCK, ("lock_frequency", 1000), F], (0.0, 1.0), 300),
        # A reset takes as long: at 400 an eighth is done. The default clock as a lock is no change.
        ([LOCK, ("advance_to", 1.0), RESET, F], (1.0, 2.125), 50 + 0.25 * 200 + 0.875 * 300),
        ([("lock_frequency", 1000), F], (0.0, 1.0), 300),
    ],
)
def test_when_a_change_of_clock_comes_into_force(gpu, steps, ran_s, energy_j):
    for name, *arguments in steps:
        ran = getattr(gpu, name)(*arguments)
    assert ran == pytest.approx(ran_s)
    state = gpu._file.read()
    assert (state.end_s, state.energy_j) == pytest.approx((ran_s[1], energy_j))
    assert state.pending is None


def test_changes_leave_no_file_open(gpu, tmp_path):
    gpu.advance_to(0.5)
    before = open_files(tmp_path)
    for end_s in range(1, 5):
        gpu.advance_to(float(end_s))
    assert open_files(tmp_path) == before


# --- conservation --------------------------------------------------------------------------------

STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("unit"),
            st.sampled_from(["forward", "backward"]),
            st.floats(0, 0.4),
            st.floats(0, 0.3),
        ),
        st.tuples(st.just("lock"), st.sampled_from([1410, 1305, 1005, 870])),
        st.tuples(st.just("reset")),
        st.tuples(st.just("wait"), st.floats(0, 5.0)),
    ),
    max_size=40,
)


@settings(max_examples=examples(30), deadline=None)
@given(STEPS)
def test_energy_is_conserved(steps):
    with tempfile.TemporaryDirectory() as root:
        gpu = EmulatedGpu.create("a100-sxm", 0, root)
        wait_w, ends = gpu.preset.wait_power_w, gpu.preset.supported_frequencies_mhz[::80]
        for step in steps:
            before = gpu._file.read()
            match step:
                case ("unit", kind, time_at_max_s, gap_s):
                    start_s, end_s = gpu.run_unit(kind, time_at_max_s, before.end_s + gap_s - 0.1)
                    assert start_s == max(before.end_s, before.end_s + gap_s - 0.1)
                    assert end_s - start_s >= time_at_max_s * (1 - 1e-9) - 1e-12
                    waited_j = wait_w * (start_s - before.end_s)
                    unit_j = gpu._file.read().energy_j - before.energy_j - waited_j
                    most_w, least_w = (gpu.preset.busy_power_w(kind, f) for f in ends)
                    busy_s = end_s - start_s
                    assert least_w * busy_s - 1e-6 <= unit_j <= most_w * busy_s + 1e-6
                case ("lock", clock_mhz):
                    gpu.lock_frequency(clock_mhz)
                case ("reset",):
                    gpu.reset_frequency()
                case ("wait", gap_s):
                    gpu.advance_to(before.end_s + gap_s)
                    added_j = gpu._file.read().energy_j - before.energy_j
                    assert added_j == pytest.approx(wait_w * gap_s, rel=1e-9, abs=1e-6)
        state, reading = gpu._file.read(), gpu.read_energy()
        lag_s = state.end_s - reading.time_s
        assert 0 <= lag_s < 0.1 + 1e-9
        assert -1e-9 <= state.energy_j - reading.energy_j <= 500 * lag_s + 1e-9


# --- counter -------------------------------------------------------------------------------------


def test_counter_refreshes_at_multiples_of_its_period(gpu):
    gpu.run_unit("forward", 0.3, 0.0)  # 300 W
    assert gpu.read_energy() == EnergyReading(75.0, 0.25)
    assert gpu._file.read().energy_j == pytest.approx(90.0)
    gpu.run_unit("forward", 0.07, 0.0)  # ends at 0.37: no refresh in it
    assert gpu.read_energy() == EnergyReading(75.0, 0.25)
    gpu.advance_to(0.5)  # the refresh at 0.375 lies 0.005 s into the wait
    assert gpu.read_energy().time_s == 0.5
    assert gpu.read_energy().energy_j == pytest.approx(0.37 * 300 + 0.13 * 50)


@pytest.mark.parametrize("refresh_s", [0.1, 0.125, 0.02, 1 / 3])
def test_tick_number_agrees_with_the_instants(refresh_s):
    for number in range(2000):
        assert tick_number(number * refresh_s, refresh_s) == number
        before_s = math.nextafter((number + 1) * refresh_s, 0.0)
        assert tick_number(before_s, refresh_s) == number


def test_reader_in_a_sleep_does_not_see_the_future(gpu):
    gpu.run_unit("forward", 1.0, 0.0)  # 0 .. 1, 300 W
    gpu.lock_frequency(400)
    gpu.advance_to(1.5)  # waits, settles at 1.25
    gpu.run_unit("forward", 1.0, 0.0)  # 1.5 .. 3.5, 200 W
    reader, clock = anchored(gpu)
    expected = [
        # virtual now, time, counter's instant and value, power, clock
        (-5.0, 0.0, EnergyReading(0.0, 0.0), 300.0, 1000),
        (0.3, 0.3, EnergyReading(75.0, 0.25), 300.0, 1000),
        (1.1, 1.1, EnergyReading(300.0, 1.0), 50.0, 1000),
        (1.3, 1.3, EnergyReading(312.5, 1.25), 50.0, 400),
        (2.5, 2.5, EnergyReading(525.0, 2.5), 200.0, 400),
        (3.5, 3.5, EnergyReading(725.0, 3.5), 50.0, 400),
        (9.0, 3.5, EnergyReading(725.0, 3.5), 50.0, 400),  # after the work: waits
    ]
    for virtual_s, time_s, reading, power_w, clock_mhz in expected:
        clock.now_s = 100.0 + virtual_s
        assert reader.time_s() == pytest.approx(time_s)
        assert reader.read_energy() == reading
        assert reader.power_w == power_w
        assert reader.clock_state().observed_mhz == clock_mhz
    gpu.anchor(None)
    assert reader.time_s() == 3.5
    assert reader.power_w == 200.0


def test_meters_of_the_past_tell_the_oldest_they_know(gpu):
    kept = EmulatedState.kept_segments
    for _ in range(kept):  # a wait and a unit each, of a refresh
        gpu.advance_to(gpu.committed_end_s() + 0.125)
        gpu.run_unit("forward", 0.125, 0.0)
    assert len(gpu._file.read().segments) == kept
    reader, _ = anchored(gpu)  # at a time before all
    end_s, energy_j = kept * 0.25, kept * (6.25 + 37.5)
    assert reader.read_energy() == EnergyReading(energy_j / 2, end_s - kept * 0.125)


# --- files ---------------------------------------------------------------------------------------


def test_a_preset_file_is_found_from_any_folder(tmp_path, round_preset, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = EmulatedGpu.create("round.toml", 0, "node")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert made.address == GpuAddress("emulated", f"{tmp_path}/node#0")
    assert made.committed_end_s() == 0
    assert EmulatedGpu.open(tmp_path / "node", 0).preset == load_preset(round_preset)
    assert EmulatedGpu.create(round_preset, 0, tmp_path / "node").index == 0  # the same one


def test_create_keeps_what_exists(gpu, tmp_path, round_preset):
    gpu.run_unit("forward", 1.0, 0.0)
    assert EmulatedGpu.create(round_preset, 0, tmp_path / "node").committed_end_s() == 1.0
    with pytest.raises(GpuError, match="exists with preset"):
        EmulatedGpu.create("a40", 0, tmp_path / "node")
    with pytest.raises(GpuError):
        EmulatedGpu.create("a400", 1, tmp_path / "node")


def test_root_comes_from_the_environment(monkeypatch, tmp_path):
    name = f"envpipe-emulated-{socket.gethostname()}-{os.getuid()}"
    assert default_root() == Path(tempfile.gettempdir()) / name
    monkeypatch.setenv(ROOT_VARIABLE, str(tmp_path / "here"))
    assert default_root() == tmp_path / "here"
    EmulatedGpu.create("v100", 3, None)
    EmulatedGpu.create("v100", 11, None)
    for name in ("gpux", "gpu07", "gpu-1", "gpu\N{ARABIC-INDIC DIGIT THREE}", "gpu"):
        (tmp_path / "here" / f"{name}.json").write_text("not one of ours")
    assert list_emulated(default_root()) == (3, 11)
    assert list_emulated(tmp_path / "nowhere") == ()


HEAD = b'{"format": "envpipe-emulated-gpu/1", "preset": "a40"'


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "Expecting value"),
        (HEAD, "Expecting"),
        (b"[1, 2]", "interpreted"),
        (b'{"format": "envpipe-plan/1"}', "another format"),
        (HEAD + b"}", "clock_mhz"),
        (HEAD + b', "clock_mhz": 1, "segments": [1]}', "iterable"),
    ],
)
def test_foreign_file_is_named_with_a_remedy(tmp_path, content, problem):
    path = tmp_path / "gpu0.json"
    path.write_bytes(content)
    for call in (EmulatedGpu.open, lambda root, i: EmulatedGpu.create("a40", i, root)):
        with pytest.raises(GpuError, match=rf"no env.*{problem}.*gpu0\.json.*delete the file"):
            call(tmp_path, 0)


def test_missing_gpu_lists_those_there_are(tmp_path):
    EmulatedGpu.create("a40", 2, tmp_path)
    with pytest.raises(GpuError, match="Known in this folder: 2"):
        EmulatedGpu.open(tmp_path, 0)
    with pytest.raises(GpuError, match="none"):
        StateFile(tmp_path / "nowhere", 0).change(lambda state: None)


def test_folder_that_cannot_be_used(tmp_path):
    file = tmp_path / "file"
    file.write_text("in the way")
    with pytest.raises(GpuError, match=ROOT_VARIABLE):
        EmulatedGpu.create("a40", 0, file / "node")


def test_a_state_that_cannot_be_written_is_not_lost_in_silence(gpu):
    gpu._file.path.with_name("gpu0.json.new").mkdir()  # in the way
    with pytest.raises(GpuError, match="Cannot write the state"):
        gpu.lock_frequency(400)
    assert gpu.requested_frequency_mhz is None


def test_a_full_disk_ends_no_work_of_an_emulated_gpu(gpu, round_preset, caplog):
    """It goes on for its process, and others see it once the disk takes it."""
    full = gpu._file.path.with_name("gpu0.json.new")
    full.mkdir()
    gpu = EmulatedGpu.create(round_preset, 0, full.parent)  # the next job of the same GPU
    _, end_s = gpu.run_unit("forward", 0.1, 0.0)
    gpu.advance_to(end_s + 1)
    other = EmulatedGpu.open(full.parent, 0)
    assert (gpu.committed_end_s(), other.committed_end_s()) == (end_s + 1, 0)
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    full.rmdir()
    gpu.advance_to(end_s + 2)
    assert gpu.read_energy() == other.read_energy()
    assert other.committed_end_s() == end_s + 2


def test_a_new_folder_is_its_users_alone(tmp_path):
    EmulatedGpu.create("a40", 0, tmp_path / "node")
    assert (tmp_path / "node").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "node" / "gpu0.lock").stat().st_mode & 0o777 == 0o600
