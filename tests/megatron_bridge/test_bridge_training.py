"""Megatron-Bridge's own `pretrain` on the CPU computes the same with EnvPipe's callback as without.

A run takes half a minute. The interpreter needs what Bridge imports: docs/start/megatron_bridge.md.
"""

import importlib.util
import itertools
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from checkouts import BRIDGE_VARIABLE
from energy_lines import json_lines
from presets import preset_profile
from torchrun_ranks import run_ranks

from envpipe_megatron.core.conditions import Conditions
from envpipe_megatron.core.kinds import Kind
from envpipe_megatron.core.orders.builders import envpipe, interleaved, one_f_one_b
from envpipe_megatron.core.plan import Plan
from envpipe_megatron.formats.timeline import parse_order

pytestmark = pytest.mark.xdist_group("megatron_bridge")

HERE = Path(__file__).parent
RUN = HERE / "bridge_run.py"
NEEDED = (
    "transformers",
    "omegaconf",
    "hydra",
    "modelopt",
    "nvidia_resiliency_ext",
    "datasets",
    "diffusers",
    "megatron.energon",
)
PRESET, FORWARD_S, CLOCKS_MHZ = "a100-sxm", 0.01, (1410, 1290)
STAGES, MICROBATCHES, WARMUP, ITERATIONS = 2, 4, 3, 12
#: As many samples as there are microbatches in a step of one pipeline.
JOB = {
    "train.train_iters": ITERATIONS,
    "train.global_batch_size": MICROBATCHES,
    "validation.eval_interval": 5,
}
PP2 = {**JOB, "model.pipeline_model_parallel_size": STAGES}
VP2 = {**PP2, "model.virtual_pipeline_model_parallel_size": 2}
DP2 = JOB


@dataclass(frozen=True)
class Run:
    """Results of a run, to the last bit, and what EnvPipe said."""

    #: Losses and gradient norm of each step, losses of evaluations, weights, of each rank.
    computed: tuple[tuple[str, ...], ...]
    said: str
    folder: Path
    imported: bool


@pytest.fixture(scope="session")
def train(tmp_path_factory):
    """Trains on two ranks; skips where Megatron-Bridge cannot be run. Equal jobs run once."""
    named = os.environ.get(BRIDGE_VARIABLE)
    if not named:
        pytest.skip(f"no checkout of Megatron-Bridge ({BRIDGE_VARIABLE})")
    checkout = Path(named).expanduser().resolve()
    megatron_lm = checkout / "3rdparty" / "Megatron-LM"
    if not (megatron_lm / "megatron" / "core").is_dir():
        pytest.skip(f"no checkout of Megatron-LM in {megatron_lm}")
    if missing := [name for name in NEEDED if not _is_there(name)]:
        pytest.skip(f"Megatron-Bridge imports what is not installed: {', '.join(missing)}")
    imports = [HERE.parent / "megatron_lm", checkout / "src", megatron_lm]
    runs: dict[str, Run] = {}

    def run(job, **options):
        settings = {**job, **({"envpipe": options} if options else {})}
        text = json.dumps(settings)
        if text in runs:
            return runs[text]
        folder = tmp_path_factory.mktemp("run")
        (folder / "settings.json").write_text(text)
        ended = run_ranks(
            [str(RUN), str(folder / "settings.json")],
            RUN,
            folder / "ranks",
            nproc=2,
            env={
                "PYTHONPATH": os.pathsep.join(
                    [*map(str, imports), *filter(None, [os.environ.get("PYTHONPATH")])]
                ),
                "ENVPIPE_EMULATED_GPU": PRESET,
                "ENVPIPE_EMULATED_FORWARD_S": str(FORWARD_S),
                "ENVPIPE_EMULATED_ROOT": str(folder / "gpus"),
            },
            timeout_s=300,
        ).require_success()
        runs[text] = Run(
            tuple(map(_computed, ended.outputs)),
            "\n".join(re.findall(r"^\[envpipe\] .*", "\n".join(ended.outputs), re.M)),
            folder / "ranks",
            _imported(ended),
        )
        return runs[text]

    return run


