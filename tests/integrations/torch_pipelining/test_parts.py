"""What is found out of a stage's backward before it is split."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from attached_ranks import OwnLinear
from torch.distributed._composable import checkpoint as composed
from torch.distributed.pipelining import _backward
from torch.utils.checkpoint import checkpoint

from envpipe_megatron.integrations.torch_pipelining import units
from envpipe_megatron.integrations.torch_pipelining.units import (
    calls_of_modules,
    known_reason,
    seen_reason,
)

WIDTH = 4


class Model(torch.nn.Module):
    """Computes what a test says of a few layers."""

    def __init__(self, compute):
        super().__init__()
        torch.manual_seed(1)
        self.compute = compute
        self.weight, self.apart = (torch.nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(2))
        self.linear, self.norm = torch.nn.Linear(WIDTH, WIDTH), torch.nn.LayerNorm(WIDTH)
        self.layer = torch.nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, batch_first=True)

    def forward(self, x):
        return self.compute(self, x)


def stage_of(compute):
    """One that has run the forward of microbatch 0, and got its gradients."""
    model = Model(compute)
    x = torch.randn(WIDTH, WIDTH, requires_grad=True)
    made = model(x)
    outputs = made if isinstance(made, tuple) else (made,)
    return SimpleNamespace(
        submod=model,
        dw_builder=None,
        is_first=False,
        is_last=False,
        fwd_cache={0: (outputs, [x])},
        _retrieve_recv_grads=lambda at: [
            torch.randn(WIDTH, WIDTH) if each.requires_grad else None for each in outputs
        ],
    )


SHARED = "a weight's gradient has the memory of another"
TWICE = "a weight is used more than once"
#: What a stage computes, and why its backwards stay whole, if they do.
STAGES = {
    "linear": (lambda of, x: of.norm(of.linear(x) @ of.weight).tanh(), ""),
    "transformer": (lambda of, x: of.layer(x[None])[0].tanh(), ""),
    "bias added": (lambda of, x: x @ of.weight + of.linear.bias, ""),
    "whole weight added behind": (lambda of, x: x @ of.weight + of.apart, SHARED),
    "whole weight added before": (lambda of, x: (x + of.apart) @ of.weight, SHARED),
    "weight twice": (lambda of, x: (x @ of.weight).tanh() @ of.weight, TWICE),
    "weight twice beside": (lambda of, x: x @ of.weight + x.tanh() @ of.weight, TWICE),
    "own function": (
        lambda of, x: OwnLinear.apply(x, of.weight),
        "weights are used by OwnLinearBackward",
    ),
    "weight past the input": (
        lambda of, x: (x @ of.weight, of.apart.tanh()),
        "other bits: gradients of apart",
    ),
    "mask as output": (lambda of, x: (x @ of.weight, x > 0), ""),
    "view as output": (lambda of, x: (x @ of.weight).view(-1), "an output is a view"),
    "reentrant checkpoint": (
        lambda of, x: checkpoint(of.linear, x, use_reentrant=True),
        "torch does not run it in two parts: RuntimeError",
    ),
}


@pytest.mark.parametrize(("compute", "why"), STAGES.values(), ids=STAGES)
def test_backwards_that_stay_whole_are_known_by_one_of_them(compute, why):
    """And gradients are as they were, with the graph for the job's own backward."""
    stage = stage_of(compute)
    model, (outputs, (x,)) = stage.submod, stage.fwd_cache[0]
    given = torch.ones(WIDTH, WIDTH)
    model.weight.grad = given
    found = seen_reason(stage, 0, None, str)
    assert why in found
    assert bool(found) == bool(why)
    assert model.weight.grad is given
    assert given.unique().tolist() == [1.0]
    assert [x.grad, model.linear.weight.grad, model.apart.grad] == [None] * 3
    learned = [each for each in outputs if each.requires_grad]
    torch.autograd.backward(learned, [torch.ones_like(each) for each in learned])


def test_other_bits_are_noticed(monkeypatch):
    """As those of torch 2.12 and before are, which counts some gradients twice."""
    stage = stage_of(lambda of, x: of.linear(x))
    own = _backward.stage_backward_weight

    def twice(weights, groups, retain_graph=False):
        given = list(weights)
        own(iter(given), groups, retain_graph)
        given[2].grad[0, 0] = torch.nextafter(given[2].grad[0, 0], torch.tensor(9.0))

    monkeypatch.setattr(_backward, "stage_backward_weight", twice)
    assert "its two parts give other bits" in seen_reason(stage, 0, None, str)


