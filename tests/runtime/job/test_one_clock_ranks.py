"""Jobs with one clock, in processes of their own."""

from __future__ import annotations

from dataclasses import replace

import one_clock_ranks
import pytest

from envpipe_megatron.gpu.presets import load_preset, override_for, sweep_range
from envpipe_megatron.tuning.one_clock import ONE_CLOCK_STEP


def test_a_dry_run_searches_and_ends_at_the_highest_clock(three_ranks, tmp_path):
    told = three_ranks.run(one_clock_ranks.train_unseen, tmp_path, 5.0, True)
    for rank in told:
        assert rank == told[0]
        assert set().union(*rank["requested"].values()) == {None}, "no clock was changed"
        assert rank["notes"][0].startswith("One clock for the whole job: 1410 MHz; a dry run")
        assert len(rank["notes"]) > 3


def test_units_that_nobody_sees_get_one_clock_on_all_stages(three_ranks, tmp_path):
    """Three stages; an iteration is one unit on each, and what they send each other is not known.

    Stages wait for the slowest at the iteration's end, so lower clocks save there alone.
    """
    told = three_ranks.run(one_clock_ranks.train_unseen, tmp_path, 5.0, False)
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


def test_a_gpu_with_a_single_clock_keeps_it(three_ranks, tmp_path):
    for rank in three_ranks.run(one_clock_ranks.train_unseen, tmp_path, 0.0, False, (1410,)):
        assert rank["requested"] == {"warm-up": {1410}, "profile": set(), "steady": {1410}}
        assert "has a single clock" in rank["notes"][0]


def test_a_clock_that_is_not_controlled_any_more_ends_the_search(three_ranks, tmp_path):
    for rank in three_ranks.run(one_clock_ranks.train_unseen, tmp_path, 5.0, False, (), 2):
        assert "Stage 2: Clock control ended while measuring: the driver" in rank["notes"][0]
        assert rank["requested"]["profile"] <= {1410, None}


def test_a_clock_that_is_right_is_looked_at_again_and_kept(three_ranks, tmp_path):
    told = three_ranks.run(one_clock_ranks.train_on, tmp_path, 0.7, 0.7)
    for steps, _ in told:
        found = next(at for at, (phase, _) in enumerate(steps) if phase == "steady")
        after = steps[found:]
        assert {clock for phase, clock in after if phase == "baseline"} == {1410}
        (kept,) = {clock for phase, clock in after if phase == "steady"}
        assert kept < 1410
        assert {phase for phase, _ in after} == {"baseline", "steady"}
    assert not [text for text in told[0][1] if "not right" in text]


def test_a_clock_that_has_become_too_slow_is_looked_for_anew(three_ranks, tmp_path):
    """Steps that waited for memory compute: a clock that cost 5 % costs more."""
    gpu = load_preset("a100-sxm")
    told = three_ranks.run(one_clock_ranks.train_on, tmp_path, 0.9, 0.3)
    for steps, _ in told:
        kept = [clock for phase, clock in steps if phase == "steady"]
        for clock, waits in ((kept[0], 0.9), (kept[-1], 0.3)):
            model = replace(gpu, forward=replace(gpu.forward, memory_fraction=waits))
            assert 1.04 < model.unit_time_s("forward", clock, 1.0) <= 1.05
    (why,) = [text for text in told[0][1] if "not right any more" in text]
    assert f"{kept[0]} MHz" in why
