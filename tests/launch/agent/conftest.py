import pytest

from envpipe_megatron.launch.agent import uplink as uplink_module


@pytest.fixture(autouse=True)
def _tries_often(monkeypatch):
    monkeypatch.setattr(uplink_module, "_FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(uplink_module, "_LONGEST_PAUSE_S", 0.01)
