"""How messages show values."""

from pathlib import Path

import numpy as np
import pytest

from envpipe_megatron.core.kinds import Kind
from envpipe_megatron.errors import EnvPipeError


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("quick", "'quick'"),
        ("two\nlines\x1b[2J", r"'two\nlines\x1b[2J'"),
        ("it's", "'it's'"),
        (b"torn \xff", "'torn \ufffd'"),
        (Path("a/p.csv"), "'a/p.csv'"),
        (Kind.FORWARD, "'forward'"),
        (["p2.csv"], "p2.csv"),
        ([Path("p2.csv"), Path("my p.csv")], "p2.csv, 'my p.csv'"),
        ([], "nothing"),
        ([[1, 2], [3]], "(1, 2), (3)"),
        ({"order": Kind.FORWARD, "steps": 3}, "order: forward, steps: 3"),
        (198 * "x", f"'{198 * 'x'}'"),
        (199 * "x", f"'{196 * 'x'}..."),
        (None, "nothing"),
        (np.float64(0.25), "0.25"),
        ((np.int64(3), np.int64(4)), "3, 4"),
        (list(range(1000)), f"{', '.join(map(str, range(1000)))[:197]}..."),
    ],
)
def test_values_are_shown_as_plain_text(value, shown):
    assert str(EnvPipeError("Wrong", value=value)) == f"Wrong (got {shown})"


def test_the_remedy_follows_the_value():
    assert str(EnvPipeError("Wrong", value=3, remedy="Give 4.")) == "Wrong (got 3). Give 4."
    assert str(EnvPipeError("Wrong")) == "Wrong"
