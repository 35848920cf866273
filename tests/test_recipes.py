"""What another package adds without a change to this one: an order, a policy, and a probe."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from emulated_pipelines import Pipelines
from envpipe_megatron.formats.energy import Phase
from envpipe_megatron.gpu.presets import load_preset
from envpipe_megatron.runtime.job.options import JobOptions
from job_runs import run_job

REPOSITORY = Path(__file__).resolve().parents[1]
CURVE = {1200: (0.10, 40.0), 1000: (0.11, 34.0), 800: (0.13, 31.0)}

CODE = '''
from dataclasses import replace

import numpy as np
from envpipe_megatron.core.kinds import WHOLE, Kind, unit
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.tuning.commands import Clocked
from envpipe_megatron.tuning.probes.probe import Look


def in_pairs(profile, request):
    """GPipe for two microbatches at a time."""
    order = [
        unit(kind, first + m)
        for first in range(0, request.num_microbatches, 2)
        for kind in WHOLE
        for m in range(2)
    ]
    stages = (tuple(order),) * profile.num_stages
    return Schedule("in-pairs", request.num_microbatches, 1, stages)


def one_more(profile, request):
    """The order of another job than was asked for."""
    microbatches = request.num_microbatches + 1
    order = [unit(kind, m) for kind in WHOLE for m in range(microbatches)]
    return Schedule("one-more", microbatches, 1, (tuple(order),) * profile.num_stages)


def backwards_slowly(schedule, profile):
    """Backwards at the lowest clock, forwards at the highest."""
    lists = [[row.frequency_mhz for row in kinds[Kind.FORWARD]] for kinds in profile.rows]
    lowest, highest = ([[pick(clocks)] for clocks in lists] for pick in (min, max))
    return np.where(schedule.is_backward, lowest, highest)


def whole_iterations(own, store):
    """Look at three clocks, each in an iteration of its own."""
    for place in (-4, -8, -12):
        clock_mhz = int(store.clocks_mhz[place])
        clocks_mhz = np.full(own.is_backward.shape, clock_mhz)
        yield Look(Clocked(own, clocks_mhz), iterations=1, note=f"at {clock_mhz} MHz")


def at_no_clock(own, store):
    """Look at a clock that is half of another."""
    for look in whole_iterations(own, store):
        yield replace(look, clocked=Clocked(own, look.clocked.frequency_mhz // 2))


def of_another_order(own, store):
    return whole_iterations(one_more(own, own), store)
'''
ENTRY_POINTS = """
[envpipe_megatron.schedules]
in-pairs = mine:in_pairs
one-more = mine:one_more
broken = mine:not_there
1f1b = mine:not_there

[envpipe_megatron.policies]
backwards-slowly = mine:backwards_slowly
"""


def install(package, entry_points):
    """A package `mine` in a folder."""
    info = package / "mine-1.0.dist-info"
    info.mkdir(parents=True)
    (package / "mine.py").write_text(CODE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry_points)


@pytest.fixture
def command(tmp_path):
    """Runs Python where a package `mine` is installed beside this one, in a folder of a profile."""
    package = tmp_path / "installed"
    install(package, ENTRY_POINTS)
    rows = [
        f"{stage},{kind},{mhz},{weight * time_s},{weight * energy_j}"
        for stage in range(3)
        for kind, weight in (("forward", 1), ("backward", 2))
        for mhz, (time_s, energy_j) in CURVE.items()
    ]
    header = "stage,instruction,frequency,time,energy"
    (tmp_path / "profile.csv").write_text("\n".join([header, *rows]) + "\n")
    path = os.pathsep.join([str(package), str(REPOSITORY)])

    def run(program, *arguments):
        return subprocess.run(
            [sys.executable, "-c", program, *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=False,
        )

    return run


#: Runs commands one after another, since a process takes a second to start.
COMMANDS = """
import json, sys
from envpipe_megatron.cli import main
for arguments in map(json.loads, sys.argv[1:]):
    main(arguments, standalone_mode=False)