@pytest.mark.parametrize(
    ("noise", "wrong", "why"),
    [
        (1e-4, 0.0, ""),
        (1e-4, 0.01, "gradients of linear.bias differ by"),
        (1.0, 0.0, "gradients of two runs of one order differ by"),
    ],
    ids=["alike", "apart", "too noisy"],
)
def test_parts_may_differ_as_much_as_two_whole_backwards(monkeypatch, noise, wrong, why):
    """As with kernels of attention on GPUs, which add in any order."""

    def compute(of, x):
        y = of.linear(x).tanh()
        y.register_hook(lambda gradient: gradient * (1 + noise * torch.rand(WIDTH, WIDTH)))
        return y @ of.weight

    stage, own = stage_of(compute), _backward.stage_backward_weight

    def parts(weights, groups, retain_graph=False):
        own(weights, groups, retain_graph)
        stage.submod.linear.bias.grad *= 1 + wrong

    monkeypatch.setattr(_backward, "stage_backward_weight", parts)
    found = seen_reason(stage, 0, None, str)
    assert (why in found, bool(found)) == (True, bool(why))


def test_parts_that_are_equal_once_may_differ_at_first():
    """Where two whole backwards agree by chance, the parts have their bits in one of few runs."""
    runs = iter([1e-4])

    def compute(of, x):
        y = of.linear(x)
        y.register_hook(lambda gradient: gradient * (1 + next(runs, 0.0)))
        return y

    assert seen_reason(stage_of(compute), 0, None, str) == ""


def test_all_ranks_of_a_stage_run_as_many_backwards():
    """Those of tensor parallelism send each other parts of gradients within."""
    run = []
    for noise in (0.0, 1e-4, 1.0):
        counted = []

        def compute(of, x, noise=noise, counted=counted):
            y = of.linear(x).tanh()
            y.register_hook(lambda gradient: counted.append(1))
            y.register_hook(lambda gradient: gradient * (1 + noise * torch.rand(WIDTH, WIDTH)))
            return y @ of.weight

        seen_reason(stage_of(compute), 0, None, str)
        run.append(len(counted))
    assert len(set(run)) == 1


def test_without_memory_no_part_is_run(monkeypatch):
    stage, run = stage_of(lambda of, x: of.linear(x)), []
    outputs, _ = stage.fwd_cache[0]
    outputs[0].register_hook(run.append)
    with monkeypatch.context() as full:
        full.setattr(units, "_free_bytes", lambda device: 2 * stage.submod.weight.nbytes)
        assert seen_reason(stage, 0, None, str) == "memory has no room to try it in two parts"
    with monkeypatch.context() as taken:  # by another process, since the driver was asked
        taken.setattr(torch, "empty", Mock(side_effect=torch.OutOfMemoryError))
        assert "OutOfMemoryError" in seen_reason(stage, 0, None, str)
    assert seen_reason(stage, 0, None, lambda why: "another rank has none") == (
        "another rank has none"
    )
    assert not run


def test_weights_without_elements_share_no_memory():
    """As the last ranks have where tensor parallelism does not divide a weight."""

    def compute(of, x):
        return of.linear(x) + of.weight.sum() + of.apart.sum()

    stage = stage_of(compute)
    stage.submod.weight, stage.submod.apart = (torch.nn.Parameter(torch.empty(0)) for _ in "ab")
    outputs = (stage.submod(stage.fwd_cache[0][1][0]),)
    stage.fwd_cache[0] = outputs, stage.fwd_cache[0][1]
    assert seen_reason(stage, 0, None, str) == ""


def test_what_is_computed_again_is_seen():
    for again in (False, True):
        stage = stage_of(
            lambda of, x, again=again: (
                checkpoint(of.linear, x, use_reentrant=False) if again else of.linear(x)
            )
        )
        outputs, _ = stage.fwd_cache[0]
        with calls_of_modules() as called:
            outputs[0].sum().backward()
        assert called == ["Linear"] * again


def test_what_is_known_before_a_step():
    stage = stage_of(lambda of, x: of.linear(x))
    assert known_reason([stage]) == ""
    hook = stage.submod.weight.register_hook(lambda gradient: None)
    assert "hooks" in known_reason([stage])
    hook.remove()
    assert known_reason([stage]) == ""
    stage.submod.weight.register_post_accumulate_grad_hook(lambda weight: None)
    assert "hooks" in known_reason([stage])
    stage = stage_of(lambda of, x: of.linear(x))
    stage.dw_builder = lambda: None
    assert "dw_builder" in known_reason([stage])
    composed(stage.submod.linear)
    assert "with checkpoint their parts" in known_reason([stage])
