"""Makes DeepSpeed's pipelines of split models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor

from envpipe_megatron.integrations.deepspeed.partition import PipelineModule
from envpipe_megatron.integrations.huggingface.layers import Entry, tied_logits
from envpipe_megatron.integrations.huggingface.split import Layer, Message, SplitModel

_KEY = "embedding"
_WEIGHT = "embedding.weight"


def deepspeed_layers(model: SplitModel) -> list[LayerSpec]:
    """Return the layers as DeepSpeed's specs, which build one when its stage needs it.

    A batch's inputs are token numbers [samples, length], or images. Those of BERT are a tuple
    (token numbers, segment numbers, whether each position holds a token), each [samples, length],
    the last one of truth values, which travel with the hidden states: its engine needs
    `set_has_attention_mask(True)`.
    """
    specs = []
    for index, entry in enumerate(model.entries):
        if model.is_tied(index):
            run = {"forward_fn": _logits} if entry.tied else {}
            place = 0 if entry.tied else index
            spec = TiedLayerSpec(_KEY, Layer, model, place, tied_weight_attr=_WEIGHT, **run)
        else:
            spec = LayerSpec(_named(model, entry), model, index)
        specs.append(spec)
    return specs


def pipeline_module(
    model: SplitModel,
    num_stages: int,
    cut: str | Sequence[int] = "parameters",
    **arguments: Any,
) -> PipelineModule:
    """Make DeepSpeed's PipelineModule of a split model; for `initialize`, on every rank.

    Args:
        model: what `split_model` gave.
        num_stages: p; more ranks than that are replicas.
        cut: as in `SplitModel.parts`.
        arguments: others of PipelineModule; without a `loss_fn` it is the model's.

    Raises EnvPipeError for a cut that does not fit.
    """
    parts = model.parts(num_stages, cut)
    return PipelineModule(
        deepspeed_layers(model),
        num_stages=num_stages,
        partition_method="parts:" + ",".join(map(str, parts)),
        **{"loss_fn": model.loss, **arguments},
    )


def _named(model: SplitModel, entry: Entry) -> type[Layer]:
    """Return a class named as transformers' own, for `partition_method="type:GPT2Block"`."""
    first = next(iter(entry.modules.values()))
    return type(type(model.model.get_submodule(first)).__name__, (Layer,), {})


def _logits(layer: Layer, message: Message) -> Message:
    """Return logits, and what comes with the hidden states."""
    if isinstance(message, Tensor):
        return tied_logits(layer, message)
    hidden, *others = message
    return (tied_logits(layer, hidden), *others)
