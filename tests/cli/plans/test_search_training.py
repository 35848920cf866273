"""`envpipe search --train`: what is set anew, and what a log says beside what was predicted."""

import json
import shlex
from pathlib import Path

import pytest
from cli_helpers import run, run_badly, run_well
from whole_layers import whole_layers

from envpipe_megatron.cli.plans import search_training
from envpipe_megatron.search.configuration import Configuration, StageLayout
from envpipe_megatron.search.layer_file import layers_text
from envpipe_megatron.search.layer_profile import Sizes

JOB = ("--gpus", 2, "--gpus-per-node", 2, "--global-batch", 8)
SCRIPT = shlex.split(
    "--standalone --nproc-per-node 2 pretrain_gpt.py --num-layers 6 --tensor-model-parallel-size 8 "
    "--recompute-modules mlp core_attn --use-distributed-optimizer --lr 1e-3 --train-samples 900"
)


@pytest.fixture
def layers_path(tmp_path):
    path = tmp_path / "layers.json"
    path.write_text(layers_text(whole_layers(1, ("layer",) * 6)))
    return path


def log_of(rank, peak_mib):
    lines = [
        f" iteration {n}/ 30 | elapsed time per iteration (ms): {5000.0 if n <= 10 else 200.0 + n}"
        for n in range(5, 31, 5)
    ]
    peak = f"[Rank {rank}] (after 30 iterations) memory (MB) | allocated: 1.0 | max allocated: "
    return "\n".join([*(lines if rank else []), f"{peak}{peak_mib} | reserved: 9"])


def test_what_is_trained_has_the_flags_found_and_is_compared(layers_path, monkeypatch):
    given = []

    def run_torchrun(words, environment, signals):
        given.extend(words)
        folder = Path(words[words.index("--log-dir") + 1])
        for rank in range(2):
            own = folder / "attempt_0" / str(rank)
            own.mkdir(parents=True)
            (own / "stdout.log").write_text(log_of(rank, 1024.0 * (rank + 1)))
        return 0

    monkeypatch.setattr(search_training, "run_torchrun", run_torchrun)
    result = run_well("search", "--profile", layers_path, *JOB, "--train", "--", *SCRIPT)
    script = given[given.index("pretrain_gpt.py") :]
    assert script[:5] == ["pretrain_gpt.py", "--num-layers", "6", "--lr", "1e-3"]
    assert "--tensor-model-parallel-size" in script[5:]
    assert script.count("--tensor-model-parallel-size") == 1
    assert not {"core_attn", "--train-samples"} & set(script)
    assert "--envpipe" not in script
    assert "0.2225" in result.stdout  # the median without the first ten
    assert "2.00" in result.stdout


def configuration(tensor_parallel, distributed_optimizer):
    stage = StageLayout(((0, 1),), Sizes(tensor_parallel), 2, (None,))
    return Configuration((stage,), 4, distributed_optimizer)


def test_arguments_of_other_iterations_and_sizes_are_set_aside():
    words = shlex.split(
        "--lr 1 --lr-warmup-iters 100 --lr-decay-iters=900 --lr-decay-style WSD "
        "--lr-wsd-decay-iters 50 --tp-comm-overlap --tp-comm-overlap-cfg a.yaml "
        "--overlap-grad-reduce --overlap-param-gather --overlap-param-gather-with-optimizer-step"
    )
    kept = search_training.without_set(words, configuration(1, False))
    assert kept == ["--lr", "1", "--overlap-grad-reduce"]
    assert search_training.without_set(words, configuration(2, True)) == ["--lr", "1", *words[9:]]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--nproc-per-node 4", "not the 2 GPUs of the job (got 4)"),
        ("--nproc-per-node 2 --nnodes 2", "not the 2 GPUs of the job (got 4)"),
        ("--nproc-per-node 2 --nnodes 1:2", "(got 'a number that changes')"),
    ],
)
def test_a_command_of_other_ranks_is_refused_before_the_search(
    layers_path, monkeypatch, options, said
):
    monkeypatch.setattr("envpipe_megatron.cli.plans.search.search", None)
    words = (*shlex.split(options), "pretrain_gpt.py")
    assert said in run_badly("search", "--profile", layers_path, *JOB, "--train", "--", *words)


def test_the_warm_up_is_left_out_and_the_last_peak_counts():
    measured = search_training.read_log(log_of(1, 1.0) + "\n" + log_of(1, 2.5))
    assert measured.iteration_s[0] == pytest.approx(0.215)
    assert measured.peak_bytes == {1: 2.5 * 2**20}


def test_recomputation_by_stage_is_envpipes_which_only_observes():
    words = search_training.arguments(["--envpipe-recompute full:1,none"])
    assert words[-3:] == ["--envpipe", "--envpipe-level", "observe"]
    words = search_training.arguments(["--micro-batch-size 2"])
    assert "--envpipe" not in words
    assert words[words.index("--log-interval") + 1] == "5"


@pytest.mark.parametrize(("code", "log"), [(1, log_of(1, 1.0)), (0, "nothing")])
def test_a_training_that_failed_or_said_nothing_is_named(layers_path, monkeypatch, code, log):
    def run_torchrun(words, environment, signals):
        (Path(words[words.index("--log-dir") + 1]) / "stdout.log").write_text(log)
        return code

    monkeypatch.setattr(search_training, "run_torchrun", run_torchrun)
    words = ("search", "--profile", layers_path, *JOB, "--train", "--", *SCRIPT)
    assert "failed, or logged no iteration" in run_badly(*words)


def test_a_command_and_train_go_together(layers_path):
    search = ("search", "--profile", layers_path, *JOB)
    assert "behind --" in run_badly(*search, "--train")
    assert "behind --" in run_badly(*search, "--", *SCRIPT)
    assert run(*search, "--trian").exit_code != 0
    assert json.loads(layers_path.read_text())["format"] == "envpipe-layers/1"
