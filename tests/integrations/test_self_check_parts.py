"""What a self-check compares, and what it puts back before an iteration runs again."""

import sys
import threading
from collections import UserDict
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
from leveled_jobs import begin

from envpipe_megatron.integrations.levels import Level

# One worker imports megatron-core, which takes seconds, and none does to collect tests.
pytestmark = pytest.mark.xdist_group("megatron")


@pytest.fixture(scope="module", autouse=True)
def megatron():
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")


class Router(torch.nn.Module):
    """With all kinds of state, of which a forward changes each."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.register_buffer("tokens", torch.zeros(3))
        self.scale = torch.ones(2)
        self.calls = 0
        self.seen: list[object] = [1]
        self.sums: dict[str, object] = {}

    def forward(self, data):
        kept = torch.rand(3) < 0.5
        self.tokens += kept
        self.scale = self.scale * 2
        self.calls += 1
        self.seen.append(kept)
        self.sums["loss"] = kept.sum()
        return (self.weight * kept * data.pop("x")).sum()


def state(router):
    held = router.tokens.tolist(), router.scale.tolist(), router.calls
    return *held, len(router.seen), sorted(router.sums)


def test_each_run_begins_where_the_first_one_did():
    from envpipe_megatron.integrations.megatron.repeating import RepeatedIteration

    router, lock = Router(), threading.Lock()
    drawn = iter([{"x": torch.arange(3.0), "lock": lock}, {"x": torch.ones(3)}])
    iteration = RepeatedIteration([router], [drawn, None])
    began, ended = [], []

    def run(data):
        iterator, nothing = data
        assert nothing is None
        assert router.weight.grad is None
        began.append(state(router))
        loss = sum(router(next(iterator)) for _ in range(2))  # type: ignore[call-overload]
        loss.backward()
        ended.append((*state(router), loss.item(), router.weight.grad.tolist()))
        return loss.item()

    first = iteration.run(run)
    assert [iteration.run(run) for _ in range(2)] == [first] * 2
    assert began == [((0.0,) * 3 and [0.0] * 3, [1.0, 1.0], 0, 1, [])] * 3
    assert ended == [ended[0]] * 3
    assert ended[0][2] == 2


def test_data_that_come_in_the_same_memory_are_those_of_the_first_run():
    """Else training would go on from gradients of the last microbatch only."""
    from envpipe_megatron.integrations.megatron.repeating import RepeatedIteration

    buffer = torch.zeros(1)
    source = (buffer.fill_(number) for number in range(3))
    iteration = RepeatedIteration([], source)
    for _ in range(2):
        assert iteration.run(lambda data: [item.item() for item in data]) == [0.0, 1.0, 2.0]


def test_batches_of_any_class_are_those_of_the_first_run():
    from envpipe_megatron.integrations.megatron.repeating import RepeatedIteration

    iteration = RepeatedIteration([], iter([UserDict(x=torch.ones(2), y=[3])]))

    def run(data):
        batch = next(data)
        return batch.pop("x").mul_(2).tolist(), batch["y"].pop()

    assert [iteration.run(run) for _ in range(2)] == [([2.0, 2.0], 3)] * 2


def test_sums_for_the_log_are_those_of_one_run():
    from megatron.core.transformer.moe import moe_utils

    from envpipe_megatron.integrations.megatron.repeating import RepeatedIteration

    if not hasattr(moe_utils, "save_to_aux_losses_tracker"):
        pytest.skip("megatron-core from 0.18 on sums up elsewhere")
    sums = moe_utils.get_moe_layer_wise_logging_tracker()

    def run(data):
        for loss in (1.0, 2.0):
            moe_utils.save_to_aux_losses_tracker("load", torch.tensor(loss), 1, 2)
        return list(sums["load"]["values"].tolist())

    try:
        for _ in range(2):  # before there is a sum at all, and where the last one is cleared
            iteration = RepeatedIteration([], iter(()))
            assert [iteration.run(run) for _ in range(3)] == [[3.0, 0.0]] * 3
            moe_utils.clear_aux_losses_tracker()
    finally:
        sums.clear()


def test_operations_are_counted_once(monkeypatch):
    """By Megatron-LM, in its module, and by Megatron-Bridge, in a state that it binds."""
    from envpipe_megatron.integrations.megatron.repeating import RepeatedIteration

    lengths, state = torch.zeros(2), SimpleNamespace(_flops_seqlen_sum=0, logger=object())
    module = SimpleNamespace(_seqlen_stats_in_iteration=lengths)
    monkeypatch.setitem(sys.modules, "megatron.training.training", module)
    iteration = RepeatedIteration([], iter(()), (SimpleNamespace, state))

    def run(_):
        lengths.add_(3)
        # Of packed sequences it becomes a tensor.
        state._flops_seqlen_sum = state._flops_seqlen_sum + torch.tensor(5)

    for _ in range(3):
        iteration.run(run)
    assert (lengths.tolist(), state._flops_seqlen_sum) == ([3.0, 3.0], 5)


def checked_session(num_microbatches: int) -> Any:
    """A session of one stage, whose backwards stay whole."""
    collectives = SimpleNamespace(stage=0, on_all=bool)
    parts = SimpleNamespace(
        channel=SimpleNamespace(capacity=None), collectives=collectives, say=print
    )
    options = SimpleNamespace(num_microbatches=num_microbatches)
    return SimpleNamespace(parts=parts, options=options, may_split=False)


@pytest.mark.parametrize("orders", [["own"], ["own", "longer"]])
def test_a_batch_that_admits_fewer_orders_than_a_full_one_is_not_checked(orders):
    """It would pass, and a full one's order would be run unchecked."""
    from envpipe_megatron.integrations.megatron.self_check import SelfCheck

    def orders_of(count):
        return ["own", "regrouped", "longer"] if count == 8 else orders

    check = SelfCheck(checked_session(8), orders_of, needed=True)  # type: ignore[arg-type]
    losses = check({"num_microbatches": 2}, None, lambda **given: [given], None)  # type: ignore[arg-type, return-value]
    assert losses == [{"num_microbatches": 2}]
    assert not check.done


