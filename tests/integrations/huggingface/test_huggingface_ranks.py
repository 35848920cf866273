"""Two ranks train split models as one process trains the whole: torch's pipelines, DeepSpeed's.

CI trains a Llama and a GPT-2; with ENVPIPE_HUGGINGFACE_FULL=1 every model.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("deepspeed")
import torch
from on_request import on_request

from envpipe_megatron.integrations.deepspeed import layer_profile
from envpipe_megatron.integrations.huggingface import split_model
from envpipe_megatron.integrations.huggingface.deepspeed_stages import deepspeed_layers

pytestmark = pytest.mark.xdist_group("launch")

IN_CI = ["llama", "gpt2"]
ON_REQUEST = [
    "tied llama", "mistral", "qwen2", "qwen3", "bert", "untied bert", "resnet", "deep resnet"
]  # fmt: skip


def train_ranks(folder, names):
    environment = {
        **os.environ,
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "ENVPIPE_EMULATED_GPU": "a100-sxm",
        "ENVPIPE_EMULATED_FORWARD_S": "0.001",
    }
    command = [sys.executable, str(Path(__file__).with_name("huggingface_ranks.py"))]
    done = subprocess.run(
        [*command, str(folder), *names], env=environment, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return [torch.load(folder / f"rank-{rank}.pt") for rank in (0, 1)]


def check(ranks, name):
    """Against the unsplit model, to the last bit where no weights are shared."""
    first, last = (rank[name] for rank in ranks)
    whole = first["whole"]
    shared = first["torch"]["weights"].keys() & last["torch"]["weights"].keys()
    exact = {"rtol": 1e-5, "atol": 1e-6} if shared else {"rtol": 0, "atol": 0}
    for engine in ("torch", "deepspeed", "envpipe"):
        assert last[engine]["losses"] == pytest.approx(whole["losses"], rel=1e-6), engine
        for stage in (first, last):
            for weight, found in stage[engine]["weights"].items():
                torch.testing.assert_close(found, whole["weights"][weight], **exact)
        for weight in shared:
            assert torch.equal(first[engine]["weights"][weight], last[engine]["weights"][weight])
    assert first["envpipe"]["losses"] == first["deepspeed"]["losses"] == last["envpipe"]["losses"]
    for stage in (first, last):
        for weight, found in stage["envpipe"]["weights"].items():
            assert torch.equal(found, stage["deepspeed"]["weights"][weight])


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return train_ranks(tmp_path_factory.mktemp("ranks"), IN_CI)


@pytest.mark.parametrize("name", IN_CI)
def test_steps_equal_those_of_the_whole_model(ranks, name):
    check(ranks, name)


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_layers_can_be_profiled_for_a_cut(name, tmp_path, monkeypatch):
    import tiny_models as tiny

    model = split_model(tiny.config_of(name))
    inputs, extras, labels = tiny.microbatches(name)[0]
    batch = ((inputs, *extras.values()) if extras else inputs, labels)
    monkeypatch.setattr(layer_profile, "_WINDOW_S", 1e-3)
    path, layers = tmp_path / "layers.json", deepspeed_layers(model)
    layer_profile.profile_layers(layers, batch, model.loss, torch.device("cpu"), path)
    parts = model.parts(2, f"time:{path}")
    assert parts[0] == 0 < parts[1] < parts[2] == len(model.entries)


@on_request("HUGGINGFACE")
def test_steps_of_every_other_model(tmp_path):
    found = train_ranks(tmp_path, ON_REQUEST)
    for name in ON_REQUEST:
        check(found, name)
