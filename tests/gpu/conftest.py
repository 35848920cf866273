from pathlib import Path

import pytest

from envpipe_megatron.gpu.base import FORBID_VARIABLE
from envpipe_megatron.gpu.emulated.store import ROOT_VARIABLE

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch):
    # A developer may have either set; the tests say themselves what they need.
    monkeypatch.delenv(FORBID_VARIABLE, raising=False)
    monkeypatch.delenv(ROOT_VARIABLE, raising=False)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    path = REPOSITORY / ".." / "shared" / "data"
    if not (path / "perseus_sosp24").is_dir():
        pytest.skip(f"the shared measurements are not at {path}")
    return path


ROUND_PRESET = """
format = "envpipe-gpu-preset/1"
gpu = "Round numbers"
fitted = false
source = "test"
max_frequency_mhz = 1000
min_frequency_mhz = 100
frequency_step_mhz = 100
power_cap_frequency_mhz = 800
frequency_change_s = 0.25
wait_power_w = 50
refresh_s = 0.125
static_power_w = 100
voltage_floor = 1.0
voltage_knee_mhz = 0
[forward]
memory_fraction = 0.0
dynamic_power_w = 200
[backward]
memory_fraction = 0.5
dynamic_power_w = 400
"""


@pytest.fixture
def round_preset(tmp_path) -> str:
    """Path of a preset whose times and powers can be computed by hand, in exact binary fractions.

    Top clock 800 MHz (cap). Forward at f <= 800: time x 800/f, power 100 + 200 f/800.
    Clock change 0.25 s, refresh 0.125 s, waiting 50 W.
    """
    path = tmp_path / "round.toml"
    path.write_text(ROUND_PRESET)
    return str(path)
