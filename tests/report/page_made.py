"""The page of a job that was never run: two pipelines of three stages, two nodes."""

from dataclasses import replace
from pathlib import Path

import numpy as np
from run_made import iterations, profile, windows

from envpipe_megatron.core.plan import Plan
from envpipe_megatron.formats.energy import EnergyLogs
from envpipe_megatron.formats.steps import Comparison, StepEnergy
from envpipe_megatron.formats.timeline import ClockSamples, TimelineLogs
from envpipe_megatron.policies.planner import make_plan
from envpipe_megatron.policies.request import PlanRequest
from envpipe_megatron.report.facts import ReportFacts, StepFacts
from envpipe_megatron.report.page.document import page_text, tiles_of
from envpipe_megatron.report.run_folder import RunFolder
from envpipe_megatron.report.summary import Section, marks_of
from envpipe_megatron.report.units import unit_table
from envpipe_megatron.report.views import timelines_view, views_of

STAGES, MICROBATCHES = 3, 4
ROWS = [(1410, 0.010, 3.0), (1200, 0.011, 2.4), (900, 0.014, 2.1)]


def two_pipelines(phases=("warm-up", "steady")):
    """As `run_made` has it, and the same once more on another node."""
    one = iterations(STAGES, MICROBATCHES, phases)
    return [
        replace(read, labels=replace(read.labels, node=node, rank=2 * read.labels.stage + number,
                                     gpu_uid=f"GPU-{node}-{read.labels.stage}"))
        for read in one
        for number, node in enumerate(("n1", "n2"))
    ]  # fmt: skip


def plan() -> Plan:
    made = make_plan(
        profile(STAGES, ROWS), PlanRequest(MICROBATCHES, "1f1b", "optimal", blocking_power_w=90.0)
    )
    return made.plan


def folder(path: Path) -> RunFolder:
    recorded = two_pipelines(("warm-up", "profile", "steady"))
    clocks = [
        ClockSamples(
            read.labels,
            (100.0, 100.5, 101.0),
            (1200, None, 900),
            (1200, 1410, 915),
            ("sw power cap", "sw power cap, hw thermal slowdown", "idle"),
        )
        for read in recorded[: 2 * STAGES]
    ]
    made = plan()
    return RunFolder(
        path,
        TimelineLogs(tuple(recorded), tuple(clocks)),
        EnergyLogs(tuple(windows(recorded)), 0, ()),
        made.profile,
        made,
        (), None, (),
    )  # fmt: skip


COLUMNS = tuple(f"part {number} (J)" for number in range(9))
SECTIONS = (
    Section("Narrow", ("", "then", "now"), (("energy of all GPUs (J)", *2 * ("1326.0 +- 19.4",)),)),
    Section("Wide", COLUMNS, (("baseline", *8 * ("1326.0 +- 19.4",)),)),
    Section("Pictures", stills={"still": "Not on the page"}),
)  # fmt: skip


#: Of six GPUs.
STEP = StepFacts(6, StepEnergy(1, 0.2, 0.001, 40.0, 0.1))


def write_page(path: Path) -> Path:
    """Write the page, with `SECTIONS` as its tables, and say where."""
    facts = ReportFacts({"steady": STEP}, STEP, Comparison(0.2, 40.0, 12.0, 0.1, 0.1, 0.2))
    page = path / "index.html"
    run = folder(path)
    table = unit_table(run.timelines.iterations, STAGES, run.profile)
    views = [timelines_view(table), *views_of(run, facts)]
    text = page_text(
        "A job <&>", marks_of(run), SECTIONS, "report", tiles_of(facts, "emulated"), views
    )
    page.write_text(text, encoding="utf-8")
    return page


def durations_ms(units, gpu):
    """Of the units of a GPU in the last iteration."""
    columns = units.columns
    own = (columns["row"] == gpu) & (columns["iteration"] == len(units.iterations) - 1)
    return np.round(columns["end"][own] - columns["begin"][own], 3)
