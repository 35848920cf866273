"""What is taken of a run's folder, and what is said of the rest."""

import json
from types import SimpleNamespace

import pytest
from energy_lines import window

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.formats.bill import SUMMARY_FORMAT
from envpipe_megatron.formats.energy import append_line
from envpipe_megatron.formats.job_file import JOB_FORMAT
from envpipe_megatron.report.pipelines import by_iteration
from envpipe_megatron.report.run_folder import read_run_folder
from envpipe_megatron.report.summary import _notes

OLD, NEW = "2026-05-04T10:11:12.345+00:00", "2026-05-04T11:00:00.000+00:00"


def put_timeline(folder, *, run="", stage=0, uid="GPU-0", node="host", **more):
    entry = {
        "format": "envpipe-timeline/1", "node": node, "gpu_uid": uid, "rank": stage,
        "stage": stage, "run": run, "phase": "steady", "iteration": 5, "begin_s": 10.0,
        "iteration_time_s": 1.0, "units": "F0 B0", "start_us": [0, 10], "end_us": [5, 20], **more,
    }  # fmt: skip
    append_line(folder / "timeline.jsonl", entry)


def put_energy(folder, *, run="", uid="GPU-0", node="n1", file="energy.jsonl", stage=0, **more):
    append_line(folder / file, window(stage, 5, node=node, gpu_uid=uid, run=run) | more)


def put_job(folder, *starts):
    (folder / "job.json").write_text(json.dumps({"format": JOB_FORMAT, "starts": starts}))


def put_summary(folder, **fields):
    (folder / "summary.json").write_text(json.dumps({"format": SUMMARY_FORMAT, **fields}))


def lacks(folder, text):
    return [line for line in folder.missing if text in line]


def test_lines_that_are_nested_too_deep_or_of_others_are_torn_ones(tmp_path):
    for name in ("energy", "timeline", "clocks"):
        (tmp_path / f"{name}.jsonl").write_text("[" * 9999 + "\n")
    judged = {"judged": 1, "above_share": 0.5}
    follow = ({**judged, "below_share": "x"}, judged, {"power_profiles": [{}]}, 1)
    for wrong in ({"rank": "x"}, *({"rank": 0, "followed": each} for each in follow)):
        append_line(tmp_path / "clocks.jsonl", wrong)
    put_timeline(tmp_path)
    put_energy(tmp_path)
    folder = read_run_folder(tmp_path)
    assert (len(folder.timelines.iterations), len(folder.energy.windows), folder.clocks) == (
        1,
        1,
        (),
    )
    assert len(lacks(folder, "1 torn or foreign lines")) == 2
    assert lacks(folder, "6 torn or foreign lines were passed over: clocks.jsonl:1, ")


@pytest.mark.parametrize("memory", [True, "x", [1], [{"predicted_peak_bytes": "x"}]])
def test_a_summary_of_other_fields_is_named_and_left_out(tmp_path, memory):
    put_timeline(tmp_path)
    put_summary(tmp_path, memory=memory)
    folder = read_run_folder(tmp_path)
    assert (folder.summary, len(lacks(folder, "summary.json cannot be used"))) == (None, 1)


def test_a_start_that_has_not_ended_is_not_what_an_earlier_ones_summary_says(tmp_path):
    put_job(tmp_path, OLD, NEW)
    put_timeline(tmp_path, run=NEW, frequency_mhz=[1410, 1200])
    for started, nothing in ((NEW, True), (OLD, False)):
        put_summary(tmp_path, only_measures=True, started=started)
        assert read_run_folder(tmp_path).changed_nothing is nothing


def test_a_summary_of_another_job_is_named_and_left_out(tmp_path):
    """It has another model's tokens and memory; the job of the lines was killed."""
    put_timeline(tmp_path, run=NEW)
    put_summary(tmp_path, tokens_per_iteration=64, started=OLD)
    for starts, known in (((NEW,), False), ((OLD, NEW), True), ((OLD,), False)):
        put_job(tmp_path, *starts)
        folder = read_run_folder(tmp_path)
        told = "summary.json is of another job: the job did not end in order"
        assert (folder.summary is not None, not lacks(folder, told)) == (known, known)


