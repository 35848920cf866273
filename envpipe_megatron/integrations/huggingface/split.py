"""Divides a model of transformers into layers, which stages are made of; see `split_model`."""

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.integrations.huggingface.layers import (
    EXTRAS,
    MASK,
    Family,
    family_of,
    rotary_of,
)
from envpipe_megatron.integrations.levels import TRANSFORMERS, check_tested
from envpipe_megatron.search.partition import make_parts

DEFAULT_SEED = 1234


#: Hidden states, or a tuple of them and what later layers need.
Message = Tensor | tuple[Tensor, ...]


class Layer(nn.Module):
    """A layer of a split model; DeepSpeed's specs call the class.

    Args:
        model: has the unsplit model's modules, and weights.
        index: the layer's place in the model.
        finished: whether it gets weights, or stays on the device `meta`.
    """

    def __init__(self, model: SplitModel, index: int, finished: bool = True) -> None:
        super().__init__()
        self.index, self.entry, self.rotary = index, model.entries[index], model.rotary
        self._takes, self._gives = model.extras(index), model.extras(index + 1)
        for attribute, name in self.entry.modules.items():
            self.add_module(attribute, copy.deepcopy(model.model.get_submodule(name)))
        for name in self.entry.elsewhere:
            parent, _, child = name.rpartition(".")
            delattr(self.get_submodule(parent), child)
        if finished:
            model.finish(self)

    def forward(self, message: Message, **extras: Tensor | None) -> Message:
        """Take what the layer before gave, or the model's inputs: a tensor, or a tuple.

        A tuple has the other inputs after the hidden states, if this layer or a later one needs
        them, and so has what is returned. Beside a tensor the `EXTRAS` come by name.
        """
        hidden, *others = (message,) if isinstance(message, Tensor) else message
        taken = dict(zip(self._takes, others, strict=True)) if others else {}
        known = taken or extras
        hidden = self.entry.run(self, hidden, *(known.get(name) for name in self.entry.needs))
        given = [taken[name] for name in self._gives if taken]
        return (hidden, *given) if given else hidden

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield parameters and lasting buffers by their name in the unsplit model."""
        for name, tensor in self.state_dict(keep_vars=True).items():
            attribute, _, rest = name.partition(".")
            yield f"{self.entry.modules[attribute]}.{rest}", tensor


class SplitModel:
    """Layers of a model of transformers; `split_model` makes them, any rank those of its stage.

    Every rank calls it, with the same arguments. No rank holds more of the model than its stage:
    the whole is made without memory, and of files only a stage's tensors are read. `entries` has
    the layers in order: embedding, positions, blocks, norm, head. A cut counts them all. The
    unsplit `model` and the `bare` layers are on the device `meta`: they take no memory.

    Args:
        config: a configuration of transformers whose `model_type` is llama, mistral, qwen2, qwen3,
            gpt2, bert (masked words) or resnet (classes of images). Its
            `attn_implementation` is sdpa.
        weights: a folder as `save_pretrained` leaves it; None for weights that are drawn as
            transformers draws them.
        seed: of weights that are drawn. Each layer has its own, so they do not depend on the cut.

    Parameters have torch's default data type: set that before, or let the engine convert them.

    Raises EnvPipeError for a model, a setting or a version of transformers that is not split here,
    and for files that are not the model's.
    """

    def __init__(
        self, config: Any, weights: str | Path | None = None, seed: int = DEFAULT_SEED
    ) -> None:
        check_tested(transformers.__version__, TRANSFORMERS)
        family = family_of(config)
        config = copy.deepcopy(config)  # making a model writes to it
        with torch.device("meta"):
            self.model = family.auto.from_config(config, dtype=torch.get_default_dtype())
        self.entries, self.loss, self._seed = family.entries(config), family.loss, seed
        self.rotary = rotary_of(self.model, config)
        self.bare = [Layer(self, index, finished=False) for index in range(len(self.entries))]
        self.num_parameters = tuple(
            sum(parameter.numel() for parameter in layer.parameters()) for layer in self.bare
        )
        needed = {name for layer in self.bare for name, _ in layer.named_weights()}
        self._places = {}
        if weights is not None:
            self._places = _places(Path(weights), family, self.model, needed)

    def parts(self, num_stages: int, cut: str | Sequence[int] = "parameters") -> list[int]:
        """Return the first layer of each stage, and the number of layers.

        Args:
            num_stages: p.
            cut: `parameters`; `time:FILE` or `energy:FILE`, a profile of all `entries`, which
                `integrations.deepspeed.layer_profile` measures; or the parts themselves.

        Raises EnvPipeError for a cut that does not fit.
        """
        return make_parts(cut, self.num_parameters, num_stages)

    def is_tied(self, index: int) -> bool:
        """Return whether a layer shares weights: the first layer and a tied head do."""
        return self.entries[index].tied or (index == 0 and any(e.tied for e in self.entries))

    def extras(self, index: int) -> tuple[str, ...]:
        """Return the inputs beside the first that come to a layer: it or a later one needs them.

        A mask comes to all: DeepSpeed takes the last part of every message for one.
        """
        needed = {name for entry in self.entries[index:] for name in entry.needs}
        if index < len(self.entries) and any(MASK in each.needs for each in self.entries):
            needed.add(MASK)
        return tuple(name for name in EXTRAS if name in needed)

    def finish(self, layer: Layer) -> None:
        """Give a layer its weights: from files, or drawn from its seed."""
        layer.to_empty(device="cpu")
        if self._places:
            for name, tensor in layer.named_weights():
                with torch.no_grad():
                    tensor.copy_(_read(self._places[name], tuple(tensor.shape)))
                tensor._is_hf_initialized = True  # type: ignore[attr-defined]  # keeps it as it is
        index = 0 if self.entries[layer.index].tied else layer.index
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            # The CPU's generator only: the GPUs' are seeded by the user, and not put back here.
            torch.default_generator.manual_seed(self._seed + index)
            for attribute in layer.entry.modules:
                layer.get_submodule(attribute).apply(self.model._init_weights)


split_model = SplitModel


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """Return a stage's weights by their names in the unsplit model; safetensors saves them.

    Args:
        module: a stage, a DeepSpeed PipelineModule, or anything with layers of a split model.
    """
    return {
        name: tensor.detach()
        for layer in module.modules()
        if isinstance(layer, Layer)
        for name, tensor in layer.named_weights()
    }


_FILE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
#: Names that an error lists.
_SHOWN = 5
#: Of a tensor in files: which file, and its name there.
_Place = tuple[Path, str]


def _places(folder: Path, family: Family, model: Any, needed: Collection[str]) -> dict[str, _Place]:
    """Return where a folder has each weight, by its name in the unsplit model.

    Only names are read, and of files with an index not even these are opened.

    Args:
        folder: as `save_pretrained` leaves it, with `model.safetensors` or its index and parts.
        family: of the model; says which names are old ones, and which it has no use for.
        needed: names of the model's weights; tied ones once.

    Raises EnvPipeError for files that are not there or cannot be read, and for names that are
    missing or unknown.
    """
    files, known = _files(folder), model.state_dict().keys()
    prefix = f"{model.base_model_prefix}."  # names of a model without its head lack it
    bare = not any(name.startswith(prefix) for name in files)
    places = {}
    for name, file in files.items():
        now = name
        for old, new in family.renamed:
            if now.endswith(old):
                now = now.removesuffix(old) + new
        if bare and now not in known:
            now = prefix + now
        places[now] = file, name
    missing = [name for name in needed if name not in places]
    unknown = [
        name
        for name in places.keys() - known
        if not name.startswith(family.ignored) and not name.endswith(family.ignored)
    ]
    for wrong, names in (("lacks", missing), ("has unknown", unknown)):
        if names:
            raise EnvPipeError(
                f"{folder} {wrong} weights: {len(names)} of them",
                value=names[:_SHOWN],
                remedy="Give the files of this model; its configuration says which layers it "
                "has, and by tie_word_embeddings whether the head has weights of its own.",
            )
    return places


def _read(place: _Place, shape: tuple[int, ...]) -> Tensor:
    """Read a tensor; an EnvPipeError if its shape is another one."""
    file, name = place
    with _readable(file), safe_open(file, framework="pt") as opened:
        found = tuple(opened.get_slice(name).get_shape())
        if found == shape:
            tensor: Tensor = opened.get_tensor(name)
            return tensor
    raise EnvPipeError(
        f"{name} in {file} has another shape than the model's, {shape}",
        value=found,
        remedy="Give the configuration that these weights were trained with.",
    )


def _files(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor, by the tensor's name."""
    if (folder / _FILE).is_file():
        with _readable(folder / _FILE), safe_open(folder / _FILE, framework="pt") as opened:
            return dict.fromkeys(opened.keys(), folder / _FILE)
    with _readable(folder / _INDEX):
        parts = json.loads((folder / _INDEX).read_text())["weight_map"]
        return {name: folder / part for name, part in parts.items()}


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    """Raise an EnvPipeError for what cannot be read of a file."""
    try:
        yield
    except (OSError, SafetensorError, ValueError, LookupError, AttributeError) as error:
        raise EnvPipeError(
            f"Weights cannot be read: {error}",
            value=str(file),
            remedy=f"Fetch the files again, or save the model there by save_pretrained: {_FILE}, "
            f"or {_INDEX} and its parts.",
        ) from error
