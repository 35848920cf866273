"""`envpipe clocks measure-latency`: what it prints and writes, and what it refuses."""

import json
import sys
from functools import partial

import pytest
from commands import run

from envpipe_megatron.gpu.base import FORBID_VARIABLE
from envpipe_megatron.gpu.control import Control
from envpipe_megatron.gpu.guard.lease_file import LEASE_DIR_VARIABLE
from envpipe_megatron.gpu.presets import load_preset


@pytest.fixture(autouse=True)
def _own_leases(tmp_path, monkeypatch):
    monkeypatch.setenv(LEASE_DIR_VARIABLE, str(tmp_path / "leases"))


clocks = sys.modules["envpipe_megatron.cli.machine.clocks"]  # not its group
measure = partial(run, "clocks", "measure-latency")


def test_emulated_gpu_tells_its_presets_latency(tmp_path, monkeypatch):
    monkeypatch.setenv(FORBID_VARIABLE, "1")  # which is about real GPUs
    output = tmp_path / "latency.json"
    result = measure(
        "--emulated", "h200", "--clocks", "1980,990", "--repeats", "1", "--output", str(output)
    )
    assert result.exit_code == 0, result.output
    written = json.loads(output.read_text())
    assert written["format"] == "envpipe-clock-latency/1"
    assert [(row["from_mhz"], row["to_mhz"]) for row in written["changes"]] == [
        (1980, 990),
        (990, 1980),
    ]
    expected_s = load_preset("h200").frequency_change_s
    assert written["frequency_change_s"] == pytest.approx(expected_s, abs=4e-4)
    assert '"frequency_change_s": 0.01' in result.output
    assert "1980 -> 990" in result.output


def test_a_device_that_cuda_does_not_show_is_refused(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    any_right = Control("auto", "nvml", "of a test")
    monkeypatch.setattr(clocks, "choose_control", lambda *_: any_right)
    for device in ("2", "-1"):
        result = measure("--device", device)
        assert result.exit_code == 1
        assert "CUDA shows 2 GPUs" in result.output


@pytest.mark.parametrize("words", [(), ("--emulated", "h200")])
def test_without_torch_it_says_so(monkeypatch, words):
    monkeypatch.setitem(sys.modules, "torch", None)
    result = measure(*words)
    assert result.exit_code == 1
    assert "Install torch" in result.output


def test_forbidden_before_anything_is_touched(fake_nvml, monkeypatch):
    fake_nvml.use_here()
    monkeypatch.setenv(FORBID_VARIABLE, "1")
    result = measure()
    assert result.exit_code == 1
    assert FORBID_VARIABLE in result.output
    assert "--emulated" in result.output
    assert fake_nvml.history() == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--emulated", "h200", "--clocks", "1980"), "two different clocks"),
        (("--emulated", "h200", "--clocks", "1980,1001"), "1001"),
        (("--emulated", "h2000"), "Unknown GPU preset"),
        (("--emulated", "h200", "--output", "/nowhere/latency.json"), "no folder"),
    ],
)
def test_bad_input_is_said(arguments, said):
    result = measure(*arguments)
    assert result.exit_code == 1
    assert said in result.output
    assert "Traceback" not in result.output
