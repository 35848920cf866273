"""What is the same in two runs, and what differs by chance."""

import math

import pytest
import torch

from envpipe_megatron.integrations.outcome import Outcome


def outcome(**gradients):
    return Outcome.of(gradients, [{"loss": torch.tensor(2.0)}])


def noisy(gradient, share):
    return gradient * (1 + share * torch.randn(gradient.shape))


def test_equal_is_to_the_last_bit_of_every_gradient():
    torch.manual_seed(1)
    one, large = torch.randn(5), torch.randn(70_000)
    same = outcome(a=one, b=large)
    assert same.differs_from(outcome(a=one.clone(), b=large.clone())) is None
    swapped = large.clone()
    swapped[[9, 60_001]] = swapped[[60_001, 9]]
    assert same.differs_from(outcome(a=one, b=swapped)) == "gradients of b"
    assert same.differs_from(outcome(b=large)) == "gradients of a"
    halves = outcome(a=one.bfloat16())
    assert halves.differs_from(outcome(a=one.bfloat16())) is None


def test_a_stage_without_losses_may_have_another_default_device():
    with torch.device("meta"):
        assert Outcome.of({}).differs_from(Outcome.of({})) is None


def test_gradients_that_are_no_numbers_are_seen_wherever_they_are():
    large = torch.ones(70_000)
    assert outcome(a=large).finite
    for number in (math.nan, math.inf):
        large[12_345] = number
        assert not outcome(a=large).finite


def test_what_is_further_than_chance_is_named():
    torch.manual_seed(2)
    weight, nothing = torch.randn(400), 1e-9 * torch.randn(40)

    def run(w):
        return outcome(w=noisy(w, 1e-4), nothing=1e-9 * torch.randn(40), last=noisy(weight, 1e-4))

    first, again = outcome(w=weight, nothing=nothing, last=weight), run(weight)
    assert first.noise(again) == pytest.approx(1e-4, rel=0.2)
    assert first.strays_from(run(weight), again) is None
    for wrong in (torch.zeros(400), weight * 0.99, torch.full((400,), math.nan)):
        assert "gradients of w differ" in str(first.strays_from(run(wrong), again))
    calm = torch.ones(9)
    behind = outcome(w=weight, a=calm, b=calm, c=calm)  # of kernels that always give the same
    assert behind.noise(outcome(w=noisy(weight, 1e-4), a=calm, b=calm, c=calm)) > 5e-5
    far = outcome(w=noisy(weight, 0.1), nothing=nothing, last=noisy(weight, 0.1))
    assert "gradients of two runs of one order differ" in str(first.strays_from(run(weight), far))


def test_a_large_gradient_is_looked_at_in_all_columns():
    torch.manual_seed(3)
    weight, other = torch.randn(8192, 512), torch.randn(400)
    weight[:, ::16] = 0.0  # of dead neurons

    def run(w):
        return outcome(w=noisy(w, 1e-5), other=noisy(other, 1e-5))

    first, again = run(weight), run(weight)
    assert first.strays_from(run(weight), again) is None
    assert "gradients of w differ" in str(first.strays_from(run(weight / 2), again))
