"""Profiles: files are refused with file, line and value; the table answers what planners ask."""

import hashlib
import re

import numpy as np
import pytest
from core_cases import B, F, profile_of, uniform_profile
from hypothesis import given, settings
from hypothesis import strategies as st
from on_request import examples

from envpipe_megatron.core.orders.builders import interleaved, one_f_one_b
from envpipe_megatron.core.profile import make_profile, read_profile
from envpipe_megatron.core.profile_rows import ProfileError, ProfileRow
from envpipe_megatron.core.sidecar import Sidecar
from envpipe_megatron.errors import EnvPipeError

HEADER = "stage,instruction,frequency,time,energy"
GOOD = "0,forward,1200,1.0,10\n0,backward,1200,2.0,20\n"


def read(tmp_path, text):
    path = tmp_path / "job.csv"
    path.write_text(text)
    return read_profile(path)


TIME = "time (s) must be a number of at least 1e-12 and below 1,000,000,000,000"
ENERGY = "energy (J) must be a number of at least 0"
CLOCK = "frequency (MHz) must be a whole number of at least 3 and below 10,000"
STAGE = "stage must be a whole number of at least 0"


BAD_TIMES = ("x", "", "nan", "0", "1e-320", "1e12")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        *[(f"0,forward,900,{bad},1", f"{TIME} (got '{bad}')") for bad in BAD_TIMES],
        *[(f"0,forward,900,1,{bad}", f"{ENERGY} (got '{bad}')") for bad in ("x", "-inf", "-2")],
        *[
            (f"0,forward,{bad},1,1", f"{CLOCK} (got '{bad}')")
            for bad in ("0", "-900", "900.5", "90000000000", "fast")
        ],
        *[(f"{bad},forward,900,1,1", f"{STAGE} (got '{bad}')") for bad in ("first", "-1", "0.5")],
        *[
            (f"0,{bad},900,1,9", f"unknown instruction (got '{bad}'). Did you mean {meant}?")
            for bad, meant in (("forwrd", F), ("Backward", B), ("input_gradient", "input-gradient"))
        ],
        ("0,forward,900,1", "too few columns (got '0,forward,900,1')"),
        ("0,forward,900,1,5,20", "too many columns (got '0,forward,900,1,5,20')"),
        (
            "0,forward,1200,1,1",
            "a second row for stage 0 forward at this frequency (MHz) (got 1200). The first is ",
        ),
    ],
)
def test_a_bad_row_is_refused_with_file_line_and_value(tmp_path, line, told):
    with pytest.raises(ProfileError) as caught:
        read(tmp_path, f"{HEADER}\n{GOOD}\n{line}\n")  # an empty line does not shift the count
    message = str(caught.value)
    assert f"{tmp_path / 'job.csv'}, line 5: " in message
    assert told in message


@pytest.mark.parametrize(
    "header",
    [
        "",
        "stage,instruction,frequency,time",
        "stage,instruction,frequency,time,energy,time",
        "stage;instruction;frequency;time;energy",
    ],
)
def test_a_wrong_header_is_refused_with_the_right_one(tmp_path, header):
    with pytest.raises(ProfileError, match=f"job.csv, line 1: .*{HEADER}"):
        read(tmp_path, header and f"{header}\n{GOOD}")


def test_powers_that_no_gpu_has_are_refused_with_the_first_line(tmp_path):
    forwards = "0,forward,1200,2.0,2\n0,forward,1000,5e-5,0.24\n"  # 1 W and 4,800 W might be
    assert read(tmp_path, f"{HEADER}\n{forwards}0,backward,1200,1.0,10\n").num_stages == 1
    for joules in ("0.99", "5000", "1e9"):
        with pytest.raises(ProfileError, match=r"line 4: .* no GPU has \(W\) \(got .*not ms, kJ"):
            read(tmp_path, f"{HEADER}\n{forwards}0,backward,1200,1.0,{joules}\n")


@pytest.mark.parametrize(
    ("clock", "meant"),
    [("1.41", "1.41 GHz is 1410 MHz"), ("2", "2 GHz is 2000 MHz"), ("1.41GHz", "is 1410 MHz"),
     ("1410000", "1410000 kHz is 1410 MHz"), ("1410000000", "1410000000 Hz is 1410 MHz")],
)  # fmt: skip
def test_a_clock_in_another_unit_is_named(tmp_path, clock, meant):
    with pytest.raises(ProfileError, match=meant):
        read(tmp_path, f"{HEADER}\n0,forward,{clock},1,10\n")


