"""Running the command as a user does, and what it is run on."""

import json
import resource
from contextlib import contextmanager
from pathlib import Path

import pytest
from commands import run_badly, run_well

MEASURED = Path(__file__).resolve().parents[3] / "shared" / "data" / "perseus_sosp24"
SLOWNESS = (1.0, 1.1, 1.0, 1.2)
#: {frequency_mhz: (time_s, energy_j)} of a forward of the first stage; a backward is twice that.
CURVE = {1200: (0.10, 40.0), 1000: (0.11, 34.0), 900: (0.12, 32.0), 600: (0.17, 35.0)}


def write_profile(path, stages=4):
    lines = ["stage,instruction,frequency,time,energy"]
    for stage in range(stages):
        for kind, factor in (("forward", 1), ("backward", 2)):
            for frequency, (time_s, energy_j) in CURVE.items():
                scale = factor * SLOWNESS[stage % len(SLOWNESS)]
                lines.append(f"{stage},{kind},{frequency},{scale * time_s},{scale * energy_j}")
    path.write_text("\n".join(lines) + "\n")
    return path


def write_sidecar(profile_path, **fields):
    document = {"format": "envpipe-profile/1", **fields}
    profile_path.with_suffix(".json").write_text(json.dumps(document))


@contextmanager
def files_of_at_most(num_bytes):
    """As on a full disk, what is longer cannot be written."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def measured_profile(name):
    """One of the published profiles, which stand beside the repository where they are at all."""
    found = sorted(MEASURED.rglob(name))
    if not found:
        pytest.skip(f"the published profiles are not at {MEASURED}")
    return found[0]


def plan_for(profile, output, *options, microbatches=8, power=80):
    return run_well(
        "plan", "--profile", profile, "--num-microbatches", microbatches, "--output", output,
        "--blocking-power", power, *options,
    )  # fmt: skip


def plan_badly(profile, folder, *options, microbatches=8):
    """Run a plan that must be refused before its file is written; its message."""
    output = folder / "refused.json"
    message = run_badly(
        "plan", "--profile", profile, "--num-microbatches", microbatches, "--output", output,
        "--blocking-power", 80, *options,
    )  # fmt: skip
    assert not output.exists()
    return message


def simulate_json(profile, plan, *options):
    return json.loads(
        run_well("simulate", "--profile", profile, "--plan", plan, "--json", *options).stdout
    )


def rows_of(shown):
    """The cells of a printed table's rows, by their names."""
    rows = (line.split("│")[1:-1] for line in shown.splitlines() if line.count("│") > 1)
    return {cells[0].strip(): [cell.strip() for cell in cells[1:]] for cells in rows}
