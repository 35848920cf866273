"""Plan files of Zeus and lowtime: what goes out comes back, and nothing in a file is run."""

import ast
import random
import re
from itertools import pairwise

import numpy as np
import pytest
from core_cases import parse_stages, random_orders, uniform_profile
from hypothesis import given, settings
from hypothesis import strategies as st
from on_request import examples

from envpipe_megatron.core.conditions import Conditions
from envpipe_megatron.core.kinds import WHOLE
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.plan import Plan
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.formats.interchange import read_freqs, write_freqs

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


def read(tmp_path, text, microbatches=2):
    path = tmp_path / "freqs_pipeline_00007.py"
    path.write_text(text)
    return read_freqs(path, microbatches)


def plan_on(schedule, seed=0, **options):
    clocks = np.random.default_rng(seed).choice(list(CURVE), schedule.is_backward.shape)
    profile = uniform_profile(schedule.num_stages, CURVE).for_chunks(schedule.num_chunks)
    conditions = Conditions((80.0,) * schedule.num_stages)
    return Plan("test", schedule, clocks.astype(np.int64), profile, conditions, **options)


@pytest.mark.parametrize("text", [OF_LOWTIME, re.sub(r"\('\w+', (\d+)\)", r"\1", OF_LOWTIME)])
def test_a_file_gives_order_and_clocks(tmp_path, text):
    schedule, frequency_mhz = read(tmp_path, text)
    assert schedule == builders.one_f_one_b(2, 2)
    assert frequency_mhz.tolist() == CLOCKS_OF_LOWTIME


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
        plan = plan_on(schedule)
        write_freqs(plan, path)
        back, frequency_mhz = read_freqs(path, schedule.num_microbatches)
        assert back.stages == orders
        assert frequency_mhz.tolist() == plan.frequency_mhz.tolist()
    else:
        with pytest.raises(EnvPipeError, match="out of ascending"):
            write_freqs(plan_on(schedule), path)


def test_what_is_written_is_what_zeus_evaluates(tmp_path):
    plan = plan_on(Schedule("x\n+ print()", 3, 1, builders.one_f_one_b(2, 3).stages))
    path = tmp_path / "freqs_pipeline_00000.py"
    write_freqs(plan, path)
    text = path.read_text()
    assert "print" not in text
    value = ast.literal_eval(text)
    assert [len(stage) for stage in value] == [6, 6]
    assert value[1][:2] == [
        ("forward", plan.frequency_mhz[1, 0]),
        ("backward", plan.frequency_mhz[1, 1]),
    ]
    assert f"# iteration time: {plan.cost.iteration_time_s}\n" in text
    assert f"# total cost with P2P: {plan.cost.energy_j}\n" in text


@pytest.mark.parametrize(
    "template",
    [
        "{call}",
        "[\n[('forward',\n {call})],\n]",
        "[\n[({call}, 1410)],\n]",
        "[[('forward', 1410)] for _ in {call}]",
        "{call}\n[[('forward', 1410)]]",
    ],
)
def test_code_in_a_file_is_refused_and_not_run(tmp_path, template):
    witness = tmp_path / "was_run"
    call = f"__import__('pathlib').Path({str(witness)!r}).touch()"
    with pytest.raises(EnvPipeError, match=r"freqs_pipeline_00007\.py is not readable"):
        read(tmp_path, template.format(call=call))
    assert not witness.exists()
    eval(call)
    assert witness.exists()  # it would have been seen


@pytest.mark.parametrize(
    "entry",
    [
        "('recomputation', 1410)",
        "([1], 1410)",
        "('forward', 1410, 1)",
        "(1410, 'forward')",
        "('forward', True)",
        "('forward', 0)",
        "('forward', 1000000)",
        "{'forward': 1410}",
    ],
)
def test_an_entry_of_another_form_is_refused(tmp_path, entry):
    with pytest.raises(EnvPipeError, match="not readable as literals"):
        read(tmp_path, f"[[{entry}, ('backward', 1410)]]")


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"# nothing\n", b"[]", b"[[]]", b"7", b"{}", b"[1]", b"\xff\xfe\x00"),
        *(b"[" * 100_000, b"[[" + b"-" * 50_000 + b"1]]", b"[[" + b"9" * 10_000 + b"]]"),
        b"[[('forward', 1410)",
        b"[{[1]: 2}]",
    ],
)
def test_a_file_that_is_no_list_of_stages_is_refused(tmp_path, content):
    path = tmp_path / "odd.py"
    path.write_bytes(content)
    for asked in (path, tmp_path / "absent.py"):
        with pytest.raises(EnvPipeError, match=re.escape(asked.name)):
            read_freqs(asked, 1)


@pytest.mark.parametrize(
    ("changed", "microbatches", "told"),
    [
        (("", ""), 3, r"does not list .*got 4, 4"),
        (("('backward', 1410), ('forward', 1410), ", ""), 2, r"does not list .*got 4, 2"),
        (("('backward', 900), ('b", "('forward', 900), ('b"), 2, "Stage 0 l"),
        (
            (
                "[('forward', 1410), ('forward', 1200), ('backward', 900)",
                "[('backward', 900), ('forward', 1410), ('forward', 1200)",
            ),
            2,
            r"runs B\d before F\d",
        ),
    ],
)
def test_units_that_do_not_fit_are_refused(tmp_path, changed, microbatches, told):
    with pytest.raises(EnvPipeError, match=told):
        read(tmp_path, OF_LOWTIME.replace(*changed), microbatches)


@pytest.mark.parametrize(
    ("plan", "name", "told"),
    [
        (plan_on(builders.one_f_one_b(2, 2)), "plan.json", r"not called \.py"),
        (plan_on(builders.interleaved(2, 2, 2)), "plan.py", "no chunks"),
        (plan_on(builders.whole_iteration(2)), "plan.py", "no order without whole backwards"),
        (
            plan_on(Schedule("late", 2, 1, parse_stages("F0 F1 B1 B0", "F0 F1 B1 B0"))),
            "plan.py",
            "out of ascending order .*late",
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
    with pytest.raises(EnvPipeError, match=told):
        write_freqs(plan, tmp_path / name)
    assert not (tmp_path / name).exists()
