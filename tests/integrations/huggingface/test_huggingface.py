"""Split models in one process: as the unsplit ones, from drawn weights and from files."""

import json
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from threading import Barrier, local
from types import SimpleNamespace

import pytest

from envpipe_megatron.integrations.levels import JobError

pytest.importorskip("transformers")
import tiny_models as tiny
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.pipelining import PipelineStage
from whole_layers import write_layers

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.integrations.huggingface import split_model, weights_of
from envpipe_megatron.integrations.huggingface.layers import IGNORED_LABEL, language_model_loss
from envpipe_megatron.integrations.huggingface.split import Layer
from envpipe_megatron.integrations.huggingface.torch_stages import (
    Stage,
    pipeline_stage,
    reduce_tied_gradients,
)
from envpipe_megatron.search.partition import make_parts

pytestmark = pytest.mark.xdist_group("launch")


@pytest.fixture(autouse=True)
def one_thread():
    """Others run beside it: threads that wait for each other take far longer."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def stages_of(model, num_stages=2):
    parts = model.parts(num_stages)
    return [Stage(model, parts, index) for index in range(num_stages)]


def weights(stages):
    return {name: weight for stage in stages for name, weight in weights_of(stage).items()}


@torch.no_grad()
def disturb(module):
    """Norms and biases of a new model are ones and zeros, which hide what they do."""
    generator = torch.Generator().manual_seed(8)
    for parameter in module.parameters():
        if parameter.dim() == 1:
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)


def chained(stages, hidden, **extras):
    for stage in stages:
        hidden = stage(hidden, **extras)
    return hidden


@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_logits_are_those_of_the_whole_model(name):
    config = tiny.config_of(name)
    model = split_model(config)
    stages = [stage.eval() for stage in stages_of(model, 3)]
    for stage in stages:
        disturb(stage)
    tied = stages[0].tied_weight is not None
    assert tied == model.is_tied(0) == any(stage.tied_weight is not None for stage in stages[1:])
    whole = tiny.whole_with(config, weights(stages)).eval()
    inputs, extras, _ = tiny.microbatches(name)[0]
    logits = chained(stages, inputs, **extras)
    assert torch.equal(logits, whole(inputs, **extras).logits)
    message = (inputs, *extras.values()) if extras else inputs
    for layer in (layer for stage in stages for layer in stage.layers):
        message = layer(message)  # as DeepSpeed hands messages on
    assert torch.equal(message, logits)


def test_bert_without_other_inputs_sees_all_as_one_segment():
    config = tiny.config_of("bert")
    stages = stages_of(split_model(config))
    whole = tiny.whole_with(config, weights(stages)).eval()
    inputs = tiny.microbatches("bert")[0][0]
    logits = chained([stage.eval() for stage in stages], inputs)
    assert torch.equal(logits, whole(inputs).logits)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "deep resnet"])
def test_weights_do_not_depend_on_the_cut_or_on_the_rank(name):
    model = split_model(tiny.config_of(name))
    state = torch.get_rng_state()
    whole = weights(stages_of(model, 1))
    assert torch.equal(torch.get_rng_state(), state), "the caller's random numbers go on"
    torch.manual_seed(99)
    for index in reversed(range(3)):
        alone = Stage(model, model.parts(3), index)
        for weight, found in weights_of(alone).items():
            assert torch.equal(found, whole[weight]), weight
    unsplit = model.model
    assert all(tensor.is_meta for tensor in unsplit.parameters()), "nobody holds the whole"
    other = weights(stages_of(split_model(tiny.config_of(name), seed=1)))
    assert any(not torch.equal(whole[weight], other[weight]) for weight in whole)


@pytest.mark.parametrize("name", ["llama", "tied llama", "gpt2", "bert", "resnet"])
@pytest.mark.parametrize("shard_size", ["5GB", "20KB"])
def test_weights_from_files(name, shard_size, tmp_path):
    config = tiny.config_of(name)
    saved = tiny.whole_model(config)
    saved.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_size == "20KB")
    model = split_model(config, weights=tmp_path)
    stages = [stage.eval() for stage in stages_of(model)]
    state = saved.state_dict()
    for weight, found in weights(stages).items():
        assert torch.equal(found, state[weight]), weight
    inputs, extras, _ = tiny.microbatches(name)[0]
    assert torch.equal(chained(stages, inputs, **extras), saved.eval()(inputs, **extras).logits)


def test_a_stage_reads_only_the_files_that_it_needs(tmp_path):
    config = tiny.config_of("llama")
    tiny.whole_model(config).save_pretrained(tmp_path, max_shard_size="8KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    model = split_model(config, weights=tmp_path)
    parts = model.parts(2)
    needed = weights_of(Stage(model, parts, 1))
    files = {index["weight_map"][weight] for weight in needed}
    assert files < set(index["weight_map"].values())
    for file in set(index["weight_map"].values()) - files:
        (tmp_path / file).unlink()
    again = weights_of(Stage(split_model(config, weights=tmp_path), parts, 1))
    assert all(torch.equal(again[weight], needed[weight]) for weight in needed)
    with pytest.raises(EnvPipeError, match=r"cannot be read.*Fetch"):
        Stage(model, parts, 0)


def test_old_names_of_files(tmp_path):
    """GPT-2's first files have no prefix, BERT's call norms by gamma and beta, and have more."""
    renamed = {
        "gpt2": {"transformer.": ""},
        "bert": {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"},
    }
    for model, more in (("gpt2", "h.0.attn.bias"), ("bert", "cls.seq_relationship.weight")):
        config = tiny.config_of(model)
        state = tiny.whole_model(config).state_dict()
        old = {more: torch.ones(1)}
        for name in state.keys() - {"lm_head.weight"}:
            then = name
            for now, before in renamed[model].items():
                then = then.replace(now, before)
            old[then] = state[name].clone()
        save_file(old, tmp_path / "model.safetensors")
        found = weights(stages_of(split_model(config, weights=tmp_path)))
        assert all(torch.equal(weight, state[name]) for name, weight in found.items())


def changed(tmp_path, change):
    config = tiny.config_of("llama")
    tiny.whole_model(config).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    return config


def test_files_of_another_model(tmp_path):
    def without_norm(tensors):
        del tensors["model.norm.weight"]

    def with_more(tensors):
        tensors["model.norm.bias"] = torch.ones(1)

    def narrow(tensors):
        tensors["lm_head.weight"] = torch.ones(tiny.WORDS, 16)

    for change, words in ((without_norm, "lacks weights: 1"), (with_more, "model.norm.bias")):
        with pytest.raises(EnvPipeError, match=words):
            split_model(changed(tmp_path, change), weights=tmp_path)
    model = split_model(changed(tmp_path, narrow), weights=tmp_path)
    Stage(model, model.parts(2), 0)
    with pytest.raises(EnvPipeError, match=r"lm_head.weight .* another shape .*\(61, 32\)"):
        Stage(model, model.parts(2), 1)
    tied = tiny.config_of("tied llama")
    with pytest.raises(EnvPipeError, match="No such file"):
        split_model(tied, weights=tmp_path / "..")
    (tmp_path / "model.safetensors").write_bytes(b"no")
    with pytest.raises(EnvPipeError, match="cannot be read"):
        split_model(tied, weights=tmp_path)


def test_models_that_are_not_split():
    with pytest.raises(EnvPipeError, match=r"got 't5'.*llama, .*resnet"):
        split_model(transformers.T5Config())
    with pytest.raises(EnvPipeError, match="got 'str'"):
        split_model("llama")
    with pytest.raises(EnvPipeError, match="is_decoder to false"):
        split_model(transformers.BertConfig(is_decoder=True))
    with pytest.raises(EnvPipeError, match="to sdpa"):
        split_model(tiny.config_of("llama", "flex_attention"))


def test_versions_that_were_not_tried(monkeypatch):
    from envpipe_megatron.integrations.huggingface import split

    monkeypatch.setattr(split, "transformers", SimpleNamespace(__version__="4.57.0"))
    with pytest.raises(JobError, match=r"got '4\.57\.0'.*transformers>="):
        split_model(tiny.config_of("llama"))


def test_a_causal_model_takes_no_mask():
    stages = stages_of(split_model(tiny.config_of("llama")))
    inputs = tiny.microbatches("llama")[0][0]
    with pytest.raises(EnvPipeError, match=r"attention_mask.*Pad at the end"):
        stages[0](inputs, attention_mask=torch.ones_like(inputs))


def test_all_blocks_keep_one_mask_of_a_window(monkeypatch):
    (stage,) = stages_of(split_model(tiny.config_of("mistral")), 1)
    masks = []
    for layer in (layer for layer in stage.layers if hasattr(layer, "block")):
        take = lambda *args, own=layer.block.forward, **given: (  # noqa: E731
            masks.append(given["attention_mask"]) or own(*args, **given)
        )
        monkeypatch.setattr(layer.block, "forward", take)
    inputs = tiny.microbatches("mistral")[0][0]
    for _ in range(2):
        stage(inputs)
    assert len(masks) > 2
    assert masks[0] is not None
    assert len({mask.data_ptr() for mask in masks}) == 1


def test_cuts(tmp_path):
    model = split_model(tiny.config_of("gpt2"))
    count = len(model.entries)
    total = sum(model.num_parameters)
    whole = tiny.whole_model(tiny.config_of("gpt2"))
    head = tiny.WORDS * 32
    assert total == sum(weight.numel() for weight in whole.parameters()) + head
    assert model.parts(3) == make_parts("parameters", model.num_parameters, 3)
    assert model.parts(2, [0, 2, count]) == [0, 2, count]
    last_s = {str(count - 1): (4.0, 4.0)}
    path = write_layers(
        tmp_path / "layers.json", {str(n): (1.0, 1.0) for n in range(count - 1)} | last_s
    )
    assert model.parts(2, f"time:{path}") == [0, 5, count]
    assert model.parts(2, f"energy:{path}") == [0, 5, count]
    for cut, words in (
        ([0, 3], "no parts of 7 layers for 2 stages"),
        ([0, 0, count], "rising"),
        ("uniform", "time:FILE"),
        ("time:nowhere.json", "nowhere.json"),
    ):
        with pytest.raises(EnvPipeError, match=words):
            model.parts(2, cut)
    with pytest.raises(EnvPipeError, match="1 to 7 stages"):
        model.parts(8)


def test_half_precision_leaves_rotary_angles_whole():
    """Frequencies in bfloat16 would be wrong by percents at far positions."""
    stages = [stage.bfloat16() for stage in stages_of(split_model(tiny.config_of("llama")))]
    rotary = stages[0].layers[1].rotary._copies[torch.device("cpu")]
    assert rotary.inv_freq.dtype == torch.float32
    cosines, _ = stages[0].layers[1].rotary.angles(torch.empty(1, 12, 32, dtype=torch.bfloat16))
    exact = torch.cos(torch.arange(12.0)[:, None] * rotary.inv_freq).bfloat16()
    assert torch.equal(cosines[0, :, :4], exact)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "resnet"])
def test_weights_have_the_default_type(name, tmp_path):
    config = tiny.config_of(name)
    saved = tiny.whole_model(config).bfloat16()
    disturb(saved)
    saved.save_pretrained(tmp_path)
    whole = type(saved).from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    torch.set_default_dtype(torch.bfloat16)
    try:
        stages = [stage.eval() for stage in stages_of(split_model(config, weights=tmp_path))]
    finally:
        torch.set_default_dtype(torch.float32)
    inputs, extras, _ = tiny.microbatches(name)[0]
    inputs = inputs.bfloat16() if inputs.is_floating_point() else inputs
    logits, expected = chained(stages, inputs, **extras), whole(inputs, **extras).logits
    assert logits.dtype == torch.bfloat16
    # BERT's bias is added after the head: it rounds once more.
    torch.testing.assert_close(logits, expected, rtol=0.01 if name == "bert" else 0, atol=0.002)
    assert torch.equal(logits, expected) or name == "bert"


def test_messages_are_known_without_a_forward(monkeypatch):
    """Torch would run one, on whatever is in memory: a ResNet's running means would change."""
    monkeypatch.setattr(PipelineStage, "__init__", lambda stage, *given, **named: record(named))
    found = []

    def record(named):
        found.append((named["input_args"][0], named["output_args"][0]))

    model = split_model(tiny.config_of("resnet"))
    images = tiny.microbatches("resnet")[0][0]
    parts, hidden = model.parts(3), images
    for index, stage in enumerate(stages_of(model, 3)):
        pipeline_stage(model, parts, index, images, torch.device("cpu"))
        given, got = found[-1]
        assert given.shape == hidden.shape
        hidden = stage(hidden)
        assert got.shape == hidden.shape
        assert got.requires_grad
        assert given.requires_grad == (index > 0)


