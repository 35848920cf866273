"""The layers of the experiments' models, in plain PyTorch, as a list that stages are cut from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from benchmarks.figures.experiments import Family, Model


class Attention(nn.Module):
    """Attention with all its scores at hand, as in 2022; to itself, or to a memory."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        """Give [batch, length, width] what it looks up in a memory of the same shape."""
        batch, length, width = x.shape
        apart = (batch, length, -1, width // self.heads)
        query = self.query(x).view(apart).transpose(1, 2)
        key, value = self.key_value(memory).view(apart).transpose(1, 2).chunk(2, dim=1)
        scores = query @ key.transpose(-2, -1) / (width // self.heads) ** 0.5
        if self.causal:
            later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
            scores = scores.masked_fill(later, float("-inf"))
        found = scores.softmax(-1) @ value
        joined: torch.Tensor = self.output(found.transpose(1, 2).reshape(batch, length, width))
        return joined


class TransformerLayer(nn.Module):
    """Attention and a feed-forward net of four times the width, norms first.

    Args:
        cross: a second attention, to the layer's own input, since stages hand over one tensor.
    """

    def __init__(self, width: int, heads: int, *, causal: bool, cross: bool) -> None:
        super().__init__()
        attentions = 2 if cross else 1
        self.attentions = nn.ModuleList(
            Attention(width, heads, causal=causal) for _ in range(attentions)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(attentions + 1))
        self.feed_forward = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, length, width] to the same."""
        memory = x
        for index, (attention, norm) in enumerate(
            zip(self.attentions, self.norms[:-1], strict=True)
        ):
            normed = norm(x)
            x = x + attention(normed, memory if index else normed)
        widened: torch.Tensor = self.feed_forward(self.norms[-1](x))
        return x + widened


class Embedding(nn.Module):
    """Tokens and their places to vectors."""

    def __init__(self, vocabulary: int, width: int, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(length, width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """[batch, length] to [batch, length, width]."""
        embedded: torch.Tensor = self.tokens(tokens)
        return embedded + self.places.weight


class SumOfWidth(nn.Module):
    """A number a token."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, length, width] to [batch, length]."""
        return x.sum(-1)


class Bottleneck(nn.Module):
    """A residual block of 1x1, 3x3 and 1x1 convolutions to four times its width."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.block = nn.Sequential(
            *_convolution(inputs, width, 1, 1), nn.ReLU(),
            *_convolution(width, width, 3, stride), nn.ReLU(),
            *_convolution(width, 4 * width, 1, 1),
        )  # fmt: skip
        same = stride == 1 and inputs == 4 * width
        self.shortcut = nn.Sequential(*([] if same else _convolution(inputs, 4 * width, 1, stride)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, inputs, side, side] to [batch, 4 * width, side / stride, side / stride]."""
        return torch.relu(self.block(x) + self.shortcut(x))


def _convolution(inputs: int, outputs: int, kernel: int, stride: int) -> list[nn.Module]:
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
    return [convolution, nn.BatchNorm2d(outputs)]


def layer_makers(model: Model) -> list[Callable[[], nn.Module]]:
    """What makes each layer of a model, each of one tensor to one tensor, in EnvPipe's order."""
    if model.family is Family.RESNET:
        return _resnet(model)
    layer = partial(
        TransformerLayer,
        model.width,
        model.heads,
        causal=model.family is Family.MEGATRON,
        cross=model.family is Family.GPT,
    )
    layers: list[Callable[[], nn.Module]] = [layer] * sum(model.layers)
    norm = partial(nn.LayerNorm, model.width)
    if model.family is Family.BERT:
        return [*layers, SumOfWidth]
    if model.family is Family.GPT:
        return [*layers, norm, SumOfWidth]
    embedding = partial(Embedding, model.outputs, model.width, model.length)
    head = partial(nn.Linear, model.width, model.outputs, bias=False)
    return [embedding, *layers, norm, head]


def _resnet(model: Model) -> list[Callable[[], nn.Module]]:
    layers: list[Callable[[], nn.Module]] = [partial(_stem, model.width)]
    inputs = model.width
    for group, blocks in enumerate(model.layers):
        width = model.width * 2**group
        for block in range(blocks):
            layers.append(partial(Bottleneck, inputs, width, 2 if group and not block else 1))
            inputs = 4 * width
    return [*layers, partial(_classifier, inputs, model.outputs)]


def _stem(width: int) -> nn.Module:
    return nn.Sequential(*_convolution(3, width, 3, 1), nn.ReLU())


def _classifier(width: int, classes: int) -> nn.Module:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes))


