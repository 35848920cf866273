"""The Transformers, without a pipeline: what they learn from, and what they may not look at."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

pytest.importorskip("deepspeed")
import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec

from envpipe_megatron.integrations.deepspeed.layers import ShapeError
from envpipe_megatron.integrations.deepspeed.models import (
    IGNORED_LABEL,
    PRESETS,
    TransformerShape,
    bert_layers,
    gpt2_layers,
    language_model_loss,
    llama_layers,
)

pytestmark = pytest.mark.xdist_group("launch")

WORDS, LENGTH = 101, 12
SHAPE = TransformerShape(2, 32, 4, 2, 64, WORDS, 16)
CAUSAL = [gpt2_layers, llama_layers]
Layers = Callable[[TransformerShape, int], list[LayerSpec]]


class Whole(torch.nn.Module):
    """All layers one after the other, as stages run them."""

    def __init__(self, specs: list[LayerSpec]) -> None:
        super().__init__()
        tied: dict[str, torch.nn.Module] = {}
        self.steps: list[Callable[[Any], Any]] = []
        self.built = torch.nn.ModuleList()
        for spec in specs:
            layer = spec.build()
            step = layer
            if isinstance(spec, TiedLayerSpec):
                layer = tied.setdefault(spec.key, layer)
                step = partial(spec.forward_fn, layer) if spec.forward_fn else layer
            self.built.append(layer)
            self.steps.append(step)

    def forward(self, inputs: Any) -> torch.Tensor:
        for step in self.steps:
            inputs = step(inputs)
        return inputs


def words(samples: int = 3) -> torch.Tensor:
    return torch.randint(WORDS, (samples, LENGTH), generator=torch.Generator().manual_seed(1))


def inputs_of(layers: Layers, tokens: torch.Tensor) -> Any:
    if layers is not bert_layers:
        return tokens
    segments = (torch.arange(LENGTH) >= LENGTH // 2).long().expand_as(tokens)
    return tokens, segments, torch.ones_like(tokens, dtype=torch.bool)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layers", [gpt2_layers, llama_layers, bert_layers])
def test_all_weights_learn(layers, dtype):
    model, tokens = Whole(layers(SHAPE, 1)).to(dtype), words()
    losses = []
    for _ in range(4):
        logits = model(inputs_of(layers, tokens))
        assert logits.dtype == dtype
        loss = language_model_loss(logits, tokens.roll(-1, dims=1))
        model.zero_grad()
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for name, weight in model.named_parameters():
                assert weight.grad is not None, name
                assert weight.grad.isfinite().all(), name
                weight -= 0.1 * weight.grad
    assert losses[0] == pytest.approx(torch.tensor(float(WORDS)).log().item(), rel=0.05)
    assert losses == sorted(losses, reverse=True)


@pytest.mark.parametrize("layers", CAUSAL)
def test_causal_models_do_not_look_ahead(layers):
    model, tokens = Whole(layers(SHAPE, 1)), words(1)
    changed = tokens.clone()
    changed[0, 7] = (changed[0, 7] + 1) % WORDS
    same = (model(tokens) == model(changed)).all(dim=-1)[0]
    assert same.tolist() == [True] * 7 + [False] * (LENGTH - 7)


def test_rotary_positions_matter():
    """The same tokens in another order come to another end at the last position."""
    model, tokens = Whole(llama_layers(SHAPE, 1)), words(1)
    swapped = tokens[:, [1, 0, *range(2, LENGTH)]]
    assert (model(tokens)[0, -1] - model(swapped)[0, -1]).abs().max() > 1e-6


def test_bert_looks_to_both_sides_and_ignores_padding():
    model, tokens = Whole(bert_layers(SHAPE, 1)), words(1)
    _, segments, is_token = inputs_of(bert_layers, tokens)
    is_token[0, 9:] = False
    logits = model((tokens, segments, is_token))
    for position, seen in ((10, False), (8, True)):
        changed = tokens.clone()
        changed[0, position] = (changed[0, position] + 1) % WORDS
        others = model((changed, segments, is_token))[0, :8]
        assert (not torch.equal(others, logits[0, :8])) == seen
    shorter = model((tokens[:, :9], segments[:, :9], is_token[:, :9]))
    torch.testing.assert_close(shorter, logits[:, :9])


def test_the_loss_is_that_of_the_labels_that_count():
    logits = torch.randn(2, LENGTH, WORDS)
    labels = torch.full((2, LENGTH), IGNORED_LABEL)
    assert language_model_loss(logits, labels).item() == 0.0
    labels[1, 3] = 5
    expected = -logits[1, 3].log_softmax(-1)[5]
    torch.testing.assert_close(
        language_model_loss(logits.half(), labels), expected, rtol=1e-3, atol=1e-3
    )


@pytest.mark.parametrize("layers", [gpt2_layers, llama_layers, bert_layers])
def test_weights_come_from_the_seed_whatever_was_built_before(layers):
    first = Whole(layers(SHAPE, 1)).state_dict()
    last_alone = layers(SHAPE, 1)[2].build().state_dict()
    for name, weight in last_alone.items():
        assert torch.equal(weight, first[f"built.2.{name}"])
    other = layers(SHAPE, 2)[2].build().state_dict()
    assert any(not torch.equal(weight, other[name]) for name, weight in last_alone.items())


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("gpt-125m", 124),
        ("gpt-350m", 355),
        ("bert-336m", 335),
        ("llama-160m", 162),
        ("llama-1b", 1100),
    ],
)
def test_presets_have_the_size_of_their_name(name, millions, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "normal_", lambda tensor, *_, **named: tensor)
    with torch.device("meta"):
        model = Whole(PRESETS[name].layers(PRESETS[name].shape))
    parameters = sum(weight.numel() for weight in model.parameters())
    assert parameters == pytest.approx(millions * 1e6, rel=5e-3)


def test_sizes_that_do_not_go_together():
    with pytest.raises(ShapeError, match="heads"):
        TransformerShape(2, 32, 4, 3, 64, WORDS, 16)
