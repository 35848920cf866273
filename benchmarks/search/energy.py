"""Modelled energy of configurations at equal time: Aceso's plan, its slack used, and ours.

Run from the checkout:

    python -m benchmarks.search.energy                  # all settings and power models
    python -m benchmarks.search.energy gpt-1.3B         # one setting

No joule was measured with these profiles: joules and clocks are **modelled** by GPU presets, so
the seconds that GPUs are busy and idle stand beside them. All rows may take as long as Aceso's plan
in 1F1B at the highest clock by our simulator:

- `Aceso, full clock`: the plan that its unmodified search finds;
- `Aceso, 1F1B stretched`: the rival: the same with its slack used by our planner's clocks;
- `Aceso, our order`: the same with order and clocks planned together;
- `sizes by stage`: our division of Aceso's space, planned in that time;
- `Megatron`: whole layers, one size, virtual stages up to 4, for the least energy; and with the
  distributed optimizer, which Aceso's model lacks.

Where Megatron's space has nothing as fast, its row takes longer by `late_percent`, and is compared
with the rival stretched to that time: `saved_percent` is always at equal time.
"""

from __future__ import annotations

import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks.outputs import Claim, leave, make_console, make_table, output_option, span
from benchmarks.search import sailor
from benchmarks.search.aceso_runs import (
    ARCHIVE,
    SETTINGS,
    Judged,
    Setting,
    read_plan,
    read_setting,
    search,
    unpack,
)
from benchmarks.search.aceso_space.aceso_files import fold_blocks
from benchmarks.search.aceso_space.plans import simulated
from benchmarks.search.searches import MAX_CHUNKS, divide_operators
from envpipe_megatron.core.plan import Plan
from envpipe_megatron.gpu.modelled import with_modelled_energy
from envpipe_megatron.gpu.presets import GpuPreset, load_preset
from envpipe_megatron.policies.objective import Goal, Objective
from envpipe_megatron.policies.planner import make_plan
from envpipe_megatron.policies.request import PlanRequest
from envpipe_megatron.search.candidates import Candidate
from envpipe_megatron.search.configuration import Configuration, Job
from envpipe_megatron.search.layer_profile import LayerProfile
from envpipe_megatron.search.search import search as search_megatron
from envpipe_megatron.search.space import Space

COMMAND = "python -m benchmarks.search.energy"
#: The first is fitted to the GPU of the last setting, the next ones to others, the last to none.
PRESETS = ("a100-sxm", "a40", "a100-pcie", "h100")
#: Sailor's A100 with 40 GB: the model is of Aceso's GPT-2.6B's shape, by which its files are named.
NEO = Setting("gpt-neo-2.7B", "a100", "gpt", "2_6B", 32, 4, 1024, 36_000)
CASES = {case.name: case for case in (SETTINGS["gpt-1.3B"], SETTINGS["gpt-2.6B"], NEO)}
FULL, RIVAL, ORDER = "Aceso, full clock", "Aceso, 1F1B stretched", "Aceso, our order"
DIVIDED, MEGATRON, SHARED = "sizes by stage", "Megatron", "Megatron, shared optimizer"
_NEO_FILES = "profiler/A100-40/profiled-data-fp16"


@dataclass(frozen=True)
class Found:
    """What searches found in a setting: Aceso's plan, as it judges it, and our division."""

    profile: LayerProfile
    theirs: Configuration
    judged: Judged
    divided: Configuration


