"""The model in the type that it has on GPUs, and what it trains on."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from one_rank_job import one_rank_job  # noqa: E402
from presets import preset_profile  # noqa: E402
from trials_helpers import short_settings  # noqa: E402

from envpipe_megatron.core.conditions import known_conditions  # noqa: E402
from envpipe_megatron.core.kinds import Kind  # noqa: E402
from envpipe_megatron.policies.objective import Objective  # noqa: E402
from envpipe_megatron.policies.planner import make_plan  # noqa: E402
from envpipe_megatron.policies.request import PlanRequest  # noqa: E402
from envpipe_megatron.trials import model, worker  # noqa: E402

pytestmark = pytest.mark.xdist_group("megatron")


def test_a_microbatch_goes_through_the_model_in_bfloat16(tmp_path):
    """Megatron makes norms and embeddings of positions in float32 whatever it is told."""
    settings = short_settings(tmp_path, num_stages=1, num_layers=2)
    with one_rank_job() as patch:
        patch.setattr(model, "_working_type", lambda: torch.bfloat16)
        built = model.build_model(settings)
        assert {parameter.dtype for parameter in built.parameters()} == {torch.bfloat16}
        losses, mean_of = model.forward_step(model.microbatches(settings, b"text" * 100, 0), built)
        mean_of(losses)[0].backward()
        assert all(parameter.grad.isfinite().all() for parameter in built.parameters())


def test_microbatches_depend_on_the_iteration_alone(tmp_path):
    settings = short_settings(tmp_path)
    text = Path(settings.text).read_bytes()

    def iteration(number):
        return list(model.microbatches(settings, text, number))

    first = iteration(0)
    assert len(first) == 6
    assert all(m.shape == (2, 33) and m.dtype == torch.int64 for m in first)
    for rows in first:
        assert all(bytes(row.tolist()) in text for row in rows)
    torch.manual_seed(99)  # whatever a rank has drawn before
    iteration(1)
    assert all(torch.equal(a, b) for a, b in zip(first, iteration(0), strict=True))
    distinct = [*first, *iteration(1), *iteration(2)]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(distinct, 2))


@pytest.mark.parametrize(("free_bytes", "most"), [(1.0, (2, 1)), (11.0, (3, 3)), (None, (8, 8))])
def test_the_best_order_of_whole_backwards_has_memory_or_is_the_own_one(free_bytes, most):
    times_s = {
        Kind.FORWARD: 0.05, Kind.BACKWARD: 0.1, Kind.INPUT_GRADIENT: 0.08,
        Kind.WEIGHT_GRADIENT: 0.02,
    }  # fmt: skip
    profile = preset_profile("a100-sxm", 2, times_s, [])
    sidecar = replace(profile.sidecar, p2p_latency_s=(0.004,))
    if free_bytes is not None:
        sidecar = replace(sidecar, activation_bytes=(5.0, 5.0), free_bytes=(free_bytes,) * 2)
    profile = replace(profile, sidecar=sidecar)
    request = PlanRequest(
        8, "auto", "optimal", objective=Objective("time"), runnable=True,
        conditions=known_conditions(profile),
    )  # fmt: skip
    best = make_plan(profile, request).plan
    assert best.schedule.split
    whole = worker._whole_plan(best)
    assert not whole.schedule.split
    assert all(map(lambda peak, limit: peak <= limit, whole.schedule.peak_in_flight, most))
    faster = -whole.cost.slowdown_percent(whole.baseline.cost)
    assert faster > 1 if most[0] > 2 else faster == pytest.approx(0)
