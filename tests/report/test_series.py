"""What pictures of a job's energy and time are drawn from."""

from dataclasses import replace

import numpy as np
import pytest
import run_made

from envpipe_megatron.formats.energy import EnergyWindow
from envpipe_megatron.formats.timeline import TimelineLogs
from envpipe_megatron.report.pipelines import on_one_axis
from envpipe_megatron.report.series import power_chart, step_charts

#: Labels of a job that was started twice.
STARTS = ("2026-05-04T10:11:12.345+00:00", "2026-05-04T11:00:00.000+00:00")


def window(gpu, first, last, *, energy_j, duration_s=1.0, begin_s=0.0, phase="steady", run=""):
    return EnergyWindow(
        "n1", f"GPU-{gpu}", "A100", gpu, gpu, run, phase, first, last, energy_j, duration_s, None,
        None, begin_s,
    )  # fmt: skip


def steps_of(windows):
    """Iterations, and the time and energy that are drawn of each."""
    times, energies = (chart.marks[2].columns for chart in step_charts(windows))
    assert times["x"] == energies["x"]
    return times["x"], times["y"], energies["y"]


def power_of(windows):
    """Instants, and the power of each GPU at these."""
    (marks,) = power_chart(windows).marks
    table = marks.columns
    gpus = [place for place, group in enumerate(table["group"]) if group == "each GPU"]
    return table["x"][0], np.array([table["y"][gpu] for gpu in gpus], float)


def energy_j(windows):
    at_s, powers_w = power_of(windows)
    return np.nansum(powers_w * (at_s[-1] - at_s[0]) / (len(at_s) - 1))


def test_windows_of_any_length_give_each_iteration_its_energy_and_time():
    own = [
        window(0, 0, 1, energy_j=200, duration_s=4, phase="warm-up"),
        window(0, 2, 2, energy_j=90, duration_s=3),
        window(1, 0, 0, energy_j=110, duration_s=2, phase="warm-up"),
        window(1, 1, 1, energy_j=130, duration_s=2, phase="warm-up"),
        window(1, 2, 2, energy_j=70, duration_s=3),
    ]
    assert steps_of(own) == ([0, 1, 2], [2, 2, 3], [210, 230, 160])
    shades = step_charts(own)[0].marks[0].columns
    assert (shades["name"], shades["begin"], shades["end"]) == (
        ["warm-up", "steady"], [-0.5, 1.5], [1.5, 2.5]
    )  # fmt: skip


def test_a_window_of_very_many_iterations_is_its_two_ends():
    long = window(0, 3, 2**31 - 1, energy_j=2**31 - 3, duration_s=2**31 - 3)
    iterations, _, energies_j = steps_of([window(0, 0, 0, energy_j=5), long])
    assert iterations == [0, 3, 2**31 - 1]
    assert energies_j == pytest.approx([5, 1, 1])


def test_a_step_that_was_repeated_after_a_restart_counts_once():
    own = [
        window(0, 5, 5, energy_j=100, run=STARTS[0]),
        window(0, 5, 5, energy_j=120, run=STARTS[1]),
    ]
    assert steps_of(own)[2] == [110]
    # The rank has another GPU now, and the job still one.
    assert steps_of([own[0], replace(own[1], node="n9", gpu_uid="GPU-new")])[2] == [110]
    killed = window(1, 4, 4, energy_j=10, run=STARTS[0])
    more = [*own, killed, window(1, 5, 5, energy_j=50, run=STARTS[1])]
    assert steps_of(more)[2] == pytest.approx([20, 180])


def test_each_start_has_the_gpus_that_it_had():
    both = [window(rank, 0, 0, energy_j=100, run=STARTS[0]) for rank in range(2)]
    four = [window(rank, 1, 1, energy_j=100, run=STARTS[1]) for rank in range(4)]
    assert steps_of([*both, *four])[2] == [200, 400]


