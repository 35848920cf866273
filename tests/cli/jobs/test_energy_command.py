"""`envpipe energy sum`: what nodes and GPUs metered adds up, each line once."""

import json

import pytest
from commands import run_badly, run_well
from energy_lines import job, note, window

from envpipe_megatron.formats.energy import append_line


def write(path, *windows):
    for entry in windows:
        append_line(path, entry)
    return path


def summed(*paths):
    return json.loads(run_well("energy", "sum", *paths, "--json").stdout)


def test_lines_that_are_given_twice_count_once_and_are_told_of(tmp_path, caplog):
    entries = [window(iteration=i, energy_j=10 + i) for i in range(6)]
    early = write(tmp_path / "copied_early.jsonl", *entries[:4])
    late = write(tmp_path / "late.jsonl", *entries[2:], *entries[5:])
    facts = summed(early, late)
    assert (facts["job"]["energy_j"], facts["repeated_lines"]) == (75, 3)
    assert "given twice" not in caplog.text
    run_well("energy", "sum", early, late)
    assert "3 lines were given twice and counted once" in caplog.text
    # The same figures of another GPU, or at another time, are not the same line.
    other = write(tmp_path / "other.jsonl", window(gpu=1, energy_j=10), window(begin_s=900.0))
    assert summed(early, other)["repeated_lines"] == 0


def test_torn_and_foreign_lines_are_passed_over_and_named_as_lacking(tmp_path, caplog):
    path = write(tmp_path / "log.jsonl", window(), window(iteration=1))
    spoilt = [
        b'{"format": "envpipe-energy/1", "rank": 1, "ener',
        b"\xff\xfe\x00",
        b'{"format": "envpipe-plan/1", "energy_j": 5, "duration_s": 1}',
        json.dumps(window(energy_j=-1.0)).encode(),
        b"[" * 100_000,
    ]
    with path.open("ab") as file:
        file.write(b"\n".join(spoilt) + b"\n\n")
    write(path, window(iteration=2))
    with path.open("ab") as file:
        file.write(b'{"format": "envpipe-en')  # a writer that was killed
    facts = summed(path)
    assert facts["job"]["windows"] == 3
    assert facts["job"]["energy_j"] == 300
    assert "energy_per_iteration_j" not in facts["job"]  # iterations count, their joules do not
    lines = [*range(3, 8), 10]
    assert facts["unreadable_lines"] == [f"{path}:{number}" for number in lines]
    shown = run_well("energy", "sum", path)
    assert "6 torn or foreign lines" in caplog.text
    assert "INCOMPLETE: 6 lines cannot be read" in shown.stdout
    assert "300.0" in shown.stdout


def test_files_without_an_energy_log_are_refused_by_name(tmp_path):
    good, empty, foreign = (tmp_path / name for name in ("good", "empty", "foreign"))
    write(good, window())
    empty.write_text("\n")
    foreign.write_text("stage,instruction\n")
    assert summed(empty, good, empty)["job"]["windows"] == 1
    for paths, named in (
        ([foreign, good], foreign),
        ([good, empty, foreign], foreign),
        ([empty], empty),
    ):
        message = run_badly("energy", "sum", *paths)
        assert f"{named} holds no line of an energy log" in message


def test_a_whole_job_is_complete(tmp_path):
    path = write(
        tmp_path / "log.jsonl",
        note("begun", time="2026-01-31T12:00:00", log="1"),
        job(num_gpus=1, tokens_per_iteration=500),
        *(window(iteration=i) for i in range(4)),
        window(iteration=3, energy_j=50.0, phase="between"),
        note("ended", exit_code=0),
    )
    options = ("--price", "3.6e6", "--grid-intensity", "7.2e6")
    facts = json.loads(run_well("energy", "sum", path, *options, "--json").stdout)
    assert (facts["complete"], facts["missing"]) == (True, [])
    assert facts["job"]["iterations"] == 4
    assert facts["job"]["energy_per_iteration_j"] == 112.5
    assert facts["job"]["energy_per_token_j"] == 0.225
    assert (facts["job"]["cost"], facts["job"]["co2_g"]) == pytest.approx((450, 900))
    shown = run_well("energy", "sum", path, *options).stdout
    assert "4 iterations: 112.5 J per iteration, 0.225 J per token" in shown
    assert "cost 450 at 3.6e+06 a kWh, 900 g of CO2 at 7.2e+06 g a kWh" in shown
    assert "INCOMPLETE" not in shown
