"""Parts of real recipes train on the CPU in EnvPipe's order as stock does, and check themselves."""

from __future__ import annotations

import pytest
from checkouts import TAGS
from lm_cases import MICROBATCHES, full, run_case, run_envpipe, write_profile
from test_lower_levels import KEPT, Find

from envpipe_megatron.core.conditions import Conditions
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.plan import Plan
from envpipe_megatron.core.profile import read_profile
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.formats.timeline import read_timelines
from envpipe_megatron.policies.frequencies import envelope

pytestmark = [pytest.mark.xdist_group("megatron_lm"), full]


def an_order(case) -> Schedule:
    """With more forwards in the warm-up than Megatron's own order has."""
    stages, more = case.num_stages, [1] * (case.num_stages - 1) + [0]
    if case.chunks > 1:
        return builders.interleaved(stages, MICROBATCHES, case.chunks, extra_warmup=more)
    return builders.envpipe(stages, MICROBATCHES, more)


@pytest.mark.parametrize("tag", TAGS)
@pytest.mark.parametrize("name", KEPT)
def test_another_order_gives_the_same_bits(
    name: str, tag: str, checkout: Find, patched: Find, tmp_path
) -> None:
    case, order = KEPT[name], an_order(KEPT[name])
    stock = run_case(checkout(tag), case, "", tmp_path / "stock")
    write_profile(tmp_path / "given.csv", case.num_stages)
    profile = read_profile(tmp_path / "given.csv").for_chunks(case.chunks)
    conditions = Conditions((0.0,) * case.num_stages)
    plan = Plan("custom", order, envelope(order, profile), profile, conditions)
    plan.write(tmp_path / "plan.json")
    how = f"--envpipe-level order --envpipe-plan {tmp_path / 'plan.json'}"
    run = run_envpipe(patched(tag), case, tmp_path / "ours", how)
    assert run.digits == stock.digits
    assert run.weights == stock.weights
    said = "\n".join(run.outputs)
    checked = "losses and gradients are equal to the last bit" in said
    assert checked is ("if a self-check holds" in said)
    ran = read_timelines([tmp_path / "ours" / "output" / "timeline.jsonl"]).iterations
    steady = [iteration for iteration in ran if iteration.phase == "steady"]
    assert {iteration.labels.stage for iteration in steady} == set(range(case.num_stages))
    for iteration in steady:
        assert iteration.order.split() == order.labels()[iteration.labels.stage]