def test_what_lies_between_steps_is_none_of_them():
    outside = window(0, 3, 3, energy_j=1e6, phase="plan")
    assert step_charts([outside]) == []
    assert steps_of([outside, window(0, 7, 7, energy_j=5)])[0] == [7]


def test_power_is_that_of_the_windows_and_gaps_are_none():
    own = [
        window(0, 0, 0, energy_j=300, duration_s=1, begin_s=10),
        window(0, 1, 1, energy_j=100, duration_s=1, begin_s=13),
    ]
    at_s, (power_w,) = power_of(own)
    assert power_w[at_s < 0.99] == pytest.approx(300)
    assert power_w[at_s > 3.01] == pytest.approx(100)
    assert np.isnan(power_w[(at_s > 1.01) & (at_s < 2.99)]).all()
    # All of it: what is drawn has the energy that was metered.
    assert energy_j(own) == pytest.approx(400)
    assert power_chart([]) is None


def test_a_start_behind_a_reboot_comes_behind_the_one_before():
    """The node's clock begins anew."""
    starts = [
        window(0, i, i, energy_j=300, begin_s=begin_s, run=run)
        for begin_s, run in ((100.0, STARTS[0]), (90.5, STARTS[1]))
        for i in range(2)
    ]
    own = [replace(one, begin_s=one.begin_s + at % 2) for at, one in enumerate(starts)]
    _, windows = on_one_axis(TimelineLogs(), own)
    assert power_chart(windows).x_range == (0, pytest.approx(4))
    assert np.nanmax(power_of(windows)[1]) == pytest.approx(300)


def test_power_keeps_the_energy_of_windows_that_overlap():
    rng = np.random.default_rng(3)
    own = [
        window(0, 0, 0, energy_j=energy_j, duration_s=length_s, begin_s=begin_s)
        for begin_s, length_s, energy_j in rng.uniform(1, 100, (40, 3)).tolist()
    ]
    own += [replace(own[0], energy_j=1e4), window(0, 0, 0, energy_j=7, begin_s=300)]
    assert energy_j(own) == pytest.approx(sum(one.energy_j for one in own))
    two = [window(0, 0, 0, energy_j=300), window(0, 0, 0, energy_j=200)]
    assert power_of(two)[1] == pytest.approx(500)


def begins_s(made):
    """Instants of iterations on one axis, by start and node."""
    timelines, _ = on_one_axis(TimelineLogs(tuple(made)), ())
    found = {}
    for read in timelines.iterations:
        found.setdefault((read.labels.run, read.labels.node), []).append(read.begin_s)
    return found


def test_nodes_are_brought_to_one_time_by_the_iterations_that_both_began():
    made = run_made.iterations(phases=("steady",) * 3, nodes={2: ("n2", 5000.0)})
    late = replace(made[-1], begin_s=made[-1].begin_s + 0.7)  # one that began late
    one = begins_s([*made[:-1], late])
    length_s = made[0].iteration_time_s
    assert one["", "n1"][::2] == pytest.approx([0, length_s, 2 * length_s])
    assert one["", "n2"] == pytest.approx([0, length_s, 2 * length_s + 0.7])
    lone = replace(made[0], labels=run_made.labels(3, "n3"), iteration=99)
    assert begins_s([*made, lone])["", "n3"] == [0.0]


def test_a_node_that_was_booted_between_two_starts_has_a_time_of_its_own_in_each():
    phases = ("steady",) * 3
    before = run_made.iterations(phases=phases, nodes={2: ("n2", 5000.0)}, run=STARTS[0])
    after = run_made.iterations(
        phases=phases, nodes={2: ("n2", 40.0)}, run=STARTS[1], begin_s=900.0
    )
    one = begins_s([*before, *after])
    assert [one[start, "n2"][0] for start in STARTS] == pytest.approx([0, 800])
    again = begins_s([*before, *(replace(own, begin_s=own.begin_s - 850) for own in after)])
    assert again[STARTS[1], "n1"][0] == pytest.approx(3 * before[0].iteration_time_s)
