"""Presets: files, model, and that the stated fit errors are those of the data."""

import json
import tomllib
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.gpu import fit_presets
from envpipe_megatron.gpu.base import GpuError
from envpipe_megatron.gpu.presets import (
    ControlOverride,
    list_presets,
    load_preset,
    override_for,
    sweep_range,
)

KINDS = ("forward", "backward")


@pytest.mark.parametrize("name", list_presets())
def test_a_preset_says_whether_it_was_fitted(name):
    preset = load_preset(name)
    assert (preset.fit_error_percent is not None) is preset.fitted
    assert ("Not fitted" in preset.source) is not preset.fitted


@pytest.mark.parametrize("name", list_presets())
@pytest.mark.parametrize("kind", KINDS)
def test_model_is_monotone_and_flat_above_the_cap(name, kind):
    preset = load_preset(name)
    clocks = preset.supported_frequencies_mhz
    times = [preset.unit_time_s(kind, f, 0.5) for f in clocks]
    powers = [preset.busy_power_w(kind, f) for f in clocks]
    assert times[0] == pytest.approx(0.5, rel=1e-12)
    for i in range(1, len(clocks)):
        if clocks[i] >= preset.top_frequency_mhz:
            assert (times[i], powers[i]) == (times[0], powers[0])
        else:
            assert times[i] > times[i - 1]
            assert powers[i] < powers[i - 1]
    assert powers[-1] > 0


WHOLE = """
format = "envpipe-gpu-preset/1"
gpu = "All of it"
fitted = true
source = "test"
max_frequency_mhz = 1000
min_frequency_mhz = 985
frequency_step_mhz = 7.5
power_cap_frequency_mhz = 800
frequency_change_s = 0
wait_power_w = 0
refresh_s = 0.25
static_power_w = 100
voltage_floor = 0.5
voltage_knee_mhz = 400
[forward]
memory_fraction = 1
dynamic_power_w = 200
[backward]
memory_fraction = 0.25
dynamic_power_w = 0
[fit_error_percent]
time_mean = 1.5
time_max = 2.5
power_mean = 3.5
power_max = 4.5
[control]
nvml_names = ["One", "Two *"]
profile_max_mhz = 900
profile_min_mhz = 900
profile_step_mhz = 30
memory_clock_mhz = 1215
"""


def test_every_field_of_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text(WHOLE)
    preset = load_preset("mine.toml")
    written = {**tomllib.loads(WHOLE), "name": "mine"}
    assert written.pop("format") == "envpipe-gpu-preset/1"
    assert json.loads(json.dumps(asdict(preset))) == written
    assert preset.supported_frequencies_mhz == (1000, 992, 985)
    assert [preset.relative_voltage(mhz) for mhz in (100, 400, 500, 800)] == [0.5, 0.5, 0.625, 1]
    # 100 W, and of 200 W at the top (800 MHz) the clock's share times the voltage squared.
    powers_w = [preset.busy_power_w("forward", mhz) for mhz in (400, 600, 800, 900)]
    assert powers_w == [125.0, 184.375, 300.0, 300.0]
    assert preset.unit_time_s("forward", 400, 3.0) == 3.0
    assert preset.unit_time_s("backward", 400, 3.0) == 5.25
    Path("mine.toml").rename("uncapped.toml")
    uncapped = WHOLE.replace("power_cap_frequency_mhz = 800\n", "").replace("985", "1000")
    Path("uncapped.toml").write_text(uncapped)
    assert load_preset("uncapped.toml").top_frequency_mhz == 1000
    assert load_preset("uncapped.toml").supported_frequencies_mhz == (1000,)


