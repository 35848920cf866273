"""torchtitan's own debug model in a pipeline of four, on the CPU, with EnvPipe and without.

Needs a checkout, named by ENVPIPE_TORCHTITAN, and its requirements; a run takes a minute, the whole
loop ten (ENVPIPE_TORCHTITAN_FULL=1).
"""

import importlib.util
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from on_request import on_request
from torchrun_ranks import Ended, run_ranks

from envpipe_megatron.core.orders import builders
from envpipe_megatron.policies.frequencies import envelope
from unmeasured import another_each_unit, stepped_order, write_unmeasured_plan

pytestmark = pytest.mark.xdist_group("torchtitan")

RUN = Path(__file__).with_name("titan_run.py")
VARIABLE = "ENVPIPE_TORCHTITAN"
NEEDED = ("torchdata", "datasets", "tensorboard", "tyro", "triton", "einops", "PIL")
STAGES, MICROBATCHES = 4, 8
#: What a forward takes at full clock: as long as all ranks need for theirs on two busy cores.
FORWARD_S = 0.12

Train = Callable[..., Ended]


@pytest.fixture(scope="session")
def train(tmp_path_factory):
    """Trains on four ranks, with EnvPipe where it has options; skips where torchtitan is not."""
    named = os.environ.get(VARIABLE)
    if not named:
        pytest.skip(f"no checkout of torchtitan ({VARIABLE})")
    checkout = Path(named).expanduser().resolve()
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        pytest.skip(f"torchtitan imports what is not installed: {', '.join(missing)}")
    text = tmp_path_factory.mktemp("text") / "data.json"
    sentences = (
        Path(__file__)
        .parents[2]
        .joinpath("docs", "understand", "method.md")
        .read_text()
        .split("\n\n")
    )
    rows = [{"text": sentence} for sentence in sentences if len(sentence) > 100]
    text.write_text("\n".join(map(json.dumps, 20 * rows)))

    def run(steps, forward_s, *options):
        folder = tmp_path_factory.mktemp("run")
        arguments = [
            f"--job.config_file={checkout}/torchtitan/models/llama3/train_configs/debug_model.toml",
            f"--model.hf_assets_path={checkout}/tests/assets/tokenizer",
            f"--training.dataset_path={text.parent}",
            f"--training.steps={steps}",
            "--training.seq_len=64",
            f"--training.local_batch_size={MICROBATCHES}",
            f"--parallelism.pipeline_parallel_degree={STAGES}",
            "--parallelism.pipeline_parallel_schedule=1F1B",
            "--debug.seed=1234",
        ]
        return run_ranks(
            [str(RUN), *options, *arguments],
            RUN,
            folder / "ranks",
            nproc=STAGES,
            env={
                "PYTHONPATH": os.pathsep.join(
                    filter(None, [str(checkout), os.environ.get("PYTHONPATH")])
                ),
                "ENVPIPE_EMULATED_GPU": "a100-sxm",
                "ENVPIPE_EMULATED_FORWARD_S": str(forward_s),
                "ENVPIPE_EMULATED_ROOT": str(folder / "gpus"),
            },
            timeout_s=1500,
        ).require_success()

    return run


def computed(ended):
    """Of each rank, its losses and weights."""
    return [re.findall("^titan_run: (.*)", output, re.M) for output in ended.outputs]


@pytest.fixture(scope="module")
def alone(train):
    """Return what twelve steps without EnvPipe come to."""
    found = computed(train(12, 0.002))
    assert [len(of_rank) for of_rank in found] == [13] * STAGES
    return found


@pytest.mark.parametrize("level", ["units", "order"])
def test_it_computes_the_same(train, alone, tmp_path, level):
    if level == "units":
        made = builders.one_f_one_b(STAGES, MICROBATCHES), another_each_unit
    else:
        made = stepped_order(STAGES, MICROBATCHES, None), envelope
    profile, plan = write_unmeasured_plan(made[0], tmp_path, made[1])
    ended = train(
        12,
        0.002,
        f"--envpipe-level={level}",
        f"--envpipe-scheduling={'1f1b' if level == 'units' else 'ours'}",
        "--envpipe-type=envelope",
        "--envpipe-reconfigure=default",
        "--envpipe-baseline-steps=3",
        f"--envpipe-profile={profile}",
        f"--envpipe-plan={plan}",
        "--envpipe-gpu=h200",
        f"--envpipe-output={tmp_path / 'out'}",
    )
    assert computed(ended) == alone
    assert f"steady: {made[0].name}" in "\n".join(ended.outputs)


@on_request("TORCHTITAN")
def test_the_whole_loop_saves_what_it_predicts(train, tmp_path):
    """By one option, as a new user has it; a bill stands at the end."""
    output = tmp_path / "out"
    ended = train(150, FORWARD_S, f"--envpipe-output={output}")
    plan = json.loads((output / "plan.json").read_text())
    predicted_percent = 100 * (1 - plan["energy_j"] / plan["baseline"]["energy_j"])
    compared = json.loads((output / "summary.json").read_text())["job"]["comparison"]
    assert compared["saving_percent"] == pytest.approx(predicted_percent, abs=1.0)
    assert compared["saving_percent"] > 10
    assert compared["slowdown_percent"] < 0.5
    assert "against the job's own baseline: a step takes" in "\n".join(ended.outputs)
