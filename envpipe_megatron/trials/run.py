"""Runs a quickstart or a proof: looks at the machine, starts the ranks, keeps what they report.

What a quickstart shows is here too, its two arms beside each other; `proof` has a proof's.
"""

from __future__ import annotations

import importlib.util
import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

from envpipe_megatron import __version__
from envpipe_megatron.console import say
from envpipe_megatron.core.plan import read_plan
from envpipe_megatron.core.profile import read_profile
from envpipe_megatron.core.profile_rows import MEASURED_SPLIT
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.files import clear_own_folder, replace_files
from envpipe_megatron.formats.energy import IDLE
from envpipe_megatron.gpu.base import FORBID_VARIABLE, GpuError
from envpipe_megatron.gpu.control import choose_control
from envpipe_megatron.gpu.presets import load_preset
from envpipe_megatron.gpu.registry import Device, look_at, vendors_here, visible_gpus
from envpipe_megatron.gpu.site import read_site
from envpipe_megatron.integrations.levels import version_of
from envpipe_megatron.trials.claims import Claim, claims_of, difference, equality
from envpipe_megatron.trials.ranks import rank_environment, run_ranks
from envpipe_megatron.trials.settings import BASELINE, ENVPIPE, Settings, load_text

Event = dict[str, Any]
CLAIMS_FORMAT, CLAIMS_FILE = "envpipe-claims/1", "claims.json"
_PACKAGES = ("torch", "megatron-core", "nvidia-ml-py", "numpy")
#: What a GPU may be busy with that only answers those who read its meters.
_MOST_BUSY_PERCENT = 5
_LEFT_ALONE = "--without-clocks was given"


@dataclass(frozen=True)
class Machine:
    """The machine that is measured on.

    Args:
        emulated: whether GPUs follow a model.
        gpu_names: one for each pipeline rank.
        devices: the real GPUs.
        missing: why no clock is changed; empty if clocks are.
        versions: of all that figures rest on.
    """

    emulated: bool
    gpu_names: tuple[str, ...]
    devices: tuple[Device, ...]
    missing: str
    versions: dict[str, str]


def emulated_machine(preset: str, num_stages: int, with_clocks: bool | None) -> Machine:
    """Return a machine of emulated GPUs, whose time does not depend on how busy the host is.

    Raises GpuError if there is no such preset.
    """
    name = f"{load_preset(preset).gpu} (emulated)"
    missing = _LEFT_ALONE if with_clocks is False else ""
    return Machine(True, (name,) * num_stages, (), missing, _versions())


def real_machine(with_clocks: bool | None) -> Machine:
    """Look at this machine's GPUs, as CUDA shows them to this process.

    By default clocks are changed where a right to is found.

    Raises EnvPipeError: fewer than two GPUs, no right to change clocks that are to be, or the
    machine is not quiet. GpuError: the driver cannot be read.
    """
    chosen = choose_control("auto", read_site())
    missing = "" if chosen.backend else ". ".join(filter(None, (chosen.why, chosen.remedy)))
    if missing and with_clocks:
        without = "Or leave --with-clocks out: the order is proven without any right."
        raise EnvPipeError(
            f"Clocks may not be changed here: {chosen.why}",
            remedy=". ".join(filter(None, (chosen.remedy, without))),
        )
    devices = visible_gpus()
    if len(devices) < 2:
        raise EnvPipeError(
            "A pipeline needs two GPUs or more; CUDA shows fewer to this process",
            value=len(devices),
            remedy="Give it more, or try --gpu a100-sxm, which emulates them.",
        )
    unrest = [text for device in devices for text in _unrest(device)]
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load >= cores:
        unrest.append(f"the host's load is {load:.1f}, on {cores} cores")
    if unrest:
        raise EnvPipeError(
            "The machine is not quiet, so what is measured would not be EnvPipe's",
            value=unrest,
            remedy="End what runs there, or wait until it has ended; a GPU that is held back while "
            "idle needs cooling, or another power limit.",
        )
    drivers = [driver.version for _, driver in vendors_here()]
    return Machine(
        False,
        tuple(device.name for device in devices),
        tuple(devices),
        _LEFT_ALONE if with_clocks is False else missing,
        {**_versions(), "driver": ", ".join(drivers)},
    )


def _unrest(device: Device) -> list[str]:
    """Say what speaks against measuring on a GPU; GpuError if it cannot be read."""
    gpu, name, found = look_at(device.uid), f"GPU {device.index}", []
    seen = gpu.activity()
    if seen.processes:
        found.append(f"{name} is used by process {', '.join(map(str, seen.processes))}")
    if (seen.busy_percent or 0) > _MOST_BUSY_PERCENT:
        found.append(f"{name} is {seen.busy_percent} % busy")
    if held := [reason for reason in gpu.clock_state().throttle_reasons if reason != IDLE]:
        found.append(f"{name} is held back by {', '.join(held)}")
    return found


def newcomers(machine: Machine) -> list[str]:
    """Return, in words, which real GPUs have other processes than the one rank of the proof."""
    found = []
    for device in machine.devices:
        with suppress(GpuError):
            count = len(look_at(device.uid).activity().processes)
            found += [f"{count} processes on GPU {device.index}"] if count > 1 else []
    return found


def _versions() -> dict[str, str]:
    installed = {package: found for package in _PACKAGES if (found := version_of(package))}
    return {"envpipe-megatron": __version__, **installed}