def test_ranks_that_were_other_stages_in_an_earlier_start_are_left_out(tmp_path):
    """After a restart with fewer replicas, rank 1 is the second stage and was the first one."""
    put_job(tmp_path, OLD, NEW)
    for rank, stage in enumerate((0, 0, 1, 1)):
        put_timeline(tmp_path, run=OLD, rank=rank, stage=stage)
    for rank in (0, 1):
        put_timeline(tmp_path, run=NEW, rank=rank, stage=rank)
    folder = read_run_folder(tmp_path)
    assert [(read.labels.run, read.labels.rank) for read in folder.recorded] == [(NEW, 0), (NEW, 1)]
    assert len(folder.timelines.iterations) == 6  # the trace has all


def test_an_iteration_that_a_restart_repeats_is_of_one_start(tmp_path):
    """The second rank's record is not written yet, or the start had fewer ranks."""
    put_job(tmp_path, OLD, NEW)
    for run, ranks in ((NEW, 1), (OLD, 2)):  # nodes' files come one after another
        for rank in range(ranks):
            put_timeline(tmp_path, run=run, stage=rank)
    (reads,) = by_iteration(read_run_folder(tmp_path).recorded).values()
    assert [(read.labels.run, read.labels.rank) for read in reads] == [(NEW, 0)]


def test_lines_of_an_earlier_job_in_the_folder_are_left_out_and_counted(tmp_path):
    put_job(tmp_path, NEW)
    for run in (OLD, NEW, ""):
        put_timeline(tmp_path, run=run)
        put_energy(tmp_path, run=run)
        append_line(tmp_path / "clocks.jsonl", {"run": run, "backend": "dry_run"})
    folder = read_run_folder(tmp_path)
    assert [read.labels.run for read in folder.timelines.iterations] == [NEW, ""]
    assert [each.run for each in folder.energy.windows] == [NEW, ""]
    assert [entry["run"] for entry in folder.clocks] == [NEW, ""]
    assert lacks(folder, "3 lines of other jobs")
    put_job(tmp_path, OLD, NEW)
    folder = read_run_folder(tmp_path)
    assert len(folder.energy.windows) == 3
    assert not lacks(folder, "other jobs")


def test_a_job_that_only_measured_last_is_the_present_one_and_in_no_job_file(tmp_path):
    put_job(tmp_path, OLD)
    put_summary(tmp_path, only_measures=True, started=NEW)
    for run in (OLD, NEW):
        put_timeline(tmp_path, run=run, frequency_mhz=[1410, 1200])
        put_energy(tmp_path, run=run)
    folder = read_run_folder(tmp_path)
    assert [read.labels.run for read in folder.timelines.iterations] == [NEW]
    assert [each.run for each in folder.energy.windows] == [NEW]
    assert folder.changed_nothing
    assert lacks(folder, "2 lines of other jobs")
    put_job(tmp_path, "2030-01-01T00:00:00.000+00:00")  # of a job that has left no line yet
    with pytest.raises(EnvPipeError, match="No run has left"):
        read_run_folder(tmp_path)


def test_of_several_runs_in_the_folder_the_last_is_reported(tmp_path):
    for run in ("baseline", "envpipe"):
        put_timeline(tmp_path, run=run)
        put_energy(tmp_path, run=f"{run} {NEW}")
    folder = read_run_folder(tmp_path)
    assert [read.labels.run for read in folder.timelines.iterations] == ["envpipe"]
    assert [each.run for each in folder.energy.windows] == [f"envpipe {NEW}"]
    assert lacks(folder, "2 lines of other jobs")


@pytest.mark.parametrize("put", [put_timeline, put_energy])
@pytest.mark.parametrize("name", ["dry_run", "emulated", "nvml"])
def test_any_line_tells_what_set_the_clocks_of_which_gpu(tmp_path, name, put):
    gpu = "NVIDIA A100 SXM (emulated)" if name == "emulated" else "NVIDIA A100"
    put(tmp_path, clock_backend=name, gpu=gpu)
    folder = read_run_folder(tmp_path)
    assert (folder.dry_run, folder.emulated) == (name == "dry_run", name == "emulated")


