"""The fault table: whatever ends, and whenever, no clock stays locked and no lease is left.

`benchmarks/gpu/guard_faults.py` plays the same rounds more often and records a table.
"""

import os

import pytest
from guard_rounds import FAULTS, Node, play


@pytest.fixture(scope="module")
def node(fake_nvml_library, tmp_path_factory):
    made = Node(tmp_path_factory.mktemp("guarded"), fake_nvml_library)
    with made.in_use():
        yield made


@pytest.mark.parametrize("fault", FAULTS)
def test_no_clock_stays_locked_after(node, fault):
    seed = int.from_bytes(os.urandom(4), "big")
    print(f"seed {seed}")
    play(node, fault, seed % 4, seed)  # on a back end by chance
