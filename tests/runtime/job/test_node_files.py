"""Each node of a job has its own files; ranks of a node share theirs."""

from __future__ import annotations

import socket

import pytest

from envpipe_megatron.formats.energy import read_energy_logs
from envpipe_megatron.launch.bill.bill import bill_of
from envpipe_megatron.runtime.job.node_files import NodeFiles


class Nodes:
    """Collectives of ranks on these nodes, one stage each."""

    def __init__(self, *names):
        self.names = names

    def from_planner(self, own):
        assert own in self.names
        self.own = own
        return self.names[0]

    def on_all(self, holds):
        assert holds == (self.own == self.names[0])
        return all(name == self.names[0] for name in self.names)


def files(monkeypatch, folder, node, *nodes):
    monkeypatch.setattr(socket, "gethostname", lambda: node)
    return NodeFiles(folder, Nodes(*nodes))


def test_one_node_has_plain_names(monkeypatch, tmp_path):
    files(monkeypatch, tmp_path, "n1", "n1", "n1").append("energy", {})
    assert [path.name for path in tmp_path.iterdir()] == ["energy.jsonl"]


def test_several_nodes_have_a_file_each_and_one_bill(monkeypatch, tmp_path):
    for number, node in enumerate(("n1", "n2", "n1")):
        files(monkeypatch, tmp_path, node, "n1", "n2", "n1").append(
            "energy",
            {"node": node, "rank": number, "phase": "steady", "energy_j": 5.0, "duration_s": 1.0},
        )
    logs = sorted(tmp_path.glob("energy*.jsonl"))
    assert [path.name for path in logs] == ["energy-n1.jsonl", "energy-n2.jsonl"]
    assert [len(path.read_text().splitlines()) for path in logs] == [2, 1]
    assert bill_of(read_energy_logs(logs).lines).total().energy_j == 15.0


def test_a_folder_that_cannot_be_written_is_logged(monkeypatch, tmp_path, caplog):
    files(monkeypatch, tmp_path / "gone", "n1", "n1").append("clocks", {})
    assert "clocks.jsonl could not be written" in caplog.text
    nowhere = files(monkeypatch, None, "n1", "n1")
    nowhere.append("clocks", {})
    assert nowhere.appender("energy") is None


@pytest.mark.parametrize("odd", ["a/b", ""])
def test_what_a_host_may_call_itself(monkeypatch, tmp_path, odd):
    files(monkeypatch, tmp_path, odd, odd, "n2").append("energy", {})
    (path,) = tmp_path.iterdir()
    assert path.is_file()
