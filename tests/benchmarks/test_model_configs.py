"""EnvPipe's models as transformers has them: their sizes, and batches that they take."""

import pytest

pytest.importorskip("transformers")
pytest.importorskip("deepspeed")
import torch

from benchmarks.models.train import NAMES, batches, config_of, length_of
from envpipe_megatron.integrations.huggingface import split_model
from envpipe_megatron.integrations.huggingface.torch_stages import Stage

pytestmark = pytest.mark.xdist_group("launch")


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("bert-336m", 335),
        ("gpt-125m", 125),
        ("megatron-1.3b", 1316),
        ("resnet-152", 58.35),  # of 100 classes
    ],
)
def test_models_have_the_size_of_their_name(name, millions):
    model = split_model(config_of(name, tiny=False))
    tied = model.num_parameters[0] if model.is_tied(0) else 0
    assert sum(model.num_parameters) - tied == pytest.approx(millions * 1e6, rel=5e-3)


@pytest.mark.parametrize("name", ["bert-336m", "gpt-125m", "resnet-152"])
def test_tiny_ones_take_their_batches(name):
    config = config_of(name, tiny=True)
    model = split_model(config)
    stage = Stage(model, model.parts(1), 0)
    inputs, labels = next(batches(config, 2, length_of(name, tiny=True)))
    if isinstance(inputs, tuple):
        inputs, segments, is_token = inputs
        logits = stage(inputs, token_type_ids=segments, attention_mask=is_token)
    else:
        logits = stage(inputs)
    assert torch.isfinite(model.loss(logits, labels))
    assert sum(model.num_parameters) < 1e6
    assert name in NAMES
