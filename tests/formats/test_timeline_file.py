"""Timeline files: what a line says is read, and a line that cannot be true is passed over."""

import json

import pytest

from envpipe_megatron.core.kinds import parse_unit
from envpipe_megatron.formats.timeline import ClockSamples, GpuLabels, read_timelines

LABELS = {
    "node": "n1", "gpu": "NVIDIA A100", "gpu_uid": "GPU-1a2b", "rank": 3, "stage": 1,
    "run": "first", "clock_backend": "nvml",
}  # fmt: skip
ITERATION = LABELS | {
    "format": "envpipe-timeline/1", "phase": "steady", "iteration": 40, "begin_s": 812.5,
    "iteration_time_s": 0.6, "units": "F0 F1 B0 B1", "start_us": [0, 10, 40, 50],
    "end_us": [10, 20, 40, 60], "frequency_mhz": [1410, 1260, 1260, 900],
}  # fmt: skip
CLOCKS = LABELS | {
    "format": "envpipe-clock/1", "time_s": [812.5, 813], "requested_mhz": [1260, None],
    "observed_mhz": [1260, 1410], "throttle_reasons": ["", "idle"],
}  # fmt: skip


def read(tmp_path, *lines):
    path = tmp_path / "timeline.jsonl"
    path.write_text(
        "".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)
    )
    return read_timelines([path])


def test_both_kinds_of_lines_are_read(tmp_path):
    logs = read(tmp_path, CLOCKS, "\n", ITERATION, '{"torn', "\n", ITERATION)
    assert logs.unreadable == (f"{tmp_path / 'timeline.jsonl'}:4",)
    labels = GpuLabels("n1", "NVIDIA A100", "GPU-1a2b", 3, 1, "first", "nvml")
    assert logs.clocks == (
        ClockSamples(labels, (812.5, 813.0), (1260, None), (1260, 1410), ("", "idle")),
    )
    one, two = logs.iterations
    assert one.labels == two.labels == labels
    assert (one.phase, one.iteration, one.begin_s, one.iteration_time_s) == (
        "steady",
        40,
        812.5,
        0.6,
    )
    assert one.units == tuple(map(parse_unit, ("F0", "F1", "B0", "B1")))
    assert one.start_us.tolist() == [0, 10, 40, 50]
    assert one.end_us.tolist() == [10, 20, 40, 60]
    assert one.frequency_mhz.tolist() == [1410, 1260, 1260, 900]


@pytest.mark.parametrize("optional", ["node", "gpu", "gpu_uid", "run", "clock_backend", "phase"])
def test_texts_may_be_absent(tmp_path, optional):
    (one,) = read(tmp_path, {k: v for k, v in ITERATION.items() if k != optional}).iterations
    assert getattr(one if optional == "phase" else one.labels, optional) == ""


@pytest.mark.parametrize(
    "line",
    [
        [],
        *[ITERATION | {"format": other} for other in ("envpipe-energy/1", None)],
        *[
            ITERATION | {field: bad}
            for field in ("rank", "stage", "iteration")
            for bad in (-1, 0.5, True, None, 2**31)
        ],
        *[
            ITERATION | {field: bad}
            for field in ("begin_s", "iteration_time_s")
            for bad in (-0.1, 1e300)
        ],
        ITERATION | {"end_us": [10, 20, 50, 2**60]},
        *[ITERATION | {field: 7} for field in ("node", "gpu", "gpu_uid", "run", "phase")],
        *[ITERATION | {"units": other} for other in ("F0 F1 B0", "F0 F1 B0 X1", "")],
        *[
            ITERATION | {field: bad}
            for field in ("start_us", "end_us", "frequency_mhz")
            for bad in ([], [1, 2, 3], [0, 10, 40, 50.5], [[0], [10], [40], [50]], "text", 7)
        ],
        ITERATION | {"units": "", "start_us": [], "end_us": [], "frequency_mhz": []},
        ITERATION | {"start_us": [-1, 10, 40, 50]},
        ITERATION | {"start_us": [0, 9, 40, 50]},  # before the end of the unit before
        ITERATION | {"end_us": [10, 20, 39, 60]},  # before its own start
        *[{k: v for k, v in ITERATION.items() if k != field} for field in ("rank", "begin_s")],
        *[
            CLOCKS | {field: bad}
            for field in ("time_s", "requested_mhz", "observed_mhz")
            for bad in ([1], [1, "2"], 7)
        ],
        CLOCKS | {"observed_mhz": [1260, None]},
        CLOCKS | {"requested_mhz": [1260.0, None]},
        CLOCKS | {"stage": -1},
    ],
)  # fmt: skip
def test_a_line_that_cannot_be_true_is_passed_over(tmp_path, line):
    logs = read(tmp_path, line, ITERATION)
    assert logs.unreadable == (f"{tmp_path / 'timeline.jsonl'}:1",)
    assert len(logs.iterations) == 1
    assert not logs.clocks
