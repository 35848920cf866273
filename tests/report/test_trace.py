"""A trace keeps the rules of its format."""

import gzip
import json
from collections import Counter, defaultdict
from dataclasses import replace

import pytest
import run_made

from envpipe_megatron.formats.timeline import ClockSamples, TimelineLogs
from envpipe_megatron.report import trace
from envpipe_megatron.report.pipelines import on_one_axis
from envpipe_megatron.report.trace import write_trace

NODES = {2: ("n2", 5000.0)}  # whose clock began long before


def check_format(events):
    """Check what viewers ask of events: fields, and slices of a thread one behind another."""
    ends = defaultdict(int)
    for event in events:
        assert {"ph", "pid", "name"} <= event.keys(), event
        assert isinstance(event["name"], str)
        if event["ph"] == "M":
            assert event["args"]
        elif event["ph"] == "C":
            assert type(event["ts"]) is int
            assert all(type(value) in (int, float) for value in event["args"].values())
        else:
            assert event["ph"] == "X"
            assert min(event["ts"], event["dur"]) >= 0
            thread = event["pid"], event["tid"]
            assert event["ts"] >= ends[thread], event
            ends[thread] = event["ts"] + event["dur"]


def traced(path, timelines, windows=()):
    said = write_trace(path, *on_one_axis(timelines, windows))
    return " ".join(said), json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


@pytest.fixture
def made():
    return run_made.iterations(nodes=NODES)


def names(events, kind="process_name"):
    return {e["pid"]: e["args"]["name"] for e in events if e["name"] == kind and e["tid"] == 0}


def units_of(events, pid):
    return [e for e in events if e["ph"] == "X" and e["pid"] == pid]


def test_every_unit_of_every_gpu_is_a_slice_at_its_time(tmp_path, made):
    said, events = traced(tmp_path / "t.json.gz", TimelineLogs(tuple(made)))
    check_format(events)
    assert "48 units of 2 iterations; 2 were recorded" in said
    assert names(events) == {
        0: "job",
        1: "n1 · stage 0 · rank 0 · NVIDIA A100",
        2: "n1 · stage 1 · rank 1 · NVIDIA A100",
        3: "n2 · stage 2 · rank 2 · NVIDIA A100",
    }
    for stage in range(3):
        slices = units_of(events, stage + 1)
        own = [one for one in made if one.labels.stage == stage]
        assert [s["name"] for s in slices] == " ".join(one.order for one in own).split()
        # On one axis: the node whose clock is ahead is brought back.
        shift_us = round(1e6 * own[1].iteration_time_s)
        starts = [*own[0].start_us, *(own[1].start_us + shift_us)]
        assert [s["ts"] for s in slices] == pytest.approx(starts, abs=1)
        assert [s["dur"] for s in slices] == pytest.approx(
            [*(own[0].end_us - own[0].start_us)] * 2, abs=1
        )
        first, last = slices[0], slices[-1]
        assert first["cat"] == "warm-up"
        assert first["args"] == {"microbatch": 0, "MHz": 1410, "iteration": 0}
        assert last["cat"] == "steady"
        assert last["args"] == {"microbatch": 3, "MHz": 1200, "iteration": 1}
    assert [(s["tid"], s["name"]) for s in units_of(events, 0)] == [
        (1, "warm-up"), (1, "steady"), (2, "0"), (2, "1"),
    ]  # fmt: skip


def test_counters_tell_clock_and_power_of_each_gpu(tmp_path, made):
    seen = ClockSamples(made[0].labels, (100.01, 100.2), (1410, 1200), (1395, 1200))
    _, events = traced(
        tmp_path / "t.json.gz", TimelineLogs(tuple(made), (seen,)), run_made.windows(made, 250.0)
    )
    check_format(events)
    told = defaultdict(list)
    for event in events:
        if event["ph"] == "C":
            ((unit, value),) = event["args"].items()
            told[event["pid"], f"{event['name']} {unit}"].append((event["ts"], value))
    length_us = round(1e6 * made[0].iteration_time_s)
    for pid in (1, 2, 3):
        # The second iteration's clock is requested when it begins, and once.
        assert told[pid, "SM clock requested MHz"] == [(0, 1410), (length_us, 1200)]
        assert told[pid, "power W"] == [
            (0, pytest.approx(250)),
            (length_us, pytest.approx(250)),
        ]
    assert told[1, "SM clock observed MHz"] == [(10_000, 1395), (200_000, 1200)]
    assert (2, "SM clock observed MHz") not in told