class Step:
    """A forward step that counts, and has a job's arguments as `args`, of which it is not bound."""

    def __init__(self):
        self.args = SimpleNamespace(num_layers=2)
        self.count = 0

    def __call__(self, *_):
        self.count += 1
        return self.count


@pytest.mark.parametrize("binds", [(), ("state",)])
def test_a_forward_step_that_is_an_object_counts_an_iteration_once(monkeypatch, binds):
    from envpipe_megatron.integrations.megatron import self_check

    monkeypatch.setattr(self_check, "_Memory", lambda *_: None)
    monkeypatch.setattr(self_check.SelfCheck, "_that_fits", lambda *_, **__: None)
    check = self_check.SelfCheck(checked_session(1), lambda count: ["own"], needed=True)  # type: ignore[arg-type, list-item]
    given: Any = {"num_microbatches": 1, "model": torch.nn.Linear(1, 1), "data_iterator": iter(())}
    given["forward_step_func"] = partial(Step(), *binds) if binds else Step()
    counts = []
    check(given, None, lambda **own: counts.append(own["forward_step_func"]()) or [], None)  # type: ignore[arg-type, func-returns-value]
    assert counts == [1, 1]


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(
    ("has_room", "group_sizes", "found"),
    [(True, (2, 3), 1), (True, (2,), 1), (False, (2, 3), None), (False, (2,), 0)],
)
def test_a_sequence_that_there_is_no_room_to_try_fails_the_check(
    has_room, group_sizes, found, split
):
    """A forward more need not be tried where memory has none for it."""
    from envpipe_megatron.core.orders import builders
    from envpipe_megatron.core.orders.builders import split_late
    from envpipe_megatron.integrations.megatron.self_check import SelfCheck

    own, *regrouped = (builders.interleaved(2, 12, 2, size) for size in group_sizes)
    orders = [own, *regrouped, builders.interleaved(2, 12, 2, 2, extra_warmup=[1, 0])]
    check = SelfCheck(checked_session(12), lambda count: orders, needed=True)
    kept = split_late(own) if split else own
    memory: Any = SimpleNamespace(has_room=lambda _, other: has_room or other.stages == kept.stages)
    order = check._that_fits(own, orders[1:], memory, split=split)
    if found is None:
        assert order is None
    else:
        assert order == (split_late(orders[found]) if split else orders[found])


