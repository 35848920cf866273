"""Parts of real recipes train on the CPU in EnvPipe's order as stock does, and check themselves."""

import os
from unittest import mock

import pytest
from checkouts import TAGS
from lm_cases import full, run_case, run_envpipe
from test_lower_levels import KEPT, by_plan, megatron_order

from envpipe_megatron.formats.timeline import read_timelines

#: Without Transformer Engine, stock 0.16.1 ends in its experts' router, and none computes again.
FOUND = {
    (name, tag): case
    for name, case in KEPT.items()
    for tag in TAGS
    if name != "recompute" and not (name.startswith("experts") and tag == "core_v0.16.1")
}
#: On the path of a rank's imports, it makes each of the job's own runs differ from ours.
_DIFFERENT = """
import sys
from importlib.machinery import PathFinder

class Finder:
    def find_spec(self, name, path, target=None):
        if name != "envpipe_megatron.integrations.megatron.self_check":
            return None
        spec = PathFinder.find_spec(name, path)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            differs = iter((None, "gradients of one") * 2)  # split backwards, and whole ones
            module.Outcome.differs_from = lambda own, other: next(differs)

        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder())
"""

pytestmark = [pytest.mark.xdist_group("megatron_lm"), full]


@pytest.mark.parametrize(("name", "tag"), FOUND)
def test_another_order_gives_the_same_bits(name, tag, checkout, patched, tmp_path):
    case = KEPT[name]
    # With more forwards in the warm-up than Megatron's own order has.
    order = megatron_order(case, [1] * (case.num_stages - 1) + [0])
    stock = run_case(checkout(tag), case, "", tmp_path / "stock")
    how = by_plan(case, tmp_path, order, "order")
    run = run_envpipe(patched(tag), case, tmp_path / "ours", how)
    assert run.result == stock.result
    said = "\n".join(run.outputs)
    assert "losses and gradients are equal to the last bit" in said
    assert ", 3 times, at last with split backwards" in said
    ran = read_timelines([tmp_path / "ours" / "output" / "timeline.jsonl"]).iterations
    steady = [iteration for iteration in ran if iteration.phase == "steady"]
    assert {iteration.labels.stage for iteration in steady} == set(range(case.num_stages))
    for iteration in steady:
        assert iteration.order.split() == order.labels()[iteration.labels.stage]


def test_a_job_that_fails_its_check_trains_on_at_level_units(checkout, patched, tmp_path):
    case, tag = KEPT["experts on two ranks"], "core_v0.19.0"
    stock = run_case(checkout(tag), case, "", tmp_path / "stock")
    (tmp_path / "sitecustomize.py").write_text(_DIFFERENT)
    with mock.patch.dict(os.environ, {"PYTHONPATH": str(tmp_path)}):
        run = run_envpipe(patched(tag), case, tmp_path / "ours", "--envpipe-type optimal")
    assert run.result == stock.result
    said = "\n".join(run.outputs)
    assert "level order; if a self-check holds, for mixture of experts" in said
    assert "Backwards stay whole: gradients of one of stage 0 differ from Megatron's" in said
    assert (
        "level units; against order: mixture of experts, expert parallelism (its self-check: "
        "gradients of one of stage 0 differ from Megatron's, which repeats itself)"
    ) in said
    phases = run.phases
    # The check ends one job, and the next begins with Megatron's own iteration.
    assert phases[0] == "framework"
    assert "warm-up" in phases
