"""`envpipe explain`: a command or a recipe's file, and what goes before what."""

import json

import pytest
from commands import run_badly, run_well

JOB = ("pretrain_gpt.py", "--pipeline-model-parallel-size", "4", "--num-experts", "8")


def explained(*words):
    return json.loads(run_well("explain", "--json", *words).stdout)


def first(*words):
    return explained(*words)["What it gets"][0]


def test_a_command_as_it_starts_the_job():
    command = ("torchrun", "--nnodes=2", "--nproc_per_node", "8", *JOB, "--envpipe")
    said = explained("--", *command)
    assert said["What it gets"][0].startswith("level order: ")
    assert "ranks: 16 on nodes of 8; stages: 4; " in said["What it gets"][-1]
    assert "ranks: 8 on nodes of 8" in explained("--nodes", 1, "--", *command)["What it gets"][-1]
    for no_number in ("gpu", "²"):
        command_of_all = ("torchrun", "--nnodes=2", f"--nproc-per-node={no_number}", *JOB)
        assert "ranks: 16 on nodes of 8" in explained("--", *command_of_all)["What it gets"][-1]
    shown = run_well("explain", *command).stdout
    assert shown.startswith("What it gets\n  - level order: ")
    assert (
        first("--", *JOB[1:], "--envpipe-recompute", "none,none,full:1,none")
        == (said["What it gets"][0])
    )


def test_envpipes_options_are_those_of_a_job(monkeypatch):
    assert first("--", *JOB, "--envpipe", "--envpipe-level", "uniform").startswith("level uniform")
    monkeypatch.setenv("ENVPIPE_TYPE", "envelope")
    assert "type envelope" in explained("--", *JOB)["What it gets"][1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--envpipe-levels", "order"), "No such option of EnvPipe"),
        (("--envpipe-level", "most"), "--envpipe-level is auto, observe"),
        (("--envpipe-profile-only",), "needs --envpipe-output"),
        (("--envpipe-level", "order", "--cuda-graph-impl", "local"), "cannot be had with: CUDA"),
        (("--inprocess-restart",), "cannot meter such a job"),
        (("--envpipe-recompute", "full:2"), "says what 1 stages recompute"),
        (("--envpipe-recompute",), "--envpipe-recompute is wrong"),
        (
            ("--envpipe-recompute", "full:1", "--hybrid-layer-pattern", "M-M*|M-M*"),
            "a hybrid model has none (got 'M-M*|M-M*')",
        ),
        (
            ("--envpipe-recompute", "full:1", "--is-hybrid-model"),
            "a hybrid model has none (got true)",
        ),
        (
            ("--envpipe-recompute", "none", "--recompute-activations"),
            "cannot be combined with --recompute-granularity",
        ),
    ],
)
def test_errors_are_those_of_a_job(words, said):
    assert said in run_badly("explain", "--", *JOB, *words)


def test_a_command_without_a_script():
    assert "no training script" in run_badly("explain", "--", "torchrun", "train")
    assert "Give the command" in run_badly("explain")


def test_a_recipes_file_and_flags_before_its(tmp_path, monkeypatch):
    for name in ("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING"):
        monkeypatch.setenv(name, "0")  # which the recipe's go before
    path = tmp_path / "model_config.yaml"
    path.write_text(
        "ENV_VARS:\n  CUDA_DEVICE_MAX_CONNECTIONS: 1\nMODEL_ARGS:\n"
        "  --pipeline-model-parallel-size: 2\n  --num-experts: 8\n  --cuda-graph-impl: local\n"
    )
    assert first("--recipe", path).startswith("level units")
    other = explained("--recipe", path, "--", "--cuda-graph-impl", "none")
    assert other["What it gets"][0].startswith("level order")
    carriers = other["What carries messages between stages"]
    assert "CUDA_DEVICE_MAX_CONNECTIONS=1: level units" in carriers[-1]
    path.write_text(
        "ENV_VARS: {CUDA_LAUNCH_BLOCKING: 1}\nMODEL_ARGS: {pipeline-model-parallel-size: 2}"
    )
    assert first("--recipe", path).startswith("level units")
    path.write_text(json.dumps({"pipeline-model-parallel-size": 4, "skip-train": True}))
    assert first("--recipe", path).startswith("level observe")
