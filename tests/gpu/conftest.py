from pathlib import Path

import pytest
from fake_zeusd import FakeZeusd

from envpipe_megatron.gpu.backends import nvml as nvml_module
from envpipe_megatron.gpu.base import FORBID_VARIABLE
from envpipe_megatron.gpu.control import check_controls
from envpipe_megatron.gpu.emulated.store import ROOT_VARIABLE
from envpipe_megatron.gpu.site import SiteConfig

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


@pytest.fixture
def node(fake_nvml):
    """Four A100s that this process sees."""
    fake_nvml.use_here()
    return fake_nvml


class Machine:
    """A node of fake GPUs, the rights that a user has on it, and what was changed on it."""

    def __init__(self, nvml, monkeypatch, folder):
        self.nvml = nvml
        self.folder = folder
        self._monkeypatch = monkeypatch
        self.set_sys_admin(False)
        monkeypatch.setattr(nvml_module, "in_user_namespace", lambda: False)
        monkeypatch.delenv("ZEUSD_TOKEN", raising=False)
        monkeypatch.setenv("ZEUSD_SOCK_PATH", str(folder / "zeusd.sock"))
        self.zeusd = None
        self.fields = {}
        self.num_old = 0

    def set_sys_admin(self, has):
        self._monkeypatch.setattr(nvml_module, "has_sys_admin", lambda: has)

    def start_zeusd(self):
        self.zeusd = FakeZeusd(self.folder / "zeusd.sock")
        self.zeusd.gpus = {bus_id: {"id": i} for i, bus_id in enumerate(self.nvml.pci_bus_ids)}
        return self.zeusd

    def grant_command(self):
        program = self.folder / "clock"
        program.write_text(f"#!/bin/sh\necho \"$@\" >> '{self.folder}/commands'\n")
        program.chmod(0o755)
        self.fields["lock_command"] = (str(program), "lock", "{uuid}", "{index}", "{mhz}")
        self.fields["reset_command"] = (str(program), "reset", "{uuid}", "{index}")
        return program

    @property
    def site(self):
        return SiteConfig(path=self.folder / "site.toml", **self.fields)

    def changes(self):
        """Return what was changed since `forget`, by the way in which it was."""
        log = self.folder / "commands"
        requests = self.zeusd.requests if self.zeusd else []
        return {
            "nvml": self.nvml.changes()[self.num_old :],
            "zeusd": [request for request in requests if "POST" in request],
            "command": log.read_text().splitlines() if log.exists() else [],
        }

    def forget(self):
        self.num_old = len(self.nvml.changes())
        self.zeusd.requests.clear()
        (self.folder / "commands").unlink(missing_ok=True)

    def look(self):
        """Return what is allowed, after checking that looking changed nothing."""
        found = {check.wanted: check for check in check_controls(self.site)}
        assert all(bool(check.remedy) is (check.backend is None) for check in found.values())
        self.assert_untouched()
        return found

    def assert_untouched(self):
        assert not any(self.changes().values())


@pytest.fixture
def machine(fake_nvml, monkeypatch, tmp_path):
    fake_nvml.use_here()
    machine = Machine(fake_nvml, monkeypatch, tmp_path)
    yield machine
    if machine.zeusd is not None and machine.zeusd.path.exists():
        machine.zeusd.stop()


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