def test_clocks_of_a_dry_run_are_not_called_requested(tmp_path, made):
    logged = [replace(read, labels=replace(read.labels, clock_backend="dry_run")) for read in made]
    _, events = traced(tmp_path / "t.json.gz", TimelineLogs(tuple(logged)))
    assert {e["name"] for e in events if e["ph"] == "C"} == {"SM clock (dry run, not set)"}


def test_a_gpu_that_was_only_metered_has_its_power(tmp_path, made):
    agent = replace(run_made.windows(made[:1])[0], gpu_uid="GPU-spare", rank=None, stage=None)
    _, events = traced(tmp_path / "t.json.gz", TimelineLogs(tuple(made)), [agent])
    pid = next(pid for pid, name in names(events).items() if "GPU-spare" in name)
    assert [e["name"] for e in events if e["pid"] == pid and e["ph"] == "C"] == ["power"]


def test_a_trace_that_is_too_long_keeps_the_same_iterations_of_all_gpus(tmp_path, monkeypatch):
    monkeypatch.setattr(trace, "MAX_UNITS", 200)
    made = run_made.iterations(phases=("warm-up",) * 4 + ("steady",) * 20)
    said, events = traced(tmp_path / "t.json.gz", TimelineLogs(tuple(made)))
    check_format(events)
    kept = [{s["args"]["iteration"] for s in units_of(events, pid)} for pid in (1, 2, 3)]
    assert kept[0] == kept[1] == kept[2] == {0, 3, 5, 8, 11, 14, 17, 20, 23}
    assert f"{9 * 24} units of 9 iterations; 24 were recorded. More would be" in said
    assert len(units_of(events, 0)) == 2 + 24  # the job's own slices are all there


def test_a_trace_has_no_more_looks_at_clocks_and_changes_of_them_than_units(tmp_path, monkeypatch):
    """An hour of 1,000 GPUs has seven million looks, which no browser holds."""
    monkeypatch.setattr(trace, "MAX_UNITS", 100)
    made = run_made.iterations(phases=("warm-up", "steady") * 20)
    times_s = tuple(100 + 0.5 * number for number in range(300))
    seen = [ClockSamples(one.labels, times_s, (1410,) * 300, (1410,) * 300) for one in made[:3]]
    logs = TimelineLogs(tuple(made), tuple(seen))
    _, events = traced(tmp_path / "t.json.gz", logs)
    counted = Counter(event["name"] for event in events if event["ph"] == "C")
    assert counted["SM clock observed"] == 3 * 34  # every ninth, and the first
    kept = {unit["args"]["iteration"] for unit in units_of(events, 1)}
    assert counted["SM clock requested"] <= 3 * len(kept)


def test_a_start_behind_a_reboot_comes_behind_the_one_before(tmp_path):
    """The machine's clock begins anew."""
    starts = [
        run_made.iterations(run=f"2026-05-04T1{hour}:00:00.000+00:00", begin_s=begin_s)
        for hour, begin_s in enumerate((5000.0, 20.0))
    ]
    made = [*starts[0], *starts[1]]
    said, events = traced(tmp_path / "t.json.gz", TimelineLogs(tuple(made)), run_made.windows(made))
    check_format(events)
    assert "96 units of 2 iterations" in said
    length_us = round(2e6 * made[0].iteration_time_s)
    assert units_of(events, 1)[16]["ts"] == pytest.approx(length_us, abs=2)


def test_units_of_ranks_that_share_a_gpu_are_all_at_their_times(tmp_path):
    made = run_made.iterations()
    shared = [replace(one, labels=replace(one.labels, gpu_uid="GPU-0")) for one in made]
    _, events = traced(tmp_path / "t.json.gz", TimelineLogs(tuple(shared)))
    check_format(events)
    first_s = min(one.begin_s for one in shared)
    for stage in range(3):
        own = [one for one in shared if one.labels.stage == stage]
        begins = [1e6 * (one.begin_s - first_s) + one.start_us for one in own]
        assert [s["ts"] for s in units_of(events, stage + 1)] == pytest.approx(
            [at for of_one in begins for at in of_one], abs=2
        )


def test_rounding_to_microseconds_makes_no_slices_overlap(tmp_path, made):
    close = [*made[:3], *(replace(one, begin_s=one.begin_s - 6e-7) for one in made[3:])]
    _, events = traced(tmp_path / "t.json.gz", TimelineLogs(tuple(close)))
    check_format(events)