def unpack_neo(folder: Path) -> None:
    """Lay Sailor's files where Aceso's search looks for the model of that shape."""
    with tarfile.open(sailor.ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    there = folder / "profiler" / f"profiled-time-{NEO.database}"
    there.mkdir(parents=True)
    for path in (folder / "sailor/Planner/baselines/Aceso" / _NEO_FILES).glob("*.csv"):
        if not path.name.startswith(("OPT", "prim_OPT")):
            path.rename(there / path.name.replace("GPT-Neo-2.7", NEO.prefix))


def find(folder: Path, setting: Setting, budget_s: int) -> Found:
    """Run both searches."""
    searched = search(folder, setting, budget_s)
    theirs, division = read_plan(searched.plan), divide_operators(folder, setting)
    if theirs is None or division is None:
        raise click.ClickException(f"{setting.name}: no plan whose stages have one size each")
    profile = read_setting(folder, setting)
    return Found(profile, theirs, searched.judged, division.configuration)


def check(found: Found, setting: Setting) -> dict[str, Any]:
    """Our simulator and memory beside Aceso's own, for its own plan."""
    candidate = simulated(found.theirs, found.profile, setting.job)
    return {
        "setting": setting.name,
        "Aceso_ms": found.judged.time_ms,
        "simulated_ms": candidate.iteration_time_s * 1e3,
        "Aceso_MiB": found.judged.memory_mib,
        "our_MiB": float(candidate.peak_bytes.max()) / 2**20,
    }


def stretched(candidate: Candidate, wait_w: float, longest_s: float) -> Plan:
    """1F1B with the clocks that take the least energy within a time."""
    request = PlanRequest(
        num_microbatches=candidate.configuration.num_microbatches,
        policy="optimal",
        deadline_factor=max(1.0, longest_s / candidate.iteration_time_s),
        conditions=candidate.conditions(wait_w),
    )
    return make_plan(candidate.stage_profile, request).plan


def rows_of(found: Found, setting: Setting, preset: GpuPreset) -> list[dict[str, Any]]:
    """All rows of a setting with one power model."""
    wait_w, job = preset.wait_power_w, setting.job
    profile = with_modelled_energy(found.profile, preset)
    aceso = simulated(found.theirs, profile, job)
    longest_s = aceso.iteration_time_s
    rival = stretched(aceso, wait_w, longest_s)
    ours = simulated(found.divided, profile, job)
    plans = {
        FULL: rival.baseline,
        RIVAL: rival,
        ORDER: aceso.plan(wait_w, longest_s),
        DIVIDED: ours.plan(wait_w, longest_s),
    }
    rows = []
    for way, plan in [*plans.items(), *_megatron(found.profile, job, preset, longest_s)]:
        late = plan.cost.iteration_time_s > longest_s * (1 + 1e-6)
        beside = stretched(aceso, wait_w, plan.cost.iteration_time_s) if late else rival
        row = {"setting": setting.name, "modelled_by": preset.name, "way": way}
        rows.append(row | figures_of(plan, longest_s, beside))
    return rows


def figures_of(plan: Plan, longest_s: float, rival: Plan) -> dict[str, Any]:
    """The columns of a plan, beside the time that all may take and the rival in its time."""
    gpus, time_s = plan.conditions.gpus_by_stage, plan.cost.iteration_time_s
    busy_s = float(gpus @ plan.timeline.duration_s.sum(axis=1))
    return {
        "time_s": time_s,
        "late_percent": max(0.0, 100 * (time_s / longest_s - 1)),
        "modelled_kJ": plan.cost.energy_j / 1e3,
        "saved_percent": plan.cost.saving_percent(rival.cost),
        "busy_GPU_s": busy_s,
        "idle_GPU_s": float(gpus.sum()) * time_s - busy_s,
    }


def _megatron(
    profile: LayerProfile, job: Job, preset: GpuPreset, longest_s: float
) -> Iterator[tuple[str, Plan]]:
    """The best of Megatron's space within a time, or within that of the fastest."""
    folded = fold_blocks(profile)
    modelled = with_modelled_energy(folded, preset)
    for way, shared in ((MEGATRON, False), (SHARED, True)):
        space = Space(MAX_CHUNKS, distributed_optimizer=shared)
        fastest = search_megatron(folded, job, space, Objective(goal=Goal.TIME)).ranked[0]
        best = search_megatron(
            modelled,
            job,
            space,
            Objective(goal=Goal.ENERGY),
            blocking_power_w=preset.wait_power_w,
            max_slowdown=max(0.0, longest_s / fastest.iteration_time_s - 1),
        ).ranked[0]
        assert best.plan is not None
        yield way, best.plan


def claim_of(rows: Sequence[dict[str, Any]], name: str) -> Claim:
    """What a setting's rows say."""

    def saved(way: str) -> str:
        found = [row["saved_percent"] for row in rows if row["way"] == way]
        late = max(row["late_percent"] for row in rows if row["way"] == way)
        return f"{span(found)} %" + (f" ({late:.1f} % later)" if late >= 0.05 else "")

    least = min(row["saved_percent"] for row in rows if row["way"] == DIVIDED)
    return Claim(
        "search_energy",
        f"{COMMAND} {name}",
        f"{name}: at equal time, against Aceso's plan with its slack used by our clocks, our"
        f" sizes by stage save {saved(DIVIDED)} of modelled energy, Megatron's space"
        f" {saved(MEGATRON)}, with the distributed optimizer {saved(SHARED)}; Aceso's plan at"
        f" full clock saves {saved(FULL)}",
        f"modelled: {', '.join(dict.fromkeys(row['modelled_by'] for row in rows))}",
        paper="Aceso knows no energy",
        agrees=least >= 0,
    )


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(list(CASES)), metavar="[SETTING]...")
@click.option("--budget", default=30, show_default=True, help="Of Aceso's search, in s.")
@output_option("search_energy")
def main(names: tuple[str, ...], budget: int, output: Path) -> None:
    """Compare all settings, or those named."""
    console = make_console()
    missing = [path for path in (ARCHIVE, sailor.ARCHIVE) if not path.exists()]
    if missing:
        console.print(f"Skipped: {missing[0]} is not there", highlight=False)
        return
    all_rows, claims = [], []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        unpack(folder)
        unpack_neo(folder)
        for name in names or CASES:
            setting = CASES[name]
            found = find(folder, setting, budget)
            console.print(
                make_table("Aceso's plan, by its model and ours", [check(found, setting)])
            )
            presets = [load_preset(preset) for preset in PRESETS]
            rows = [row for preset in presets for row in rows_of(found, setting, preset)]
            console.print(make_table("Modelled energy of an iteration at equal time", rows))
            claims.append(claim_of(rows, name))
            all_rows += rows
    leave(output, {"energy": all_rows}, claims)


if __name__ == "__main__":
    main()
