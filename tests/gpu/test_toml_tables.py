"""Dataclasses from TOML tables."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from envpipe_megatron.gpu.base import GpuError
from envpipe_megatron.gpu.toml_tables import build, parse_toml


@dataclass
class Part:
    size_w: float = 1.0


@dataclass
class Whole:
    name: str
    count: int
    on: bool
    time_s: float
    part: Part
    path: Path | None = None
    words: tuple[str, ...] = ()
    range_mhz: tuple[int, int] | None = None
    other: Part | None = None


WHOLE = """
format = "test/1"
count = 3
on = true
time_s = 2
path = "/somewhere"
words = ["", "b"]
range_mhz = [1, 2]
[part]
[other]
size_w = 0
"""


def read(text, **given):
    return build(Whole, parse_toml(text.encode(), "The file", "test/1"), "The file: ", **given)


def test_every_type():
    assert read(WHOLE, name="given") == Whole(
        "given", 3, True, 2.0, Part(), Path("/somewhere"), ("", "b"), (1, 2), Part(0.0)
    )
    assert type(read(WHOLE, name="given").time_s) is float
    few = 'format = "test/1"\nname = "x"\ncount = 1\non = false\ntime_s = 0.5\n[part]'
    assert read(few) == Whole("x", 1, False, 0.5, Part())


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("test/1", "test/2", "field format must be 'test/1' (got 'test/2')"),
        ("count = 3", "count = ", "The file is not TOML"),
        ("count = 3", "", "The file: count is missing"),
        ("count = 3", "count = 3\ncounts = 4", "counts is not a known field. Known are count, on"),
        ("size_w", "size", "The file: other.size is not a known field. Known are size_w."),
        ("[part]", "[[part]]", "The file: part must be a table"),
        *[("count = 3", f"count = {bad}", "count must be a whole") for bad in ("0", "true", "1.5")],
        ("on = true", "on = 1", "on must be true or false"),
        *[
            ("time_s = 2", f"time_s = {bad}", "time_s must be a finite number")
            for bad in ("-1", "nan", "inf", "true", "'2'")
        ],
        ("/somewhere", "elsewhere", "path must be an absolute path (got 'elsewhere')"),
        ('"/somewhere"', "3", "path must be an absolute path"),
        ('words = ["", "b"]', "words = [3]", "words must be a list of texts"),
        ('words = ["", "b"]', "words = 'b'", "words must be a list of texts"),
        *[
            ("[1, 2]", bad, "range_mhz must be a list of two whole numbers")
            for bad in ("1", "[1]", "[1, 2, 3]", "[0, 1]", "[true, 2]", "[1, 2.0]")
        ],
    ],
)
def test_what_is_wrong_is_named(old, new, said):
    with pytest.raises(GpuError) as caught:
        read(WHOLE.replace(old, new), name="given")
    assert said in str(caught.value)


@pytest.mark.parametrize("name", ['""', "3"])
def test_a_text_is_not_empty(name):
    with pytest.raises(GpuError, match="name must be a text"):
        read(WHOLE.replace("count", f"name = {name}\ncount"))
