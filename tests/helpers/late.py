"""Modules that are imported when they are used: every worker collects the tests of all."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any


class Late:
    """Stands for a module; where its package is not installed, the tests of a module skip."""

    def __init__(self, name: str) -> None:
        package = name.partition(".")[0]
        if importlib.util.find_spec(package) is None:
            import pytest  # ranks, which have it all, do not wait for its import

            pytest.skip(f"{package} is not installed", allow_module_level=True)
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked for by pytest, of all that stands in a module
            raise AttributeError(name)
        return getattr(importlib.import_module(self._name), name)
