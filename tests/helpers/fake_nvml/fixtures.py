"""Fixtures of the fake NVML library, for the tests of every folder."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fake_nvml.fake_nvml import FakeNvml, build_library


@pytest.fixture(scope="session")
def fake_nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # that of the run, which its workers share
    if shutil.which("cc") is None:
        pytest.skip("the fake NVML library needs a C compiler: cc")
    return build_library(base / "fake_nvml_library")


@pytest.fixture
def fake_nvml_node(
    fake_nvml_library: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., FakeNvml]]:
    """Makes a node of the given models (see `models.MODELS`); what it uses here ends after."""
    nodes: list[FakeNvml] = []

    def make(*models: str) -> FakeNvml:
        nodes.append(FakeNvml(tmp_path_factory.mktemp("node"), fake_nvml_library, models))
        return nodes[-1]

    yield make
    for node in reversed(nodes):
        node.close()


@pytest.fixture
def fake_nvml(fake_nvml_node: Callable[..., FakeNvml]) -> FakeNvml:
    """Four A100s. Call `use_here()` on it where this process is to see them."""
    return fake_nvml_node("a100", "a100", "a100", "a100")
