"""NVML's failures have names and say what to do; power profiles are read by name, never changed."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pynvml
import pytest

from envpipe_megatron.gpu.backends.nvml import NvmlGpu
from envpipe_megatron.gpu.backends.nvml_library import PROFILES
from envpipe_megatron.gpu.base import (
    GpuAddress,
    GpuError,
    GpuNotSupportedError,
    GpuPermissionError,
    PowerState,
)
from envpipe_megatron.gpu.registry import open_gpu


@pytest.mark.parametrize("change", ["lock", "reset", "site reset"])
@pytest.mark.parametrize(
    ("fault", "value", "error", "remedy"),
    [
        ("no_permission", 1, GpuPermissionError, "root or CAP_SYS_ADMIN.*zeusd"),
        ("lost", 1, GpuError, "Xid"),
        ("timeout", 1, GpuError, "nvidia-smi"),
        ("not_supported", 1, GpuNotSupportedError, "nvidia-smi -q"),
        ("fail_after", 0, GpuError, "nvidia-smi"),
    ],
)
def test_faults_of_a_gpu(node, change, fault, value, error, remedy):
    uuid = node.uuids[0]
    gpu = NvmlGpu(uuid, reset_range_mhz=(210, 1305) if change == "site reset" else None)
    gpu.lock_frequency(1200)
    node.set_fault(uuid, fault, value)
    with pytest.raises(error, match=f"{remedy}") as raised:
        gpu.lock_frequency(900) if change == "lock" else gpu.reset_frequency()
    assert type(raised.value) is error
    assert uuid in str(raised.value)
    assert raised.value.remedy
    assert isinstance(raised.value, GpuPermissionError) is (fault == "no_permission")
    # The lock stays as it was.
    assert node.locked_mhz(uuid) == (1200, 1200)
    assert len(node.changes()) == 2


@pytest.mark.parametrize("uid", ["GPU-0000", "0", "MIG-12"])
def test_no_such_gpu(node, uid):
    with pytest.raises(GpuError, match="nvidia-smi -L"):
        NvmlGpu(uid)
    if not uid.startswith("GPU-"):
        with pytest.raises(GpuError, match="clocks show"):
            open_gpu(GpuAddress("none", uid))


@pytest.mark.parametrize(
    ("module", "says"),
    [
        ("NVML_SUCCESS = 0", "pip uninstall pynvml"),
        ("raise ModuleNotFoundError('No pynvml')", "nvml cannot be imported: No pynvml"),
    ],
)
def test_an_old_package_with_a_module_of_the_same_name_is_told_apart(node, tmp_path, module, says):
    """And that it took nvidia-ml-py's module along when it was removed."""
    (tmp_path / "pynvml").mkdir()  # a package goes before a module of its name
    (tmp_path / "pynvml" / "__init__.py").write_text(module)
    ran = subprocess.run(
        [sys.executable, "-m", "envpipe_megatron.cli", "clocks", "show"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 1
    assert says in ran.stderr
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    needed = next(each for each in project["dependencies"] if each.startswith("nvidia-ml-py"))
    assert f"'{needed}'" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_no_library(tmp_path):
    if _has_system_library():
        pytest.skip("this machine has NVIDIA's library, so the loader finds one")
    script = (
        "from envpipe_megatron.gpu.backends.nvml import NvmlGpu\n"
        "from envpipe_megatron.gpu.base import NoDriverError\n"
        "try:\n    NvmlGpu.list_gpus()\n"
        "except NoDriverError as error:\n    print(error)\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "LD_LIBRARY_PATH"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True
    )
    assert "no libnvidia-ml.so.1. Install the NVIDIA driver" in done.stdout, done.stderr


def _has_system_library() -> bool:
    environment = {k: v for k, v in os.environ.items() if k != "LD_LIBRARY_PATH"}
    load = "import ctypes; ctypes.CDLL('libnvidia-ml.so.1')"
    done = subprocess.run([sys.executable, "-c", load], env=environment, capture_output=True)
    return done.returncode == 0


ASKED = "nvmlDeviceWorkloadPowerProfileGetCurrentProfiles"


@pytest.fixture
def profiled(fake_nvml_node):
    node = fake_nvml_node("b200", "a100")
    node.use_here()
    yield node
    assert node.changes() == []


def test_every_profile_of_nvml_has_its_name():
    numbers = {
        value: name
        for name, value in vars(pynvml).items()
        if name.startswith("NVML_POWER_PROFILE_") and "OPERATION" not in name
    }
    assert numbers.pop(most := max(numbers)) == "NVML_POWER_PROFILE_MAX"
    assert most <= len(PROFILES)  # older libraries have fewer
    for number, name in numbers.items():
        words = PROFILES[number].upper().replace("-", "_").replace(" ", "_")
        assert name == f"NVML_POWER_PROFILE_{words}"


@pytest.mark.parametrize("backend", ["nvml", "none", "dry_run"])
def test_profiles_and_limits_are_read_by_whoever_reads(profiled, backend):
    gpu = open_gpu(GpuAddress(backend, profiled.uuids[0]))
    assert gpu.power_state() == PowerState((), (), 1000.0, 1000.0)
    profiled.set_fault(profiled.uuids[0], "requested_profiles", 1 << 1 | 1 << 7 | 1 << 33)
    profiled.set_fault(profiled.uuids[0], "enforced_profiles", 1 << 1)
    profiled.set_fault(profiled.uuids[0], "power_limit_w", 800)
    asked = ("max-Q", "LLM training", "profile 33")
    state = gpu.power_state()
    assert state == PowerState(asked, ("max-Q",), 800.0, 1000.0)
    assert state.is_capped
    assert str(state) == (
        "max-Q enforced, max-Q, LLM training, profile 33 requested, "
        "power limit 800 W (1000 W by default)"
    )


@pytest.mark.parametrize("why", ["no profiles", "old driver", "no permission", "version"])
def test_a_gpu_without_profiles_has_none(profiled, monkeypatch, why):
    gpu = NvmlGpu(profiled.uuids[1 if why == "no profiles" else 0])
    if why == "old driver":
        profiled.set_fault(None, "old_driver")
    elif why == "no permission":
        monkeypatch.setattr(pynvml, ASKED, refusing(pynvml.NVML_ERROR_NO_PERMISSION))
    elif why == "version":
        monkeypatch.setattr(pynvml, "nvmlWorkloadPowerProfileCurrentProfiles_v1", 0x2000064)
    state = gpu.power_state()
    assert (state.requested_profiles, state.enforced_profiles) == ((), ())
    assert not state.is_capped


def test_a_gpu_that_tells_nothing(profiled, monkeypatch):
    nothing = refusing(pynvml.NVML_ERROR_NOT_SUPPORTED)
    monkeypatch.setattr(pynvml, ASKED, nothing)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetEnforcedPowerLimit", nothing)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetPowerManagementDefaultLimit", nothing)
    state = NvmlGpu(profiled.uuids[0]).power_state()
    assert state == PowerState()
    assert str(state) == "no power profile enforced, power limit not known"


def test_a_failure_is_no_absence(profiled):
    gpu = NvmlGpu(profiled.uuids[0])
    profiled.set_fault(profiled.uuids[0], "lost")
    with pytest.raises(GpuError, match="lost"):
        gpu.power_state()
    profiled.set_fault(profiled.uuids[0], "lost", 0)
    profiled.set_fault(profiled.uuids[0], "enforced_profiles", 1)
    assert gpu.power_state().enforced_profiles == ("max-P",)


def refusing(code):
    def refuse(*arguments):
        raise pynvml.NVMLError(code)

    return refuse
