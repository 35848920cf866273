"""Tensors of a model that lies in safetensors files, one by one and by name."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.integrations.huggingface.families import Family

_FILE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
#: Names that an error lists.
_SHOWN = 5


class WeightsError(EnvPipeError):
    """Files of weights that are not those of the model."""


class Checkpoint:
    """The weights of a model in a folder as `save_pretrained` leaves it, or in one file.

    Only names are read at first, and of a file with an index not even the parts are opened.

    Args:
        path: the folder, the index (`model.safetensors.index.json`) or a `.safetensors` file.
        family: of the model; says which names are old ones, and which it has no use for.
        needed: names of the model's weights; tied ones once.
        known: names that may be there, too.
        prefix: what names of a model without its head lack.

    Raises WeightsError for a file that is not there or cannot be read, and for names that are
    missing or unknown.
    """

    def __init__(
        self,
        path: Path,
        family: Family,
        needed: Collection[str],
        known: Collection[str],
        prefix: str,
    ) -> None:
        self._path = path
        files = _files(path)
        bare = not any(name.startswith(f"{prefix}.") for name in files)
        #: By the model's name, the file and the name there.
        self._places: dict[str, tuple[Path, str]] = {}
        for name, file in files.items():
            now = name
            for old, new in family.renamed:
                if now.endswith(old):
                    now = now.removesuffix(old) + new
            if bare and now not in known:
                now = f"{prefix}.{now}"
            self._places[now] = file, name
        missing = [name for name in needed if name not in self._places]
        if missing:
            raise WeightsError(
                f"{path} lacks {len(missing)} of the model's weights",
                value=missing[:_SHOWN],
                remedy="Give the files of this model; its configuration says which layers it has, "
                "and by tie_word_embeddings whether the head has weights of its own.",
            )
        unknown = [
            name
            for name in self._places
            if name not in known
            and not name.startswith(family.ignored)
            and not name.endswith(family.ignored)
        ]
        if unknown:
            raise WeightsError(
                f"{path} has {len(unknown)} weights that the model does not know",
                value=unknown[:_SHOWN],
                remedy="Give the files of this model: its configuration is another one.",
            )

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Read a tensor; a WeightsError if its shape is another one."""
        file, there = self._places[name]
        try:
            with safe_open(file, framework="pt") as opened:
                found = tuple(opened.get_slice(there).get_shape())
                if found == shape:
                    tensor: Tensor = opened.get_tensor(there)
                    return tensor
        except (OSError, SafetensorError) as error:
            raise WeightsError(
                f"Weights cannot be read: {error}",
                value=str(file),
                remedy="Fetch the files again.",
            ) from error
        raise WeightsError(
            f"{there} in {file} has another shape than the model's, {shape}",
            value=found,
            remedy="Give the configuration that these weights were trained with.",
        )


def _files(path: Path) -> dict[str, Path]:
    """By name of a tensor, the file that it is in."""
    if path.is_dir():
        found = [path / name for name in (_FILE, _INDEX) if (path / name).is_file()]
        if not found:
            raise WeightsError(
                f"There is neither {_FILE} nor {_INDEX} in the folder",
                value=str(path),
                remedy="Save the model there by save_pretrained, which writes safetensors.",
            )
        path = found[0]
    try:
        if path.suffix == ".json":
            parts = json.loads(path.read_text())["weight_map"]
            return {name: path.parent / part for name, part in parts.items()}
        with safe_open(path, framework="pt") as opened:
            return dict.fromkeys(opened.keys(), path)
    except (OSError, SafetensorError, ValueError, LookupError, AttributeError) as error:
        raise WeightsError(
            f"These are no weights in safetensors: {error}",
            value=str(path),
            remedy=f"Give a .safetensors file, {_INDEX}, or the folder of either.",
        ) from error
