"""Fixtures of the fake NVML library, for the tests of every folder."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from envpipe_megatron.gpu.backends import nvml
from envpipe_megatron.gpu.base import FORBID_VARIABLE
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


@pytest.fixture
def own_node(
    fake_nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[[bool], FakeNvml]:
    """Gives four A100s that this process sees, for a user who may lock them or not.

    Folders of leases and sockets are the test's own, and no variable says otherwise.
    """

    def use(may_lock: bool) -> FakeNvml:
        names = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_DEVICE_MAX_CONNECTIONS")
        for name in (*names, "ENVPIPE_SITE_CONFIG", "ZEUSD_TOKEN", FORBID_VARIABLE):
            monkeypatch.delenv(name, raising=False)
        for name in ("ENVPIPE_LEASE_DIR", "XDG_RUNTIME_DIR"):
            (tmp_path / name).mkdir(mode=0o700)
            monkeypatch.setenv(name, str(tmp_path / name))
        monkeypatch.setenv("ZEUSD_SOCK_PATH", str(tmp_path / "zeusd.sock"))
        monkeypatch.setattr(nvml, "has_sys_admin", lambda: may_lock)
        monkeypatch.setattr(nvml, "in_user_namespace", lambda: False)
        fake_nvml.use_here()
        return fake_nvml

    return use
