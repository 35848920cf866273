import pytest
from cli_helpers import write_profile

from envpipe_megatron.gpu.base import FORBID_VARIABLE
from envpipe_megatron.gpu.emulated.store import ROOT_VARIABLE


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch):
    # A developer may have any of these set; tables are laid out for the terminal's width.
    for name in (FORBID_VARIABLE, ROOT_VARIABLE, "FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def profile_path(tmp_path):
    """Four stages, one of them slow, with an energy valley at 900 MHz; no sidecar."""
    return write_profile(tmp_path / "profile.csv")
