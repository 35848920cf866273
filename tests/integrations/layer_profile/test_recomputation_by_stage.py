"""A stage that recomputes some of its layers computes what it did, and those layers twice."""

import argparse
from types import SimpleNamespace

import pytest

from envpipe_megatron.integrations.levels import JobError

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from one_rank_job import one_rank_job  # noqa: E402
from test_layer_pieces import make_model  # noqa: E402

from envpipe_megatron.integrations.hooking import recompute  # noqa: E402
from envpipe_megatron.integrations.megatron_lm.hooks import add_arguments, by_stage  # noqa: E402


def given(text, stages=2, granularity=None):
    parser = argparse.ArgumentParser()
    add_arguments(parser.add_argument_group())
    args = parser.parse_args([] if text is None else ["--envpipe-recompute", text])
    return SimpleNamespace(
        **vars(args), pipeline_model_parallel_size=stages, recompute_granularity=granularity
    )


def test_each_stage_is_told_what_it_recomputes():
    assert by_stage(given("full:2,none")) == [("full", 2), ("none", 0)]
    assert by_stage(given("selective:6, full:0")) == [("selective", 6), ("full", 0)]
    assert by_stage(given(None, granularity="full")) is None
    assert by_stage(SimpleNamespace()) is None


@pytest.mark.parametrize(
    ("text", "granularity", "message"),
    [
        ("full", None, "is wrong .got 'full'"),
        ("full:x,none", None, "is wrong"),
        ("none:1,none", None, "is wrong"),
        ("none", None, "what 1 stages recompute"),
        ("none,none", "full", "cannot be combined with --recompute-granularity"),
    ],
)
def test_what_cannot_be_is_refused(text, granularity, message):
    with pytest.raises(JobError, match=message):
        by_stage(given(text, granularity=granularity))


def test_layers_compute_again_and_gradients_stay_the_same():
    with one_rank_job():
        _compute_again()


def _compute_again():
    model = make_model()
    layers = model.decoder.layers
    calls = {f"{part} {number}": 0 for part in ("layer", "attention") for number in range(3)}

    def count(name):
        return lambda *_: calls.update({name: calls[name] + 1})

    for number, layer in enumerate(layers):
        layer.register_forward_hook(count(f"layer {number}"))
        layer.self_attention.core_attention.register_forward_hook(count(f"attention {number}"))
    tokens = torch.arange(8).repeat(2, 1)
    positions, mask = torch.arange(8).repeat(2, 1), torch.ones(1, 1, 8, 8).triu(1).bool()

    def train(*ways):
        for way in ways:
            recompute([model.decoder], *way)
        calls.update(dict.fromkeys(calls, 0))
        model.zero_grad()
        model(tokens, positions, mask, labels=tokens).sum().backward()
        grads = [parameter.grad.clone() for parameter in model.parameters()]
        return [*calls.values(), grads]

    *plain, gradients = train(("none", 0))
    assert plain == [1, 1, 1, 1, 1, 1]
    for ways, expected in (
        ([("full", 1)], [2, 1, 1, 2, 1, 1]),
        ([("full", 9)], [2, 2, 2, 2, 2, 2]),
        ([("selective", 2)], [1, 1, 1, 2, 2, 1]),
        ([("full", 3), ("selective", 1)], [1, 1, 1, 2, 1, 1]),
        ([("selective", 3), ("full", 2)], [2, 2, 1, 2, 2, 1]),
        ([("full", 1), ("none", 0)], [1, 1, 1, 1, 1, 1]),
    ):
        *seen, again = train(*ways)
        assert seen == expected, ways
        assert all(map(torch.equal, gradients, again)), ways
