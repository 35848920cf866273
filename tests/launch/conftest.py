import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

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
def nodes(monkeypatch) -> Iterator[Nodes]:
    """In a folder whose path leaves room for a socket's."""
    monkeypatch.setattr(agent_module, "_ACCEPT_AGAIN_S", 0.01)
    folder = Path(tempfile.mkdtemp(prefix="agent-", dir="/tmp"))
    with ExitStack() as last:
        last.callback(shutil.rmtree, folder, ignore_errors=True)
        yield Nodes(folder, last)