GIB = 2**30


@pytest.mark.parametrize(
    ("recomputes", "free_gib", "fits"),
    [(False, 1.4, (False, False)), (False, 1.6, (True, True)), (True, 1.6, (True, False)),
     (True, 40.0, (True, True))],
)  # fmt: skip
def test_room_for_what_waits_between_two_parts_is_that_of_linear_layers(
    monkeypatch, recomputes, free_gib, fits
):
    """With recomputation a microbatch in flight holds next to nothing, and such a wait much."""
    from envpipe_megatron.core.orders import builders
    from envpipe_megatron.core.orders.builders import split_late
    from envpipe_megatron.integrations.megatron import self_check
    from envpipe_megatron.runtime.memory.stage import Reading

    device = SimpleNamespace(capacity_bytes=lambda: (14 + free_gib) * GIB)
    device.read = lambda: Reading(allocated_bytes=10 * GIB, peak_bytes=14 * GIB)
    monkeypatch.setattr(self_check, "device_memory", lambda: device)
    width = 4096 if recomputes else 8
    model = torch.nn.ModuleDict({"embedding": torch.nn.Linear(2**14, 2**14, device="meta")})
    model["layers"] = torch.nn.Sequential(
        *(torch.nn.Linear(width, 3 * width, device="meta") for _ in range(8))
    )
    model.config = SimpleNamespace(
        context_parallel_size=2, num_moe_experts=None, moe_router_topk=2,
        expert_model_parallel_size=1,
    )  # fmt: skip
    memory = self_check._Memory({"model": model, "seq_length": 4096, "micro_batch_size": 4}, 0)
    # Where it recomputes, 4 GiB: 8192 tokens, 16384 elements of 4 bytes a token, 8 layers.
    own, longer = builders.one_f_one_b(4, 8), builders.envpipe(4, 8, [1, 0, 0, 0])
    assert memory.has_room(own, own)
    for peak_gib in (14, 18):  # the second is of an order that was tried and is wrong
        device.read = lambda peak=peak_gib * GIB: Reading(10 * GIB, peak)
        assert (memory.has_room(own, longer), memory.has_room(own, split_late(own))) == fits


def test_a_step_without_memory_for_messages_is_megatrons_and_the_level_falls():
    from envpipe_megatron.integrations.megatron.training import Training
    from envpipe_megatron.runtime.memory.peak import MemoryFullError

    def full(own, **arguments):
        raise MemoryFullError("too little of a test")

    training, made, said = begin(Training)
    # Where the GPU cannot be read by then, all later steps are Megatron's as well.
    training.options = replace(training.options, gpu_control="none")
    stand_in = {"end_step": lambda own, skipped: None, "__call__": full}
    training._replacement, training._framework_function = type("Full", (), stand_in)(), dict
    assert training._forward_backward(model="m") == {"model": "m"}
    assert training.level is Level.ORDER, "within the step"
    for _ in range(2):
        training.end_step(skipped=False)
    assert training.level is Level.UNITS
    assert str(training.decision).endswith("this job (too little of a test)")
    assert (len(made), said, training.job) == (1, ["level order; active"], None)
    assert training._forward_backward(model="n") == {"model": "n"}
    assert training.in_place_of(dict)(model="n") == {"model": "n"}


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("may_split", [False, True])
def test_a_job_checks_what_its_table_says_and_split_backwards(monkeypatch, checked, may_split):
    from envpipe_megatron.core.orders import builders
    from envpipe_megatron.integrations.megatron import training as module

    orders = [builders.one_f_one_b(2, 4), builders.envpipe(2, 4, [1, 0])]
    monkeypatch.setattr(module, "orders_to_try", lambda args, model, count, regroups: orders)
    training, (job,), _ = begin(module.Training)
    job.session.may_split = may_split
    training._args, training._checked = SimpleNamespace(seq_length=8), checked
    training._microbatches, training._model = 4, []
    check = training._make_replacement(dict)._check
    if not checked and not may_split:
        assert check is None
        return
    assert check._needed == checked
    assert check._keep_whole == (job.session.split_no_more if may_split else None)
