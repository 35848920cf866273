"""The quickstart's command: starts the ranks, shows progress, writes the report."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.gpu.emulated import reset_all
from envpipe_megatron.gpu.emulated_store import ROOT_VARIABLE
from envpipe_megatron.gpu.presets import load_preset
from envpipe_megatron.quickstart.results import write_results
from envpipe_megatron.quickstart.settings import RUNS, QuickstartError, Settings, load_text

#: What starts a line of a rank's standard output that is meant for this command.
EVENT_MARK = "@envpipe "
#: How long ranks get to give their clocks back before they are killed.
_GRACE_S = 15.0


@dataclass
class Progressed:
    """What the ranks have told so far."""

    #: For each run, its iterations in order: phase, loss, times.
    iterations: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    #: For each finished run, what it came to.
    results: dict[str, dict[str, Any]] = field(default_factory=dict)


def run_quickstart(settings: Settings, console: Console) -> None:
    """Train both runs and write the report to the settings' output folder.

    Raises:
        QuickstartError: too little text, megatron-core missing, or a rank that failed; what was
            measured until then is kept in the output folder.
        KeyboardInterrupt: after clocks are reset and partial results are kept.
    """
    output, text = Path(settings.output_dir), Path(settings.text)
    load_preset(settings.preset)
    load_text(text, 100 * settings.sequence_length)
    _check_installed()
    _clear(output)
    settings.write(output / "settings.json")
    console.print(
        f"Training a {settings.model_name} on {text}\n"
        f"{settings.num_stages} pipeline ranks on this machine's CPU, "
        f"{settings.num_microbatches} microbatches, emulated GPUs ({settings.preset})."
    )
    progressed = Progressed()
    try:
        _train(settings, output, progressed, console)
    except KeyboardInterrupt:
        console.print(f"Interrupted: clocks are reset, partial results are in {output}.")
        write_results(settings, output, progressed.iterations, progressed.results, console)
        raise
    except EnvPipeError:
        write_results(settings, output, progressed.iterations, progressed.results, console)
        raise
    write_results(settings, output, progressed.iterations, progressed.results, console)


def _check_installed() -> None:
    from importlib.util import find_spec

    for module, package in (("torch", "torch"), ("megatron", "megatron-core")):
        if find_spec(module) is None:
            raise QuickstartError(
                f"The quickstart trains with {package}, which is not installed",
                remedy="pip install 'envpipe-megatron[megatron]', or use make quickstart.",
            )


def _clear(output: Path) -> None:
    """Remove an earlier quickstart's files, and nothing that is not one's."""
    marker = output / "settings.json"
    if output.exists() and any(output.iterdir()) and not marker.exists():
        raise QuickstartError(
            "The output folder is not empty and holds no quickstart",
            value=str(output),
            remedy="Give an empty or new folder with --output.",
        )
    if marker.exists():
        shutil.rmtree(output)
    output.mkdir(parents=True, exist_ok=True)


def _train(settings: Settings, output: Path, progressed: Progressed, console: Console) -> None:
    emulated = output / "emulated"
    log_path = output / "log.txt"
    environment = {
        **os.environ,
        ROOT_VARIABLE: str(emulated.resolve()),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        # Peers are on this machine; gloo would look up its name otherwise, which may not resolve.
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
    }
    command = [
        sys.executable, "-m", "torch.distributed.run",
        "--standalone", "--nproc-per-node", str(settings.num_stages),
        "--module", "envpipe_megatron.quickstart.worker", str(output / "settings.json"),
    ]  # fmt: skip
    # A session of its own: Ctrl-C reaches this process alone, which then stops the ranks in order.
    with (
        log_path.open("w") as log,
        subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        ) as ranks,
        _show_progress(settings, console) as show,
    ):
        try:
            assert ranks.stdout is not None
            for line in ranks.stdout:
                if line.startswith(EVENT_MARK):
                    _take(json.loads(line[len(EVENT_MARK) :]), progressed, show)
                else:
                    log.write(line)
            code = ranks.wait()
        finally:
            _stop(ranks)
            reset_all(emulated)  # also what a rank that was killed left behind
    if code != 0:
        raise QuickstartError(
            f"A rank failed (exit code {code}); clocks are reset",
            remedy=f"The first error stands in {log_path}.",
        )


def _stop(ranks: subprocess.Popen[str]) -> None:
    if ranks.poll() is not None:
        return
    ranks.terminate()  # torchrun passes it on to the ranks, which give their clocks back
    try:
        ranks.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(ranks.pid, signal.SIGKILL)
        ranks.wait()


def _take(event: dict[str, Any], progressed: Progressed, show: _Shown) -> None:
    run = event["run"]
    match event["event"]:
        case "iteration":
            progressed.iterations.setdefault(run, []).append(event)
            show.iteration(event)
        case "say":
            show.say(run, event["text"])
        case "grid":
            show.grid(event["text"])
        case "result":
            progressed.results[run] = event
            show.finished(run)


class _Shown:
    """Progress bars, one a run, with the phase beside them."""

    def __init__(self, progress: Progress, settings: Settings) -> None:
        self._progress = progress
        self._settings = settings
        self._last_grid = ""
        self._tasks = {
            run: progress.add_task(run, total=None, note="", start=False) for run, *_ in RUNS
        }
        progress.update(self._tasks[RUNS[0][0]], total=settings.baseline_iterations)

    def iteration(self, event: dict[str, Any]) -> None:
        task = self._tasks[event["run"]]
        self._progress.start_task(task)  # a repeated start changes nothing
        self._progress.update(task, advance=1, note=f"{event['phase']}, loss {event['loss']:.3f}")

    def say(self, run: str, text: str) -> None:
        if text.startswith("steady"):
            task = self._tasks[run]
            done = self._progress.tasks[task].completed
            self._progress.update(task, total=done + self._settings.steady_iterations)
            if self._last_grid:
                self._progress.console.print(self._last_grid, highlight=False, markup=False)
        if not text.startswith("warm-up"):
            self._progress.console.print(f"[dim]{run}: {text}[/dim]", highlight=False)

    def grid(self, text: str) -> None:
        # Every grid is in reconfigure.txt; the screen gets its headline, and the last one whole.
        self._last_grid = text
        self._progress.console.print(f"[dim]envpipe: {text.splitlines()[0]}[/dim]")

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
