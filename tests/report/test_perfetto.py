"""A report of many ranks, and Perfetto's own parser on its trace where that is installed."""

import gzip
import json

import pytest
from trace_rules import check_format

from benchmarks.report import perfetto_check, report_scale
from envpipe_megatron.formats.energy import PHASES
from envpipe_megatron.gpu.emulated.presets import load_preset
from envpipe_megatron.report.run_folder import read_run_folder
from envpipe_megatron.report.trace import write_trace

STAGES, REPLICAS, MICROBATCHES, ITERATIONS = 4, 2, 8, 25

needs_perfetto = pytest.mark.skipif(
    bool(perfetto_check.missing_checker()), reason=str(perfetto_check.missing_checker())
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small one of the benchmark's, with its trace."""
    preset = load_preset("a100-sxm")
    plan = report_scale.plan_of(preset, STAGES, MICROBATCHES)
    made = tmp_path_factory.mktemp("scale")
    report_scale.make_folder(report_scale.Job(STAGES, REPLICAS, ITERATIONS, preset, plan), made)
    read = read_run_folder(made)
    facts = write_trace(made / "trace.json.gz", read.timelines, read.windows)
    return made, read, facts


def test_the_benchmarks_job_is_one_that_could_have_been(folder):
    _, read, facts = folder
    assert facts.units == STAGES * REPLICAS * ITERATIONS * 2 * MICROBATCHES
    assert facts.overlapping == 0
    assert {one.phase for one in read.timelines.iterations} < set(PHASES)
    assert read.plan is not None
    last = {one.labels.stage: one for one in read.timelines.iterations}
    for stage, one in last.items():
        assert one.order.split() == read.plan.schedule.labels()[stage]
        assert one.frequency_mhz.tolist() == read.plan.frequency_mhz[stage].tolist()


def test_its_trace_keeps_the_rules(folder):
    events = json.loads(gzip.decompress((folder[0] / "trace.json.gz").read_bytes()))
    check_format(events["traceEvents"])


@needs_perfetto
def test_perfetto_reads_all_of_it(folder):
    path, read, facts = folder
    found = perfetto_check.check(path / "trace.json.gz")
    assert found["problems"] == {}
    phases = len({one.phase for one in read.timelines.iterations})
    assert found["slices"] == facts.units + ITERATIONS + phases
    assert found["processes"] == STAGES * REPLICAS + 1
    assert found["threads"] == STAGES * REPLICAS + 2
    assert found["deepest"] == 0  # no slice lies on another
    assert found["counter_tracks"] == {
        "SM clock requested MHz": STAGES * REPLICAS,
        "power W": STAGES * REPLICAS,
    }


@needs_perfetto
@pytest.mark.parametrize(
    "text", ["hello", '{"traceEvents":[{"ph":"X","pid":1,"tid":1,"ts":5,"dur":3,"name":"F0"}']
)
def test_perfetto_does_not_read_everything(tmp_path, text):
    (tmp_path / "trace.json").write_text(text)
    with pytest.raises(ValueError, match="trace"):
        perfetto_check.check(tmp_path / "trace.json")
