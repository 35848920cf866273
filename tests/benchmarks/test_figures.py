"""EnvPipe's experiments: what is trained, how long its units take, and what names a run."""

from dataclasses import replace

import pytest
from on_request import on_request

pytest.importorskip("torch")
import torch

from benchmarks.figures.experiments import (
    BALANCED,
    BASELINE,
    MODELS,
    Job,
    reduced,
)
from benchmarks.figures.layers import (
    build_stage,
    inputs_of,
)
from benchmarks.figures.requests import RunRequest
from benchmarks.figures.unit_times import (
    EmulatedTime,
    stage_operations,
)

# --- what is trained -----------------------------------------------------------------------------


@pytest.mark.parametrize("with_gradient", [False, True], ids=["a sample", "an activation"])
@pytest.mark.parametrize("name", ["gpt_125M", "resnet_152"])
def test_recomputing_changes_no_gradient(name, with_gradient):
    small, cpu = reduced(MODELS[name], 2), torch.device("cpu")
    found = []
    for recomputes in (True, False):
        stage, x = build_stage(small, 2, 0), inputs_of(small, 2, 0, cpu)
        stage._recomputed = [recomputes and old for old in stage._recomputed]
        x.requires_grad_(with_gradient)
        stage(x).square().sum().backward()
        found.append([x.grad, *(parameter.grad for parameter in stage.parameters())])
    assert (found[0][0] is not None) == with_gradient
    for mine, other in zip(*found, strict=True):
        assert (mine is None and other is None) or torch.equal(mine, other)


# --- how long it takes ---------------------------------------------------------------------------


@on_request("FIGURES")
def test_operations_by_hand():
    """A backward computes the layers' forward again, and not that of Megatron's head."""

    def layers(count, tokens, width, length, attentions=1):
        attention = 8 * tokens * width**2 + 4 * tokens * length * width
        return count * (attentions * attention + 16 * tokens * width**2)

    for stage in stage_operations(MODELS["bert_336M"], 4, 4):
        assert stage.forward == layers(6, 4 * 512, 1024, 512)
        assert stage.backward == 3 * stage.forward
    first, *_, last = stage_operations(MODELS["megatron_125M"], 4, 4)
    head = 2 * 4 * 2048 * 768 * 50304
    assert first.forward == layers(3, 4 * 2048, 768, 2048)
    assert last.forward == first.forward + head
    assert last.backward == 3 * first.forward + 2 * head
    decoder = stage_operations(MODELS["gpt_125M"], 4, 2)[1]
    assert decoder.forward == layers(3, 2 * 2048, 768, 2048, attentions=2)


# --- what is run, and what was run before --------------------------------------------------------


def request(setting=BALANCED, **changes):
    job = replace(Job("bert_336M", "v100", 4, 64), **changes)
    return RunRequest(job, setting, 10, EmulatedTime(0.5, (0.01,) * 4, (0.03,) * 4))


def test_a_key_is_all_of_the_settings():
    keys = {
        request().key,
        request(BASELINE).key,
        request(minibatch_size=32).key,
        replace(request(), steps=30).key,
        replace(request(), emulated=None).key,
        replace(request(), emulated=replace(request().emulated, factor=0.6)).key,
    }
    assert len(keys) == 6
    assert request().key == request().key
