"""One-sided copies on fake GPUs: what comes is what was sent, and every order finishes."""

import random
import weakref
from collections.abc import Callable
from functools import partial
from itertools import count

import pytest
import torch
from fake_device import DeviceSpec, FakeStream
from on_request import examples
from plain_stages import expect
from put_pipeline import SHAPE, PutPipeline
from random_orders import random_order
from taking_turns import HangError

from envpipe_megatron.core.channel_model import completes, slots_of
from envpipe_megatron.core.kinds import WHOLE, Kind, unit
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.runtime.channel import puts
from envpipe_megatron.runtime.channel.carrier import ChannelError, StageSpecs
from envpipe_megatron.runtime.channel.flag_page import PUT, TAKEN

FORWARD = (
    torch.randn(2, 3),
    torch.arange(5),
    torch.tensor([True, False, True]),
    torch.empty(0, 4),
    torch.tensor(2.5, dtype=torch.bfloat16),
    torch.randn(300).to(torch.float8_e4m3fn),
)
BACKWARD = (torch.randn(7).to(torch.bfloat16), torch.randn(3, 2).t())


def any_order(rng: random.Random) -> Schedule:
    """EnvPipe's order of 2 to 4 stages with random extra forwards, or units in any sequence."""
    if rng.random() < 0.5:
        size = rng.randint(2, 4), rng.randint(1, 6), rng.randint(1, 2)
        return random_order(rng, *size, split=rng.random() < 0.5)
    stages = rng.randint(2, 4)
    microbatches = rng.randint(stages, 8)
    extra: list[int] = []
    for stage in range(stages):
        most = max(0, microbatches - stages + stage)
        extra.append(rng.randint(0, min(most, extra[-1] + 1) if extra else most))
    return builders.envpipe(stages, microbatches, extra)


@pytest.mark.parametrize("one_queue", [False, True])
def test_messages_come_as_they_were_sent(pipeline, one_queue):
    """Of several shapes and types, others backward; none waits for one to be taken first."""
    made = pipeline(2, one_queue=one_queue)
    messages = {Kind.FORWARD: FORWARD, Kind.BACKWARD: BACKWARD}
    by_kind = {kind: DeviceSpec.on(made.devices, *like) for kind, like in messages.items()}
    specs = StageSpecs(by_kind, by_kind)

    def sent(kind: Kind, number: int) -> list[torch.Tensor]:
        return [(t.float() * (number + 1)).to(t.dtype) for t in messages[kind]]

    def host(stage: int) -> None:
        channel = made.channels[stage]
        goes, comes = list(WHOLE) if stage == 0 else list(WHOLE)[::-1]
        expect(channel, [unit(comes, number) for number in range(3)], specs)
        got = []
        for number in range(3):
            channel.send(unit(goes, number), sent(goes, number))
            got.append(channel.receive(unit(comes, number)))
        made.devices[stage].synchronize()
        channel.end_step()
        for number, tensors in enumerate(got):
            for tensor, wanted in zip(tensors, sent(comes, number), strict=True):
                assert (tensor.shape, tensor.dtype) == (wanted.shape, wanted.dtype)
                assert tensor.requires_grad is (
                    comes is Kind.FORWARD and wanted.is_floating_point()
                )
                assert torch.equal(tensor.detach().float(), wanted.float())

    assert made.turns.run(lambda: host(0), lambda: host(1)) == [None, None]


@pytest.mark.parametrize("one_queue", [False, True])
@pytest.mark.parametrize("seed", range(examples(12)))
def test_random_orders_finish_whoever_is_slow(pipeline, seed, one_queue):
    """Also where units wait for the whole device, and with a single hardware queue."""
    rng = random.Random(seed)
    order = any_order(rng)
    for syncs in (0.0, 0.3, 1.0):
        wraps = order.num_chunks > 1
        made = pipeline(order.num_stages, seed=rng.random(), one_queue=one_queue, wraps=wraps)
        steps = rng.randint(1, 3)
        assert made.train([order] * steps, syncs=syncs) == [None] * order.num_stages
        assert all(len(ran) == steps * order.units_per_stage for ran in made.ran)


