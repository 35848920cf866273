"""Tiny models of transformers, what they are trained with, and the training of a whole one."""

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    BertConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    ResNetConfig,
)

from envpipe_megatron.integrations.huggingface.layers import image_class_loss, language_model_loss

WORDS, LENGTH, MICROBATCH, MICROBATCHES = 61, 12, 2, 4
STEPS = 10
_SIZES = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "intermediate_size": 48,
    "vocab_size": WORDS,
    "max_position_embeddings": 16,
    "bos_token_id": None,
    "eos_token_id": None,
}
_LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}
_FEW = {**_SIZES, "num_key_value_heads": 2}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
CONFIGS = {
    "llama": lambda: LlamaConfig(**_FEW),
    "tied llama": lambda: LlamaConfig(**_FEW, tie_word_embeddings=True, rope_parameters=_LLAMA_3),
    "mistral": lambda: MistralConfig(**_FEW, sliding_window=5),
    "qwen2": lambda: Qwen2Config(
        **_FEW, use_sliding_window=True, sliding_window=5, max_window_layers=1
    ),
    "qwen3": lambda: Qwen3Config(**_FEW, head_dim=8, tie_word_embeddings=True),
    "gpt2": lambda: GPT2Config(
        n_embd=32, n_head=4, n_layer=3, vocab_size=WORDS, n_positions=16,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None, eos_token_id=None,
    ),
    "bert": lambda: BertConfig(**_SIZES, **_NO_DROPOUT),
    "untied bert": lambda: BertConfig(**_SIZES, **_NO_DROPOUT, tie_word_embeddings=False),
    "resnet": lambda: ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], num_labels=7, layer_type="basic"
    ),
    "deep resnet": lambda: ResNetConfig(
        embedding_size=8, hidden_sizes=[16, 32], depths=[1, 2], num_labels=7
    ),
}  # fmt: skip


def config_of(name: str, attention: str = "sdpa"):
    config = CONFIGS[name]()
    if "resnet" not in name:
        config._attn_implementation = attention
    return config


def whole_model(config) -> torch.nn.Module:
    auto = {"bert": AutoModelForMaskedLM, "resnet": AutoModelForImageClassification}
    return auto.get(config.model_type, AutoModelForCausalLM).from_config(config)


def whole_with(config, weights: dict[str, Tensor]) -> torch.nn.Module:
    """The unsplit model with a split one's weights."""
    model = whole_model(config)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected
    assert config.model_type == "bert" or set(missing) <= {"lm_head.weight"}, "tied: names once"
    model.tie_weights()
    return model


def loss_of(name: str):
    return image_class_loss if "resnet" in name else language_model_loss


def microbatches(name: str) -> list[tuple[Tensor, dict[str, Tensor], Tensor]]:
    """First input, the others by name, and labels, of each microbatch; the same in each step."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for number in range(MICROBATCHES):
        if "resnet" in name:
            images = torch.randn(MICROBATCH, 3, 32, 32, generator=generator)
            found.append((images, {}, torch.randint(7, (MICROBATCH,), generator=generator)))
            continue
        text = torch.randint(WORDS, (MICROBATCH, LENGTH + 1), generator=generator)
        extras = {}
        if "bert" in name:
            ends = LENGTH - torch.arange(MICROBATCH)[:, None] * (1 + number)
            extras = {
                "token_type_ids": (text[:, :-1] > WORDS // 2).long(),
                "attention_mask": torch.arange(LENGTH)[None] < ends,
            }
        found.append((text[:, :-1], extras, text[:, 1:]))
    return found


class Momentum(torch.optim.Optimizer):
    """Gradient descent with momentum. Torch's own imports its compiler, which takes seconds."""

    def __init__(self, parameters) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            state["moved"] = 0.9 * state.get("moved", 0.0) + parameter.grad
            parameter -= 0.05 * state["moved"]


def train_whole(model: torch.nn.Module, name: str) -> list[float]:
    """Some steps of the unsplit model; its losses."""
    model.train()
    optimizer, losses = Momentum(model.parameters()), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for inputs, extras, labels in microbatches(name):
            loss = loss_of(name)(model(inputs, **extras).logits, labels) / MICROBATCHES
            loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    assert losses[-1] < losses[0], "something is learned"
    return losses
