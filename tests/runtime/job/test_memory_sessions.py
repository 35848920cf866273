"""Sessions whose plans are limited by the memory that was measured, through the real runtime."""

import functools
import json
from dataclasses import replace

import memory_ranks
import pytest
from on_request import on_request
from presets import preset_profile

from envpipe_megatron.core.profile import read_profile
from envpipe_megatron.core.sidecar import Sidecar
from envpipe_megatron.gpu.presets import load_preset
from envpipe_megatron.runtime.memory.stage import SAFETY_MARGIN

pytestmark = pytest.mark.xdist_group("pipeline")

SIZES = memory_ranks.SIZES
#: Of a stage with one microbatch in flight, in its backward.
ALONE = SIZES.weights + SIZES.gradients + SIZES.optimizer + SIZES.backward + SIZES.activations
STAGES, MICROBATCHES = 3, 6


def capacities(*in_flight):
    """Of devices that hold so many microbatches and half of another, and the margin."""
    return tuple(
        int((ALONE + (count - 0.5) * SIZES.activations) / (1 - SAFETY_MARGIN))
        for count in in_flight
    )


def train(pool, root, devices, request, profile_file=None):
    run = functools.partial(memory_ranks.train, profile_file=profile_file)
    return pool.run(run, root, devices, MICROBATCHES, request)


ENVELOPE = {"scheduling": "envpipe", "type": "envelope"}


def test_extra_forwards_are_limited_by_measured_memory(three_ranks, tmp_path):
    request = {**ENVELOPE, "max_in_flight": "memory", "reconfigure": "balanced"}
    told = train(three_ranks, tmp_path, capacities(5, 3, 1), request)
    for rank, one in enumerate(told):
        assert one.phase == "steady"
        assert one.peak_in_flight == (5, 3, 1)
        assert one.memory == told[0].memory
        stage = one.memory[rank]
        assert (stage.baseline_in_flight, stage.in_flight) == (STAGES - rank, (5, 3, 1)[rank])
        assert stage.activation_bytes == SIZES.activations
        # What was predicted, what the session measured, and what the device saw.
        assert stage.predicted_peak_bytes == one.peak_bytes
        assert stage.measured_peak_bytes == one.peak_bytes
        # Units are looked at in the last iteration of the warm-up and where peaks are compared.
        seen = one.readings_by_phase
        assert seen.pop("warm-up") == 2 * MICROBATCHES + 1
        assert seen.pop("steady") == 2 * MICROBATCHES + 1
        assert set(seen.values()) == {0}
    said = "\n".join(told[0].said)
    assert "in flight 5, 3, 1, predicted peak" in said
    assert "+0.0%, +0.0%, +0.0% from the prediction" in said
    assert "Memory is known to hold at most 5, 3, 1 microbatches in flight." in told[0].notes
    sidecar = read_profile(tmp_path / "profile.csv").sidecar
    assert sidecar.activation_bytes == (SIZES.activations,) * STAGES
    half = SIZES.activations / 2
    assert sidecar.free_bytes == pytest.approx(
        [4 * SIZES.activations + half, 2 * SIZES.activations + half, half], abs=2
    )
    assert json.loads((tmp_path / "plan.json").read_text())["peak_in_flight"] == [5, 3, 1]


@pytest.mark.parametrize(
    ("last", "splits"), [(7_000, True), pytest.param(4_000, False, marks=on_request("PIPELINE"))]
)
def test_split_orders_hold_what_was_measured_in_parts(three_ranks, tmp_path, last, splits):
    """Recomputing stages have room for few weight gradients that wait, or one of them for none."""
    sizes = replace(SIZES, activations=400, pending=6_400, backward=2_000, layers=4)
    alone = sizes.weights + sizes.gradients + sizes.optimizer + sizes.backward
    devices = tuple(int((alone + more) / (1 - SAFETY_MARGIN)) for more in (13_000, 9_000, last))
    request = {"type": "optimal", "sweep": True, "max_in_flight": "memory"}
    run = functools.partial(memory_ranks.train, splits=True, sizes=sizes)
    told = three_ranks.run(run, tmp_path, devices, MICROBATCHES, request)
    for one, stage in zip(told, told[0].memory, strict=True):
        assert one.phase == "steady"
        assert stage.pending_bytes == (sizes.pending,)
        assert stage.measured_peak_bytes <= stage.predicted_peak_bytes
        assert stage.predicted_peak_bytes <= 1.01 * stage.measured_peak_bytes
    profile = read_profile(tmp_path / "profile.csv")
    assert profile.sidecar.pending_bytes == (sizes.pending,) * STAGES
    assert profile.weight_shares.ravel().tolist() == [16.0] * STAGES
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert any("I" in unit for order in plan["schedule"] for unit in order) is splits


def test_where_no_memory_is_measured_that_of_a_profile_by_file_counts(three_ranks, tmp_path):
    path = tmp_path / "given.csv"
    clocks = sorted(load_preset("a100-sxm").supported_frequencies_mhz[::40])[:-1]
    given = preset_profile("a100-sxm", STAGES, memory_ranks.TIMES, clocks)
    request = {**ENVELOPE, "max_in_flight": "memory"}
    free_bytes = (350.0, 250.0, 150.0)
    facts = Sidecar(activation_bytes=(100.0,) * STAGES, free_bytes=free_bytes)
    replace(given, sidecar=facts).write(path)
    told = train(three_ranks, tmp_path, None, request, path)
    assert told[0].peak_in_flight == (4, 3, 1)
    assert told[0].free_bytes == free_bytes
    assert all(one.memory is None for one in told)
