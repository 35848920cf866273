"""Which override a GPU gets by its name, and which clocks are swept."""

import pytest
from fake_nvml.models import MODELS

from envpipe_megatron.gpu.emulated.presets import (
    ControlOverride,
    list_presets,
    load_preset,
    override_for,
    sweep_range,
)


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-sxm"),
        ("A100-SXM4-40GB", "a100-sxm"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie"),
        ("NVIDIA A100-PCIE-40GB", "a100-pcie"),
        ("NVIDIA A40", "a40"),
        ("NVIDIA RTX A6000", "a6000"),
        ("NVIDIA GeForce RTX 3090", "rtx3090"),
        ("Tesla V100-SXM2-32GB", "v100"),
    ],
)
def test_a_gpu_gets_the_override_of_its_preset(name, preset):
    assert override_for(name) is load_preset(preset).control


@pytest.mark.parametrize(
    "name",
    [
        *("NVIDIA GeForce RTX 3090 Ti", "NVIDIA A400", "NVIDIA H100 80GB HBM3", "NVIDIA H200"),
        "NVIDIA A100 SXM (emulated)",
    ],
)
def test_other_gpus_get_none(name):
    assert override_for(name) is None


def test_no_name_belongs_to_two_presets():
    controls = [load_preset(preset).control for preset in list_presets()]
    patterns = [name for control in controls if control for name in control.nvml_names]
    assert len(set(patterns)) == len(patterns)


def _swept(model):
    model = MODELS[model]
    override = override_for(model.name)
    memory = (override and override.memory_clock_mhz) or max(model.graphics_mhz)
    return sweep_range(model.graphics_mhz[memory], override)


def test_sweeps_of_real_tables():
    assert _swept("v100") == (1530, 1440, 1350, 1260, 1170, 1080, 990, 900, 810)
    a100 = _swept("a100")
    assert (a100[0], a100[1], a100[-1], len(a100)) == (1410, 1350, 750, 12)
    h200 = _swept("h200")
    assert (h200[0], h200[1], h200[10], h200[-1]) == (1980, 1890, 1080, 360)
    rtx3090 = _swept("rtx3090")
    assert (rtx3090[0], rtx3090[1], rtx3090[-1]) == (1995, 1905, 1185)


def test_the_highest_clock_is_always_swept_and_steps_are_no_shorter_than_asked():
    override = ControlOverride(("x",), profile_step_mhz=50)
    swept = sweep_range([100, 400, 130, 160, 390, 350, 349], override)
    assert swept == (400, 350, 160, 100)


def test_a_range_of_another_variant_is_not_followed():
    override = ControlOverride(("x",), profile_min_mhz=1700, profile_max_mhz=1900)
    assert sweep_range([1410, 1200, 1000], override) == (1410, 1200, 1000)


@pytest.mark.parametrize(
    ("range_mhz", "swept"),
    [
        ((1000, 1200), (1200, 1000)),
        ((1200, 1200), (1400, 1200, 1000, 800)),  # one clock is no range
        ((None, 1000), (1000, 800)),
        ((1200, None), (1400, 1200)),
    ],
)
def test_a_range_has_its_ends(range_mhz, swept):
    lowest, highest = range_mhz
    override = ControlOverride(("x",), profile_min_mhz=lowest, profile_max_mhz=highest)
    assert sweep_range([1000, 1400, 800, 1200], override) == swept


def test_a_step_is_a_share_of_the_highest_clock_that_is_swept():
    clocks = [2000, 1000, 961, 960, 959]
    assert sweep_range(clocks, None) == (2000, 1000)
    assert sweep_range(clocks, ControlOverride(("x",), profile_max_mhz=1000)) == (1000, 960)


def test_one_clock():
    assert sweep_range([1000], None) == (1000,)