@pytest.mark.parametrize("seed", range(examples(30)))
def test_one_queue_finishes_exactly_where_the_model_does(pipeline, seed, monkeypatch):
    """With fewer slots than are needed the device hangs: `channel_model` is no more than true."""
    rng = random.Random(seed)
    order = any_order(rng)
    for slots in (1, 2, 3):
        wraps = order.num_chunks > 1
        made = pipeline(order.num_stages, seed=seed, one_queue=True, wraps=wraps)
        made.turns.watchers.clear()  # they would call the hang a silent neighbour
        for side in made.sides:
            monkeypatch.setattr(side, "slots", lambda schedule, size, slots=slots: slots)
        if completes(order, slots):
            assert made.train([order]) == [None] * order.num_stages
        else:
            with pytest.raises(HangError):
                made.train([order])


def test_slots_grow_with_the_order_and_the_messages_between_steps(pipeline):
    made = pipeline(2, budget_bytes=8 * 256)
    small, deep = builders.one_f_one_b(2, 8), builders.envpipe(2, 8, (6, 0))

    def slots() -> list[tuple[int, int]]:
        return [(c._slots, c._slot_bytes) for s in made.sides for c in s.carriers]

    assert made.train([small]) == [None, None]
    assert slots() == [(slots_of(small, 8), 256)] * 2
    assert made.train([deep, small]) == [None, None]
    assert slots() == [(slots_of(deep, 8), 256)] * 2
    made.specs = StageSpecs.alike(DeviceSpec.on(made.devices, torch.empty(100), torch.empty(1)))
    assert made.train([deep, deep]) == [None, None]
    # Less than the order would like, by the budget, and never less than it has had.
    assert slots() == [(slots_of(deep, 8), 768)] * 2
    assert slots_of(deep, 8 * 256 // 768) < slots_of(deep, 8)


def test_messages_are_counted_beyond_32_bits(pipeline):
    made = pipeline(2)
    order = builders.one_f_one_b(2, 8)
    first = 2**32 - 5
    for side in made.sides:
        for carrier in side.carriers:
            carrier._put = carrier._taken = first
            for what in (PUT, TAKEN):
                carrier.page.own(what).set(first)
    assert made.train([order, order], syncs=0.2) == [None, None]
    assert [page.own(PUT).value for page in made.pages] == [11, 11]


@pytest.mark.parametrize("lost", range(2))
def test_a_message_that_is_not_as_agreed_ends_the_job(pipeline, lost):
    made = pipeline(2)
    order = builders.one_f_one_b(2, 3)

    def host(stage: int) -> None:
        channel = made.channels[stage]
        channel.begin_step(order, made.specs)
        shape = (2, 4) if stage == lost else SHAPE
        channel.send(unit(list(WHOLE)[stage], 0), [torch.zeros(shape)])

    outcomes = made.turns.run(lambda: host(0), lambda: host(1))
    name = "FB"[lost]
    said = rf"The output of {name}0 has another size .* agreed on, \[24\] \(got 32\)"
    with pytest.raises(ChannelError, match=said):
        raise outcomes[lost]
    assert outcomes[1 - lost] is None


def test_messages_that_no_unit_took_end_the_step(pipeline):
    made = pipeline(2)

    def host(stage: int) -> None:
        channel = made.channels[stage]
        channel.begin_step(builders.one_f_one_b(2, 3), made.specs)
        made.devices[stage].synchronize()
        channel.end_step()

    for stage, error in enumerate(made.turns.run(lambda: host(0), lambda: host(1))):
        with pytest.raises(ChannelError, match=rf"Stage {stage} .*\(got {'bf'[stage]}\w+: 3\)"):
            raise error


def probe(made: PutPipeline, *hosts: Callable[[], None]) -> list[BaseException | None]:
    """A first message each way, of which the hosts look at what came."""
    for device in made.devices:
        device.blocks = True
    outcomes = made.turns.run(*(hosts or (side.carriers[0].probe for side in made.sides)))
    for device in made.devices:
        device.blocks = False
    return outcomes


def test_a_first_message_that_does_not_come_is_an_error(pipeline):
    made = pipeline(2)
    (one,) = made.sides[0].carriers

    def silent() -> None:
        made.devices[1].share(0, 1, puts._PROBE_BYTES)

    error, _ = probe(made, one.probe, silent)
    assert "no message came in 20 s" in str(error)


@pytest.mark.parametrize("wrong", [0, 20, 31])
def test_one_wrong_byte_in_one_of_the_first_messages_is_an_error(pipeline, monkeypatch, wrong):
    """Both sides go through all of them: neither waits for one that does not come."""
    copy, copies = FakeStream.copy, count()

    def almost_copies(stream: FakeStream, into: torch.Tensor, source: torch.Tensor) -> None:
        copy(stream, into, source)
        if next(copies) == wrong:
            byte = stream._device.seen(into)[-7:-6]
            stream.run(lambda: byte.add_(1))

    monkeypatch.setattr(FakeStream, "copy", almost_copies)
    made = pipeline(2)
    (error,) = (error for error in probe(made) if error is not None)
    with pytest.raises(RuntimeError, match="other contents"):
        raise error
    assert next(copies) == 2 * 2 * 8  # both sides put and take each message
    assert made.turns.now_s < 20


def test_with_little_memory_there_are_as_few_slots_as_the_order_needs(pipeline):
    """At one boundary, so that there is some for the other."""
    made = pipeline(3, budget_bytes=8 * 256)
    order = builders.one_f_one_b(3, 8)
    needed, liked = slots_of(order, 1), slots_of(order, 8)
    made.devices[1].free_bytes = (2 * needed + liked) * 256
    rooms = made.turns.run(*(partial(c.make_room, order, made.specs) for c in made.channels))
    assert rooms == [True] * 3
    assert made.train([order, order]) == [None] * 3
    slots = [[c._slots for c in side.carriers] for side in made.sides]
    assert slots == [[liked], [liked, needed], [needed]]


def test_an_order_that_there_is_no_memory_for_leaves_both_sides_as_they_were(pipeline):
    made = pipeline(2, budget_bytes=256)
    shallow, deep = builders.one_f_one_b(2, 8), builders.envpipe(2, 8, (6, 0))
    assert made.train([shallow]) == [None, None]
    made.devices[1].free_bytes = 0
    rooms = made.turns.run(*(partial(c.make_room, deep, made.specs) for c in made.channels))
    assert rooms == [False, False]
    assert made.train([shallow, shallow]) == [None, None]  # whose messages are checked
    with pytest.raises(ChannelError, match="no memory for their messages"):
        raise next(error for error in made.train([deep]) if isinstance(error, ChannelError))


def test_a_channel_that_is_closed_gives_its_memory_back(pipeline):
    made = pipeline(3)
    for device in made.devices:
        device.free_bytes = 2**20
    assert made.train([builders.one_f_one_b(3, 8)]) == [None] * 3
    assert made.devices[1].free_bytes < 2**20
    pages = [weakref.ref(page) for page in made.pages]
    assert made.turns.run(*(channel.close for channel in made.channels)) == [None] * 3
    assert [device.free_bytes for device in made.devices] == [2**20] * 3
    assert made.turns.run(*(channel.close for channel in made.channels)) == [None] * 3  # again
    made.pages.clear()
    for device in made.devices:
        device._pages.clear()
        device.written.clear()
    assert not any(page() for page in pages)


def test_a_channel_whose_neighbour_does_not_close_is_left(pipeline, caplog):
    made = pipeline(2)
    assert made.train([builders.one_f_one_b(2, 4)]) == [None, None]
    assert made.turns.run(made.channels[0].close, lambda: None) == [None, None]
    assert "Memory of messages stays taken: the other side has not come" in caplog.text
