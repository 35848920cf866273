"""Plan files of Zeus and lowtime: what goes out comes back, and nothing in a file is run."""

import ast
import random
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from core_cases import parse_stages, random_orders, uniform_profile
from hypothesis import given, settings
from hypothesis import strategies as st
from on_request import examples

from envpipe_megatron.core.conditions import Conditions
from envpipe_megatron.core.kinds import WHOLE, ScheduleError
from envpipe_megatron.core.orders import builders, zero_bubble
from envpipe_megatron.core.plan import Plan
from envpipe_megatron.core.profile import read_profile
from envpipe_megatron.core.profile_rows import SplitBackward
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.formats.interchange import InterchangeError, read_freqs, write_freqs

CURVE = {1410: (0.10, 40.0), 1200: (0.11, 34.0), 900: (0.13, 32.0)}
#: Two stages and two microbatches as lowtime 0.3 and Zeus's example write them.
OF_LOWTIME = """[
[('forward', 1410), ('forward', 1200), ('backward', 900), ('backward', 1410)],
[('forward', 1200), ('backward', 1410), ('forward', 1410), ('backward', 900)],
]
# Iteration 7 cost change: 0.5
# Iteration 7 total cost: 12.5
# Iteration 7 total cost with P2P: 45.0
"""
CLOCKS_OF_LOWTIME = [[1410, 1200, 900, 1410], [1200, 1410, 1410, 900]]


def read(tmp_path, text):
    path = tmp_path / "freqs_pipeline_00007.py"
    path.write_text(text)
    return read_freqs(path)


def plan_on(schedule, seed=0, **options):
    clocks = np.random.default_rng(seed).choice(list(CURVE), schedule.is_backward.shape)
    profile = uniform_profile(schedule.num_stages, CURVE).for_chunks(schedule.num_chunks)
    conditions = Conditions((80.0,) * schedule.num_stages)
    return Plan("test", schedule, clocks.astype(np.int64), profile, conditions, **options)


def test_a_file_of_lowtime_gives_order_and_clocks(tmp_path):
    freqs = read(tmp_path, OF_LOWTIME)
    schedule = freqs.schedule(2)
    assert schedule == builders.one_f_one_b(2, 2)
    assert freqs.frequency_mhz(schedule).tolist() == CLOCKS_OF_LOWTIME


def test_a_file_of_the_papers_artifact_lists_clocks_alone(tmp_path):
    clocks_alone = re.sub(r"\('\w+', (\d+)\)", r"\1", OF_LOWTIME)
    assert "forward" not in clocks_alone
    freqs = read(tmp_path, clocks_alone)
    schedule = freqs.schedule(2)
    assert schedule == builders.one_f_one_b(2, 2)
    assert freqs.frequency_mhz(schedule).tolist() == CLOCKS_OF_LOWTIME


@pytest.mark.parametrize(
    "schedule",
    [
        builders.one_f_one_b(4, 6),
        builders.one_f_one_b(4, 2),
        builders.one_f_one_b(1, 1),
        builders.gpipe(3, 4),
        builders.envpipe(4, 8, [3, 2, 1, 0]),
    ],
    ids=lambda schedule: f"{schedule.name}-{schedule.num_stages}x{schedule.num_microbatches}",
)
def test_a_plan_comes_back_in_its_own_order(tmp_path, schedule):
    plan = plan_on(schedule)
    path = tmp_path / "freqs_pipeline_00000.py"
    write_freqs(plan, path)
    freqs = read_freqs(path)
    back = freqs.schedule(schedule.num_microbatches)
    assert back.stages == schedule.stages
    assert freqs.frequency_mhz(back).tolist() == plan.frequency_mhz.tolist()
    again = Plan("again", back, freqs.frequency_mhz(back), plan.profile, plan.conditions)
    assert again.cost == plan.cost


