"""Stock Megatron-LM beside the patched one on the CPU: the same losses, and the same weights.

With ENVPIPE_LM_FULL=1 on all mappings, features and tags; else the least that shows it. A run takes
a quarter of a minute where two cores are free.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
from checkouts import TAGS
from lm_cases import (
    AUTO,
    CASES,
    ENVPIPE,
    ITERATIONS,
    MICROBATCHES,
    ONE_F_ONE_B,
    OVERLAPPED,
    WARMUP,
    full,
    run_case,
    run_envpipe,
)
from lm_runs import Run

from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.plan import read_plan
from envpipe_megatron.core.profile import read_profile

pytestmark = pytest.mark.xdist_group("megatron_lm")

oldest_tag = pytest.mark.parametrize(
    "tag", [TAGS[0], *(pytest.param(tag, marks=full) for tag in TAGS[1:])]
)

Find = Callable[[str], Path]
Stock = Callable[[str, str], Run]


@pytest.fixture(scope="session")
def stock(checkout, tmp_path_factory):
    """Return what stock Megatron-LM makes of a case, on a tag; each is run once."""
    runs: dict[tuple[str, str], Run] = {}

    def find(name, tag):
        if (name, tag) not in runs:
            folder = tmp_path_factory.mktemp("stock") / name
            runs[name, tag] = run_case(checkout(tag), CASES[name], "", folder)
        return runs[name, tag]

    return find


def _assert_same(run, stock):
    assert run.digits == stock.digits
    assert run.weights == stock.weights
    # There was something to compare.
    assert len(stock.iterations) == ITERATIONS
    assert len(stock.evaluations) >= 4
    assert None not in stock.weights


def _assert_planned(run, case, how):
    """EnvPipe was at work, in the order that was asked for."""
    assert run.imported
    phases = run.phases
    assert phases[:WARMUP] == ["warm-up"] * WARMUP
    assert phases[-1] in ("reconfigure", "steady")
    plan = read_plan(
        run.folder / "output" / "plan.json", read_profile(run.folder.with_suffix(".csv"))
    )
    framework_order = builders.one_f_one_b(case.num_stages, MICROBATCHES)
    if how != AUTO:  # which is free to choose
        assert (plan.schedule.stages == framework_order.stages) == (how == ONE_F_ONE_B)


def _check(name, tag, how, stock, patched, folder):
    run = run_envpipe(patched(tag), CASES[name], folder, how)
    _assert_planned(run, CASES[name], how)
    _assert_same(run, stock(name, tag))


@oldest_tag
def test_another_order_trains_the_same(tag, stock, patched, tmp_path):
    _check("pp4", tag, ENVPIPE, stock, patched, tmp_path / "run")


@full
@pytest.mark.parametrize("tag", TAGS)
@pytest.mark.parametrize("name", [name for name in CASES if name != "pp4"])
def test_another_order_trains_the_same_everywhere(name, tag, stock, patched, tmp_path):
    _check(name, tag, ENVPIPE, stock, patched, tmp_path / "run")


@full
@pytest.mark.parametrize("tag", TAGS)
def test_stages_that_recompute_each_their_own_train_the_same(tag, stock, patched, tmp_path):
    how = f"{ENVPIPE} --envpipe-recompute full:2,selective:1,full:1,none"
    _check("pp4", tag, how, stock, patched, tmp_path / "run")


@full
@pytest.mark.parametrize("tag", TAGS)
@pytest.mark.parametrize("name", ["pp4", "pp2tp2", "pp2dp2-overlapped"])
@pytest.mark.parametrize("arm", [ONE_F_ONE_B, AUTO], ids=["framework's order", "optimal plan"])
def test_another_arm_trains_the_same(arm, name, tag, stock, patched, tmp_path):
    _check(name, tag, arm, stock, patched, tmp_path / "run")


@full
@pytest.mark.parametrize("tag", TAGS)
def test_attached_to_an_unpatched_checkout_it_trains_the_same(tag, checkout, stock, tmp_path):
    run = run_envpipe(checkout(tag), CASES["pp4"], tmp_path / "run", attached=True)
    _assert_planned(run, CASES["pp4"], ENVPIPE)
    _assert_same(run, stock("pp4", tag))


@oldest_tag
def test_flag_off_nothing_of_envpipe_is_imported(tag, stock, patched, tmp_path):
    run = run_case(patched(tag), CASES["pp4"], "", tmp_path / "run")
    assert not run.imported
    _assert_same(run, stock("pp4", tag))


@full
@pytest.mark.parametrize("tag", TAGS)
def test_stock_is_the_same_twice(tag, checkout, stock, tmp_path):
    _assert_same(run_case(checkout(tag), CASES["pp4"], "", tmp_path / "run"), stock("pp4", tag))


@full
@pytest.mark.parametrize("tag", TAGS)
@pytest.mark.parametrize("name", ["pp4-fp16", "pp2dp2-overlapped-fp16"])
def test_fp16_skips_iterations_and_goes_on(name, tag, stock):
    skipped = [iteration.skipped for iteration in stock(name, tag).iterations]
    assert skipped[0]
    assert not all(skipped)


@full
@pytest.mark.parametrize("tag", TAGS)
@pytest.mark.parametrize("name", ["pp4", "pp2tp2-sequence", "pp2dp2-overlapped"])
def test_a_restarted_job_trains_the_same(name, tag, checkout, stock, patched, tmp_path):
    """Stopped at a checkpoint in the middle, and started again from it."""
    case = CASES[name]
    middle = ITERATIONS // 2
    # Without Apex, Megatron-LM cannot load the distributed optimizer's state in any format.
    loses_state = OVERLAPPED in case.features
    without_state = "--no-load-optim" if loses_state else ""

    def saving(arm):
        return f"--save {tmp_path / arm} --save-interval {middle} --exit-interval {middle}"

    def loading(arm):
        return f"--load {tmp_path / arm} {without_state}"

    first = run_case(checkout(tag), case, saving("stock"), tmp_path / "stock first")
    second = run_case(checkout(tag), case, loading("stock"), tmp_path / "stock then")
    # Megatron-LM prints the second loss after a restart as its mean with the first.
    assert (second.weights == stock(name, tag).weights) == (not loses_state)

    patched_first = run_envpipe(
        patched(tag), case, tmp_path / "first", f"{ENVPIPE} {saving('envpipe')}"
    )
    patched_second = run_envpipe(
        patched(tag), case, tmp_path / "then", f"{ENVPIPE} {loading('envpipe')}"
    )
    assert patched_first.digits == first.digits
    assert patched_second.digits == second.digits
    assert patched_second.weights == second.weights
