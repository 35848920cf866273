"""Where checkouts of Megatron-LM are found; nothing of them is kept in this repository.

`ENVPIPE_MEGATRON_LM` names a folder with a checkout for each tag (`core_v0.16.1/`, ...), or one
checkout; without it they are looked for in the user's cache folder, `~/.cache/envpipe/megatron-lm`.
"""

import os
import shutil
from pathlib import Path

from envpipe_megatron.patching.catalog import load_catalog

_PATCHES = [patch for patch in load_catalog() if patch.project == "megatron-lm"]
TAGS = tuple(patch.tag for patch in _PATCHES)
VARIABLE = "ENVPIPE_MEGATRON_LM"
#: Names a stock checkout of Megatron-DeepSpeed.
DEEPSPEED_VARIABLE = "ENVPIPE_MEGATRON_DEEPSPEED"
#: Names a checkout of Megatron-Bridge, with its submodule Megatron-LM.
BRIDGE_VARIABLE = "ENVPIPE_MEGATRON_BRIDGE"


def folder_of_checkouts() -> Path:
    """The folder that is looked in; it need not exist."""
    if named := os.environ.get(VARIABLE):
        return Path(named).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "envpipe" / "megatron-lm"


def checkout_of(tag: str) -> Path | None:
    """The checkout of a tag, or None where there is none."""
    folder = folder_of_checkouts()
    for checkout in (folder / tag, folder):
        if tag_of(checkout) == tag:
            return checkout
    return None


def tag_of(checkout: Path) -> str | None:
    """The tag among `TAGS` that a folder is a checkout of, or None."""
    if not (checkout / "pretrain_gpt.py").is_file():
        return None
    return next((patch.tag for patch in _PATCHES if patch.recognition.fits(checkout)), None)


def copy_checkout(checkout: Path, folder: Path) -> Path:
    """Copy what is run or changed of a checkout to a new folder: `megatron/` and the scripts.

    The rest is some 50 MB of documents, tests and examples.
    """
    shutil.copytree(
        checkout / "megatron",
        folder / "megatron",
        ignore=shutil.ignore_patterns("__pycache__", "*.so"),
    )
    for script in checkout.glob("*.py"):
        shutil.copy(script, folder)
    return folder
