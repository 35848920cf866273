"""The model in the type that it has on GPUs, and what it trains on."""

import itertools
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from one_rank_job import one_rank_job  # noqa: E402
from trials_helpers import short_settings  # noqa: E402

from envpipe_megatron.trials import model  # noqa: E402

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