@settings(max_examples=examples(30), deadline=None)
@given(st.integers(0, 10**6))
def test_any_order_comes_back_or_is_refused_for_its_microbatches(tmp_path_factory, seed):
    rng = random.Random(seed)
    orders = random_orders(rng, rng.randint(1, 3), rng.randint(1, 3))
    schedule = Schedule("random", len(orders[0]) // 2, 1, orders)
    counts_up = all(
        first.microbatch < second.microbatch
        for order in orders
        for kind in WHOLE
        for first, second in pairwise([u for u in order if u.kind is kind])
    )
    path = tmp_path_factory.getbasetemp() / "freqs_pipeline_00001.py"
    if counts_up:
        write_freqs(plan_on(schedule), path)
        assert read_freqs(path).schedule(schedule.num_microbatches).stages == orders
    else:
        with pytest.raises(InterchangeError, match="ascending"):
            write_freqs(plan_on(schedule), path)


def test_backwards_in_two_parts_have_no_place_in_a_plan_file(tmp_path):
    path, order = tmp_path / "freqs_pipeline_00000.py", zero_bubble.zero_bubble(2, 3)
    profile = uniform_profile(2, CURVE).with_split_backwards(SplitBackward())
    clocks = np.full(order.is_backward.shape, max(CURVE))
    plan = Plan("test", order, clocks, profile, Conditions((80.0, 80.0)))
    with pytest.raises(InterchangeError, match="whole forwards and backwards"):
        write_freqs(plan, path)
    assert not path.exists()


def test_what_is_written_is_what_zeus_evaluates(tmp_path):
    plan = plan_on(builders.one_f_one_b(2, 3))
    path = tmp_path / "freqs_pipeline_00000.py"
    write_freqs(plan, path)
    text = path.read_text()
    value = ast.literal_eval(text)
    assert [len(stage) for stage in value] == [6, 6]
    assert value[1][:2] == [
        ("forward", plan.frequency_mhz[1, 0]),
        ("backward", plan.frequency_mhz[1, 1]),
    ]
    assert f"# iteration time: {plan.cost.iteration_time_s}\n" in text
    assert f"# total cost with P2P: {plan.cost.energy_j}\n" in text


def test_no_text_of_the_plan_reaches_a_file_that_zeus_evaluates(tmp_path):
    order = builders.one_f_one_b(2, 2)
    named = Schedule("x\n+ print()", 2, 1, order.stages)
    path = tmp_path / "freqs_pipeline_00000.py"
    write_freqs(plan_on(named), path)
    assert "print" not in path.read_text()


HOSTILE = "__import__('pathlib').Path({path!r}).touch()"


@pytest.mark.parametrize(
    ("template", "line"),
    [
        ("{call}", 1),
        ("[\n{call},\n]", 2),
        ("[\n[('forward', 1410)],\n[{call}],\n]", 3),
        ("[\n[('forward',\n {call})],\n]", 3),
        ("[\n[({call}, 1410)],\n]", 2),
        ("[\n[('forward', 1410)],\n][{call}:]", 1),
        ("[\n[('forward', 1410)],\n] + [{call}]", 1),
        ("[\n[('forward', 1410)] * 2,\n]", 2),
        ("[[('forward', 1410)] for _ in {call}]", 1),
        ("[\n[f'{{{call}}}'],\n]", 2),
        ("[\n[*{call}],\n]", 2),
        ("{call}\n[[('forward', 1410)]]", 2),
        ("import os\n[[('forward', 1410)]]", 1),
        ("stages = [[('forward', 1410)]]", 1),
    ],
)
def test_code_in_a_file_is_refused_with_its_line_and_not_run(tmp_path, template, line):
    witness = tmp_path / "was_run"
    text = template.format(call=HOSTILE.format(path=str(witness)))
    with pytest.raises(InterchangeError, match=rf"freqs_pipeline_00007.py, line {line}: "):
        read(tmp_path, text)
    assert not witness.exists()


def test_the_hostile_call_would_be_seen_if_it_ran(tmp_path):
    witness = tmp_path / "was_run"
    eval(HOSTILE.format(path=str(witness)))
    assert witness.exists()


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ("('recomputation', 1410)", "line 1: unknown instruction (got 'recomputation')"),
        ("('Forward', 1410)", "line 1: unknown instruction (got 'Forward')"),
        ("('forward', 1410, 1)", "not an instruction and its frequency"),
        ("('forward',)", "not an instruction and its frequency"),
        ("(1410, 'forward')", "not an instruction and its frequency"),
        ("'forward'", "not a frequency in whole MHz"),
        ("('forward', '1410')", "not a frequency in whole MHz"),
        ("('forward', 1410.0)", "not a frequency in whole MHz"),
        ("('forward', True)", "not a frequency in whole MHz"),
        ("('forward', None)", "not a frequency in whole MHz"),
        ("('forward', 0)", "not a frequency in whole MHz"),
        ("('forward', -1410)", "not a frequency in whole MHz (got '-1410)"),
        ("('forward', 10**9)", "not a frequency in whole MHz"),
        ("('forward', 1000000)", "not a frequency in whole MHz"),
        ("{'forward': 1410}", "not an instruction and its frequency"),
    ],
)
def test_an_entry_of_another_form_is_refused(tmp_path, entry, told):
    with pytest.raises(InterchangeError, match=re.escape(told)):
        read(tmp_path, f"[[{entry}, ('backward', 1410)]]")


@pytest.mark.parametrize("text", ["", "# nothing\n", "[]", "[[]]", "()", "7", "None", "{}", "[1]"])
def test_a_file_without_stages_is_refused(tmp_path, text):
    with pytest.raises(InterchangeError, match=r"freqs_pipeline_00007\.py"):
        read(tmp_path, text)


