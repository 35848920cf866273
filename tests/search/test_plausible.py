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


@pytest.mark.parametrize(
    ("times_ms", "gpu", "told"),
    [
        (
            LOSS,
            "a GPU",
            "loss at tensor parallel 4, microbatch 2 takes 2.8 times as long as at microbatch 1",
        ),
        ({**LOSS, Sizes(4, 2): (7.4, 8.242)}, "a GPU", ""),
        (LOSS, None, ""),  # times of a CPU vary more
        # A smaller microbatch that takes longer than a larger one.
        (
            {Sizes(1, 2): (1.4, 2.0), Sizes(1, 1): (2.0, 2.0)},
            "a GPU",
            "loss at microbatch 1 takes 1.2 times as long as at microbatch 2",
        ),
        # The host bounds both: as long for two samples, its waits in another direction.
        ({Sizes(4, 1): (3.920, 2.887), Sizes(4, 2): (2.397, 4.233)}, "a GPU", ""),
        ({Sizes(1, 1): (1.0, 2.0), Sizes(1, 4): (4.0, 8.0)}, "a GPU", ""),
        # Other sizes than the microbatch's are not compared.
        (
            {Sizes(1, 1): (1.0, 2.0), Sizes(2, 1): (9.0, 9.0), Sizes(1, 2, 2): (0.1, 0.1)},
            "a GPU",
            "",
        ),
    ],
)
def test_rows_that_contradict_others_are_named(
    times_ms: dict[Sizes, tuple[float, float]], gpu: str | None, told: str
) -> None:
    assert implausible_rows(profile(times_ms, gpu)) == [told][: bool(told)]
