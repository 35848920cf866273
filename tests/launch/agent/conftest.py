import pytest

from envpipe_megatron.launch.agent import collector as collector_module


@pytest.fixture(autouse=True)
def _tries_often(monkeypatch):
    monkeypatch.setattr(collector_module, "_TRY_AGAIN_S", 0.001)