@pytest.mark.parametrize(
    "content",
    [
        b"\xff\xfe\x00",
        b"[[\x00]]",
        b"[" * 100_000,
        b"[[" + b"-" * 50_000 + b"1]]",
        b"[[" + b"a" + b".a" * 50_000 + b"]]",
        b"[[" + b"9" * 10_000 + b"]]",
        b"[[('forward', 1410)",
    ],
    ids=["bytes", "zero", "brackets", "signs", "attributes", "digits", "cut"],
)
def test_a_file_that_breaks_parsers_is_refused(tmp_path, content):
    path = tmp_path / "odd.py"
    path.write_bytes(content)
    with pytest.raises(InterchangeError, match=r"odd\.py"):
        read_freqs(path)


def test_a_missing_file_or_folder_is_refused_with_its_name(tmp_path):
    for path in (tmp_path, tmp_path / "absent.py"):
        with pytest.raises(InterchangeError, match=re.escape(str(path))):
            read_freqs(path)


def test_counts_that_do_not_fit_are_refused(tmp_path):
    freqs = read(tmp_path, OF_LOWTIME)
    for microbatches in (1, 3, 10**12):
        with pytest.raises(InterchangeError, match=r"does not list .*got 4, 4"):
            freqs.schedule(microbatches)
    with pytest.raises(InterchangeError, match="stages"):
        freqs.frequency_mhz(builders.one_f_one_b(3, 2))
    with pytest.raises(InterchangeError, match="stage 0 does not list 6 units"):
        freqs.frequency_mhz(builders.one_f_one_b(2, 3))

    ragged = OF_LOWTIME.replace("('backward', 1410), ('forward', 1410), ", "")
    with pytest.raises(InterchangeError, match=r"does not list .*got 4, 2"):
        read(tmp_path, ragged).schedule(2)

    lopsided = OF_LOWTIME.replace("('backward', 900), ('b", "('forward', 900), ('b")
    with pytest.raises(InterchangeError, match=r"stage 0 has not as many .*got 3, 1"):
        read(tmp_path, lopsided).schedule(2)

    mixed = OF_LOWTIME.replace("('forward', 1410)", "1410")
    with pytest.raises(InterchangeError, match="does not name the instruction of every unit"):
        read(tmp_path, mixed).schedule(2)


def test_an_order_that_cannot_run_is_refused(tmp_path):
    backward_first = "[[('backward', 1410), ('forward', 1410)]]"
    with pytest.raises(ScheduleError, match=r"runs B\d before F\d"):
        read(tmp_path, backward_first).schedule(1)


def test_a_schedule_of_another_order_is_refused(tmp_path):
    freqs = read(tmp_path, OF_LOWTIME)
    with pytest.raises(InterchangeError, match="unit 1 of stage 1 is a backward, but the 'gpipe'"):
        freqs.frequency_mhz(builders.gpipe(2, 2))


@pytest.mark.parametrize(
    ("plan", "name", "told"),
    [
        (plan_on(builders.one_f_one_b(2, 2)), "plan.json", r"not called \.py"),
        (plan_on(builders.interleaved(2, 2, 2)), "plan.py", "chunks"),
        (plan_on(builders.forward_only(2, 2)), "plan.py", "forwards and backwards"),
        (
            plan_on(Schedule("late", 2, 1, parse_stages("F0 F1 B1 B0", "F0 F1 B1 B0"))),
            "plan.py",
            "ascending order, and stage 0 of 'late'",
        ),
        (
            plan_on(builders.one_f_one_b(2, 2), park_mhz=np.full((2, 4), 900, dtype=np.int64)),
            "plan.py",
            "parked",
        ),
    ],
    ids=["name", "chunks", "forward-only", "descending", "parking"],
)
def test_a_plan_that_the_format_cannot_hold_is_refused(tmp_path, plan, name, told):
    with pytest.raises(InterchangeError, match=told):
        write_freqs(plan, tmp_path / name)
    assert not (tmp_path / name).exists()


PUBLISHED = Path(__file__).resolve().parents[3] / "shared/data/perseus_sosp24/emulation"


@pytest.mark.skipif(not PUBLISHED.exists(), reason=f"the published profiles are not at {PUBLISHED}")
@pytest.mark.parametrize("name", ["gpt3-175b_a100_sxm", "gpt3-175b_a40"])
def test_a_published_profile_is_written_as_it_was_read(tmp_path, name):
    profile = read_profile(PUBLISHED / "stage_profile" / f"{name}.csv")
    copy = tmp_path / "copy.csv"
    profile.write(copy)
    assert read_profile(copy).rows == profile.rows
