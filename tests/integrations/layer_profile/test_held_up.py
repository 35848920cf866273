"""A layer profile has what is undisturbed, where a host that others use is held up at times."""

from __future__ import annotations

import math
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from envpipe_megatron.integrations.layer_profile import job, measuring, passes  # noqa: E402
from envpipe_megatron.integrations.layer_profile.gpt import FULL, Piece  # noqa: E402
from envpipe_megatron.integrations.layer_profile.measuring import Timing, Window  # noqa: E402
from envpipe_megatron.integrations.layer_profile.passes import (  # noqa: E402
    Way,
    measure_pieces,
    undisturbed_s,
)

#: Of a layer; the host hands forward and backward over in more time than the device needs.
FORWARD_S, BACKWARD_S, HOST_S = 1.25, 2.75, 6.0
SLOW, RESTED = 1.9, 0.75
ROW = 4


@pytest.mark.parametrize(
    ("times_s", "expected_s"),
    [
        ((10.0, 10.1, 18.0, 19.0, 10.2), 10.1),
        ((18.0, 10.0, 19.0), 10.0),
        # None was held up: the middle, not the shortest.
        ((10.0, 10.2, 10.4), 10.2),
    ],
)
def test_held_up_repeats_do_not_count(times_s: tuple[float, ...], expected_s: float) -> None:
    assert undisturbed_s(np.array(times_s)) == expected_s


class Gpu:
    """Of two clocks; its energies are how long their windows lasted."""

    name, frequency_mhz = "a GPU", (2000, 1000)

    def __init__(self) -> None:
        self.clocks: list[int] = []

    def set(self, frequency_mhz: int) -> None:
        self.clocks.append(frequency_mhz)

    def energies_j(self, windows: list[Window | None]) -> list[float]:
        return [(w.end_s - w.begin_s) / w.runs if w else math.nan for w in windows]


class Layers:
    """Stands for a model's pieces: each knows which one it is."""

    def ways(self, piece: str) -> tuple[str, ...]:
        return (FULL,) if piece == "layer" else ()

    def row_length(self, piece: str) -> int:
        return ROW if piece == "layer" else 1

    @contextmanager
    def running(
        self, name: str, size: int, way: str | None = None, length: int = 1
    ) -> Iterator[tuple[Piece, Any]]:
        yield Piece(f"{name} {way} {length}", torch.clone, 0), size


class Machine:
    """Stands for what measures: the host is slow in some of the passes, the device never."""

    def __init__(self, slow: set[int], host_s: float) -> None:
        self.slow, self.host_s = slow, host_s
        self.measured: list[str] = []

    @property
    def factor(self) -> float:
        number = self.measured.count(self.measured[-1]) - 1
        return SLOW if number // len(Gpu.frequency_mhz) in self.slow else 1.0

    def time(self, piece: Piece, _hidden: Any, _window_s: float) -> Timing:
        """The device waits for the host in the forward, where it has done all that was handed."""
        self.measured.append(piece.name)
        length = int(piece.name.split()[-1])
        both_s = max(FORWARD_S + BACKWARD_S, self.host_s * self.factor)
        forward_s = length * (both_s - BACKWARD_S)
        return Timing(forward_s, length * BACKWARD_S, Window(0.0, both_s * length, 1))

    def forwards(self, piece: Piece, *_: Any) -> Window:
        return Window(0.0, float(piece.name.split()[-1]), 1)

    def rested(self, piece: Piece, _hidden: Any, timing: Timing, *_: Any) -> float:
        return RESTED * (timing.forward_s + timing.backward_s)

    def host(self, piece: Piece, _hidden: Any) -> float:
        return int(piece.name.split()[-1]) * self.host_s * self.factor


def measured(
    monkeypatch: pytest.MonkeyPatch, machine: Machine
) -> dict[tuple[str, str | None], Way]:
    for name, stands_in in (
        ("measure_time", machine.time),
        ("run_forwards", machine.forwards),
        ("measure_rested_s", machine.rested),
        ("measure_host_s", machine.host),
        ("measure_memory", lambda *_: measuring.Held()),
        ("repeats_that_fit", lambda _, wanted: wanted),
    ):
        monkeypatch.setattr(passes, name, stands_in)
    return dict(measure_pieces(Layers(), ("layer", "loss"), 2, Gpu()))  # type: ignore[arg-type]