class Trial:
    """The reports of the ranks of a quickstart or a proof, and what they show, complete or not.

    Attributes:
        who: the command's work, in a word.
        leaves: all that may be in its folder; the first, its settings, marks it as its own.
        machine: that is measured on.
        introduction: says what is trained.
        turns: reports of those that have ended, in their order; `turns.jsonl` has them, too.
        latency: of each GPU, as `measure_latency` gives it; None if it was not measured.
        claims: as far as they are known.
    """

    who: ClassVar[str]
    leaves: ClassVar[tuple[str, ...]]

    def __init__(self, settings: Settings, machine: Machine, introduction: str) -> None:
        self.settings, self.machine, self.introduction = settings, machine, introduction
        self.turns: list[Event] = []
        self.latency: list[Event] | None = None
        self.claims: list[Claim] = []

    @property
    def complete(self) -> bool:
        """True if all turns came to their end."""
        return len(self.turns) == len(self.settings.turns)

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
        """Write claims, and what else is known."""
        self.claims = claims_of(
            self.turns, self.settings.arms, self.latency, emulated=self.machine.emulated
        )
        self.put(CLAIMS_FILE, self.document())

    def document(self) -> dict[str, Any]:
        """Return what the file of claims has."""
        return {
            "format": CLAIMS_FORMAT,
            "complete": self.complete,
            "emulated": self.machine.emulated,
            "clocks_changed": not self.machine.missing,
            "claims": [asdict(claim) for claim in self.claims],
        }

    def show(self, console: Console) -> None:
        """Show the result of all turns, as it was written."""
        raise NotImplementedError

    def put(self, name: str, data: object) -> None:
        """Write a JSON file."""
        replace_files({self.settings.output / name: [json.dumps(data, indent=1), "\n"]})


class Quickstart(Trial):
    """A quickstart under way."""

    who = "quickstart"
    leaves = (
        "settings.json", "text.bin", "log.txt", "energy.jsonl", "timeline.jsonl", "clocks.jsonl",
        "profile.csv", "profile.json", "plan.json", "loop.jsonl", "turns.jsonl", "summary.json",
        CLAIMS_FILE, ".lock", "emulated", "report", "arms",
    )  # fmt: skip

    def __init__(self, settings: Settings) -> None:
        layers, width, preset = settings.num_layers, settings.hidden_size, settings.preset
        assert preset is not None
        super().__init__(
            settings,
            emulated_machine(preset, settings.num_stages, None),
            f"Training a GPT ({layers} layers, width {width}) on {settings.text}\n"
            f"{settings.num_stages} pipeline ranks on this machine's CPU, "
            f"{settings.num_microbatches} microbatches, emulated GPUs ({preset}).\n"
            "They load torch and build the model first, which takes up to a minute ...",
        )
        self._preset = load_preset(preset)

    def show(self, console: Console) -> None:
        """Show what was saved, and that training was the same; a report has both runs' figures."""
        output = self.settings.output
        plan = read_plan(output / "plan.json", read_profile(output / "profile.csv"))
        cost, full = plan.cost, plan.baseline.cost
        (saved, _), (slower, _) = (
            difference(self.turns, ENVPIPE.name, BASELINE.name, which)
            for which in ("saving", "slowdown")
        )
        steps, same_losses, _ = equality(self.turns)
        first, last = (fmean(self.turns[-1]["losses"][step]) for step in (0, steps - 1))
        equal = "equal to the last bit" if same_losses else "NOT equal"
        console.print(
            f"[bold]Saving {saved:.2f} %, slowdown {slower:.2f} %[/bold] (envpipe simulate says "
            f"{cost.saving_percent(full):.2f} % and {cost.slowdown_percent(full):.2f} %). "
            f"Losses of the {steps} steps both runs made, {first:.4f} to {last:.4f}: {equal}.",
            highlight=False,
        )
        basis = "fitted to published" if self._preset.fitted else "not fitted to any"
        console.print(
            "These joules are emulated: no GPU was used. Times and energies are those of a model "
            f"of the {self._preset.gpu}, {basis} measurements, in emulated time. A backward in two "
            f"parts takes {100 * MEASURED_SPLIT.overhead:g} % more, as was measured on an H200.",
            highlight=False,
        )
        turn = self.turns[-1]
        errors = (stage["clocks"]["error"] for stage in turn["stages"])
        for note in (*turn["notes"], *filter(None, errors)):
            say(f"Note: {note}", console)
        say(f"Everything is in {output}", console)


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
                f"A {trial.who} needs {package}, which is not installed",
                remedy="pip install 'torch>=2.11' megatron-core==0.16.1, or use make quickstart.",
            )
    clear_own_folder(output, trial.leaves, trial.who)
    trial.put(trial.leaves[0], asdict(settings))
    # One copy for all ranks: the source may change meanwhile, as when it holds this very folder.
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


def _train(trial: Trial, console: Console) -> None:
    settings = trial.settings
    worker, settings_file = "envpipe_megatron.trials.worker", settings.output / trial.leaves[0]
    with trial.begin(console):
        run_ranks(
            settings.num_stages,
            ["--module", worker, str(settings_file)],
            # A rank that must not change a clock cannot, even if something goes wrong.
            rank_environment(settings.output / "emulated")
            | ({} if settings.changes_clocks else {FORBID_VARIABLE: "1"}),
            settings.output / "log.txt",
            trial.take,
        )
