"""`envpipe profile --layers` of stock Megatron-LM on the CPU, on several ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkouts import TAGS
from jsonschema import Draft202012Validator
from lm_cases import OVERLAPPED, PP4, RECOMPUTE, full
from lm_runs import CPU_ARGS, CPU_RUN, LLAMA, MOCK_DATA, OPTIMIZER

from envpipe_megatron.search.layer_file import read_layers
from envpipe_megatron.search.layer_profile import Block, Sizes

pytestmark = [full, pytest.mark.xdist_group("megatron_lm")]

SCHEMA = Path(__file__).parents[2] / "docs" / "schemas" / "layers.json"
EXPERTS = (
    "--num-experts 4 --moe-layer-freq [0,1,1,1] --moe-router-topk 2 "
    "--moe-token-dispatcher-type alltoall"
)


def profile(checkout, folder, options, model):
    output = folder / "layers.json"
    command = [sys.executable, "-m", "envpipe_megatron.cli", "profile", "--layers"]
    command += ["--output", str(output), *options.split(), "--", "--standalone"]
    command += ["--nproc-per-node", "2", str(CPU_RUN), str(checkout / "pretrain_gpt.py")]
    # Stages, recomputation and a batch that do not fit a measurement are set aside.
    model += f" {MOCK_DATA} {OPTIMIZER} {PP4} {RECOMPUTE} --bf16 --sequence-parallel"
    command += [*CPU_ARGS.split(), *model.split(), "--global-batch-size", "6"]
    command += ["--train-iters", "10"]
    environment = {"TORCHDYNAMO_DISABLE": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    ended = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=600
    )
    assert ended.returncode == 0, ended.stdout[-5000:] + ended.stderr[-5000:]
    return output


@pytest.mark.parametrize("tag", TAGS)
def test_layers_at_two_tensor_parallel_sizes(tag, checkout, tmp_path):
    path = profile(checkout(tag), tmp_path, "--microbatch-size 1,2", f"{LLAMA} {OVERLAPPED}")
    Draft202012Validator(json.loads(SCHEMA.read_text())).validate(json.loads(path.read_text()))
    made = read_layers(path)
    assert made.blocks == (Block(("embedding",)), Block(("layer",), 4), Block(("loss",)))
    assert set(made.measures) == {Sizes(t, b) for t in (1, 2) for b in (1, 2)}
    whole, half = (made.at(Sizes(t, 1))["layer"] for t in (1, 2))
    norms = 2 * 32
    assert whole.parameters - norms == 2 * (half.parameters - norms)
    assert whole.output_bytes == 2 * half.output_bytes == 32 * 32 * 2
    assert [way.name for way in whole.recomputation] == ["selective", "full"]
    held = made.bytes_per_parameter
    assert (held.weight, held.gradient, round(held.optimizer)) == (2, 4, 12)
    assert [each.gpus for each in made.links.all_reduce] == [2]


def test_experts_are_another_kind_of_layer(checkout, tmp_path):
    options = "--microbatch-size 1 --tensor-parallel 1 --expert-parallel 1,2"
    made = read_layers(profile(checkout("core_v0.19.0"), tmp_path, options, f"{LLAMA} {EXPERTS}"))
    assert [block.pieces for block in made.blocks] == [
        ("embedding",), ("layer1",), ("layer2",), ("loss",)
    ]  # fmt: skip
    assert [block.repeat for block in made.blocks] == [1, 1, 3, 1]
    alone, shared = (made.at(Sizes(1, 1, 1, e)) for e in (1, 2))
    assert alone["layer1"].parameters == shared["layer1"].parameters
    assert alone["layer2"].parameters > shared["layer2"].parameters > alone["layer1"].parameters
