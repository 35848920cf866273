"""The model in the type that it has on GPUs."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from one_rank_job import one_rank_job  # noqa: E402
from quickstart_helpers import short_settings  # noqa: E402

from envpipe_megatron.quickstart import model  # noqa: E402

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
