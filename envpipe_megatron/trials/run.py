"""Runs a quickstart or a proof: starts the ranks, keeps what they report, and shows it."""

from __future__ import annotations

import importlib.util
import itertools
import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

from envpipe_megatron.console import say, show_table
from envpipe_megatron.core.fields import read_json
from envpipe_megatron.core.plan import Plan, read_plan
from envpipe_megatron.core.profile import read_profile
from envpipe_megatron.core.profile_rows import MEASURED_SPLIT
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.files import lock_file, replace_files
from envpipe_megatron.gpu.base import FORBID_VARIABLE
from envpipe_megatron.gpu.presets import load_preset
from envpipe_megatron.report.page.document import page_text, to_markdown
from envpipe_megatron.report.summary import Section
from envpipe_megatron.runtime.job.options import PROFILE_FILE
from envpipe_megatron.trials.claims import Claim, claims_of, equality
from envpipe_megatron.trials.machine import Machine, newcomers
from envpipe_megatron.trials.ranks import rank_environment, run_ranks
from envpipe_megatron.trials.results import (
    arms_section,
    claims_section,
    line_to_paste,
    machine_section,
    turns_section,
)
from envpipe_megatron.trials.settings import Settings, load_text

Event = dict[str, Any]
CLAIMS_FORMAT, CLAIMS_FILE = "envpipe-claims/1", "claims.json"


class Trial:
    """The reports of the ranks of a quickstart or a proof, and what they show, complete or not.

    Args:
        machine: the one to measure on, which `trials.machine` has found fit.
        checks: doctor's, as JSON, for a proof's files.

    Attributes:
        turns: reports of those that have ended, in their order; `turns.jsonl` has them, too.
        latency: of each GPU, as `measure_latency` gives it; None if it was not measured.
        claims: as far as they are known.
    """

    def __init__(
        self, settings: Settings, machine: Machine, checks: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        self.settings, self.machine, self._checks = settings, machine, checks
        self.turns: list[Event] = []
        self.latency: list[Event] | None = None
        self.claims: list[Claim] = []

    @property
    def complete(self) -> bool:
        """True if all turns came to their end."""
        return len(self.turns) == len(self.settings.turns)

    @property
    def introduction(self) -> str:
        """Say what is trained."""
        settings, machine = self.settings, self.machine
        only = f"\nOrders only, no clock is changed: {machine.missing}" if machine.missing else ""
        return (
            f"Training a GPT ({settings.num_layers} layers, width {settings.hidden_size}) on "
            f"{settings.text}\nover {machine.gpus}, with {settings.num_microbatches} microbatches; "
            f"rounds: {settings.rounds}, of {', '.join(arm.name for arm in settings.arms)}{only}\n"
            "Its ranks load torch and build the model first, which takes up to a minute ..."
        )

    @property
    def line(self) -> str:
        """Say all claims in one line, to paste."""
        return line_to_paste(self.claims, self.machine, self.turns, self.settings.command)

    def begin(self, console: Console) -> Progress:
        """Return the bar of progress, whose time runs from now on."""
        shown = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), "{task.fields[note]}"
        self.progress = Progress("turns", *shown, console=console)
        self._bar = self.progress.add_task("", total=len(self.settings.turns), note="")
        return self.progress

    def take(self, event: Event) -> None:
        """Note and show what a rank reported, and write down what ended turns show."""
        match event["event"]:
            case "say":
                text = f"{event['arm']}: {event['text']}"
                self.progress.console.print(text, highlight=False, markup=False, style="dim")
            case "iteration":
                note = f"{event['arm']}: {event['phase']}, iteration {event['number']}"
                note += "" if event["loss"] is None else f", loss {event['loss']:.3f}"
                self.progress.update(self._bar, note=note)
            case "versions":
                self.machine.versions.update(torch=event["torch"], CUDA=event["cuda"])
            case "latency":
                self.latency = event["gpus"]
                self.put("latency.json", self.latency)
            case "turn":
                event["newcomers"] = newcomers(self.machine)
                self.turns.append(event)
                with (self.settings.output / "turns.jsonl").open("a") as file:
                    file.write(json.dumps(event) + "\n")
                self.progress.update(self._bar, advance=1)
                self.write()

    def write(self) -> None:
        """Write the claims, and a proof's page, as far as they are known."""
        settings, machine = self.settings, self.machine
        self.claims = claims_of(self.turns, settings.arms, self.latency, emulated=machine.emulated)
        document = {
            "format": CLAIMS_FORMAT,
            "complete": self.complete,
            "emulated": machine.emulated,
            "clocks_changed": not machine.missing,
            "claims": [asdict(claim) for claim in self.claims],
            "line": self.line,
        }
        self.put(CLAIMS_FILE, document)
        if not settings.proof:
            return
        self.put("machine.json", {**asdict(machine), "doctor": list(self._checks)})
        title = "EnvPipe: a proof" + (" (emulated)" if machine.emulated else "")
        title += "" if self.complete else ", not complete"
        marks = [self.line]
        marks += [f"No clock was changed: {machine.missing}"] if machine.missing else []
        sections = (
            Section("To paste", lines=(self.line,)),
            claims_section(self.claims),
            arms_section(self.turns, settings, self._plans()),
            turns_section(self.turns, len(machine.gpu_names)),
            machine_section(machine),
        )
        replace_files(
            {
                settings.output / "summary.md": [to_markdown(title, sections, "prove")],
                settings.output / "index.html": [page_text(title, marks, sections, "prove")],
            }
        )

    def show(self, console: Console) -> None:
        """Show the result of all turns, as it was written."""
        say(self.line, console)
        arms = arms_section(self.turns, self.settings, self._plans())
        show_table(arms.title, arms.header, arms.rows, left=arms.header[5:], console=console)
        steps, losses = equality(self.turns)[0], self.turns[0]["losses"]
        first, last = (fmean(losses[step]) for step in (0, steps - 1))
        say(f"Losses of the {steps} steps that all turns made: {first:.4f} to {last:.4f}", console)
        if self.settings.preset is not None:
            preset = load_preset(self.settings.preset)
            basis = "fitted to published" if preset.fitted else "not fitted to any"
            say(
                "These joules are emulated: no GPU was used. Times and energies are those of a "
                f"model of the {preset.gpu}, {basis} measurements, in emulated time. A backward in "
                f"two parts takes {100 * MEASURED_SPLIT.overhead:g} % more, as was measured on an "
                "H200.",
                console,
            )
        errors = (stage["clocks"]["error"] for turn in self.turns for stage in turn["stages"])
        notes = (note for turn in self.turns for note in turn["notes"])
        for note in dict.fromkeys(filter(None, (*notes, *errors))):
            say(f"Note: {note}", console)
        say(f"Everything is in {self.settings.output}", console)

    def _plans(self) -> dict[str, Plan]:
        """Return the plans that arms have run, as far as they are there."""
        plans = {}
        for arm in self.settings.arms:
            with suppress(EnvPipeError, OSError):  # not yet, or a rank was ended while it wrote
                profile = read_profile(self.settings.profile_folder / PROFILE_FILE)
                plans[arm.name] = read_plan(self.settings.output_of(arm) / "plan.json", profile)
        return plans

    def put(self, name: str, data: object) -> None:
        """Write a JSON file."""
        replace_files({self.settings.output / name: [json.dumps(data, indent=1), "\n"]})


