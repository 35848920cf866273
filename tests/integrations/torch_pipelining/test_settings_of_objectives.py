"""The objective of a job: what it goes for at its level, with control of clocks and without."""

import pytest
from attached_ranks import Case

pytestmark = pytest.mark.xdist_group("torch")

ALONE = "only measuring, in the framework's order and at the "
SHORTEST = "order auto, the shortest that is found, at the "
READ = "A GPU is opened for reading only: the "
KEPT = "Objective time needs another order, and this job keeps its own"


@pytest.mark.parametrize(
    ("asked", "does", "notes"),
    [
        ({"objective": "time"}, f"{SHORTEST}highest clock, where it is faster", []),
        ({"objective": "time", "level": "units"}, f"{ALONE}highest clock; clocks", [KEPT]),
        ({"objective": "edp", "level": "uniform"}, "one clock of least energy for the whole", []),
        (
            {"objective": "edp", "gpu_control": "none"},
            f"{SHORTEST}clocks as they are, where it is faster",
            [f"{READ}shortest order in place of least edp, and clocks stay as they are"],
        ),
        (
            {"level": "units", "gpu_control": "none"},
            f"{ALONE}clocks as they are, not order 1f1b, plans of least energy",
            [f"{READ}framework's order at baseline clocks"],
        ),
    ],
)
def test_what_a_job_goes_for(trained, two_ranks, asked, does, notes):
    case = Case("Schedule1F1B", 4, steps=4, settings={"baseline_steps": 2, **asked})
    _, ours = trained(case, ranks=two_ranks)
    assert f"is active: {does}" in ours[0]["said"][0]
    assert ours[0]["summary"]["notes"][: len(notes) or None] == notes
    assert ours[0]["said"][0].endswith("; ".join(["", *notes])) or not notes
