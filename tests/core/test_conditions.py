"""Conditions: one form for equal ones, off by default, and from the sidecar only when asked for."""

import numpy as np
import pytest
from core_cases import uniform_profile

from envpipe_megatron.core.conditions import (
    SIDECAR_FIELDS,
    Conditions,
    known_conditions,
    make_conditions,
)
from envpipe_megatron.core.sidecar import Sidecar
from envpipe_megatron.errors import EnvPipeError

FULL = Sidecar(
    tensor_parallel=8,
    wait_power_w=({900: 60.0, 1200: 80.0},) * 3,
    p2p_latency_s=(0.1, 0.2),
    tail_time_s=(0.4, 0.4, 0.5),
    frequency_change_s=0.01,
    frequency_change_j=0.2,
)
PLAIN = Conditions((80.0,) * 3)


def profile(sidecar=FULL):
    return uniform_profile(3, {1200: (1.0, 10.0)}, sidecar=sidecar)


@pytest.mark.parametrize(
    "same",
    [
        Conditions([80, 80, 80]),
        Conditions(np.full(3, 80.0)),
        Conditions((80.0,) * 3, 0),
        Conditions((80.0,) * 3, (0.0, 0.0), (0.0,) * 3, (1, 1, 1)),
    ],
)
def test_equal_conditions_compare_equal(same):
    assert same == PLAIN


class TestWaitingPower:
    def test_is_the_blocking_power_at_any_clock(self):
        powers = Conditions((80.0, 40.0)).waiting_power_w(np.array([[900, 1200], [1, 5000]]))
        assert powers.tolist() == [[80.0, 80.0], [40.0, 40.0]]

    def test_is_linear_between_measured_clocks_and_constant_beyond(self):
        conditions = Conditions((99.0, 99.0), wait_power_w=({1200: 80.0, 900: 50.0}, {1000: 70.0}))
        clocks = np.array([[600, 900, 1000, 1050, 1200, 1410]] * 2)
        powers = conditions.waiting_power_w(clocks)
        assert powers[0].tolist() == pytest.approx([50, 50, 60, 65, 80, 80])
        assert powers[1].tolist() == [70.0] * 6


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (field, bad)
        for field, wrong in {
            "blocking_power_w": ((), (80.0, -1.0), (80.0, float("nan")), (80.0, None), ("x", 1)),
            "latency_s": (-0.1, float("inf"), (0.1, 0.1), (-0.1,), None, "x"),
            "tail_time_s": ((0.1,), (0.1, -0.1), (0.1, float("nan")), ()),
            "gpus_per_stage": ((8,), (8, 0), (8, 1.5), (8, -8), ("8", 8), (8, None)),
            "wait_power_w": (
                ({900: 1.0},),
                ({900: 1.0}, {}),
                ({900: -1.0}, {900: 1.0}),
                *(({900: 1.0}, {clock: 1.0}) for clock in (0, 1_000_000, 10**400)),
                ({900: 1.0}, {900: float("nan")}),
            ),
            "change_time_s": (-0.01, float("inf"), None),
            "change_energy_j": (-0.01, float("nan"), None),
        }.items()
        for bad in wrong
    ],
)
def test_wrong_values_are_named(field, value):
    with pytest.raises(EnvPipeError, match=field):
        Conditions(**{"blocking_power_w": (80.0, 40.0), field: value})


class TestFromTheSidecar:
    def test_the_latency_alone_is_used_unasked(self):
        made = make_conditions(profile(), blocking_power_w=80.0)
        assert made == Conditions((80.0,) * 3, (0.1, 0.2))
        assert make_conditions(profile(Sidecar()), blocking_power_w=80.0) == PLAIN

    @pytest.mark.parametrize(
        ("name", "fields"),
        [
            ("latency", {"latency_s": FULL.p2p_latency_s}),
            ("tail", {"tail_time_s": FULL.tail_time_s}),
            ("tensor-parallel", {"gpus_per_stage": (8, 8, 8)}),
            ("wait-power", {"wait_power_w": FULL.wait_power_w}),
            ("change", {"change_time_s": 0.01, "change_energy_j": 0.2}),
        ],
    )
    def test_each_when_asked_for_beside_the_latency(self, name, fields):
        made = make_conditions(profile(), blocking_power_w=80.0, use=[name])
        assert made == Conditions((80.0,) * 3, **{"latency_s": FULL.p2p_latency_s, **fields})

    @pytest.mark.parametrize("name", ["latency", "tail", "wait-power", "change"])
    def test_what_it_lacks_is_refused_by_name(self, name):
        with pytest.raises(EnvPipeError, match=f"lacks '{SIDECAR_FIELDS[name][1]}'"):
            make_conditions(profile(Sidecar()), blocking_power_w=80.0, use=[name])

    def test_an_unknown_name_is_refused_with_those_there_are(self):
        with pytest.raises(EnvPipeError, match=r"got 'tails'.*tensor-parallel"):
            make_conditions(profile(), blocking_power_w=80.0, use=["tails"])


@pytest.mark.parametrize("sidecar", [FULL, Sidecar()])
@pytest.mark.parametrize("use", [(), tuple(SIDECAR_FIELDS)])
def test_given_values_win_over_the_sidecar_and_need_none(sidecar, use):
    curves = ({1000: 33.0},) * 3
    made = make_conditions(
        profile(sidecar), blocking_power_w=80.0, use=use, latency_s=0.3, tail_time_s=0.7,
        gpus_per_stage=2, wait_power_w=curves, change_time_s=0.02, change_energy_j=0.9,
    )  # fmt: skip
    powers = (80.0,) * 3
    assert made == Conditions(powers, (0.3, 0.3), (0.7,) * 3, (2, 2, 2), curves, 0.02, 0.9)
    assert make_conditions(profile(), blocking_power_w=80.0, latency_s=0) == PLAIN


def test_all_that_is_known_is_what_the_sidecar_holds():
    conditions = known_conditions(profile())
    assert conditions == make_conditions(profile(), blocking_power_w=80.0, use=list(SIDECAR_FIELDS))
    assert known_conditions(profile(Sidecar())) == Conditions((0.0,) * 3)
    some = Sidecar(tail_time_s=(0.4, 0.4, 0.5))
    assert known_conditions(profile(some)) == Conditions((0.0,) * 3, 0.0, (0.4, 0.4, 0.5))
