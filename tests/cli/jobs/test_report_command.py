"""`envpipe report`: from what a run left, however little, to what somebody reads."""

import gzip
import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from cli_helpers import files_of_at_most, plan_for, write_profile
from commands import run_badly, run_well
from energy_lines import note, window

from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.timeline import Timeline
from envpipe_megatron.formats.energy import append_line
from envpipe_megatron.trials import run

# One worker makes what they share.
pytestmark = pytest.mark.xdist_group("report")

STAGES, MICROBATCHES = 2, 4
#: (first, last) iteration of each phase.
PHASES = {"warm-up": (0, 2), "profile": (3, 5), "steady": (6, 9)}
POWER_W = {"warm-up": 300.0, "profile": 250.0, "steady": 240.0}
#: That is what a step at full clock takes.
BASELINE = {
    "iterations": 3, "time_s": 1.5, "time_uncertainty_s": 0.0, "energy_j": 450.0,
    "metering_uncertainty_j": 0.1,
}  # fmt: skip


def labels(stage, **more):
    return {
        "node": "n1", "gpu": "NVIDIA A100", "gpu_uid": f"GPU-{stage}", "rank": stage,
        "stage": stage, **more,
    }  # fmt: skip


def write_run(folder, *, begin_s=100.0, **more):
    """Return what a job of two ranks leaves that is killed in its steady phase: logs only."""
    schedule = builders.one_f_one_b(STAGES, MICROBATCHES)
    timeline = Timeline(schedule, np.where(schedule.is_backward, 0.2, 0.1))
    length_s = timeline.iteration_time_s
    for phase, (first, last) in PHASES.items():
        for stage in range(STAGES):
            for iteration in range(first, last + 1):
                entry = {
                    "format": "envpipe-timeline/1",
                    **labels(stage, **more),
                    "phase": phase,
                    "iteration": iteration,
                    "begin_s": begin_s + iteration * length_s,
                    "iteration_time_s": length_s,
                    "units": " ".join(schedule.labels()[stage]),
                    "start_us": np.rint(1e6 * timeline.start_s[stage]).astype(int).tolist(),
                    "end_us": np.rint(1e6 * timeline.end_s[stage]).astype(int).tolist(),
                    "frequency_mhz": [1200 if phase == "warm-up" else 900] * 2 * MICROBATCHES,
                }
                append_line(folder / "timeline.jsonl", entry)
            steps = last - first + 1
            metered = window(
                stage, first, steps * length_s * POWER_W[phase], phase=phase, last_iteration=last,
                begin_s=begin_s + first * length_s, duration_s=steps * length_s,
                compute_s=steps * 1.2, blocking_s=steps * 0.2, idle_s=steps * (length_s - 1.4),
            )  # fmt: skip
            compared = {"baseline": BASELINE} if phase == "steady" else {}
            append_line(folder / "energy.jsonl", metered | labels(stage, **more) | compared)
    return folder


def pictures(folder):
    return {path.stem for path in folder.glob("*.png")}


def views_of(folder):
    return re.findall(r'<section id="((?!part-).+?)"', (folder / "index.html").read_text())


def trace_of(folder):
    return json.loads(gzip.decompress((folder / "trace.json.gz").read_bytes()))["traceEvents"]


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "job"
    made.mkdir()
    # As a job labels its lines that may be started again.
    return write_run(made, run="2026-05-04T10:11:12.345+00:00", clock_backend="dry_run")


def test_a_job_that_left_all_its_files_has_all_its_pictures(folder):
    profile = write_profile(folder / "profile.csv", STAGES)
    plan_for(profile, folder / "plan.json", "--policy", "envelope", microbatches=MICROBATCHES)
    memory = {
        "activation_bytes": 2**28, "baseline_in_flight": 2, "baseline_peak_bytes": 2**31,
        "room_bytes": 0, "in_flight": 4, "predicted_peak_bytes": 2**31 + 2**29,
        "measured_peak_bytes": 2**31 + 2**29,
    }  # fmt: skip
    (folder / "summary.json").write_text(
        json.dumps({"format": "envpipe-summary/1", "memory": [memory] * STAGES})
    )
    followed = {"power_profiles": [{"text": "none, 700 W"}, {"text": "max-Q, 500 W"}]}
    for rank in range(2):
        line = {**labels(rank), "backend": "dry_run", "changes": 12, "followed": followed}
        append_line(folder / "clocks.jsonl", line)
    shown = run_well("report", folder).stdout
    made = folder / "report"
    assert pictures(made) == {"timeline", "iterations", "energy_valley"}
    assert views_of(made) == [
        "timeline", "bubbles", "iterations", "power", "energy_valley", "frontier",
    ]  # fmt: skip
    # 240 W a GPU against 300 W, and as fast as the baseline.
    said = "own baseline: a step takes 1.5 s (0.00 % less time) and 360 J a GPU (20.00 "
    assert said in " ".join(shown.split())
    summary = (made / "summary.md").read_text()
    assert re.search(r"\n\| baseline, compared with \| \d \| 3 \| 1\.5000 \|", summary)
    assert re.search(r"\n\| steady \| \d \| \d+ \| 1\.5000 \|", summary)
    assert "dry run" in summary
    assert "| 0 | 2.50 | 2.50 |" in summary
    assert "- Rank 0, 1: none, 700 W, then max-Q, 500 W." in summary
    assert "Not in this report" not in summary
    for link in re.findall(r"\((\S+\.png)\)", summary):
        assert (made / link).exists()


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """Return what was shown of a job that was killed while it wrote, and its report."""
    folder = write_run(tmp_path_factory.mktemp("killed"))
    with (folder / "timeline.jsonl").open("a") as file:
        file.write('{"format": "envpipe-timeline/1", "ra')
    (folder / "profile.csv").write_text("stage,instruction\n0,forward\n")
    shown = run_well("report", folder).stdout
    return " ".join(shown.split()), folder / "report"


