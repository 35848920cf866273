"""Stock Megatron-DeepSpeed beside the patched one on the CPU: the same losses and weights.

A run takes half a minute where two cores are free.
"""

import json

import pytest
from mds_runs import (
    FORWARD_S,
    ITERATIONS,
    PRESET,
    STAGES,
    WARMUP,
    gpt_args,
    run_script,
)
from presets import preset_profile

from envpipe_megatron.core.kinds import Kind

pytestmark = pytest.mark.xdist_group("megatron_deepspeed")

TIMES_S = {Kind.FORWARD: FORWARD_S, Kind.BACKWARD: 2 * FORWARD_S}
ENVELOPE = "--envpipe-type envelope --envpipe-scheduling ours --envpipe-reconfigure balanced"
ARMS = {
    "baseline": "--envpipe-type baseline",
    "envelope": ENVELOPE,
    "optimal": "--envpipe-type optimal",
}


@pytest.fixture(scope="session")
def stock_gpt(stock, data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("stock") / "run"
    return run_script(stock / "pretrain_gpt.py", gpt_args(data), folder).require_success()


def with_envpipe(how, folder):
    """Arguments of a run that has the profile of its emulated GPUs."""
    profile = folder.with_suffix(".csv")
    preset_profile(PRESET, STAGES, TIMES_S, range(1290, 690, -120)).write(profile)
    given = "" if "baseline" in how else f"--envpipe-profile {profile}"
    return f"--envpipe {how} {given} --envpipe-baseline-steps {WARMUP} --envpipe-output output"


def test_flag_off_nothing_changes_and_nothing_is_imported(patched, data, stock_gpt, tmp_path):
    run = run_script(patched / "pretrain_gpt.py", gpt_args(data), tmp_path / "run")
    assert run.require_success().result == stock_gpt.result
    assert not run.imported
    # There was something to compare.
    assert len(run.iterations) == ITERATIONS
    assert len(run.evaluations) == 4
    assert None not in run.weights


@pytest.mark.parametrize("arm", ARMS)
def test_gpt_trains_the_same(arm, patched, data, stock_gpt, tmp_path):
    args = f"{gpt_args(data)} {with_envpipe(ARMS[arm], tmp_path / 'run')}"
    run = run_script(patched / "pretrain_gpt.py", args, tmp_path / "run").require_success()
    assert run.result == stock_gpt.result
    assert run.imported
    assert run.phases[0] == "framework"
    assert run.phases[1:WARMUP] == ["warm-up"] * (WARMUP - 1)
    assert run.phases[-1] in ("steady", "reconfigure")
    assert "energy of 4 GPUs in training" in run.output
    # Megatron's log line has it, so DeepSpeed's engine says nothing beside.
    assert "[envpipe] steps:" not in run.output


def test_a_batch_that_grows_trains_the_same(stock, patched, data, tmp_path):
    """From half of it to the whole, each size with a plan of its own."""
    steps = ITERATIONS + 6  # so that clocks are swept in those of full size, too
    args = gpt_args(data).replace("--lr-decay-iters 100", "--lr-decay-samples 800")
    args += f" --train-samples {16 + 8 * (steps - 4)} --rampup-batch-size 4 4 16"
    own = run_script(stock / "pretrain_gpt.py", args, tmp_path / "stock").require_success()
    args += f" {with_envpipe(ENVELOPE, tmp_path / 'run')}"
    run = run_script(patched / "pretrain_gpt.py", args, tmp_path / "run").require_success()
    assert run.result == own.result
    assert len(own.iterations) == steps
    small = [phase.endswith(" m4") for phase in run.phases[1:]]
    assert small == sorted(small, reverse=True)
    assert {*small} == {True, False}
    assert run.phases[-1] in ("steady", "reconfigure")


def test_a_restarted_job_trains_the_same(stock, patched, data, stock_gpt, tmp_path):
    """Stopped at a checkpoint in the middle, with its bill, and started again from it."""
    middle = ITERATIONS // 2

    def first_and_then(checkout, arm, envpipe):
        saved, runs = tmp_path / f"{arm} saved", []
        for part, args in (
            ("first", f"--save '{saved}' --save-interval {middle} --exit-interval {middle}"),
            ("then", f"--load '{saved}'"),
        ):
            folder = tmp_path / f"{arm}-{part}"
            ours = with_envpipe(ENVELOPE, folder) if envpipe else ""
            args = f"{gpt_args(data)} {args} {ours}"
            runs.append(run_script(checkout / "pretrain_gpt.py", args, folder).require_success())
        return runs[0], runs[1]

    first, then = first_and_then(patched, "patched", envpipe=True)
    assert "energy of 4 GPUs in training" in first.output
    own_first, own_then = first_and_then(stock, "stock", envpipe=False)
    assert (first.result, then.result) == (own_first.result, own_then.result)
    losses = [each.loss for run in (first, then) for each in run.iterations]
    assert losses == [each.loss for each in stock_gpt.iterations]
    # The last stage's copy of the position embeddings, which nothing uses, is the first's then.
    assert then.weights[:-1] == stock_gpt.weights[:-1]


def test_the_whole_loop_saves_energy(patched, data, tmp_path):
    """From profiling to steady, with nothing given; emulated time and energy."""
    run = run_script(
        patched / "pretrain_gpt.py",
        # An interval of one short iteration is only some refreshes of the energy counter long.
        f"{gpt_args(data)} --log-interval 10 --eval-interval 1000 --envpipe {ENVELOPE} "
        "--envpipe-profile-steps 1 --envpipe-output output",
        tmp_path / "run",
        iterations=200,
        timeout_s=900,
    ).require_success()
    assert run.phases[-1] == "steady"
    summary = json.loads((run.folder / "output" / "summary.json").read_text())
    comparison = summary["job"]["comparison"]
    assert comparison["saving_percent"] > 5
    assert comparison["slowdown_percent"] < 1


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (("--deepspeed ", ""), "training without DeepSpeed"),
        (("--lr 1e-3", "--lr 1e-3 --random-ltd"), "random layer token"),
    ],
)
def test_what_is_not_run_is_refused_before_anything_is_built(change, why, patched, data, tmp_path):
    args = f"{gpt_args(data).replace(*change)} --envpipe"
    run = run_script(patched / "pretrain_gpt.py", args, tmp_path / "run")
    assert run.returncode == 1
    assert "pretrain_gpt.py: error: " in run.output
    assert why in run.output
    assert "building" not in run.output.split("error: ")[0]
