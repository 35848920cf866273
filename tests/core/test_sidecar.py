"""Sidecars: what is written is read back, and a wrong field is named."""

import json
import re

import pytest

from envpipe_megatron.core.sidecar import (
    SIDECAR_FORMAT,
    Sidecar,
    read_sidecar,
    sidecar_path,
)
from envpipe_megatron.errors import EnvPipeError

FULL = Sidecar(
    gpu="NVIDIA A100",
    tensor_parallel=8,
    num_chunks=2,
    microbatch_size=4,
    sequence_length=2048,
    wait_power_w=({1410: 83.6, 900: 70.25}, {1410: 84.0}),
    p2p_latency_s=(0.0002,),
    tail_time_s=(0.4, 0.5),
    activation_bytes=(1234.0, 99.0),
    free_bytes=(9999.0, 0.0),
    frequency_change_s=0.01,
    frequency_change_j=0.2,
)


def read(tmp_path, data):
    path = tmp_path / "job.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return read_sidecar(path)


def written(tmp_path, sidecar):
    path = tmp_path / "job.json"
    path.write_text(sidecar.to_json_text())
    return path


@pytest.mark.parametrize("sidecar", [FULL, Sidecar(), Sidecar(gpu="é 'quoted'")])
def test_round_trip(tmp_path, sidecar):
    assert read_sidecar(written(tmp_path, sidecar)) == sidecar


def test_unknown_facts_are_left_out_of_the_file(tmp_path):
    assert written(tmp_path, Sidecar()).read_text() == (
        '{\n "format": "envpipe-profile/1",\n "tensor_parallel": 1,\n "num_chunks": 1\n}\n'
    )


def test_the_example_of_the_format_is_read(tmp_path):
    data = {
        "format": "envpipe-profile/1",
        "gpu": "NVIDIA A100",
        "wait_power_w": [{"stage": 0, "frequency_mhz": 1410, "power_w": 83.6}],
        "p2p_latency_s": [0.0002, 0.0002, 0.0002],
        "frequency_change_s": 0.010,
    }
    sidecar = read(tmp_path, data)
    assert sidecar.wait_power_w == ({1410: 83.6},)
    assert sidecar.p2p_latency_s == (0.0002,) * 3
    assert sidecar.tail_time_s is None
    assert sidecar.frequency_change_j is None


def test_the_blocking_power_is_that_at_the_highest_clock():
    curves = ({900: 70.0, 1410: 60.0, 1200: 65.0}, {1000: 80.0})
    assert Sidecar(wait_power_w=curves).blocking_power_w == (60.0, 80.0)
    assert Sidecar().blocking_power_w is None


@pytest.mark.parametrize(
    ("field", "entries"),
    [
        ("wait_power_w", ({900: 70.0},)),
        ("p2p_latency_s", (0.1, 0.1, 0.1)),
        ("p2p_latency_s", (0.1,)),
        *[(name, (1.0,) * 2) for name in ("tail_time_s", "activation_bytes", "free_bytes")],
    ],
)
def test_facts_of_another_pipeline_are_refused(tmp_path, field, entries):
    with pytest.raises(EnvPipeError, match=f"field '{field}' has {len(entries)} entries"):
        read_sidecar(written(tmp_path, Sidecar(**{field: entries})), 3)


def test_facts_of_as_many_stages_are_taken(tmp_path):
    assert read_sidecar(written(tmp_path, FULL), 2) == FULL


def test_it_stands_beside_its_csv(tmp_path):
    assert sidecar_path(tmp_path / "a.b.csv") == tmp_path / "a.b.json"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[
            (name, bad)
            for name in ("tensor_parallel", "num_chunks", "microbatch_size", "sequence_length")
            for bad in (0, -1, 1.5, "1", True, None, [1])
        ],
        *[
            (name, bad)
            for name in ("p2p_latency_s", "tail_time_s", "activation_bytes", "free_bytes")
            for bad in (0.1, [-0.1], ["0.1"], "12", [None], [float("nan")], [[1]], [True], None)
        ],
        *[
            (name, bad)
            for name in ("frequency_change_s", "frequency_change_j")
            for bad in (-1, "0.01", float("inf"), True, None, [0.01])
        ],
        ("wait_power_w", [{"stage": 1, "frequency_mhz": 900, "power_w": 1}]),  # no stage 0
        ("wait_power_w", [{"stage": 0, "frequency_mhz": 900}]),
        ("wait_power_w", [{"stage": 0, "frequency_mhz": 900, "power_w": w} for w in (1, 2)]),
        ("wait_power_w", [{"stage": 0, "frequency_mhz": 1_000_000, "power_w": 1}]),
        ("wait_power_w", [{"stage": 0.0, "frequency_mhz": 900, "power_w": 1}]),
        ("wait_power_w", [{"stage": 0, "frequency_mhz": "900", "power_w": 1}]),
        ("wait_power_w", [{"stage": 0, "frequency_mhz": 900, "power_w": -1}]),
        ("wait_power_w", [{"stage": 0, "frequency_mhz": 0, "power_w": 1}]),
        ("wait_power_w", [{"stage": "x", "frequency_mhz": 900, "power_w": 1}]),
        ("wait_power_w", [3]),
        ("wait_power_w", 83.6),
    ],
)
def test_a_wrong_field_is_named(tmp_path, field, value):
    with pytest.raises(EnvPipeError, match=f"job.json: field '{field}'"):
        read(tmp_path, {"format": SIDECAR_FORMAT, field: value})


def test_an_unknown_field_is_named_with_those_there_are(tmp_path):
    with pytest.raises(EnvPipeError, match=r"unknown field \(got 'tail_time'\).*tail_time_s"):
        read(tmp_path, {"format": SIDECAR_FORMAT, "tail_time": [0.4]})


@pytest.mark.parametrize(
    "data", [{}, {"format": "envpipe-profile/2"}, {"format": None}, [], 3, None]
)
def test_other_formats_are_refused(tmp_path, data):
    told = f"field 'format'.*{SIDECAR_FORMAT}" if isinstance(data, dict) else "is not a JSON object"
    with pytest.raises(EnvPipeError, match=told):
        read(tmp_path, data)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe\x00", b"stage,instruction"])
def test_files_that_are_no_json_are_refused_with_their_name(tmp_path, content):
    path = tmp_path / "job.json"
    path.write_bytes(content)
    with pytest.raises(EnvPipeError, match=re.escape(str(path))):
        read_sidecar(path)
    with pytest.raises(EnvPipeError, match=re.escape(str(tmp_path))):
        read_sidecar(tmp_path)
