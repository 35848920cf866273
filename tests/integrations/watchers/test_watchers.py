"""Who compares GPUs finds a slowed stage sick without EnvPipe's pauses, and none with them.

Megatron's and NVRx's own functions judge, by what emulated GPUs take at their clocks.
"""

import ast
import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import watcher_ranks
from checkouts import TAGS, checkout_of
from presets import preset_profile
from rank_pool import RankPool
from watcher_ranks import MICROBATCHES, STAGES, TIMES_S

from envpipe_megatron.core.conditions import Conditions
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.plan import Plan
from envpipe_megatron.integrations.hooking import BETWEEN_STEPS, between_steps
from envpipe_megatron.integrations.levels import Level, decide, limits_of_arguments
from envpipe_megatron.integrations.megatron.limits import LIMITS

SLOWED, SLOW_MHZ = 1, 810
#: A folder that NVRx was installed to, beside what is installed here.
NVRX = os.environ.get("ENVPIPE_NVRX", "")
HAS_NVRX = bool(NVRX or find_spec("nvidia_resiliency_ext"))
NEWEST = "core_v0.19.0"


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    if not (HAS_NVRX or checkout_of(NEWEST)):
        pytest.skip("neither Megatron-LM nor nvidia-resiliency-ext is here")
    with RankPool(STAGES) as pool:
        yield pool


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with a plan that slows one stage."""
    profile = preset_profile("a100-sxm", STAGES, TIMES_S, (SLOW_MHZ,))
    order = builders.one_f_one_b(STAGES, MICROBATCHES)
    clocks = np.full((STAGES, order.units_per_stage), 1410)
    clocks[SLOWED] = SLOW_MHZ
    profile.write(tmp_path / "profile.csv")
    Plan("custom", order, clocks, profile, Conditions((0.0,) * STAGES)).write(
        tmp_path / "plan.json"
    )
    return tmp_path


def newest() -> Path:
    return checkout_of(NEWEST) or pytest.skip(f"no checkout of Megatron-LM {NEWEST}")


def test_megatrons_check_of_gpus_meets_them_at_full_clock(ranks: RankPool, root: Path) -> None:
    (before, after, units), (*_, slowed), _ = ranks.run(watcher_ranks.sniff, root, newest())
    outliers = [line for line in before if "OUTLIER rank" in line]
    assert len(outliers) == 2
    assert all(f"OUTLIER rank {SLOWED}" in line for line in outliers)
    assert any("OUTLIERS DETECTED" in line for line in before)
    assert any("ALL RANKS OK" in line for line in after)
    assert sum("GEMM throughput" in line for line in after) == 2
    assert slowed["F"][-1] > 1.3 * units["F"][-1]  # training goes on by its plan


@pytest.mark.parametrize("sick", [None, 2])
def test_nvrx_has_thresholds_that_slowed_gpus_meet(
    ranks: RankPool, root: Path, sick: int | None
) -> None:
    if not HAS_NVRX:
        pytest.skip("nvidia-resiliency-ext is not installed (ENVPIPE_NVRX names its folder)")
    (before, after), *_ = ranks.run(watcher_ranks.score, root, NVRX, sick)
    ill = set() if sick is None else {sick}
    assert before == [{SLOWED} | ill, {SLOWED}]
    assert after == [ill, set()]


def test_megatrons_detector_of_stragglers_has_one_clock_to_compare(
    ranks: RankPool, root: Path
) -> None:
    asked = {"pipeline_model_parallel_size": STAGES, "log_straggler": True}
    level = decide(limits_of_arguments(SimpleNamespace(**asked), LIMITS)).level  # type: ignore[arg-type]
    before, *_ = ranks.run(watcher_ranks.report_stragglers, root, newest(), Level.ORDER)
    assert before["MnEtpt"] < 0.75 * before["MxEtpt"]
    assert before["MnClk"] < before["MxClk"]
    after, *_ = ranks.run(watcher_ranks.report_stragglers, root, newest(), level)
    assert level is Level.UNIFORM
    assert after["MnEtpt"] == pytest.approx(after["MxEtpt"], rel=0.01)
    assert after["MnClk"] == after["MxClk"] < before["MxClk"]


@pytest.mark.parametrize("tag", TAGS)
def test_megatron_has_what_the_table_names(tag: str) -> None:
    checkout = checkout_of(tag) or pytest.skip(f"no checkout of Megatron-LM {tag}")
    tree = ast.parse((checkout / "megatron" / "training" / "training.py").read_text())
    there = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.alias)}
    wanted = {row.function for row in BETWEEN_STEPS["Megatron-LM"]}
    new = set() if tag in ("core_v0.16.1", "core_v0.17.1") else {"_run_gpu_sniff_test"}
    assert wanted & there == wanted - {"_run_gpu_sniff_test"} | new


def test_a_row_is_paused_before_while_it_lasts_and_only_if_it_does_something() -> None:
    told: list[str] = []
    job: Any = Mock(pause=lambda: told.append("pause"))
    checkpointer = SimpleNamespace(
        save=lambda step, last=False: told.append(f"save {step}"),
        _should_save=lambda step, last=False: step == 2 or last,
    )
    trainer = SimpleNamespace(checkpointer=checkpointer)
    with between_steps("torchtitan", job, trainer):
        for step in (1, 2):
            checkpointer.save(step)
        checkpointer.save(3, last=True)
    checkpointer.save(2)
    assert told == ["save 1", "pause", "save 2", "pause", "save 3", "save 2"]


def test_thresholds_are_lowered_by_their_names(monkeypatch):
    """So that a version with other arguments beside them, or with none that is set, goes on."""

    class Report:
        def identify_stragglers(self, gpu_rel_threshold=0.75, *, gpu_indiv_threshold, **others):
            return gpu_rel_threshold, gpu_indiv_threshold, others

    module = SimpleNamespace(Report=Report)
    monkeypatch.setitem(sys.modules, "nvidia_resiliency_ext.straggler.reporting", module)
    job: Any = Mock()
    job.session.slowest_share.return_value = 0.5
    with between_steps("Megatron-LM", job):
        assert Report().identify_stragglers(gpu_indiv_threshold=None, top=3) == (
            *(0.375, None),
            {"top": 3},
        )
    assert Report().identify_stragglers(0.7, gpu_indiv_threshold=0.7) == (0.7, 0.7, {})