def test_rows_of_other_instructions_are_left_out_and_named(tmp_path, caplog):
    others = "0,load,1200,x,\n0,load,900,0,0\n0,send_forward,1200,9,9\n7,recv_backward,1200,9,9\n"
    assert (
        read(tmp_path, f"{HEADER}\n{others}{GOOD}").rows == read(tmp_path, f"{HEADER}\n{GOOD}").rows
    )
    (record,) = caplog.records
    named = "job.csv: rows of other instructions are left out: load (2), send_forward (1), recv_b"
    assert named in record.getMessage()
    with pytest.raises(ProfileError, match="has no rows"):
        read(tmp_path, f"{HEADER}\n{others}")
    with pytest.raises(ProfileError, match="no row for stage 0 backward"):
        read(tmp_path, f"{HEADER}\n{others}0,forward,1200,1,10\n")


@pytest.mark.parametrize("lower", ["", "1,forward,900,1.5,8\n1,backward,900,1.5,9\n"])
def test_a_stage_without_energy_at_its_highest_clocks_is_refused(tmp_path, lower):
    half = GOOD + lower + "1,forward,1200,1.0,0\n1,backward,1200,1.0,{}\n"
    assert read(tmp_path, f"{HEADER}\n{half.format(20)}").num_stages == 2
    with pytest.raises(ProfileError, match=r"job\.csv: stage 1 has no energy at its highest"):
        read(tmp_path, f"{HEADER}\n{half.format(0)}")


def test_a_profile_is_not_written_over_its_own_sidecar(tmp_path):
    with pytest.raises(ProfileError, match=r"cannot be \(got .*job\.json"):
        read(tmp_path, f"{HEADER}\n{GOOD}").write(tmp_path / "job.json")
    assert not (tmp_path / "job.json").exists()


def test_the_ranks_of_a_stage_become_one_gpu(tmp_path):
    # The columns of Zeus's InstructionProfilingResult.to_csv, for tensor parallel 2.
    lines = ["rank,dp_rank,pp_rank,tp_rank,stage,instruction,frequency,time,energy"]
    for rank, time_s, energy_j in ((0, 1.0, 10.0), (1, 1.5, 13.0)):
        lines += [f"{rank},0,0,{rank},0,forward,1200,{time_s},{energy_j}"]
        lines += [f"{rank},0,0,{rank},0,backward,1200,{2 * time_s},{2 * energy_j}"]
    profile = read(tmp_path, "\n".join(lines))
    assert profile.row(0, F, 1200) == ProfileRow(1200, 1.5, 11.5)
    assert profile.row(0, B, 1200) == ProfileRow(1200, 3.0, 23.0)
    with pytest.raises(ProfileError, match="line 6: a second row for stage 0 forward of rank 0"):
        read(tmp_path, "\n".join([*lines, lines[1]]))


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("0,forward,900,1,1\n", "no row for stage 0 backward"),
        (GOOD + "2,forward,900,1,1\n", "no row for stage 1 forward"),
        (GOOD.replace("0,f", "1,f").replace("0,b", "1,b"), "no row for stage 0 forward"),
        (
            # Parts at clocks that differ make no whole backward.
            "0,forward,900,1,9\n0,input-gradient,900,1,9\n0,weight-gradient,600,1,9\n",
            "no row for stage 0 backward",
        ),
    ],
)
def test_an_incomplete_table_is_refused_with_what_it_lacks(tmp_path, body, told):
    with pytest.raises(ProfileError, match=re.escape(told)):
        read(tmp_path, f"{HEADER}\n{body}")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x89PNG\r\n\x1a\n\x00\x00",
        b"\xff\xfe" + HEADER.encode("utf-16-le"),
        HEADER.encode() + b'\n0,"' + b"x" * 200_000,
    ],
    ids=["empty", "png", "utf-16", "endless quote"],
)
def test_a_file_that_is_no_csv_is_refused_with_its_name(tmp_path, content):
    path = tmp_path / "odd.csv"
    path.write_bytes(content)
    with pytest.raises(ProfileError, match=re.escape(str(path))):
        read_profile(path)


@settings(max_examples=examples(200), deadline=None)
@given(st.text(alphabet='0123456789.,-eE_ \n"\r\tforwadbckn', max_size=60))
def test_whatever_follows_the_header_is_read_or_refused(tmp_path_factory, text):
    path = tmp_path_factory.getbasetemp() / "fuzz.csv"
    path.write_text(f"{HEADER}\n{GOOD}{text}")
    try:
        profile = read_profile(path)
    except EnvPipeError as error:
        assert "fuzz.csv" in str(error)  # noqa: PT017 - both outcomes are right
    else:
        assert profile.num_stages >= 1


