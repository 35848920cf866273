"""The energy log of a node: one writer, one identity, whole lines."""

import json
import os
from pathlib import Path

import pytest
from energy_lines import window
from open_files import open_files

from envpipe_megatron.formats.bill import Bill
from envpipe_megatron.formats.energy import read_energy_logs
from envpipe_megatron.launch.agent.ledger import NodeLog


def notes(log: NodeLog) -> list[dict]:
    lines = [json.loads(line) for line in log.path.read_text().splitlines()]
    return [line for line in lines if line["format"] == "envpipe-note/1"]


@pytest.mark.parametrize("how", ["deleted", "renamed", "its folder deleted"])
def test_a_log_that_loses_its_name_loses_no_line(tmp_path, how):
    log = NodeLog(tmp_path / "runs", "n0")
    log.append(window(0, 0))
    before = log.read(0, 1 << 16)
    if how == "renamed":
        log.path.rename(tmp_path / "older.jsonl")
    else:
        log.path.unlink()
    if how == "its folder deleted":
        log.path.parent.rmdir()
    log.append(window(0, 1))
    log.note("ended", exit_code=0)
    whole = log.read(0, 1 << 16)
    assert whole.startswith(before)
    assert [json.loads(line).get("note") for line in whole.splitlines()] == [
        "begun",
        None,
        None,
        "ended",
    ]
    assert log.size == len(whole)
    assert not log.path.exists()
    log.close()


def test_starts_that_end_alike_are_told_apart(tmp_path):
    """Readers count a line that is given twice once: two starts must leave no such lines."""
    for _ in range(3):
        log = NodeLog(tmp_path, "n0")
        log.note("job", facts={"num_gpus": 1})
        log.note("ended", exit_code=0)
        log.close()
    logs = read_energy_logs([log.path])
    assert logs.repeated == 0
    assert Bill(logs.lines).nodes["n0"].exit_code == 0
    assert not Bill(logs.lines).nodes["n0"].running


@pytest.mark.parametrize("torn", [b'{"format": "envpipe-no', b"\xff\xfe\0\0", b"[" * 5000, b"{}"])
def test_a_torn_first_line_costs_no_identity(tmp_path, torn):
    """Else each start would be another log, all of whose lines count anew."""
    (tmp_path / "energy-n0.jsonl").write_bytes(torn)
    identities = []
    for _ in range(2):
        log = NodeLog(tmp_path, "n0")
        identities.append(log.identity)
        log.close()
    assert identities[0] == identities[1]
    (other := NodeLog(tmp_path, "n1")).close()
    assert other.identity not in identities
    lines = log.path.read_bytes().split(b"\n")
    assert lines[0] == torn
    assert [json.loads(line)["note"] for line in lines[1:-1]] == ["begun", "begun"]


@pytest.mark.parametrize("node", ["../../etc/passwd", "rack 1/node 2", "a:b\0c", "..", "é"])
def test_any_name_gives_a_file_in_the_folder(tmp_path, node):
    log = NodeLog(tmp_path / "out", node)
    log.close()
    assert log.path.parent == tmp_path / "out"
    assert [path.name for path in (tmp_path / "out").iterdir()] == [log.path.name]
    assert notes(log)[0]["node"] == node


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    files = open_files(tmp_path)
    with pytest.raises(OSError, match="file"):
        NodeLog(tmp_path / "file" / "out", "n0")
    (tmp_path / "energy-n0.jsonl").mkdir()
    with pytest.raises(OSError, match=r"energy-n0\.jsonl"):
        NodeLog(tmp_path, "n0")
    assert open_files(tmp_path) == files


def test_a_disk_that_is_full_from_the_start_is_an_error_that_holds_no_lock(tmp_path, monkeypatch):
    files = open_files(tmp_path)
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda descriptor, data: 0)
        with pytest.raises(OSError, match="No space left"):
            NodeLog(tmp_path, "n0")
    assert open_files(tmp_path) == files
    NodeLog(tmp_path, "n0").close()


def test_what_the_job_says_while_the_disk_is_full_is_written_later(tmp_path, monkeypatch):
    log = NodeLog(tmp_path, "n0")
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda descriptor, data: 0)
        for num_gpus in (4, 8):
            log.attempt(log.note, "job", facts={"num_gpus": num_gpus})
        with pytest.raises(OSError, match="space"):
            log.append(window(0, 0))
    log.append(window(0, 0))
    log.note("ended", exit_code=0)
    assert [note["note"] for note in notes(log)] == ["begun", "job", "job", "ended"]
    (found,) = Bill(read_energy_logs([log.path]).lines).missing()
    assert found == "7 of 8 GPUs sent nothing"


def test_reading_gives_whole_lines_alone(tmp_path):
    log = NodeLog(tmp_path, "n0")
    for iteration in range(20):
        log.append(window(0, iteration))
    whole = log.path.read_bytes()
    assert log.read(0, 1 << 20) == whole
    offset, pieces = 0, []
    while piece := log.read(offset, 1000):
        assert piece.endswith(b"\n")
        assert len(piece) <= 1000
        pieces.append(piece)
        offset += len(piece)
    assert b"".join(pieces) == whole
    assert len(pieces) > 5
    with log.path.open("ab") as file:
        file.write(b'{"torn": ')
    assert log.read(offset, 1000) == b""
    log.append(window(0, 20))
    torn, line = log.read(offset, 1000).splitlines()
    assert torn == b'{"torn": '
    assert json.loads(line)["last_iteration"] == 20
    log.close()


def test_a_file_system_without_locks_will_do(tmp_path, monkeypatch):
    def unsupported(descriptor: int, how: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", unsupported)
    log = NodeLog(tmp_path, "n0")
    assert Path(log.path).stat().st_size > 0
    log.close()
