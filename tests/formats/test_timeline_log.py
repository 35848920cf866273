"""What of a job's iterations is written."""

from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from fake_gpu import FakeGpu

from envpipe_megatron.formats.energy import Phase, append_line
from envpipe_megatron.formats.timeline import TimelineLog, is_recorded, read_timelines
from envpipe_megatron.runtime.clocks.watch import ClockWatch

LABELS = {"node": "n1", "gpu": "A100", "gpu_uid": "GPU-1", "rank": 3, "stage": 1, "run": "first"}
SPAN_S = 12.5, 0.3
UNITS_S = np.array([[0.0, 0.1], [0.1, 0.2499996]])


def add(log, phase, iteration, clocks=(1410, 1200)):
    log.add(phase, iteration, SPAN_S, UNITS_S, lambda: ["F0", "B0"], clocks and list(clocks))


def test_what_is_written_is_read_again(tmp_path):
    path = tmp_path / "timeline.jsonl"
    log = TimelineLog(partial(append_line, path), LABELS)
    add(log, Phase.WARMUP, 7)
    add(log, Phase.PROFILE, 8, clocks=None)
    log.close()
    with path.open("ab") as file:
        file.write(b'{"format": "envpipe-timeline/1", "node": "n1", "units": "F0 B')
    read = read_timelines([path])
    assert read.unreadable == (f"{path}:3",)
    first, second = read.iterations
    assert vars_of(first.labels) == LABELS
    assert (first.phase, first.iteration, first.begin_s) == ("warm-up", 7, 12.5)
    assert first.iteration_time_s == 0.3
    assert [str(unit) for unit in first.units] == ["F0", "B0"]
    assert first.start_us.tolist() == [0, 100_000]
    assert first.end_us.tolist() == [100_000, 250_000]
    assert first.frequency_mhz.tolist() == [1410, 1200]
    assert second.frequency_mhz is None


def vars_of(labels):
    return {name: getattr(labels, name) for name in LABELS}


def test_a_long_steady_phase_is_thinned_out_and_the_others_are_not():
    lines = []
    log = TimelineLog(lines.append, LABELS)
    for index in range(30):
        add(log, Phase.RECONFIGURE, index)
    for index in range(250):
        add(log, Phase.STEADY, 30 + index)
    log.close()
    recorded = [line["iteration"] for line in lines]
    assert recorded == [*range(30), *range(30, 40), 130, 230]


@pytest.mark.parametrize("phase", list(Phase))
def test_a_million_iterations_of_any_phase_leave_some_hundreds(phase):
    recorded = [index for index in range(10**6) if is_recorded(phase, index)]
    assert len(recorded) < 750
    assert max(after / before for before, after in pairwise(recorded[300:])) < 1.5


def test_the_next_iteration_whose_units_are_timed_is_written_for_one_that_was_due():
    lines = []
    log = TimelineLog(lines.append, LABELS)
    for number in range(250):
        units_s = UNITS_S if number < 13 or number % 100 == 7 else None
        log.add(Phase.STEADY, number, SPAN_S, units_s, lambda: ["F0", "B0"], None)
    log.close()
    assert [line["iteration"] for line in lines] == [*range(10), 107, 207]


def test_clocks_that_were_seen_stand_beside_the_iterations(tmp_path):
    path = tmp_path / "timeline.jsonl"
    log = TimelineLog(partial(append_line, path), LABELS)
    gpu, page = FakeGpu(), SimpleNamespace(last_change_s=0.0, set_mhz=None)

    def see(time_s, state):
        log.add_clock(time_s, state.requested_mhz, state.observed_mhz, state.throttle_reasons)

    watch = ClockWatch(gpu, page, see)
    watch.sample()
    gpu.lock_frequency(1200)
    page.set_mhz = 1200
    watch.sample()
    watch.close()
    log.close()
    (samples,) = read_timelines([path]).clocks
    assert samples.requested_mhz == (None, 1200)
    assert samples.observed_mhz[1] == 1200
    assert samples.time_s[0] <= samples.time_s[1]


def test_clocks_of_a_long_job_are_recorded_in_its_first_hour():
    lines = []
    log = TimelineLog(lines.append, LABELS)
    reasons = "sw power cap", "hw slowdown"
    for half_seconds in range(3 * 7200):
        log.add_clock(0.5 * half_seconds + 1e-4, 1200, 1185, reasons)
    log.close()
    assert sum(len(line["time_s"]) for line in lines) == 7200
    assert lines[0] == {
        "format": "envpipe-clock/1",
        **LABELS,
        "time_s": [0.5 * half_seconds for half_seconds in range(120)],
        "requested_mhz": [1200] * 120,
        "observed_mhz": [1185] * 120,
        "throttle_reasons": ["sw power cap, hw slowdown"] * 120,
    }
