"""Stands here so that tests of every folder can import what they share."""

import gc
import os
from collections.abc import Iterator

import pytest
from fake_nvml.fixtures import fake_nvml, fake_nvml_library, fake_nvml_node

__all__ = ["fake_nvml", "fake_nvml_library", "fake_nvml_node"]

# Megatron's decorators would import torch's compiler, which takes each rank three seconds.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

# Tests fork hundreds of children that live for milliseconds: looking through all objects of this
# process for garbage takes each a fifth of a second, and a copy of them.
os.register_at_fork(after_in_child=gc.freeze)


@pytest.hookimpl(hookwrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported stays: nothing of it is looked through for garbage, now or later."""
    gc.disable()
    yield
    gc.freeze()
    gc.enable()