def test_extra_columns_blanks_bom_and_crlf_are_accepted(tmp_path):
    plain = read(tmp_path, f"{HEADER}\n{GOOD}")
    dressed = f"\ufeff{HEADER},samples\n 0 ,forward, 1200 ,1.0,10,7\n\n0,backward,1200,2.0,20\n"
    assert read(tmp_path, dressed).rows == plain.rows
    for line_end in ("\r\n", "\r"):
        (tmp_path / "job.csv").write_bytes(dressed.replace("\n", line_end).encode())
        assert read_profile(tmp_path / "job.csv").rows == plain.rows


def test_the_uncertainty_of_energies_is_a_column_that_may_follow(tmp_path):
    sure = [
        (0, kind, ProfileRow(clock, 1.0, 10.0, known))
        for kind in (F, B)
        for clock, known in ((1200, 0.25), (900, None))
    ]
    path = tmp_path / "job.csv"
    make_profile(sure, source="made").write(path)
    lines = path.read_text().splitlines()
    assert lines[0] == f"{HEADER},energy_uncertainty_j"
    assert lines[1:3] == ["0,forward,1200,1.0,10.0,0.25", "0,forward,900,1.0,10.0,"]
    again = read_profile(path)
    assert again.row(0, F, 1200).energy_uncertainty_j == 0.25
    assert again.row(0, F, 900).energy_uncertainty_j is None
    # A part of a unit is as much less sure in J; two GPUs' mean is surer than one's.
    assert again.for_chunks(2).row(0, B, 1200) == ProfileRow(1200, 0.5, 5.0, 0.125)
    ranks = [f"rank,{HEADER},energy_uncertainty_j"]
    for kind in ("forward", "backward"):
        ranks += [f"0,0,{kind},9,1,10,3", f"1,0,{kind},9,1,10,4"]
    assert read(tmp_path, "\n".join(ranks)).row(0, F, 9).energy_uncertainty_j == 2.5
    for wrong in ("-1", "nan", "text"):
        with pytest.raises(ProfileError, match=r"line 2: energy_uncertainty_j \(J\)"):
            read(tmp_path, f"{HEADER},energy_uncertainty_j\n0,forward,900,1,1,{wrong}\n")


def test_rows_may_stand_in_any_order_and_come_out_highest_first(tmp_path):
    lines = [
        f"{s},{k},{f},1,1" for s in (1, 0) for k in ("backward", "forward") for f in (9, 12, 3)
    ]
    profile = read(tmp_path, "\n".join([HEADER, *lines]))
    assert profile.num_stages == 2
    assert [r.frequency_mhz for r in profile.rows[1][B]] == [12, 9, 3]


def test_written_files_are_read_back_with_sidecar_and_digest(tmp_path):
    profile = uniform_profile(
        2, {1200: (0.1, 1 / 3), 900: (2e-10, 1e-9)}, sidecar=Sidecar(gpu="Some GPU", num_chunks=2)
    )
    path = tmp_path / "job.csv"
    profile.write(path)
    again = read_profile(path)
    assert again.rows == profile.rows
    assert again.sidecar == profile.sidecar
    assert again.sha256 == profile.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert again.source == str(path)


def test_an_unprofiled_frequency_is_refused_with_those_there_are():
    profile = uniform_profile(1, {1200: (1, 1), 900: (2, 1)})
    with pytest.raises(ProfileError, match=r"stage 0 backward .*got 1000.*1200, 900"):
        profile.row(0, B, 1000)
    with pytest.raises(ProfileError, match=r"stage 0 forward .*got 1000"):  # the first of several
        profile.lookup(one_f_one_b(1, 2), np.array([[1000, 900, 1001, 900]]))


def test_the_optimal_frequency_is_the_bottom_of_the_sum():
    profile = profile_of(
        {
            (0, F): {1500: (1, 10), 1200: (2, 6), 900: (3, 5)},  # forward alone: 900
            (0, B): {1500: (1, 20), 1200: (2, 15), 900: (3, 18)},  # sums: 30, 21, 23
            (1, F): {1500: (1, 5), 1200: (2, 5), 900: (3, 9)},  # sums: 10, 10, 19: the higher
            (1, B): {1500: (1, 5), 1200: (2, 5), 900: (3, 10)},
            (2, F): {1500: (1, 9), 900: (3, 7)},  # 1200 was not profiled for both
            (2, B): {1500: (1, 9), 1200: (2, 1), 900: (3, 8)},
        }
    )
    assert profile.optimal_frequency_mhz == (1200, 1500, 900)