def test_unknown_preset_lists_the_names():
    with pytest.raises(GpuError, match=r"'a1000'.*a100-pcie, a100-sxm, a40, a6000, h100"):
        load_preset("a1000")
    for path in ("/nowhere/mine.toml", "~nobody-of-this-name/mine.toml"):
        with pytest.raises(GpuError, match="No such GPU preset file"):
            load_preset(path)


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("wait_power_w = 50", "", "'wait_power_w' is wrong .got nothing"),
        ("wait_power_w = 50", "wait_power_w = -1", "'wait_power_w' is wrong .*of at least 1, or 0"),
        ("preset/1", "preset/2", r"field 'format' is wrong .*It must be 'envpipe-gpu-preset/1'"),
        ('"Round numbers"', '""', "field 'gpu' is wrong .*It must be a text"),
        *[
            ("frequency_mhz = 1000", f"frequency_mhz = {bad}", "be a whole number of at least 3")
            for bad in ("0", "true", "1.5", "1000000000")
        ],
        ("[forward]", "[[forward]]", "field 'forward' is wrong .*It must be a table"),
        ("memory_fraction = 0.0", "memory = 0", r"unknown field \(got 'memory'\)\. Known"),
        ("frequency_step_mhz = 100", "frequency_step_mhz = 1e-320", "number of at least 1, or 0"),
        ("refresh_s = 0.125", "refresh_s = 0", "refresh_s must be above 0"),
        ("voltage_floor = 1.0", "voltage_floor = 1.5", "voltage_floor must be above 0 and at most"),
        ("voltage_knee_mhz = 0", "voltage_knee_mhz = 800", "voltage_knee_mhz must be below.* 800"),
        ("memory_fraction = 0.0", "memory_fraction = 2", r"forward\.memory_fraction must be at"),
        ("min_frequency_mhz = 100", "min_frequency_mhz = 1100", "min_frequency_mhz must not exc"),
    ],
)
def test_a_wrong_field_is_named_with_its_file(round_preset, old, new, problem):
    path = Path(round_preset)
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(GpuError, match=rf"{path.name}.*: .*{problem}"):
        load_preset(round_preset)


@pytest.mark.parametrize(
    ("name", "time_mean", "power_mean"),
    [("a100-sxm", 1.5, 2.0), ("a40", 1.5, 2.0), ("a100-pcie", 1.5, 2.5)],
)
def test_stated_fit_error_reproduces(shared_data, name, time_mean, power_mean):
    preset = load_preset(name)
    target = next(t for t in fit_presets.TARGETS if t.preset == name)
    samples = fit_presets.load_samples(shared_data, target, preset.max_frequency_mhz)
    stated = asdict(preset.fit_error_percent)
    assert asdict(fit_presets.errors(preset, samples)) == pytest.approx(stated, abs=1e-3)
    assert stated["time_mean"] < time_mean
    assert stated["power_mean"] < power_mean
    if name == "a40":  # the others' fits are the same, and each takes seconds
        return
    refit = fit_presets.fit(preset, target, samples)
    assert refit.power_cap_frequency_mhz == preset.power_cap_frequency_mhz
    # Optimisers of different versions may stop elsewhere on the same valley floor.
    assert asdict(refit.fit_error_percent) == pytest.approx(stated, abs=0.05)


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-sxm"),
        ("A100-SXM4-40GB", "a100-sxm"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie"),
        ("NVIDIA GeForce RTX 3090", "rtx3090"),
        ("Tesla V100-SXM2-32GB", "v100"),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA A400", None),
        ("NVIDIA H100 80GB HBM3", None),
        ("NVIDIA A100 SXM (emulated)", None),
    ],
)
def test_a_gpu_gets_the_override_of_its_preset(name, preset):
    assert override_for(name) is (preset and load_preset(preset).control)


def test_no_name_belongs_to_two_presets():
    controls = [load_preset(preset).control for preset in list_presets()]
    patterns = [name for control in controls if control for name in control.nvml_names]
    assert len(set(patterns)) == len(patterns)


FOUR, FEW = [1000, 1400, 800, 1200], [2000, 1000, 961, 960, 959]


@pytest.mark.parametrize(
    ("clocks", "override", "swept"),
    [
        # The highest always, and steps that are no shorter than what is asked for.
        ([100, 400, 130, 160, 390, 350, 349], {"step": 50}, (400, 350, 160, 100)),
        # A step is a share of the highest clock that is swept.
        (FEW, None, (2000, 1000)),
        (FEW, {"max": 1000}, (1000, 960)),
        # A range has its ends.
        (FOUR, {"min": 1000, "max": 1200}, (1200, 1000)),
        (FOUR, {"max": 1000}, (1000, 800)),
        (FOUR, {"min": 1200}, (1400, 1200)),
        # One clock is no range, and a range of another variant is not followed.
        (FOUR, {"min": 1200, "max": 1200}, (1400, 1200, 1000, 800)),
        ([1410, 1200, 1000], {"min": 1700, "max": 1900}, (1410, 1200, 1000)),
        ([1000], None, (1000,)),
    ],
)
def test_which_clocks_are_swept(clocks, override, swept):
    if override is not None:
        limits = {f"profile_{name}_mhz": mhz for name, mhz in override.items()}
        override = ControlOverride(("x",), **limits)
    assert sweep_range(clocks, override) == swept