def run_trial(trial: Trial, console: Console) -> None:
    """Train all turns, and leave what they show in the output folder.

    Raises EnvPipeError for too little text, a package missing, a folder with
    other files, a rank that failed, turns that are missing, or arms that trained differently;
    KeyboardInterrupt on Ctrl-C, SIGTERM or a closed terminal. Clocks are reset, and what was
    measured until then is kept.
    """
    settings, output = trial.settings, trial.settings.output
    content = load_text(Path(settings.text), 100 * settings.sequence_length)
    for module, package in (("torch", "torch"), ("megatron", "megatron-core")):
        if importlib.util.find_spec(module) is None:
            raise EnvPipeError(
                f"`envpipe {settings.command}` needs {package}, which is not installed",
                remedy="pip install 'torch>=2.11' megatron-core==0.16.1, or use make quickstart.",
            )
    with _take_folder(settings):
        trial.put(settings.file.name, asdict(settings))
        # One copy for all ranks: the source may change, as when it holds this very folder.
        settings.text_copy.write_bytes(content)
        say(trial.introduction, console)
        try:
            _train(trial, console)
        except KeyboardInterrupt:
            say(f"Interrupted: clocks are reset, what was measured is in {output}.", console)
            raise
        finally:
            settings.text_copy.unlink(missing_ok=True)
            trial.write()
    if not trial.complete:
        raise EnvPipeError(
            "The ranks ended without reporting all turns",
            remedy=f"Look for the reason in {output / 'log.txt'}.",
        )
    trial.show(console)
    if not all(equality(trial.turns)[1:]):
        raise EnvPipeError(
            "EnvPipe changed the result of training, which it must never do",
            remedy=f"Please report this with the files in {output}.",
        )


def _take_folder(settings: Settings) -> AbstractContextManager[object]:
    """Make the output folder, or move what an earlier run of the command left there out of the way.

    Returns its lock. Raises EnvPipeError if the folder holds anything, and no settings of such a
    run, or if that still goes on.
    """
    output, earlier = settings.output, settings.output / "earlier"
    lock_path = output / ".trial.lock"
    output.mkdir(parents=True, exist_ok=True)
    found = sorted(path for path in output.iterdir() if path not in (earlier, lock_path))
    own = not found
    with suppress(EnvPipeError):  # other programs have files of that name, too
        own = own or "output_dir" in read_json(settings.file, "File").data
    if not own:
        raise EnvPipeError(
            f"The output folder {output} holds what no `envpipe {settings.command}` left there",
            value=found[0].name,
            remedy="Give an empty or new folder with --output.",
        )
    try:
        lock: AbstractContextManager[object] = lock_file(lock_path)
    except BlockingIOError as error:
        raise EnvPipeError(
            f"Another run writes to {output}",
            remedy="Wait until it has ended, or give another --output.",
        ) from error
    except OSError:
        lock = nullcontext()  # as on a disk without locks
    if found:
        numbered = (earlier / str(number) for number in itertools.count(1))
        aside = next(folder for folder in numbered if not folder.exists())
        aside.mkdir(parents=True)
        for path in found:
            path.rename(aside / path.name)
    return lock


def _train(trial: Trial, console: Console) -> None:
    settings, worker = trial.settings, "envpipe_megatron.trials.worker"
    with trial.begin(console):
        run_ranks(
            settings.num_stages,
            ["--module", worker, str(settings.file)],
            # A rank that must not change a clock cannot, even if something goes wrong.
            rank_environment(settings.output / "emulated")
            | ({} if settings.changes_clocks else {FORBID_VARIABLE: "1"}),
            settings.output / "log.txt",
            trial.take,
        )
