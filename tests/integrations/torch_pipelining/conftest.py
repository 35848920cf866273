"""Ranks of the tests of torch's schedules, and what they train with EnvPipe and without."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attached_ranks
import pytest
from attached_ranks import Case
from memory_folder import memory_folder
from presets import write_changed_preset
from rank_pool import RankPool

Runs = tuple[list[Any], list[Any]]
FEW_CLOCKS = {"min_frequency_mhz": 810, "frequency_step_mhz": 200}


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[RankPool]:
    """With two chunks of each there is a first stage, a last one, and one between."""
    with RankPool(2) as pool:
        yield pool


@pytest.fixture
def trained(pool: RankPool, tmp_path: Path) -> Callable[..., Runs]:
    """Return what a case comes to by torch only, and with EnvPipe attached."""

    def run(case: Case, preset: str | None = None, ranks: RankPool = pool) -> Runs:
        few = write_changed_preset(tmp_path / "few.toml", FEW_CLOCKS)
        with memory_folder() as folder:
            ours = ranks.run(attached_ranks.train, case, folder, preset or str(few))
        alone = ranks.run(attached_ranks.train, case, None)
        for own, with_envpipe in zip(alone, ours, strict=True):
            assert own["weights"] == with_envpipe["weights"]
            assert own["losses"] == with_envpipe["losses"]
        usual = (case.microbatches,)
        expected = sum(case.others.get(step, usual)[0] for step in range(case.steps))
        assert sum(len(own["losses"]) for own in alone) >= expected
        return alone, ours

    return run
