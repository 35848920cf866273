"""What megatron-core's tensors take in other orders is as predicted from 1F1B."""

from dataclasses import replace

import pytest
from jobs import Job
from live_memory import MESSAGE_BYTES, peaks_of_orders, train_and_watch
from on_request import on_request
from rank_pool import RankPool
from test_bit_equality import by_plan

from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.orders.builders import half_split, split_in_place, zero_bubble
from envpipe_megatron.runtime.memory.stage import peaks_bytes

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


@pytest.mark.parametrize(
    "how",
    [
        {"recompute": True},
        pytest.param({"tied": True}, marks=on_request("PIPELINE")),
        pytest.param({"chunks": 2, "recompute": True}, marks=on_request("PIPELINE")),
    ],
)
def test_peaks_of_split_orders_are_as_predicted(pool: RankPool, tmp_path, how):
    """What weight gradients wait for is held: of recomputed layers more than of those in flight."""
    job = Job(2, microbatches=8, layers=4, deallocate=False, **how)
    own = job.own_order
    orders = [split_in_place(own, 8)]
    orders += [zero_bubble(2, 8, most) for most in (2, 3) if job.chunks == 1]
    told = pool.run(peaks_of_orders, job, half_split(own), orders, tmp_path)[::2]  # of one replica
    for stage in told[0][0]:
        assert (stage.pending_bytes[0] > 1.5 * stage.chunk_bytes[0]) is job.recompute
    for number, order in enumerate(orders):
        predicted = peaks_bytes(told[0][0], order, own)
        for each, (_, peaks) in zip(predicted, told, strict=True):
            assert 0.999 * peaks[number] <= each <= 1.015 * peaks[number], (order.name, predicted)
