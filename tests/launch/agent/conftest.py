import pytest

from envpipe_megatron.launch.agent import collector as collector_module


@pytest.fixture(autouse=True)
def _tries_often(monkeypatch):
    monkeypatch.setattr(collector_module, "_FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(collector_module, "_LONGEST_PAUSE_S", 0.01)