def test_what_is_made_in_memory_is_checked():
    row = ProfileRow(1400, 1, 1)
    below_0 = [(stage, kind, row) for kind in (F, B) for stage in (-1, 0)]
    for rows in ([(0, F, row), (0, B, row), (0, F, row)], below_0):
        with pytest.raises(ProfileError):
            make_profile(rows, source="made for a test")
    wrong = [(clock, 1, 1) for clock in (0, 1_000_000)]
    wrong += [(1400, time_s, 1) for time_s in (0, float("nan"), float("inf"))]
    wrong += [(1400, 1, energy_j) for energy_j in (-0.5, float("inf"))]
    wrong += [(1400, 1, 1, uncertainty_j) for uncertainty_j in (-0.5, float("inf"))]
    for values in wrong:
        with pytest.raises(ProfileError, match="row"):
            ProfileRow(*values)


def test_chunks_share_time_and_energy_evenly():
    profile = uniform_profile(2, {1200: (1.0, 10.0), 900: (1.5, 8.0)})
    half = profile.for_chunks(2)
    assert half.row(1, B, 900) == ProfileRow(900, 1.5, 8.0)
    assert half.row(0, F, 1200) == ProfileRow(1200, 0.5, 5.0)
    assert half.sidecar.num_chunks == 2
    assert half.sha256 == profile.sha256
    assert half.for_chunks(2) is half  # not halved twice
    assert profile.for_chunks(1) is profile
    assert half.optimal_frequency_mhz == profile.optimal_frequency_mhz


CHUNKED = """stage,instruction,frequency,time,energy,energy_uncertainty_j,chunk
0,forward,1200,1.0,10.0,0.5,0
0,forward,900,1.5,8.0,,0
0,backward,1200,2.0,20.0,,0
0,forward,1200,3.0,31.0,,1
0,forward,900,4.0,25.0,,1
0,backward,900,5.0,44.0,,1
0,backward,1200,4.0,50.0,,1
1,forward,1200,1.0,12.0,,0
1,backward,1200,2.0,24.0,,0
1,forward,1200,3.0,36.0,,1
1,backward,1200,4.0,48.0,,1
"""


def test_each_chunk_may_have_rows_of_its_own(tmp_path):
    profile = read(tmp_path, CHUNKED)
    assert (profile.num_stages, profile.sidecar.num_chunks) == (2, 2)
    assert profile.row(1, F, 900) == ProfileRow(900, 4.0, 25.0)
    assert profile.for_chunks(2) is profile
    assert profile.optimal_frequency_mhz == (1200, 1200)  # 900 is not known of all units
    assert profile.valley_j(0) == {1200: 41.0 + 70.0}
    frequency = np.array([[1200, 900, 900, 900], [1200, 1200, 1200, 1200]])
    time_s, energy_j = profile.lookup(interleaved(2, 1, 2), frequency[:, [0, 1, 2, 0]])
    assert time_s.tolist() == [[1, 4, 5, 2], [1, 3, 4, 2]]  # F0.0 F0.1 B0.1 B0.0
    assert energy_j.tolist() == [[10, 25, 44, 20], [12, 36, 48, 24]]
    for num_chunks in (1, 4):
        with pytest.raises(ProfileError, match=f"2 chunks .*got {num_chunks}"):
            profile.for_chunks(num_chunks)
    with pytest.raises(ProfileError, match=r"stage 0 chunk 0 backward .*got 900"):
        profile.lookup(interleaved(2, 1, 2), frequency)


@pytest.mark.parametrize(
    ("text", "sidecar", "told"),
    [
        (CHUNKED.replace("50.0,,1", "50.0,,x"), None, "line 8: chunk must be a whole number"),
        (CHUNKED.replace("50.0,,1", "50.0,,"), None, "line 8: chunk must be a whole number"),
        (CHUNKED.replace("36.0,,1", "36.0,,2"), None, "no row for stage 0 chunk 2 forward"),
        (
            CHUNKED.replace("50.0,,1", "50.0,,1\n0,backward,1200,4.0,50.0,,1"),
            None,
            "line 9: a second row for .* chunk 1",
        ),
        (CHUNKED, 4, r"lists 2 chunks a stage, and its sidecar says 4\. .*num_chunks"),
    ],
)
def test_chunks_that_do_not_fit_are_refused(tmp_path, text, sidecar, told):
    if sidecar:
        (tmp_path / "job.json").write_text(Sidecar(num_chunks=sidecar).to_json_text())
    with pytest.raises(ProfileError, match=told):
        read(tmp_path, text)
