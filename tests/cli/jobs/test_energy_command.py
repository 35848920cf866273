"""`envpipe energy sum`: what nodes and GPUs metered adds up, each line once."""

import json

from commands import run_well
from energy_lines import window

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