def _is_there(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:
        return False


def _computed(output):
    return tuple(re.findall(r"^(?:bridge_run: .*|cpu_run: weights .*)", output, re.M))


def _imported(ended):
    return any("cpu_run: envpipe imported" in output for output in ended.outputs)


def _alternating(schedule, folder):
    """Options of a plan of this order, by which each unit has another clock than the one before."""
    times_s = {Kind.FORWARD: FORWARD_S, Kind.BACKWARD: 2 * FORWARD_S}
    profile = preset_profile(PRESET, STAGES, times_s, CLOCKS_MHZ[1:])
    clocks = itertools.cycle(CLOCKS_MHZ)
    frequency_mhz = np.array([[next(clocks) for _ in order] for order in schedule.stages])
    plan = Plan(
        "custom",
        schedule,
        frequency_mhz,
        profile.for_chunks(schedule.num_chunks),
        Conditions((80.0,) * STAGES),
    )
    profile.write(folder / "profile.csv")
    plan.write(folder / "plan.json")
    return {"profile": str(folder / "profile.csv"), "plan": str(folder / "plan.json")}


def test_without_the_callback_nothing_of_envpipe_is_imported(train):
    stock = train(PP2)
    assert not stock.imported
    # There is something to compare: steps, two evaluations in training and one after, operations,
    # weights.
    assert [len(rank) for rank in stock.computed] == [ITERATIONS + 3 + 2] * 2


@pytest.mark.parametrize(
    ("job", "level", "schedule"),
    [
        (PP2, "units", one_f_one_b(STAGES, MICROBATCHES)),
        (VP2, "units", interleaved(STAGES, MICROBATCHES, 2)),
        (PP2, "order", envpipe(STAGES, MICROBATCHES, [1, 0])),
    ],
    ids=["units", "units of two chunks", "order"],
)
def test_clocks_change_at_each_unit_and_results_do_not(job, level, schedule, train, tmp_path):
    run = train(
        job, level=level, baseline_steps=WARMUP, output="output", **_alternating(schedule, tmp_path)
    )
    assert run.computed == train(job).computed
    assert f"level {level};" in run.said
    assert "energy of 2 GPUs in training" in run.said
    lines = json_lines(run.folder / "output" / "timeline.jsonl")
    steady = [step for step in lines if step["phase"] == "steady"]
    assert {step["rank"] for step in steady} == {0, 1}
    for step in steady:
        assert parse_order(step["units"]) == schedule.stages[step["stage"]]
        assert all(own != other for own, other in itertools.pairwise(step["frequency_mhz"]))
    summary = json.loads((run.folder / "output" / "summary.json").read_text())
    # Each request reached the emulated GPU.
    units = len(schedule.stages[0]) * len(steady) // STAGES
    assert all(rank["clocks"]["changes"] > 0.9 * units for rank in summary["ranks"])


def test_observing_changes_nothing(train):
    run = train(PP2, level="observe", baseline_steps=WARMUP)
    assert run.computed == train(PP2).computed
    assert "level observe;" in run.said
    assert "energy of 2 GPUs in training" in run.said


def test_without_a_pipeline_the_job_has_one_clock(train):
    run = train(DP2, baseline_steps=WARMUP, max_slowdown=3)
    assert run.computed == train(DP2).computed
    assert "level uniform; against units: no pipeline" in run.said


def test_a_job_that_leaves_early_has_its_bill(train, tmp_path):
    leaving = {**PP2, "train.exit_interval": 6}
    saving = {"checkpoint.save": str(tmp_path / "saved"), "checkpoint.save_interval": 4}
    run = train({**leaving, **saving}, baseline_steps=WARMUP, output="output")
    assert run.computed == train(leaving).computed
    assert "energy of 2 GPUs in training" in run.said