def test_shared_weights_of_no_stage_and_of_one():
    reduce_tied_gradients(stages_of(split_model(tiny.config_of("llama"))))
    with pytest.raises(EnvPipeError, match=r"no stage .*got Linear"):
        reduce_tied_gradients([nn.Linear(1, 1)])
    (one,) = stages_of(split_model(tiny.config_of("gpt2")), 1)
    assert one.tied_weight is None
    assert one.layers[0].embedding is one.layers[-1].embedding


def test_what_is_done_around_layers_is_done():
    """Hooks, as of FSDP, and wrappers, as of activation checkpoints."""
    stages = stages_of(split_model(tiny.config_of("bert")))
    inputs, extras, _ = tiny.microbatches("bert")[0]
    expected = chained([stage.eval() for stage in stages], inputs, **extras)
    called = []
    for stage in stages:
        for number, layer in enumerate(stage.layers):
            layer.register_forward_pre_hook(lambda layer, _: called.append(layer.index))
            stage.layers[number] = checkpoint_wrapper(layer)
    assert torch.equal(chained(stages, inputs, **extras), expected)
    assert called == list(range(len(called)))
    assert len(called) == sum(len(stage.layers) for stage in stages)


def test_layers_are_drawn_without_a_trace_in_the_users_random_numbers(monkeypatch):
    """On GPUs too, where replicas' own seeds give them other dropout; weights stay as they were."""
    model = split_model(tiny.config_of("gpt2"), seed=7)
    torch.manual_seed(8)
    before = torch.get_rng_state()

    def seeded(*_):
        raise AssertionError("seeded for all devices")

    for devices in (torch.cuda, torch.mps, torch.xpu):
        for name in ("manual_seed", "manual_seed_all"):
            monkeypatch.setattr(devices, name, seeded, raising=False)
    layers = [Layer(model, index) for index in range(len(model.entries))]
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.cuda.is_initialized()
    torch.default_generator.manual_seed(7)
    drawn = torch.empty_like(layers[0].embedding.weight).normal_(
        0, model.model.config.initializer_range
    )
    assert torch.equal(layers[0].embedding.weight, drawn)


