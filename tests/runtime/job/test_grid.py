"""The reconfigurer prints what EnvPipe prints."""

from __future__ import annotations

import numpy as np

from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.policies.reconfigure import Ended, Step
from envpipe_megatron.runtime.job.reconfigurer import grid

# From the README of EnvPipe (casys-kaist/EnvPipe): its only sample, four stages and GPipe's order
# but for the last stage.
SAMPLE = """
Stage 0 | [F0 1980 0.0] F1 1260 0.0 F2 1260 0.0 F3 1260 0.0 B0 1260 185.8 B1 1260 62.7 B2 1260 61.8 [B3 1980 40.3]
Stage 1 | [F0 1980 23.4] F1 1260 8.4 F2 1260 2.1 F3 1260 1.3 B0 1260 109.1 B1 1260 63.0 B2 1260 62.2 [B3 1980 50.9]
Stage 2 | [F0 1980 41.4] F1 1260 12.8 F2 1260 2.1 F3 1260 1.4 B0 1260 32.8 B1 1260 62.7 B2 1260 62.3 [B3 1980 61.1]
Stage 3 | [F0 1980 59.5] [B0 1980 0.0] [F1 1980 0.6] [B1 1980 0.0] [F2 1980 0.6] [B2 1980 0.0] [F3 1980 0.6] [B3 1980 0.0]
"""  # noqa: E501


def test_grid_has_the_form_of_the_sample():
    lines = SAMPLE.strip().splitlines()
    cells = [line.split("|")[1].replace("[", " [ ").split() for line in lines]
    gpipe, one_f_one_b = builders.gpipe(4, 4).stages, builders.one_f_one_b(4, 4).stages
    schedule = Schedule("sample", 4, 1, (*gpipe[:3], one_f_one_b[3]))
    frequency, wait_s, path = [], [], []
    for stage, row in enumerate(cells):
        tokens = [token.strip("[]") for token in row if token != "["]
        for position in range(8):
            label, mhz, wait_ms = tokens[3 * position : 3 * position + 3]
            assert schedule.stages[stage][position].label() == label
            frequency.append(int(mhz))
            wait_s.append(float(wait_ms) / 1e3)
        on_path = [p for p in range(8) if f"[{tokens[3 * p]} " in lines[stage]]
        path += [stage * 8 + p for p in on_path]
    text = grid(schedule, frequency, np.array(wait_s), Step(path[::-1], {}, Ended.ENVELOPE))
    assert text.splitlines() == lines


def test_cells_hold_unit_frequency_and_wait():
    schedule = builders.one_f_one_b(2, 2)
    waits_s = np.array([0, 0.1, 0, 0, 0, 0.0123, 0.0001, 0.00001])
    text = grid(schedule, [1410] * 4 + [990] * 4, waits_s, Step([0, 5], {}, None))
    one, other = text.splitlines()
    assert one.startswith("Stage 0 | [F0 1410 0.0] ")
    assert "[B0 990 12.3]" in other
    assert " F1 1410 100.0 " in one
