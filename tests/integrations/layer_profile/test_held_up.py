"""A layer profile has what is undisturbed, where a host that others use is held up at times."""

import math
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from envpipe_megatron.integrations.layer_profile import job  # noqa: E402
from envpipe_megatron.integrations.layer_profile.job import measure_pieces  # noqa: E402
from envpipe_megatron.integrations.layer_profile.rank_gpu import Looks, Window  # noqa: E402
from envpipe_megatron.search.layer_profile import FULL  # noqa: E402

#: Of each piece; the host hands forward and backward over in more time than the device needs.
FORWARD_S, BACKWARD_S, HOST_S, DATA_S = 1.25, 2.75, 6.0, 0.25
SLOW, RESTED = 1.9, 0.75
LAYER_W, AROUND_W = 300.0, 200.0
ROW = 4


class Gpu:
    """Of two clocks; windows begin at the number of pieces that run in them."""

    name, frequency_mhz = "a GPU", (2000, 1000)

    def set(self, frequency_mhz):
        pass

    def energies_j(self, windows):
        """Those of a run of which all but an embedding and a loss is layers'."""
        return [
            (each.end_s - each.begin_s) / each.runs
            * (2 * AROUND_W + (each.begin_s - 2) * LAYER_W) / each.begin_s
            for each in windows
        ]  # fmt: skip


class Layers:
    """Stands for a model's pieces."""

    names = ("embedding", "layer", "loss")
    longest_row = ROW

    def __init__(self):
        self.length, self.way = ROW, None

    @property
    def slots(self):
        return ["embedding", *["layer"] * self.length, "loss"]

    def ways(self, piece):
        return (FULL,) if piece == "layer" else ()

    @contextmanager
    def rows(self, most):
        before, self.length = self.length, min(most, ROW)
        yield
        self.length = before

    @contextmanager
    def recomputing(self, way):
        before, self.way = self.way, way
        yield
        self.way = before


class Machine:
    """Stands for what runs microbatches: the host is slow in some passes, the device never."""

    message_bytes = 0

    def __init__(self, layers, slow, host_s):
        self.layers, self.slow, self.host_s = layers, slow, host_s
        self.looked_s, self.slow_looks, self.looks = host_s, range(0), 0
        self.timed: list[str | None] = []

    def measure(self, size, count, marks, rest_cycles=0):
        slots = len(self.layers.slots)
        if isinstance(marks, Looks):
            looked = np.zeros((1 + 2 * slots, 4))
            factor = SLOW if self.looks in self.slow_looks else 1.0
            looked[1 : 1 + slots, 0] = self.looked_s * factor
            self.looks += 1
            return looked, Window(0.0, 1.0, 1)
        self.timed.append(self.layers.way)
        # Each of two ways is run once before the passes; what is not recomputed rests as well.
        number = (self.timed.count(FULL) - 2) // len(Gpu.frequency_mhz)
        factor = SLOW if number in self.slow else 1.0
        forward_s = max(FORWARD_S + BACKWARD_S, self.host_s * factor) - BACKWARD_S
        times_s = np.array([0.0, *[forward_s] * slots, *[BACKWARD_S] * slots])
        times_s[:2] += (DATA_S, -DATA_S)
        times_s *= RESTED if rest_cycles else 1.0
        return times_s[:, None], Window(slots, slots + count * times_s.sum(), count)

    def run(self, size, count, marks):
        slots = len(self.layers.slots)
        return Window(slots, slots + count * (FORWARD_S + BACKWARD_S) * slots, count)


def measured(monkeypatch, slow, host_s, looked_s=None, slow_looks=range(0)):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(job, "of_all_ranks", lambda value: [value])
    monkeypatch.setattr(job, "free_bytes", lambda: math.inf)
    monkeypatch.setattr(job, "Marks", nullcontext)
    machine = Machine(layers := Layers(), slow, host_s)
    machine.looked_s, machine.slow_looks = looked_s or host_s, slow_looks
    return measure_pieces(layers, machine, 2, Gpu()), machine  # type: ignore[arg-type]


@pytest.mark.parametrize("slow", [{0}, {1}, {0, 2}, {1, 2}, {0, 1, 2}])
@pytest.mark.parametrize("host_s", [1.0, HOST_S])
def test_a_slow_phase_of_the_host_leaves_no_trace(slow, host_s, monkeypatch):
    """But a host that is always slow counts."""
    ways, _ = measured(monkeypatch, slow, host_s)
    assert set(ways) == {(name, None) for name in Layers.names} | {("layer", FULL)}
    factor = SLOW if len(slow) == job._PASSES else 1.0
    for each in ways.values():
        # Where the host is slower than the device, the layer takes as long as the host.
        both_s = max(FORWARD_S + BACKWARD_S, factor * host_s)
        # The last piece loads the data again.
        both_s += DATA_S * (each is ways["loss", None])
        np.testing.assert_allclose(each.both_s, [both_s] * 2)
        np.testing.assert_allclose(each.backward_s, [BACKWARD_S] * 2)
        np.testing.assert_allclose(each.rested_s, RESTED * each.both_s)
        assert each.host_s == pytest.approx(host_s)


@pytest.mark.parametrize("slow_looks", [range(2), range(2, 3), range(3), range(3, 5)])
def test_a_slow_look_at_the_host_leaves_no_trace(slow_looks, monkeypatch):
    """Each way is looked at before the passes and behind them."""
    ways, _ = measured(monkeypatch, set(), HOST_S, slow_looks=slow_looks)
    for each in ways.values():
        assert each.host_s == pytest.approx(HOST_S)
    np.testing.assert_allclose(ways["layer", FULL].both_s, [HOST_S] * 2)


def test_a_layer_takes_no_less_than_the_host_needs_for_it(monkeypatch):
    """In a row of a few it may: the host is ahead of the first ones."""
    ways, _ = measured(monkeypatch, set(), HOST_S, looked_s=1.1 * HOST_S)
    for (name, _), each in ways.items():
        both_s = {"layer": 1.1 * HOST_S, "loss": HOST_S + DATA_S}.get(name, HOST_S)
        np.testing.assert_allclose(each.both_s, both_s)


def test_passes_lie_apart(monkeypatch):
    _, machine = measured(monkeypatch, set(), HOST_S)
    once = [FULL, None, None]  # the last one rests
    assert machine.timed == [None, FULL] + once * job._PASSES * len(Gpu.frequency_mhz)


def test_joules_are_shared_out_by_rows_of_two_lengths(monkeypatch):
    ways, _ = measured(monkeypatch, set(), 1.0)
    for (name, _), each in ways.items():
        power_w = LAYER_W if name == "layer" else AROUND_W
        np.testing.assert_allclose(each.both_j, power_w * each.both_s)
