"""Jobs with one clock, in processes of their own."""

from __future__ import annotations

import one_clock_ranks
import pytest

from envpipe_megatron.gpu.presets import load_preset, override_for, sweep_range
from envpipe_megatron.tuning.one_clock import ONE_CLOCK_STEP


def test_units_that_nobody_sees_get_one_clock_on_all_stages(three_ranks, tmp_path):
    """Three stages; an iteration is one unit on each, and what they send each other is not known.

    Stages wait for the slowest at the iteration's end, so lower clocks save there alone.
    """
    told = three_ranks.run(one_clock_ranks.train_unseen, tmp_path, 5.0)
    gpu = load_preset("a100-sxm")
    clocks = sweep_range(gpu.supported_frequencies_mhz, override_for(gpu.gpu), ONE_CLOCK_STEP)
    lowest = min(c for c in clocks if gpu.unit_time_s("forward", c, 1.0) <= 1.05)
    for rank in told:
        assert rank["notes"] == told[0]["notes"]
        assert (rank["requested"]["warm-up"], rank["requested"]["steady"]) == ({1410}, {lowest})
        assert {1410, lowest} < rank["requested"]["profile"]
        assert rank["executed"] == ["F0"]
        # But for the timeline, nobody looks at units of the steady phase.
        assert rank["timed"] == [True] * 10 + [False] * 2
        assert rank["iterations"][0] == pytest.approx(1.2)
        assert rank["iterations"][-1] == pytest.approx(gpu.unit_time_s("forward", lowest, 1.2))