def split(model: Model, stages: int) -> list[range]:
    """The layers of each stage: by EnvPipe's own numbers of layers where it gives them.

    Else each stage gets the same number of transformer layers or blocks, the last one the rest.
    """
    if model.split and len(model.split) == stages:
        ends = [0, *accumulate(model.split)]
    else:
        before, after = _SURROUNDINGS[model.family]
        layers = sum(model.layers)
        inner = (before + layers // stages * stage for stage in range(1, stages))
        ends = [0, *inner, before + layers + after]
    return [range(begin, end) for begin, end in pairwise(ends)]


#: Layers before and after the transformer layers or blocks.
_SURROUNDINGS = {
    Family.BERT: (0, 1),
    Family.GPT: (0, 2),
    Family.MEGATRON: (1, 2),
    Family.RESNET: (1, 1),
}


class Stage(nn.Module):
    """The layers of one stage; the backward recomputes those with weights, as DeepSpeed does.

    Of Megatron's, it recomputes transformer layers alone.
    """

    def __init__(self, layers: Sequence[nn.Module], *, megatron: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self._recomputed = [
            isinstance(layer, TransformerLayer)
            if megatron
            else any(True for _ in layer.parameters())
            for layer in layers
        ]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Pass a microbatch through all layers."""
        with set_checkpoint_early_stop(False):  # DeepSpeed's recomputes a layer to its end
            for layer, recomputed in zip(self.layers, self._recomputed, strict=True):
                x = _checkpointed(layer, x) if recomputed else layer(x)
        return x


def _checkpointed(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    # The reentrant kind, as DeepSpeed's, takes a third less of a host, and an input with gradient.
    reentrant = x.requires_grad
    result: torch.Tensor = checkpoint(layer, x, use_reentrant=reentrant, preserve_rng_state=False)
    return result


def build_stage(model: Model, stages: int, stage: int) -> Stage:
    """One stage of a model; a layer's weights follow from its number alone."""
    makers, layers = layer_makers(model), []
    for index in split(model, stages)[stage]:
        torch.manual_seed(index)
        layers.append(makers[index]())
    return Stage(layers, megatron=model.family is Family.MEGATRON)


def activation_shapes(model: Model, stages: int, samples: int) -> list[torch.Size]:
    """What each stage hands to the next; the last's is its output."""
    shapes = []
    passed = inputs_of(model, samples, 0, torch.device("cpu")).to("meta")
    for index in range(stages):
        with torch.device("meta"), torch.no_grad():
            passed = build_stage(model, stages, index)(passed)
        shapes.append(passed.shape)
    return shapes


def inputs_of(model: Model, samples: int, seed: int, device: torch.device) -> torch.Tensor:
    """One microbatch for the first stage, drawn on a device; the seed is the microbatch's own."""
    generator = torch.Generator(device).manual_seed(seed)
    match model.family:
        case Family.MEGATRON:
            tokens = (samples, model.length)
            return torch.randint(model.outputs, tokens, generator=generator, device=device)
        case Family.RESNET:
            shape: tuple[int, ...] = (samples, 3, model.length, model.length)
        case _:
            shape = (samples, model.length, model.width)
    return torch.randn(shape, generator=generator, device=device)


def targets_of(
    model: Model, outputs: Sequence[int], seed: int, device: torch.device
) -> torch.Tensor:
    """What the last stage's outputs of one microbatch are compared with."""
    generator = torch.Generator(device).manual_seed(seed)
    if model.outputs:
        classes = tuple(outputs[:-1])
        return torch.randint(model.outputs, classes, generator=generator, device=device)
    return torch.randn(tuple(outputs), generator=generator, device=device)


def loss_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The loss of one microbatch: against classes, or against values of the same shape."""
    if targets.is_floating_point():
        return functional.mse_loss(outputs.float(), targets)
    return functional.cross_entropy(outputs.float().flatten(0, -2), targets.flatten())
