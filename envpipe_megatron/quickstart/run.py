"""The quickstart's command: starts the ranks, shows progress, writes what they leave."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from envpipe_megatron.console import say
from envpipe_megatron.files import clear_own_folder
from envpipe_megatron.formats.energy import Phase
from envpipe_megatron.gpu.emulated.presets import load_preset
from envpipe_megatron.quickstart.ranks import (
    ended_like_ctrl_c,
    events_of,
    rank_environment,
    started_ranks,
    torchrun_command,
)
from envpipe_megatron.quickstart.results import write_results
from envpipe_megatron.quickstart.settings import (
    RUNS,
    QuickstartError,
    Settings,
    check_installed,
    load_text,
)

#: All that a quickstart leaves in its folder; the first marks the folder as its own.
_FILES = (
    "settings.json", "text.bin", "log.txt", "energy.jsonl", "timeline.jsonl", "clocks.jsonl",
    "profile.csv", "profile.json", "plan.json", "loop.jsonl", "results.csv", "summary.json",
    ".lock",
)  # fmt: skip
_EMULATED = "emulated"
#: Folders that may be beside them: the emulated GPUs, and what `envpipe report` makes.
_FOLDERS = (_EMULATED, "report")


@dataclass
class Progressed:
    """What the ranks have reported so far."""

    #: For each run, its iterations in order: phase, loss, times.
    iterations: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    #: For each finished run, its result.
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    #: The process of each rank, which leads its own session.
    rank_pids: list[int] = field(default_factory=list)


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
        with ended_like_ctrl_c(signal.SIGTERM, signal.SIGHUP):
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
    log_path = output / "log.txt"
    module = "envpipe_megatron.quickstart.worker"
    command = torchrun_command(
        settings.num_stages, ["--module", module, str(output / "settings.json")]
    )
    with (
        log_path.open("w") as log,
        _show_progress(settings, console) as show,
        started_ranks(
            command, rank_environment(emulated), log, emulated, progressed.rank_pids
        ) as ranks,
    ):
        try:
            for event in events_of(ranks, log):
                _take(event, progressed, show)
        except KeyboardInterrupt:
            show.stopping()
            raise
        code = ranks.wait()
    if code != 0:
        raise QuickstartError(
            f"A rank failed (exit code {code}); clocks are reset",
            remedy=f"The first error stands in {log_path}.",
        )


def _take(event: dict[str, Any], progressed: Progressed, show: _Shown) -> None:
    run = event["run"]
    match event["event"]:
        case "rank":
            progressed.rank_pids.append(event["pid"])
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
