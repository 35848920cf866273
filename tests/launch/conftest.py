import os
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from agent_ranks import Nodes

from envpipe_megatron.launch.agent import agent as agent_module


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch):
    """Neither a developer's variables nor those of a cluster that runs the tests."""
    own = {"NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "NPROC_PER_NODE"}
    for name in list(os.environ):
        if name in own or name.startswith(("PET_", "SLURM_")):
            monkeypatch.delenv(name)


@pytest.fixture
def nodes(monkeypatch, tmp_path) -> Iterator[Nodes]:
    monkeypatch.setattr(agent_module, "_ACCEPT_AGAIN_S", 0.01)
    with ExitStack() as last:
        yield Nodes(tmp_path, last)