"""


def envpipe(command, *commands):
    done = command(COMMANDS, *map(json.dumps, commands))
    assert done.returncode == 0, done.stderr


def plan(output, *options):
    return [
        "plan", "--profile", "profile.csv", "--num-microbatches", "4",
        "--output", output, *options,
    ]  # fmt: skip


def test_new_names_are_planned_with_simulated_and_drawn(command, tmp_path):
    envpipe(
        command,
        plan(
            *("plan.json", "--schedule", "in-pairs"),
            *("--policy", "optimal", "--deadline-factor", "1.5"),
        ),
        ["simulate", "--profile", "profile.csv", "--plan", "plan.json", "--output", "pictures"],
        plan("clocks.json", "--policy", "backwards-slowly"),
    )
    made = json.loads((tmp_path / "plan.json").read_text())
    assert made["schedule_name"] == "in-pairs"
    assert made["schedule"] == [["F0", "F1", "B0", "B1", "F2", "F3", "B2", "B3"]] * 3
    facts = json.loads((tmp_path / "pictures" / "simulation.json").read_text())
    assert (facts["schedule"], facts["baseline"]["schedule"]) == ("in-pairs", "1f1b")
    assert facts["peak_in_flight"] == [2, 2, 2]
    assert (tmp_path / "pictures" / "timeline.png").stat().st_size > 10_000
    made = json.loads((tmp_path / "clocks.json").read_text())
    assert made["policy"] == "backwards-slowly"
    for order, clocks in zip(made["schedule"], made["frequency_mhz"], strict=True):
        assert clocks == [800 if unit.startswith("B") else 1200 for unit in order]


def test_a_job_takes_both_names(command):
    program = """
import argparse
from envpipe_megatron.integrations.options import add_arguments, flags_given, read_options
parser = argparse.ArgumentParser()
add_arguments(parser.add_argument_group("envpipe"))
given = parser.parse_args()
print(read_options(flags_given(given), num_stages=3, on_gpu=True).request())
"""
    arguments = ["--envpipe-type", "backwards-slowly", "--envpipe-scheduling", "in-pairs"]
    done = command(program, *arguments)
    assert done.returncode == 0, done.stderr
    assert "schedule='in-pairs', policy='backwards-slowly'" in done.stdout


def test_what_cannot_be_planned_is_refused_and_no_package_replaces_ours(command):
    program = """
import sys
from click.testing import CliRunner
from envpipe_megatron.cli import main
for name in sys.argv[1:]:
    options = ["--profile", "profile.csv", "--num-microbatches", "4", "--output", "plan.json"]
    done = CliRunner().invoke(main, ["plan", *options, "--schedule", name])
    print(name, done.exit_code, " ".join(done.stderr.split()))
"""
    done = command(program, "broken", "one-more", "none", "1f1b")
    broken, other_job, unknown, ours = done.stdout.splitlines()
    assert "'broken' of envpipe_megatron.schedules cannot be imported" in broken
    assert "has 3 stages, 5 microbatches and 1 chunks a stage, and the job has 3" in other_job
    assert "'none' is not one of '1f1b'" in unknown
    assert ours.startswith("1f1b 0 ")


def run_probed(monkeypatch, folder, probes, iterations=40):
    """A closed loop where a package adds probes, and the clocks of each phase."""
    install(folder, f"[envpipe_megatron.probes]\n{probes}\n")
    monkeypatch.syspath_prepend(folder)
    clocks_mhz, inner = {}, Pipelines.run

    def watched(self, orders):
        clocks_mhz.setdefault(orders[0].phase, set()).update(orders[0].frequency_mhz.flat)
        return inner(self, orders)

    monkeypatch.setattr(Pipelines, "run", watched)
    config = JobOptions(num_microbatches=12, scheduling="1f1b", baseline_steps=3)
    preset = load_preset("a100-sxm")
    return run_job(config, preset, [0.03, 0.03, 0.036], iterations=iterations), clocks_mhz


def test_a_probe_looks_at_other_clocks_and_the_job_saves(monkeypatch, tmp_path):
    ran, clocks_mhz = run_probed(monkeypatch, tmp_path, "mine = mine:whole_iterations")
    assert clocks_mhz[Phase.PROFILE] == {1230, 990, 750}
    assert "at 990 MHz" in [text for _, text in ran.said]
    assert ran.job[-1].phase == Phase.STEADY
    assert ran.saved(ran.steady, 40) > 0.1
    assert ran.slower(ran.steady, 40) < 1e-3


@pytest.mark.parametrize(
    ("probes", "why"),
    [
        ("mine = mine:not_there", "'mine' of envpipe_megatron.probes cannot be imported"),
        ("a = mine:whole_iterations\nb = mine:whole_iterations", "probes (got a, b). Remove all"),
        ("mine = mine:at_no_clock", "clocks (MHz) that plans may not use (got 615)"),
        ("mine = mine:of_another_order", "Look at '1f1b', with clocks of shape (3, 24)"),
    ],
)
def test_a_job_goes_on_without_a_probe_that_it_cannot_use(monkeypatch, tmp_path, probes, why):
    ran, clocks_mhz = run_probed(monkeypatch, tmp_path, probes, 10)
    assert any(why in text for _, text in ran.said)
    assert ran.job[-1].phase == Phase.STEADY
    assert set.union(*clocks_mhz.values()) == {1410}
