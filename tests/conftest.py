"""Stands here so that tests of every folder can import what they share."""

import gc
import os
import signal
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
from fake_nvml.fixtures import fake_nvml, fake_nvml_library, fake_nvml_node, own_node
from rank_pool import RankPool

__all__ = ["fake_nvml", "fake_nvml_library", "fake_nvml_node", "own_node"]

# Megatron's decorators would import torch's compiler, which takes each rank three seconds.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

# Workers share the cores: threads of numpy and torch would only wait for each other, and spin
# meanwhile. Neither is imported yet.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# What tests serve they ask for on this machine, by no proxy that its user may have.
os.environ["no_proxy"] = f"{os.environ.get('no_proxy', '')},localhost,127.0.0.1,127.0.0.2"

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


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Four ranks that have megatron-core; the same for all tests of a worker."""
    if find_spec("megatron") is None or find_spec("megatron.core") is None:
        pytest.skip("megatron-core is not installed")
    preload = (
        "torch.distributed.pipelining",
        "megatron.core.models.gpt.gpt_layer_specs",
        "megatron.core.optimizer",
        "envpipe_megatron.integrations.megatron.core",
        "envpipe_megatron.integrations.device",
    )
    with RankPool(4, preload=preload) as ranks:
        yield ranks


@pytest.fixture
def signals_at_default() -> Iterator[None]:
    """SIGINT and SIGHUP as in a terminal, for this process and its children.

    `nohup` and a shell's `&` start a suite that ignores them, which children inherit. Only for
    tests that send one: the others, and so the suite, go on when the terminal closes.
    """
    defaults = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in defaults.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def sigchld_ignored() -> Iterator[None]:
    """SIGCHLD as a rank's script or a Perl program may leave it: no child's status is known."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGCHLD, before)