def test_a_page_needs_no_other_file_and_its_names_are_its_own(killed):
    page = (killed[1] / "index.html").read_text()
    page = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    assert views_of(killed[1]) == ["timeline", "bubbles", "iterations", "power"]
    assert not re.search(r'<\w+ [^>]*(src|xlink:href)="(?!#|data:)', page)
    names = re.findall(r'\bid="([^"]+)"', page)
    assert len(names) == len(set(names))


def test_what_is_missing_is_named_and_nothing_fails_for_it(killed):
    for name in ("profile.csv cannot be used", "plan.json", "clocks.jsonl", "summary.json"):
        assert f"Missing: {name}" in killed[0], name
    assert "summary.json: the job did not end in order" in killed[0]
    assert "1 torn or foreign lines" in killed[0]


def test_a_folder_whose_name_is_latin_1_has_a_report(killed, tmp_path):
    folder = tmp_path / "l\udce4uft"
    shutil.copytree(killed[1].parent, folder)
    run_well("report", folder)
    assert r"l\udce4uft" in (folder / "report" / "index.html").read_text()


@pytest.mark.parametrize("exit_code", [0, 1])
def test_a_job_that_wrote_elsewhere_is_not_said_to_have_failed(tmp_path, exit_code):
    for line in window(), note("ended", exit_code=exit_code):
        append_line(tmp_path / "energy.jsonl", line)
    shown = " ".join(run_well("report", tmp_path).stdout.split())
    assert ("summary.json: the job wrote to another folder" in shown) == (exit_code == 0)


@pytest.mark.parametrize("kept", ["energy.jsonl", "timeline.jsonl"])
def test_either_log_alone_makes_a_report(folder, tmp_path, kept):
    for path in folder.iterdir():
        if path.name != kept:
            path.unlink()
    run_well("report", folder, "--output", tmp_path / "out")
    names = {event["name"] for event in trace_of(tmp_path / "out")}
    assert ("F0" in names) == (kept == "timeline.jsonl")
    assert ("power" in names) == (kept == "energy.jsonl")
    assert ("power" in views_of(tmp_path / "out")) == (kept == "energy.jsonl")
    assert ("iterations" in pictures(tmp_path / "out")) == (kept == "energy.jsonl")


def test_a_folder_of_something_else_is_refused(tmp_path, profile_path):
    """A profile alone is no run either: its page would be empty."""
    (tmp_path / "summary.json").write_text('{"of": "something else"}')
    message = run_badly("report", tmp_path)
    assert "No run has left timeline*.jsonl or energy*.jsonl" in message
    assert str(profile_path.parent) in message
    assert not (tmp_path / "report").exists()


def test_a_report_overwrites_nothing_of_others(killed, tmp_path):
    run = killed[1].parent
    page = tmp_path / "index.html"
    page.write_text("my page")
    assert "index.html" in run_badly("report", run, "--output", tmp_path)
    assert page.read_text() == "my page"
    assert not (tmp_path / "trace.json.gz").exists()


@pytest.mark.parametrize(("num_bytes", "left"), [(100, []), (3000, ["trace.json.gz"])])
def test_a_report_on_a_full_disk_leaves_nothing_that_is_cut_short(tmp_path, num_bytes, left):
    folder = tmp_path / "run"
    folder.mkdir()
    write_run(folder)
    with files_of_at_most(num_bytes):
        assert "File too large. Make room there" in run_badly("report", folder)
    assert [path.name for path in (folder / "report").iterdir()] == left


def test_a_quickstart_ends_with_the_path_of_its_page_which_a_report_overwrites(
    tmp_path, monkeypatch
):
    def run_trial(results, _):
        output = results.settings.output
        write_run(output)
        write_profile(output / "profile.csv")
        (output / "timeline.jsonl").unlink()  # fewer pictures, drawn sooner

    monkeypatch.setattr(run, "run_trial", run_trial)
    (tmp_path / "out").mkdir()
    python = tmp_path / "an environment" / "python"
    python.parent.mkdir()
    python.with_name("activate").touch()
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.chdir(tmp_path)
    shown = run_well("quickstart", "--output", "out")
    *_, activate, plan = re.findall(r"^  (.*)", shown.output, re.MULTILINE)
    assert shlex.split(activate) == ["source", str(python.with_name("activate"))]
    run_well(*shlex.split(plan)[1:], "--blocking-power", 80)
    page = Path(shown.output.split(": ")[-1].strip())
    assert page.is_absolute()
    assert page.read_text().startswith("<!doctype html>")
    page.write_text("")
    run_well("report", tmp_path / "out")
    assert page.read_text().startswith("<!doctype html>")
