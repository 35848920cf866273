from collections.abc import Callable
from pathlib import Path

import pytest
from checkouts import VARIABLE, checkout_of, copy_checkout, folder_of_checkouts
from lm_runs import missing_modules

from envpipe_megatron.patching.checkout import apply_patch


@pytest.fixture(scope="session")
def checkout() -> Callable[[str], Path]:
    """The stock checkout of a tag, not to be changed; skips where it cannot be run."""

    def find(tag: str) -> Path:
        found = checkout_of(tag)
        if found is None:
            pytest.skip(f"no checkout of Megatron-LM {tag} in {folder_of_checkouts()} ({VARIABLE})")
        if missing := missing_modules():
            pytest.skip(f"Megatron-LM imports what is not installed: {', '.join(missing)}")
        return found

    return find


@pytest.fixture(scope="session")
def patched(
    checkout: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """A patched copy of a tag's checkout, not to be changed further; skips likewise."""
    copies: dict[str, Path] = {}

    def find(tag: str) -> Path:
        if tag not in copies:
            copies[tag] = copy_checkout(checkout(tag), tmp_path_factory.mktemp("patched") / tag)
            apply_patch(copies[tag])
        return copies[tag]

    return find
