import os

import pytest

from envpipe_megatron.launch.torchrun_parser import TorchrunParser


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch):
    """Neither a developer's variables nor those of a cluster that runs the tests."""
    own = {"NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "NPROC_PER_NODE"}
    for name in list(os.environ):
        if name in own or name.startswith(("PET_", "SLURM_")):
            monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def parser():
    return TorchrunParser()
