"""What the tests of `benchmarks/megatron_lm` share."""

import pytest
from fake_checkout import write_checkout


@pytest.fixture
def site(tmp_path_factory):
    """Of two GPUs and a fake checkout, which is both the unmodified and the patched one."""
    from benchmarks.megatron_lm.running.jobs import Site

    checkout = write_checkout(tmp_path_factory.mktemp("checkout"))
    return Site(checkout, checkout, tmp_path_factory.mktemp("s"), cpu=False, num_gpus=2)


@pytest.fixture
def state(tmp_path):
    """Nothing was found so far."""
    from benchmarks.megatron_lm.running.jobs import State

    return State(tmp_path / "out" / "proof.json")
