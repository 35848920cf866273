"""Power profiles and limits by NVML: read by name, never changed, and not asked for in vain."""

import pynvml
import pytest

from envpipe_megatron.gpu.backends.nvml import NvmlGpu
from envpipe_megatron.gpu.backends.nvml_library import PROFILES, NvmlError
from envpipe_megatron.gpu.base import GpuAddress, PowerState
from envpipe_megatron.gpu.opening import open_gpu

ASKED = "nvmlDeviceWorkloadPowerProfileGetCurrentProfiles"


@pytest.fixture
def node(fake_nvml_node):
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
    assert numbers.pop(len(PROFILES)) == "NVML_POWER_PROFILE_MAX"
    for number, name in numbers.items():
        words = PROFILES[number].upper().replace("-", "_").replace(" ", "_")
        assert name == f"NVML_POWER_PROFILE_{words}"


@pytest.mark.parametrize("backend", ["nvml", "none", "dry_run"])
def test_profiles_and_limits_are_read_by_whoever_reads(node, backend):
    gpu = open_gpu(GpuAddress(backend, node.uuids[0]))
    assert gpu.power_state() == PowerState((), (), 1000.0, 1000.0)
    node.set_fault(node.uuids[0], "requested_profiles", 1 << 1 | 1 << 7 | 1 << 33)
    node.set_fault(node.uuids[0], "enforced_profiles", 1 << 1)
    node.set_fault(node.uuids[0], "power_limit_w", 800)
    asked = ("max-Q", "LLM training", "profile 33")
    state = gpu.power_state()
    assert state == PowerState(asked, ("max-Q",), 800.0, 1000.0)
    assert state.is_capped
    assert str(state) == (
        "max-Q enforced, max-Q, LLM training, profile 33 requested, "
        "power limit 800 W (1000 W by default)"
    )


@pytest.mark.parametrize("why", ["no profiles", "old driver", "no permission", "version"])
def test_a_gpu_without_profiles_is_asked_once(node, monkeypatch, why):
    gpu = NvmlGpu(node.uuids[1 if why == "no profiles" else 0])
    if why == "old driver":
        node.set_fault(None, "old_driver")
    elif why == "no permission":
        monkeypatch.setattr(pynvml, ASKED, refused := Refusing(pynvml.NVML_ERROR_NO_PERMISSION))
    elif why == "version":
        monkeypatch.setattr(pynvml, "nvmlWorkloadPowerProfileCurrentProfiles_v1", 0x2000064)
    for _ in range(3):
        state = gpu.power_state()
        assert (state.requested_profiles, state.enforced_profiles) == ((), ())
        assert not state.is_capped
    asked = sum(call.function == ASKED for call in node.history())
    assert (refused.calls if why == "no permission" else asked) == 1


def test_an_older_nvidia_ml_py_and_a_gpu_that_tells_nothing(node, monkeypatch):
    monkeypatch.delattr(pynvml, ASKED)
    nothing = Refusing(pynvml.NVML_ERROR_NOT_SUPPORTED)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetEnforcedPowerLimit", nothing)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetPowerManagementDefaultLimit", nothing)
    state = NvmlGpu(node.uuids[0]).power_state()
    assert state == PowerState()
    assert str(state) == "no power profile enforced, power limit not known"


def test_a_failure_is_no_absence(node):
    gpu = NvmlGpu(node.uuids[0])
    node.set_fault(node.uuids[0], "lost")
    with pytest.raises(NvmlError, match="lost"):
        gpu.power_state()
    node.set_fault(node.uuids[0], "lost", 0)
    node.set_fault(node.uuids[0], "enforced_profiles", 1)
    assert gpu.power_state().enforced_profiles == ("max-P",)


class Refusing:
    def __init__(self, code):
        self.code, self.calls = code, 0

    def __call__(self, *arguments):
        self.calls += 1
        raise pynvml.NVMLError(self.code)
