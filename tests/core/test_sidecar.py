"""Sidecars: what is written is read back, and a wrong field is named."""

import json
import re

import pytest

from envpipe_megatron.core.sidecar import (
    SIDECAR_FORMAT,
    Sidecar,
    read_sidecar,
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
    pending_bytes=(20000.0, 0.5),
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
        *[
            (name, (1.0,) * 2)
            for name in ("tail_time_s", "activation_bytes", "free_bytes", "pending_bytes")
        ],
    ],
)
def test_facts_of_another_pipeline_are_refused(tmp_path, field, entries):
    with pytest.raises(EnvPipeError, match=f"field '{field}' has {len(entries)} entries"):
        read_sidecar(written(tmp_path, Sidecar(**{field: entries})), 3)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("gpu", (5, None)),
        ("tensor_parallel", (0, 1.5, "1", True, None)),
        ("sequence_length", (-1, [1])),
        ("tail_time_s", (0.1, [-0.1], ["0.1"], "12", [None], [float("nan")], [True], None)),
        ("free_bytes", ([10**400, 1], {})),
        ("frequency_change_s", (-1, "0.01", float("inf"), True, [0.01])),
        ("wait_power_w", ([{"stage": 1, "frequency_mhz": 900, "power_w": 1}], [3], 83.6)),
        *[
            ("wait_power_w", ([{"stage": 0, "frequency_mhz": 900, "power_w": 1} | change],))
            for change in ({"stage": 0.0}, {"frequency_mhz": "900"}, {"frequency_mhz": 1_000_000},
                           {"power_w": -1}, {"stage": "x"})
        ],
        ("wait_power_w", ([{"stage": 0, "frequency_mhz": 9, "power_w": w} for w in (1, 2)],)),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named(tmp_path, field, values):
    for value in values:
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