@pytest.mark.parametrize("slow", [{0}, {1}, {0, 2}, {1, 2}])
@pytest.mark.parametrize("host_s", [1.0, HOST_S])
def test_a_slow_phase_of_the_host_leaves_no_trace(
    slow: set[int], host_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways = measured(monkeypatch, Machine(slow, host_s))
    assert set(ways) == {("layer", None), ("layer", FULL), ("loss", None)}
    for (_, way), each in ways.items():
        # Where the host is slower than the device, the layer takes as long as the host.
        np.testing.assert_allclose(each.both_s, [max(FORWARD_S + BACKWARD_S, host_s)] * 2)
        np.testing.assert_allclose(each.backward_s, [BACKWARD_S] * 2)
        assert each.host_s == (pytest.approx(host_s) if way is None else None)
        rested = RESTED if way is None else math.nan
        np.testing.assert_allclose(each.rested_s, rested * each.both_s)


def test_a_host_that_is_always_slow_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = measured(monkeypatch, Machine({0, 1, 2}, HOST_S))["layer", None]
    np.testing.assert_allclose(layer.both_s, [SLOW * HOST_S] * 2)
    assert layer.host_s == pytest.approx(SLOW * HOST_S)


def test_repeats_of_a_piece_lie_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(set(), HOST_S)
    measured(monkeypatch, machine)
    once = ["layer None 4", "layer full 4", "loss None 1"]
    assert machine.measured == once * 3 * len(Gpu.frequency_mhz)


@pytest.mark.parametrize("slow", [set(), {0}, {1, 2}])
def test_joules_are_of_the_piece_that_was_measured(
    slow: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the passes whose times count."""
    ways = measured(monkeypatch, Machine(slow, HOST_S))
    np.testing.assert_allclose(ways["layer", None].both_j, [HOST_S] * 2)
    np.testing.assert_allclose(ways["layer", None].forward_j, [1.0] * 2)
    assert np.isnan(ways["layer", FULL].forward_j).all()


def test_a_first_run_that_compiles_does_not_shorten_the_window(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measuring, "_count", lambda round_s, _: counts.append(round_s) or 2)
    counts: list[float] = []
    runs = iter([0.0, 0.3, *[0.0] * 9])  # the first gives the gradient's shape

    def forward(hidden: Any) -> Any:
        time.sleep(next(runs))
        return hidden.sum()

    measuring.measure_time(Piece("layer", forward, 0), torch.ones(2), 0.6)
    assert counts[0] < 0.1


@pytest.mark.parametrize(
    "slow", [set(), {0, 1, 2}, {4, 6, 8}, {5, 7, 9}, set(range(4, 15)), set(range(9, 20))]
)
def test_a_slow_phase_does_not_lengthen_a_microbatch(
    slow: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does it shorten one: the runs that are subtracted can be slow, too."""
    schedules = pytest.importorskip("megatron.core.pipeline_parallel.schedules")
    clock = SimpleNamespace(now_s=0.0, run=-1, factor=1.0)

    class Model(torch.nn.Module):
        def forward(self, size: int) -> None:
            clock.now_s += clock.factor * 0.75 * size

    def forward_step(size: int, model: Model) -> None:
        clock.now_s += clock.factor * 0.25 * size  # its data
        model(size)

    def run(
        *,
        num_microbatches: int,
        micro_batch_size: int,
        forward_step_func: Any,
        model: Any,
        **_: Any,
    ) -> None:
        assert args.micro_batch_size == micro_batch_size
        clock.factor = SLOW if clock.run in slow else 1.0
        clock.now_s += clock.factor * 0.5
        for _microbatch in range(num_microbatches):
            forward_step_func(micro_batch_size, model)
        clock.run += 1

    monkeypatch.setattr(schedules, "forward_backward_no_pipelining", run)
    monkeypatch.setattr(measuring, "time", SimpleNamespace(perf_counter=lambda: clock.now_s))
    args = Namespace(seq_length=4, micro_batch_size=1, create_attention_mask_in_dataloader=False)
    model = Model()
    times = job.measure_microbatches(model, args, forward_step, [2, 3])
    np.testing.assert_allclose(times, [(2.0, 0.5), (3.0, 0.75)])
    assert not model._forward_pre_hooks
    assert clock.run == 23
    assert args.micro_batch_size == 1
