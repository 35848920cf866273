"""What units are seen to change beside their outputs and gradients."""

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.pipelining import Schedule1F1B

from envpipe_megatron.core.orders import builders
from envpipe_megatron.integrations.framework_units import UnitRecorder
from envpipe_megatron.integrations.levels import Level
from envpipe_megatron.integrations.torch_pipelining.orders import (
    limits_of,
    limits_seen,
    torch_order,
)
from envpipe_megatron.integrations.torch_pipelining.units import (
    BUFFERS_BY_BACKWARDS,
    DRAWN_BY_BACKWARDS,
    DRAWN_BY_FORWARDS,
    NOT_TRIED,
    Units,
)


class Stage:
    """One of torch's, whose units do what they are told to."""

    def __init__(self, forward=None, backward=None):
        self.submod = torch.nn.BatchNorm1d(2)
        self.device, self.is_last, self.stage_index = torch.device("cpu"), False, 0
        self.args_recv_info: dict[int, Any] = {}
        self._does = {"forward": forward, "backward": backward}

    def _do(self, kind):
        if self._does[kind] is not None:
            self._does[kind](self)

    def forward_one_chunk(self, microbatch):
        self._do("forward")

    def backward_one_chunk(self, microbatch):
        self._do("backward")

    def backward_weight_one_chunk(self, microbatch):
        self._do("backward")


def run_again(stage):
    """As a checkpoint's recomputation does."""
    stage.submod(torch.ones(3, 2))


@pytest.mark.parametrize(
    ("forward", "backward", "seen"),
    [
        (None, None, set()),
        (run_again, None, set()),
        (None, run_again, {BUFFERS_BY_BACKWARDS}),
        (lambda stage: torch.rand(1), None, {DRAWN_BY_FORWARDS}),
        (lambda stage: random.random(), None, {DRAWN_BY_FORWARDS}),
        (lambda stage: np.random.rand(), None, {DRAWN_BY_FORWARDS}),
        (None, lambda stage: random.random(), {DRAWN_BY_BACKWARDS}),
    ],
)
def test_what_the_order_of_units_may_change_is_seen(forward, backward, seen):
    stage: Any = Stage(forward, backward)
    units = Units([stage], str, split=False)
    units.reporter, units.seen = UnitRecorder(), set()
    stage.forward_one_chunk(0)
    stage.backward_one_chunk(0)
    assert units.seen == seen
    order = builders.interleaved(2, 4, 2)
    limits = limits_seen(order, [stage], in_order=True, seen=seen)
    assert [limit.highest for limit in limits] == [Level.UNITS] * len(seen)


@pytest.mark.parametrize(
    ("backward", "given", "seen"),
    [
        (lambda bwd_chunk_id, loss=None: loss, {"bwd_chunk_id": 2, "loss": 0.5}, "B2"),
        (lambda loss=None: loss, {"loss": 0.5}, "B"),
    ],
)
def test_a_users_schedule_may_name_a_microbatch_or_leave_it_to_the_stage(backward, given, seen):
    """And what cannot be looked at ends no step."""
    stage: Any = Stage()
    stage.is_first, stage.backward_one_chunk = False, backward
    units = Units([stage], str, split=False)
    assert stage.backward_one_chunk(**given) == 0.5
    units.reporter, units.seen, units.why_whole = UnitRecorder(), set(), {0: NOT_TRIED}
    for _ in range(2):
        assert stage.backward_one_chunk(**given) == 0.5
    assert list(map(str, units.reporter.units)) == [seen] * 2
    assert units.why_whole[0] == "torch does not run it in two parts: AttributeError"


@pytest.mark.parametrize("of", ["tensor", "module", "loss"])
def test_hooks_of_backwards_are_called_by_no_trial(of):
    x, module = torch.ones(2, requires_grad=True), torch.nn.Tanh()
    module.register_full_backward_hook(lambda *_: None)
    sets = {"tensor": lambda *_: (2 * x).register_hook(print), "module": lambda *_: module(2 * x)}
    stage: Any = Stage(sets.get(of), lambda stage: None)
    stage.is_first, stage.fwd_cache = False, {0: ((2 * x,), [x]), 1: ((2 * x,), [x])}
    stage.is_last = of == "loss"
    stage.submod, stage._retrieve_recv_grads = torch.nn.Linear(1, 1), lambda at: [x.detach()]
    units = Units([stage], str, split=False)
    schedule = SimpleNamespace(_maybe_compute_loss=sets["module"] if of == "loss" else print)
    units.report_losses_of(schedule)
    units.reporter, units.seen, units.why_whole = UnitRecorder(), set(), {0: NOT_TRIED}
    for microbatch in range(2):
        stage.forward_one_chunk(microbatch)
        schedule._maybe_compute_loss()
        stage.backward_one_chunk(microbatch)
    assert "hooks of a backward" in units.why_whole[0]


def test_an_object_gets_its_own_function_back():
    stage, schedule = Stage(), SimpleNamespace(step=print, _maybe_compute_loss=max)
    units = Units([stage], str, split=False)
    units.report_losses_of(schedule)
    units.replace(schedule, "step", min)
    assert (schedule.step, vars(stage).keys() >= {"forward_one_chunk"}) == (min, True)
    units.release()
    assert (schedule.step, schedule._maybe_compute_loss) == (print, max)
    assert "forward_one_chunk" not in vars(stage)


@pytest.mark.parametrize("name", ["step", "_compute_loss", "_check_inputs", "_initialize_stage"])
def test_a_schedule_with_a_function_of_its_own_keeps_its_order(name):
    """Another order runs in a schedule of torch's, which has not got it."""
    order, stage = builders.one_f_one_b(2, 4), Stage()
    harmless = {"_get_pipeline_order": print, "mine": print, "__init__": print}
    bare = object.__new__(type("OnesOwn", (Schedule1F1B,), harmless))
    assert limits_of(bare, order, "", [stage]) == []
    of_object = object.__new__(Schedule1F1B)
    setattr(of_object, name, print)
    of_class = object.__new__(type("OnesOwn", (Schedule1F1B,), {name: print}))
    for schedule in (of_object, of_class):
        (limit,) = limits_of(schedule, order, "", [stage])
        assert (limit.highest, limit.feature) == (Level.UNITS, f"{name} of the user's")


def test_a_class_of_ones_own_has_the_order_of_torchs_class_below_it():
    schedule = object.__new__(type("OnesOwn", (Schedule1F1B,), {}))
    schedule._stage = SimpleNamespace(stage_index=1, num_stages=2)
    schedule._n_microbatches = np.int64(4)  # which no JSON has
    order = torch_order(schedule)
    assert order.stages == builders.one_f_one_b(2, 4).stages
    assert type(order.num_microbatches) is int
