"""Runs a quickstart or a proof: starts the ranks, and keeps what they report."""

from __future__ import annotations

import importlib.util
import json
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from envpipe_megatron.console import say
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.files import clear_own_folder, replace_files
from envpipe_megatron.gpu.base import FORBID_VARIABLE
from envpipe_megatron.gpu.presets import load_preset
from envpipe_megatron.trials.claims import equality
from envpipe_megatron.trials.ranks import rank_environment, run_ranks
from envpipe_megatron.trials.settings import Settings, load_text

Event = dict[str, Any]


class Results(ABC):
    """Reports of ranks so far; a subclass writes down what they show.

    Attributes:
        who: the command's work, in a word.
        files: all that it leaves in its folder; the first, its settings, mark it as its own.
        folders: that may be beside them.
        introduction: says what is trained.
        turns: reports of those that have ended, in their order.
        losses: of each arm's iterations so far, on average; None where nobody waited for them.
    """

    who: ClassVar[str]
    files: ClassVar[tuple[str, ...]]
    folders: ClassVar[tuple[str, ...]]

    def __init__(self, settings: Settings, introduction: str) -> None:
        self.settings, self.introduction = settings, introduction
        self.turns: list[Event] = []
        self.losses: dict[str, list[float | None]] = {}

    @property
    def complete(self) -> bool:
        """True if all turns came to their end."""
        return len(self.turns) == len(self.settings.turns)

    def begin(self, console: Console) -> Progress:
        """Return the bar of progress, whose time runs from now on."""
        columns = (
            TextColumn("turns"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
        )
        self.progress = Progress(*columns, console=console)
        self._bar = self.progress.add_task("", total=len(self.settings.turns), note="")
        return self.progress

    def take(self, event: Event) -> None:
        """Note and show what a rank reported."""
        match event["event"]:
            case "say":
                text = f"{event['arm']}: {event['text']}"
                self.progress.console.print(text, highlight=False, markup=False, style="dim")
            case "iteration":
                losses, loss = self.losses.setdefault(event["arm"], []), event["loss"]
                losses.append(loss)
                note = f"{event['arm']}: {event['phase']}, iteration {len(losses)}"
                note += "" if loss is None else f", loss {loss:.3f}"
                self.progress.update(self._bar, note=note)
            case "turn":
                self.turns.append(event)
                self.progress.update(self._bar, advance=1)

    @abstractmethod
    def write(self) -> None:
        """Write files of what is known, complete or not."""

    @abstractmethod
    def show(self, console: Console) -> None:
        """Show the result of all turns, as it was written."""

    def put(self, name: str, data: object) -> None:
        """Write a JSON file."""
        replace_files({self.settings.output / name: [json.dumps(data, indent=1), "\n"]})


def run_trial(results: Results, console: Console) -> None:
    """Train all turns, and leave what they show in the output folder.

    Raises EnvPipeError for an unknown preset, too little text, a package missing, a folder with
    other files, a rank that failed, turns that are missing, or arms that trained differently;
    KeyboardInterrupt on Ctrl-C, SIGTERM or a closed terminal. Clocks are reset, and what was
    measured until then is kept.
    """
    settings, output = results.settings, results.settings.output
    if settings.preset is not None:
        load_preset(settings.preset)
    content = load_text(Path(settings.text), 100 * settings.sequence_length)
    for module, package in (("torch", "torch"), ("megatron", "megatron-core")):
        if importlib.util.find_spec(module) is None:
            raise EnvPipeError(
                f"A {results.who} needs {package}, which is not installed",
                remedy="pip install 'torch>=2.11' megatron-core==0.16.1, or use make quickstart.",
            )
    clear_own_folder(output, results.files, results.folders, results.who)
    settings.write(output / results.files[0])
    # One copy for all ranks: the source may change meanwhile, as when it holds this very folder.
    settings.text_copy.write_bytes(content)
    say(results.introduction, console)
    try:
        _train(results, console)
    except KeyboardInterrupt:
        say(f"Interrupted: clocks are reset, what was measured is in {output}.", console)
        raise
    finally:
        settings.text_copy.unlink(missing_ok=True)
        results.write()
    if not results.complete:
        raise EnvPipeError(
            "The ranks ended without reporting all turns",
            remedy=f"Look for the reason in {output / 'log.txt'}.",
        )
    results.show(console)
    if not all(equality(results.turns)[1:]):
        raise EnvPipeError(
            "EnvPipe changed the result of training, which it must never do",
            remedy=f"Please report this with the files in {output}.",
        )


def _train(results: Results, console: Console) -> None:
    settings = results.settings
    worker, settings_file = "envpipe_megatron.trials.worker", settings.output / results.files[0]
    with results.begin(console):
        run_ranks(
            settings.num_stages,
            ["--module", worker, str(settings_file)],
            # A rank that must not change a clock cannot, even if something goes wrong.
            rank_environment(settings.output / "emulated")
            | ({} if settings.changes_clocks else {FORBID_VARIABLE: "1"}),
            settings.output / "log.txt",
            results.take,
        )
