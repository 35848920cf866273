"""Rows of a layer profile that contradict one another are named."""

import numpy as np
import pytest

from envpipe_megatron.search.layer_profile import (
    Block,
    BytesPerParameter,
    LayerProfile,
    Links,
    Measure,
    Sizes,
    implausible_rows,
)


def profile(times_ms: dict[Sizes, tuple[float, float]], gpu: str | None = "a GPU") -> LayerProfile:
    """Of a loss with these times, forward and backward."""
    measures = {
        sizes: {"loss": Measure(*(np.array([1e-3 * time_ms, 9e9]) for time_ms in both_ms))}
        for sizes, both_ms in times_ms.items()
    }
    clocks = np.array([1980, 1500])
    blocks = (Block(("loss",)),)
    return LayerProfile(blocks, clocks, measures, BytesPerParameter(), Links(), gpu=gpu)


#: As they were measured on four H100s; the last but one while the host was held up.
LOSS = {
    Sizes(1, 1): (14.003, 16.531),
    Sizes(1, 2): (28.586, 30.310),
    Sizes(2, 1): (7.368, 8.795),
    Sizes(2, 2): (14.630, 16.035),
    Sizes(4, 2): (18.754, 8.242),
    Sizes(4, 1): (4.877, 4.766),
}


def test_the_row_that_was_held_up_is_named() -> None:
    told = ["loss at tensor parallel 4, microbatch 2 takes 2.8 times as long as at microbatch 1"]
    assert implausible_rows(profile(LOSS)) == told
    assert implausible_rows(profile({**LOSS, Sizes(4, 2): (7.4, 8.242)})) == []


def test_a_smaller_microbatch_that_takes_longer_is_named() -> None:
    told = ["loss at microbatch 1 takes 1.2 times as long as at microbatch 2"]
    assert implausible_rows(profile({Sizes(1, 2): (1.4, 2.0), Sizes(1, 1): (2.0, 2.0)})) == told


@pytest.mark.parametrize(
    "times_ms",
    [
        # The host bounds both: as long for two samples, its waits in another direction.
        {Sizes(4, 1): (3.920, 2.887), Sizes(4, 2): (2.397, 4.233)},
        {Sizes(1, 1): (1.0, 2.0), Sizes(1, 4): (4.0, 8.0)},
        # Other sizes than the microbatch's are not compared.
        {Sizes(1, 1): (1.0, 2.0), Sizes(2, 1): (9.0, 9.0), Sizes(1, 2, 2): (0.1, 0.1)},
    ],
)
def test_other_rows_are_left_alone(times_ms: dict[Sizes, tuple[float, float]]) -> None:
    assert implausible_rows(profile(times_ms)) == []


def test_microbatches_are_compared_where_all_other_sizes_are_alike() -> None:
    alone = {Sizes(1, 1): (8.0, 8.0), Sizes(1, 2): (15.0, 15.0)}
    slow = {Sizes(1, 1, 2, 2): (1.0, 2.0), **alone, Sizes(1, 2, 2, 2): (9.0, 2.0)}
    (told,) = implausible_rows(profile(slow))
    assert told.startswith("loss at context parallel 2, expert parallel 2, microbatch 2 takes 3.7")


def test_times_of_a_cpu_are_not_judged() -> None:
    assert implausible_rows(profile(LOSS, gpu=None)) == []
