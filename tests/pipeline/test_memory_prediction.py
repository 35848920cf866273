"""What megatron-core's tensors take in other orders is as predicted from 1F1B."""

from __future__ import annotations

from dataclasses import replace

import pytest
from jobs import Job
from live_memory import MESSAGE_BYTES, train_and_watch
from on_request import on_request
from rank_pool import RankPool
from test_bit_equality import by_plan

from envpipe_megatron.core.orders import builders

pytestmark = pytest.mark.xdist_group("pipeline")


@pytest.mark.parametrize(
    ("stages", "extra", "options"),
    [
        pytest.param(
            4,
            (2, 2, 1, 0),
            {"tied": True, "reducer": ("overlap_grad_reduce",)},
            marks=on_request("PIPELINE"),
        ),
        (2, (4, 1), {"layers": 4, "recompute": True, "deallocate": False}),
    ],
)
def test_peaks_are_as_predicted(pool: RankPool, tmp_path, stages, extra, options):
    """But for messages under way, which come and go; they are large in so small a model."""
    # The optimizer's state is there after the first iteration, and the third is measured.
    # Gradients are made anew in each iteration: the most must be in flight behind a backward too.
    job = Job(stages, microbatches=8, steps=7, **options)
    order = builders.envpipe(stages, job.microbatches, extra)
    how = replace(by_plan(tmp_path, order), warmup_iterations=3)
    told = pool.run(train_and_watch, job, how, tmp_path)
    for memory, more in zip(told[0], extra, strict=True):
        assert memory.in_flight == memory.baseline_in_flight + more
        under_way = (memory.in_flight + 2) * MESSAGE_BYTES
        predicted = memory.predicted_peak_bytes
        assert memory.measured_peak_bytes == pytest.approx(predicted, abs=under_way)
        if more:  # that is not for want of a difference
            assert memory.measured_peak_bytes > memory.baseline_peak_bytes + 0.7 * more * (
                memory.activation_bytes - MESSAGE_BYTES
            )