#: Of each side of shared weights whether they are trained, and the gradient; what both come to.
SIDES = [
    (((False, None), (False, None)), [None, None]),  # as LoRA freezes them
    (((True, 1.0), (True, None)), [1.0, 1.0]),
    (((True, 1.0), (True, 2.0)), [3.0, 3.0]),
    (((True, None), (True, None)), None),
    (((True, 1.0), (False, None)), None),
]


#: Of each rank of a pipeline its stages, as in a loop or a V. One has the bias behind the head.
LAYOUTS = [[[0, 1, 2, 3]], [[0], [1], [2], [3]], [[0, 2], [1, 3]], [[0, 3], [1, 2]]]


@pytest.mark.parametrize(("sides", "expected"), SIDES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sides_of_shared_weights_come_to_the_same(monkeypatch, sides, expected, layout):
    """Wherever the head is, on ranks that send as many messages, whatever each of them has."""
    model = split_model(tiny.config_of("bert"))
    stages = [Stage(model, [0, 2, 4, 7, 8], index) for index in range(4)]
    for stage, (trained, gradient) in zip((stages[0], stages[2]), sides, strict=True):
        weight = stage.tied_weight.requires_grad_(trained)
        weight.grad = None if gradient is None else torch.full_like(weight, gradient)
    met, known, rank = Barrier(len(layout), timeout=20), {}, local()
    sent = [Queue() for _ in layout]

    def all_reduce(mine, group):
        known[rank.number] = mine.clone()
        met.wait()
        mine.copy_(sum(known.values()))

    def exchanged(mine, peer, group):
        sent[peer].put(mine.clone())
        return sent[rank.number].get(timeout=20)

    def reduce(number):
        rank.number = number
        try:
            # As if wrapped.
            reduce_tied_gradients([nn.Sequential(stages[index]) for index in layout[number]])
        except EnvPipeError as error:
            return str(error)
        return ""

    monkeypatch.setattr(f"{reduce_tied_gradients.__module__}._exchanged", exchanged)
    monkeypatch.setattr(dist, "get_rank", lambda group: rank.number)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    with ThreadPoolExecutor(len(layout)) as threads:
        errors = list(threads.map(reduce, range(len(layout))))
    if expected is None:
        assert any(errors)
        assert all("no gradient, or are frozen on one" in error for error in errors if error)
        return
    assert not any(errors)
    assert all(queue.empty() for queue in sent)
    for stage, gradient in zip((stages[0], stages[2]), expected, strict=True):
        found = stage.tied_weight.grad
        assert (found is None) == (gradient is None)
        assert found is None or bool((found == gradient).all())


def test_the_loss_is_that_of_the_labels_that_count():
    logits = torch.randn(2, 12, 101)
    labels = torch.full((2, 12), IGNORED_LABEL)
    assert language_model_loss(logits, labels).item() == 0.0
    labels[1, 3] = 5
    expected = -logits[1, 3].log_softmax(-1)[5]
    found = language_model_loss(logits.half(), labels)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
