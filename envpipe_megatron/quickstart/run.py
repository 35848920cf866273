"""The quickstart's command: starts the ranks, shows progress, writes what they leave."""

from __future__ import annotations

import contextlib
import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from envpipe_megatron.console import say, show_tables, table_of
from envpipe_megatron.core.plan import read_plan
from envpipe_megatron.core.profile import read_profile
from envpipe_megatron.files import clear_own_folder, replace_files
from envpipe_megatron.formats.energy import Phase
from envpipe_megatron.gpu.emulated.presets import GpuPreset, load_preset
from envpipe_megatron.quickstart.ranks import rank_environment, running_ranks
from envpipe_megatron.quickstart.settings import (
    RUNS,
    QuickstartError,
    Settings,
    check_installed,
    load_text,
)
from envpipe_megatron.report.facts import gpu_shares

#: EnvPipe's columns, then ours.
_RESULT_COLUMNS = (
    "Model", "Microbatch size", "Minibatch size", "Type", "Scheduling", "Reconfig",
    "Throughput (sample/s)", "Energy (mJ)",
    "Iterations", "Iteration time (s)", "Energy per iteration (J)", "Average power (W)",
    "Final loss", "Wall time per iteration (s)", "Emulated",
)  # fmt: skip

Iterations = dict[str, list[dict[str, Any]]]
Results = dict[str, dict[str, Any]]

#: All that a quickstart leaves in its folder; the first marks the folder as its own.
_FILES = (
    "settings.json", "text.bin", "log.txt", "energy.jsonl", "timeline.jsonl", "clocks.jsonl",
    "profile.csv", "profile.json", "plan.json", "loop.jsonl", "results.csv", "summary.json",
    ".lock",
)  # fmt: skip
_EMULATED = "emulated"
#: Folders that may be beside them: the emulated GPUs, and what `envpipe report` makes.
_FOLDERS = (_EMULATED, "report")


def write_results(
    settings: Settings,
    output: Path,
    iterations: Iterations,
    results: Results,
    console: Console,
) -> dict[str, Any]:
    """Write what is known of both runs, finished or not; show and return the summary."""
    runs = {run: _run_facts(settings, results[run]) for run in results}
    summary: dict[str, Any] = {
        "emulated": True,
        "complete": len(runs) == len(RUNS),
        "gpu": settings.preset,
        "model": settings.model_name,
        "num_stages": settings.num_stages,
        "num_microbatches": settings.num_microbatches,
        "runs": runs,
        "losses": {run: [entry["loss"] for entry in told] for run, told in iterations.items()},
    }
    if summary["complete"]:
        summary |= _comparison(output, runs, results)
    replace_files({output / "summary.json": [json.dumps(summary, indent=1), "\n"]})
    _write_csv(settings, output / "results.csv", runs)
    if summary["complete"]:
        _show(settings, summary, console)
        say(console, f"Everything is in {output}")
    return summary


def _run_facts(settings: Settings, result: dict[str, Any]) -> dict[str, Any]:
    steady = [entry for entry in result["iterations"] if entry["phase"] == "steady"]
    energy_j = [stage["metered"]["steady"]["energy_j"] for stage in result["stages"]]
    time_s = sum(entry["iteration_time_s"] for entry in steady)
    return {
        "steady_iterations": len(steady),
        "iterations": len(result["iterations"]),
        "iteration_time_s": time_s / len(steady),
        "energy_j": sum(energy_j),
        "energy_per_iteration_j": sum(energy_j) / len(steady),
        "energy_by_gpu_j": energy_j,
        "average_power_w": sum(energy_j) / time_s,
        "throughput_samples_per_s": settings.minibatch_size * len(steady) / time_s,
        "wall_time_per_iteration_s": float(np.mean([entry["wall_time_s"] for entry in steady])),
        "first_loss": result["losses"][0],
        "final_loss": result["losses"][-1],
        "schedule": result["schedule"],
        "executed_order": [stage["executed"] for stage in result["stages"]],
        "clock_changes": sum(stage["clock_changes"] for stage in result["stages"]),
        "notes": result["notes"],
    }


def _comparison(output: Path, runs: dict[str, Any], results: Results) -> dict[str, Any]:
    baseline, envpipe = (runs[run] for run, *_ in RUNS)
    compared = results["envpipe"]["stages"]
    plan = read_plan(output / "plan.json", read_profile(output / "profile.csv"))
    for run, ran in (("baseline", plan.baseline), ("envpipe", plan)):
        runs[run]["shares_by_gpu"] = [
            gpu_shares(ran, stage, facts["metered"]["steady"])
            for stage, facts in enumerate(results[run]["stages"])
        ]
    return {
        "saving_percent": 100
        * (1 - envpipe["energy_per_iteration_j"] / baseline["energy_per_iteration_j"]),
        "slowdown_percent": 100 * (envpipe["iteration_time_s"] / baseline["iteration_time_s"] - 1),
        "predicted_saving_percent": plan.cost.saving_percent(plan.baseline.cost),
        "predicted_slowdown_percent": plan.cost.slowdown_percent(plan.baseline.cost),
        "losses_bit_equal": compared[-1]["losses_bit_equal"],
        "weights_bit_equal": all(
            ours["weights_sha256"] == theirs["weights_sha256"]
            for ours, theirs in zip(compared, results["baseline"]["stages"], strict=True)
        ),
        "steps_compared": results["envpipe"]["steps_compared"],
        "extra_forwards": list(plan.schedule.extra_forwards),
        "peak_in_flight": list(plan.schedule.peak_in_flight),
    }


