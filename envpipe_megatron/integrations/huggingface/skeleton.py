"""The unsplit model on the device `meta`: all of its modules, none of its memory."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers
from torch import nn

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.integrations import versions
from envpipe_megatron.integrations.huggingface.attention import IMPLEMENTATIONS, Attention
from envpipe_megatron.integrations.huggingface.families import FAMILIES, Family
from envpipe_megatron.integrations.huggingface.layers import Entry


class ModelError(EnvPipeError):
    """A model or a version of transformers that is not split here."""


class Skeleton:
    """A configuration's model without memory, its layers, and what they share.

    Parameters have torch's default data type. Raises ModelError.
    """

    def __init__(self, config: Any) -> None:
        check_version()
        self.family = _family(config)
        config = copy.deepcopy(config)  # making a model writes to it
        with torch.device("meta"):
            self.model = self.family.auto.from_config(config, dtype=torch.get_default_dtype())
        self.entries: list[Entry] = self.family.entries(config)
        self.attention = Attention(*_attention(self.model, config))

    def module(self, name: str) -> nn.Module:
        """A module by its name in the model."""
        found: nn.Module = self.model.get_submodule(name)
        return found

    def initialize(self, module: nn.Module) -> None:
        """Draw a module's weights as transformers does, from torch's generator."""
        with torch.no_grad():
            module.apply(self.model._init_weights)


def check_version() -> None:
    """Refuse by a ModelError versions of transformers that EnvPipe was not tried with."""
    if not versions.is_tested(transformers.__version__, versions.TRANSFORMERS):
        oldest, beyond = map(versions.as_text, versions.TRANSFORMERS)
        raise ModelError(
            "EnvPipe was not tried with this version of transformers",
            value=transformers.__version__,
            remedy=f"Install transformers>={oldest},<{beyond}.",
        )


def _family(config: Any) -> Family:
    model_type = getattr(config, "model_type", None)
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise ModelError(
            "Models of this type are not split into stages",
            value=model_type or type(config).__name__,
            remedy=f"Those are: {', '.join(FAMILIES)}, by a configuration of transformers.",
        )
    for name in family.refused:
        if getattr(config, name, False):
            raise ModelError(
                f"A {model_type} with {name} is not split into stages",
                value=getattr(config, name),
                remedy=f"Set {name} to false in the configuration.",
            )
    return family


def _attention(model: Any, config: Any) -> tuple[str, nn.Module | None]:
    """The implementation of attention, and the module of rotary frequencies on the CPU."""
    if not hasattr(config, "num_attention_heads"):  # no Transformer
        return IMPLEMENTATIONS[0], None
    implementation = model.config._attn_implementation
    if implementation not in IMPLEMENTATIONS:
        allowed = " or ".join(IMPLEMENTATIONS)
        raise ModelError(
            "Models with this implementation of attention are not split into stages",
            value=implementation,
            remedy=f"Set attn_implementation of the configuration to {allowed}.",
        )
    rotary = getattr(model.base_model, "rotary_emb", None)
    if rotary is None:
        return implementation, None
    with torch.device("cpu"):
        return implementation, type(rotary)(config)
