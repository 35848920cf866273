"""The fault table: whatever ends, and whenever, no clock stays locked and no lease is left.

`benchmarks/gpu/guard_faults.py` plays the same rounds more often and records a table.
"""

import os

import pytest
from guard_rounds import FAULTS, Node, play

ROUNDS = 2


@pytest.fixture(scope="module")
def node(fake_nvml_library, tmp_path_factory):
    made = Node(tmp_path_factory.mktemp("guarded"), fake_nvml_library)
    with made.in_use():
        yield made


@pytest.mark.parametrize("fault", FAULTS)
def test_no_clock_stays_locked_after(node, fault):
    seed = int.from_bytes(os.urandom(4), "big")
    for number in range(seed % 4, seed % 4 + ROUNDS):  # back ends take turns
        print(f"seed {seed}, round {number}")
        play(node, fault, number, seed)
