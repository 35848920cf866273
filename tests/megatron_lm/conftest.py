from collections.abc import Callable
from pathlib import Path

import pytest
from checkouts import VARIABLE, checkout_of, copy_checkout, folder_of_checkouts


@pytest.fixture
def checkout() -> Callable[[str], Path]:
    """The stock checkout of a tag, not to be changed; skips where there is none."""

    def find(tag: str) -> Path:
        found = checkout_of(tag)
        if found is None:
            pytest.skip(f"no checkout of Megatron-LM {tag} in {folder_of_checkouts()} ({VARIABLE})")
        return found

    return find


@pytest.fixture
def working_copy(checkout: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a tag's checkout that a test may change; skips where there is none."""
    return lambda tag: copy_checkout(checkout(tag), tmp_path / tag)
