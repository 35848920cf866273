"""The guard against clock control, and what the base class checks for every back end."""

import logging

import pytest
from fake_gpu import FakeGpu
from plain_reader import UUID, PlainReader, assert_reads_through

from envpipe_megatron.gpu.base import (
    FORBID_VARIABLE,
    DryRunGpu,
    Gpu,
    GpuAddress,
    GpuError,
    GpuPermissionError,
)
from envpipe_megatron.gpu.emulated.emulated_gpu import EmulatedGpu


class HardwareGpu(FakeGpu):
    """A fake of real hardware: it says of itself what a back end says by default."""

    drives_hardware = Gpu.drives_hardware

    def __init__(self):
        super().__init__(supported_frequencies_mhz=(1410, 1395, 1380))


@pytest.mark.parametrize("value", ["1", "true", "yes", "on", "no", "00", " 1 "])
def test_forbidden_hardware_is_not_reached(monkeypatch, value):
    gpu = HardwareGpu()
    gpu.lock_frequency(1380)
    monkeypatch.setenv(FORBID_VARIABLE, value)  # after the object was made: read at each call
    with pytest.raises(GpuPermissionError, match=FORBID_VARIABLE):
        gpu.lock_frequency(1395)
    with pytest.raises(GpuPermissionError, match=FORBID_VARIABLE) as caught:
        gpu.reset_frequency()
    with pytest.raises(GpuPermissionError):  # the guard comes before the check of the clock
        gpu.lock_frequency(1)
    assert gpu.history == [1380]
    assert str(caught.value) == (
        "Refused to reset the clock on fake: ENVPIPE_FORBID_CLOCK_CONTROL is set (got "
        f"{value!r}). Unset ENVPIPE_FORBID_CLOCK_CONTROL, or use the dry_run or emulated back end"
    )


@pytest.mark.parametrize("value", ["", "0", " "])
def test_empty_and_zero_do_not_forbid(monkeypatch, value):
    monkeypatch.setenv(FORBID_VARIABLE, value)
    gpu = HardwareGpu()
    gpu.lock_frequency(1410)
    assert gpu.history == [1410]


def test_dry_run_and_emulated_work_while_forbidden(monkeypatch, tmp_path):
    monkeypatch.setenv(FORBID_VARIABLE, "1")
    for gpu in (DryRunGpu(HardwareGpu()), EmulatedGpu.create("a100-sxm", 0, tmp_path)):
        gpu.lock_frequency(1395)
        gpu.reset_frequency()


@pytest.mark.parametrize("method", ["lock_frequency", "reset_frequency"])
def test_a_back_end_cannot_replace_the_guarded_methods(method):
    with pytest.raises(TypeError, match=f"{method}.*_lock and _reset"):
        type("Evasive", (HardwareGpu,), {method: lambda self, *_: None})
    mixin = type("Mixin", (), {method: lambda self, *_: None})
    with pytest.raises(TypeError, match=method):
        type("EvasiveByMixin", (mixin, HardwareGpu), {})


@pytest.mark.parametrize(
    ("wanted_mhz", "nearest"),
    [(1400, "1410 MHz, 1395 MHz"), (2000, "1410 MHz"), (1, "1380 MHz")],
)
def test_unsupported_clock_names_the_nearest(wanted_mhz, nearest):
    gpu = HardwareGpu()
    with pytest.raises(GpuError, match=rf"{wanted_mhz}.*: {nearest}$"):
        gpu.lock_frequency(wanted_mhz)
    assert gpu.history == []


def test_dry_run_reads_through_but_sets_nothing(caplog):
    reader = PlainReader()
    gpu = DryRunGpu(reader)
    assert gpu.address == GpuAddress("dry_run", UUID)
    assert_reads_through(gpu)
    with caplog.at_level(logging.DEBUG):
        gpu.lock_frequency(1380)
        assert_reads_through(gpu)
        gpu.reset_frequency()
    assert_reads_through(gpu)
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("DEBUG", "dry run: would lock plain at 1380 MHz"),
        ("INFO", "dry run: would reset the clock of plain"),
    ]
    with pytest.raises(GpuError):
        gpu.lock_frequency(1400)