def _write_csv(settings: Settings, path: Path, runs: dict[str, Any]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(_RESULT_COLUMNS)
        for run, policy, scheduling, reconfigure in RUNS:
            if run not in runs:
                continue
            facts = runs[run]
            writer.writerow(
                [
                    settings.model_name, settings.microbatch_size, settings.minibatch_size,
                    policy, scheduling, reconfigure,
                    f"{facts['throughput_samples_per_s']:.4f}", f"{1e3 * facts['energy_j']:.0f}",
                    facts["steady_iterations"], f"{facts['iteration_time_s']:.6f}",
                    f"{facts['energy_per_iteration_j']:.3f}", f"{facts['average_power_w']:.2f}",
                    f"{facts['final_loss']:.6f}", f"{facts['wall_time_per_iteration_s']:.4f}",
                    "yes",
                ]
            )  # fmt: skip


def _show(settings: Settings, summary: dict[str, Any], console: Console) -> None:
    preset = load_preset(settings.preset)
    baseline, envpipe = (summary["runs"][run] for run, *_ in RUNS)

    def row(name: str, ours: float, theirs: float, digits: int) -> tuple[str, ...]:
        change = f"{100 * (ours / theirs - 1):+.2f}"
        return name, f"{theirs:.{digits}f}", f"{ours:.{digits}f}", change

    def rows_of(*figures: tuple[str, str, int]) -> list[tuple[str, ...]]:
        return [row(name, envpipe[key], baseline[key], digits) for name, key, digits in figures]

    compared = summary["steps_compared"]
    losses = [summary["losses"][run] for run, *_ in RUNS]
    by_gpu = zip(envpipe["energy_by_gpu_j"], baseline["energy_by_gpu_j"], strict=True)
    rows = [
        ("loss of step 1", *(f"{loss[0]:.4f}" for loss in losses)),
        (f"loss of step {compared}", *(f"{loss[compared - 1]:.4f}" for loss in losses)),
        ("loss of the last step", *(f"{loss[-1]:.4f} (step {len(loss)})" for loss in losses)),
        *rows_of(
            ("throughput (samples/s)", "throughput_samples_per_s", 3),
            ("iteration time (s)", "iteration_time_s", 4),
            ("wall time per iteration (s)", "wall_time_per_iteration_s", 4),
        ),
        *(row(f"energy of GPU {gpu} (J)", *joules, 0) for gpu, joules in enumerate(by_gpu)),
        *rows_of(("energy of all (J)", "energy_j", 0), ("average power (W)", "average_power_w", 1)),
    ]
    for part, name in (("compute", "units"), ("blocking", "receives"), ("idle", "the rest")):
        for unit, quantity in (("s", "time"), ("j", "energy")):
            percents = (_share_percent(run, part, unit) for run in (baseline, envpipe))
            rows.append((f"{quantity} in {name} (%)", *(f"{p:.1f}" for p in percents)))
    title = f"{settings.model_name}: {baseline['steady_iterations']} iterations each"
    show_tables(console, table_of(title, ("", "baseline", "EnvPipe", "change (%)"), rows))
    equal = "equal to the last bit" if summary["losses_bit_equal"] else "NOT equal"
    console.print(
        f"[bold]Saving {summary['saving_percent']:.2f} %, slowdown "
        f"{summary['slowdown_percent']:.2f} %[/bold] (envpipe simulate says "
        f"{summary['predicted_saving_percent']:.2f} % and "
        f"{summary['predicted_slowdown_percent']:.2f} %). Losses of the "
        f"{summary['steps_compared']} steps both runs made: {equal}.",
        highlight=False,
    )
    console.print(_emulation_note(preset), highlight=False)
    for note in envpipe["notes"]:
        console.print(f"Note: {note}", highlight=False, markup=False)


def _share_percent(run: dict[str, Any], part: str, unit: str) -> float:
    """The part of all GPUs' time (unit s) or energy (unit j)."""
    by_gpu = run["shares_by_gpu"]
    whole = sum(gpu[f"{name}_{unit}"] for gpu in by_gpu for name in ("compute", "blocking", "idle"))
    return float(100 * sum(gpu[f"{part}_{unit}"] for gpu in by_gpu) / whole)


def _emulation_note(preset: GpuPreset) -> str:
    basis = "fitted to published measurements" if preset.fitted else "not fitted to any measurement"
    return (
        f"These joules are emulated: no GPU was used. Times and energies are those of a model of "
        f"the {preset.gpu}, {basis}; they are judged in emulated time."
    )


@dataclass
class Progressed:
    """Reports of the ranks so far."""

    #: For each run, its iterations in order: phase, loss, times.
    iterations: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    #: For each finished run, its result.
    results: dict[str, dict[str, Any]] = field(default_factory=dict)


def run_quickstart(settings: Settings, console: Console) -> None:
    """Train both runs and write the report to the settings' output folder.

    Raises QuickstartError for too little text, a package missing, a folder with other files, a rank
    that failed, or runs that trained differently; KeyboardInterrupt on Ctrl-C, SIGTERM or a closed
    terminal. Clocks are reset, and what was measured until then is kept in the output folder.
    """
    output, text = Path(settings.output_dir), Path(settings.text)
    load_preset(settings.preset)
    say(
        console,
        f"Training a {settings.model_name} on {text}\n"
        f"{settings.num_stages} pipeline ranks on this machine's CPU, "
        f"{settings.num_microbatches} microbatches, emulated GPUs ({settings.preset}).\n"
        "They load torch and build the model first, which takes up to a minute ...",
    )
    content = load_text(text, 100 * settings.sequence_length)
    check_installed("The quickstart")
    clear_own_folder(output, _FILES, _FOLDERS, "quickstart")
    settings.write(output / "settings.json")
    # One copy for all ranks: the source may change meanwhile, as when it holds this very folder.
    settings.text_copy.write_bytes(content)
    progressed = Progressed()
    try:
        _train(settings, output, progressed, console)
    except BaseException as error:
        write_results(settings, output, progressed.iterations, progressed.results, console)
        if isinstance(error, KeyboardInterrupt):
            say(console, f"Interrupted: clocks are reset, partial results are in {output}.")
        raise
    finally:
        settings.text_copy.unlink(missing_ok=True)
    summary = write_results(settings, output, progressed.iterations, progressed.results, console)
    if not summary["complete"]:
        raise QuickstartError(
            "The ranks ended without reporting their results",
            remedy=f"Look for the reason in {output / 'log.txt'}.",
        )
    if not (summary["losses_bit_equal"] and summary["weights_bit_equal"]):
        raise QuickstartError(
            "EnvPipe changed the result of training, which it must never do",
            remedy=f"Please report this with the files in {output}.",
        )


def _train(settings: Settings, output: Path, progressed: Progressed, console: Console) -> None:
    emulated = output / _EMULATED
    program = ["--module", "envpipe_megatron.quickstart.worker", str(output / _FILES[0])]
    with (
        _show_progress(settings, console) as show,
        running_ranks(
            settings.num_stages, program, rank_environment(emulated), output / "log.txt", emulated
        ) as events,
    ):
        try:
            for event in events:
                _take(event, progressed, show)
        except KeyboardInterrupt:
            show.stopping()
            raise


def _take(event: dict[str, Any], progressed: Progressed, show: _Shown) -> None:
    run = event["run"]
    match event["event"]:
        case "iteration":
            progressed.iterations.setdefault(run, []).append(event)
            show.iteration(event)
        case "say":
            show.say(run, event["text"])
        case "result":
            progressed.results[run] = event
            show.finished(run)


class _Shown:
    """Progress bars, one per run, with the phase beside them."""

    def __init__(self, progress: Progress, settings: Settings) -> None:
        self._progress = progress
        self._settings = settings
        self._tasks = {
            run: progress.add_task(run, total=None, note="", start=False) for run, *_ in RUNS
        }
        progress.update(self._tasks[RUNS[0][0]], total=settings.baseline_iterations)
        progress.start_task(self._tasks[RUNS[0][0]])

    def iteration(self, event: dict[str, Any]) -> None:
        task = self._tasks[event["run"]]
        self._progress.start_task(task)  # a repeated start changes nothing
        shown = self._progress.tasks[task]
        if shown.total is None and event["phase"] == Phase.STEADY:
            total = shown.completed + self._settings.steady_iterations
            self._progress.update(task, total=total)
        self._progress.update(task, advance=1, note=f"{event['phase']}, loss {event['loss']:.3f}")

    def say(self, run: str, text: str) -> None:
        if not text.startswith("warm-up"):
            self._progress.console.print(f"[dim]{run}: {escape(text)}[/dim]", highlight=False)

    def stopping(self) -> None:
        self._progress.console.print("Interrupted: stopping the ranks (again: kill them)")

    def finished(self, run: str) -> None:
        task = self._tasks[run]
        self._progress.update(task, total=self._progress.tasks[task].completed, note="done")


@contextlib.contextmanager
def _show_progress(settings: Settings, console: Console) -> Iterator[_Shown]:
    columns = (
        TextColumn("{task.description:9}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console) as progress:
        yield _Shown(progress, settings)