@pytest.mark.parametrize(
    ("other", "nothing"),
    [
        ({}, True),
        ({"frequency_mhz": [1410, 1410]}, True),
        ({"units": "F0 F1 B0", "start_us": [0, 5, 10], "end_us": [5, 10, 20]}, True),  # a batch
        ({"units": "B0 F0"}, False),
        ({"units": "F0 I0 W0", "start_us": [0, 5, 10], "end_us": [5, 10, 20]}, False),
        ({"frequency_mhz": [1410, 1200]}, False),
        ({"frequency_mhz": [1200, 1200]}, False),
    ],
)
def test_a_job_that_changed_nothing_is_told_from_one_that_did(tmp_path, other, nothing):
    for stage in range(2):
        clocks = {"frequency_mhz": [1410, 1410]} if "frequency_mhz" in other else {}
        put_timeline(tmp_path, stage=stage, **clocks)
        put_timeline(tmp_path, stage=stage, iteration=6, **other)
    assert read_run_folder(tmp_path).changed_nothing is nothing


@pytest.mark.parametrize(
    ("start_us", "end_us"),
    [([-1, 10], [5, 20]), ([0, 10], [5, 9]), ([0, 4], [5, 20]), ([0], [5]), ([0, 10], [5])],
)
def test_timelines_that_no_stage_can_have_are_left_out(tmp_path, start_us, end_us):
    put_timeline(tmp_path)
    put_timeline(tmp_path, start_us=start_us, end_us=end_us)
    timelines = read_run_folder(tmp_path).timelines
    assert (len(timelines.iterations), len(timelines.unreadable)) == (1, 1)


def test_stages_without_a_timeline_are_named(tmp_path):
    put_timeline(tmp_path, stage=1)
    put_energy(tmp_path, stage=3)
    folder = read_run_folder(tmp_path)
    assert folder.num_stages == 4
    assert lacks(folder, "stages 0, 2, 3:")


def test_a_file_without_a_line_takes_no_other_files_energies(tmp_path):
    put_energy(tmp_path, file="energy.n1.jsonl")
    (tmp_path / "energy.n2.jsonl").write_text('{"format": "envpipe-en')
    folder = read_run_folder(tmp_path)
    assert len(folder.energy.windows) == 1
    assert lacks(folder, "energy.n2.jsonl")


def test_notes_without_energies_are_kept_and_named(tmp_path):
    put_timeline(tmp_path)
    append_line(
        tmp_path / "energy.jsonl", {"format": "envpipe-note/1", "node": "n1", "note": "begun"}
    )
    folder = read_run_folder(tmp_path)
    assert len(folder.energy.lines) == 1
    assert lacks(folder, "only what agents noted")


def test_files_of_another_version_are_named_and_left_out(tmp_path):
    """Their fields may mean something else; of a later one, nobody knows yet what."""
    put_timeline(tmp_path)
    for name, known in (("summary.json", SUMMARY_FORMAT), ("job.json", JOB_FORMAT)):
        (tmp_path / name).write_text('{"format": "envpipe-other/9", "starts": ["x"]}')
        folder = read_run_folder(tmp_path)
        assert folder.summary is None
        assert known in lacks(folder, f"{name} cannot be used")[0]


@pytest.mark.parametrize("name", ["timeline", "energy", "clocks"])
def test_a_folder_that_is_called_like_a_log_is_named(tmp_path, name):
    put_timeline(tmp_path)
    (tmp_path / f"{name}-x.jsonl").mkdir()
    assert lacks(read_run_folder(tmp_path), f"{name}-x.jsonl is no file")


@pytest.mark.parametrize("name", ["summary.json", "job.json"])
@pytest.mark.parametrize("text", ["{", "null"])
def test_a_file_that_is_no_object_is_named(tmp_path, name, text):
    put_energy(tmp_path)
    (tmp_path / name).write_text(text)
    assert lacks(read_run_folder(tmp_path), f"{name} cannot be used: File {tmp_path / name} is not")


@pytest.mark.parametrize("ranks", [3, [3, {"notes": -1}, {"notes": ["kept"]}]])
def test_notes_of_a_summary_that_was_edited_are_shown_where_they_are_some(tmp_path, ranks):
    put_timeline(tmp_path)
    put_summary(tmp_path, ranks=ranks)
    shown = list(_notes(read_run_folder(tmp_path), SimpleNamespace(notes=())))  # type: ignore[arg-type]
    assert shown == ([] if ranks == 3 else ["kept"])
