"""Megatron-DeepSpeed's checkouts, beside each other: what counts as equal."""

import pytest

from benchmarks.megatron_deepspeed.compare_checkouts import compared


@pytest.mark.parametrize(
    ("found", "reference", "word"),
    [
        ([["1", "2"], ["1", "2"]], ["1", "2"], "equal"),
        ([["1", "2"], ["1", "3"]], ["1", "2"], "DIFFER"),
        ([["1"]], ["1", "2"], "DIFFER"),
        ([[]], [], "nothing to compare with"),
    ],
)
def test_runs_are_equal_to_a_reference_that_printed_something(found, reference, word):
    assert compared(found, reference) == word
