"""Results of a quickstart: its two arms beside each other, in `summary.json`."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from rich.console import Console

from envpipe_megatron.console import say
from envpipe_megatron.core.plan import read_plan
from envpipe_megatron.core.profile import read_profile
from envpipe_megatron.core.profile_rows import MEASURED_SPLIT
from envpipe_megatron.gpu.presets import load_preset
from envpipe_megatron.trials.claims import difference, equality
from envpipe_megatron.trials.machine import emulated_machine
from envpipe_megatron.trials.run import Trial
from envpipe_megatron.trials.settings import BASELINE, ENVPIPE, Settings


class Quickstart(Trial):
    """A quickstart under way."""

    who = "quickstart"
    files = (
        "settings.json", "text.bin", "log.txt", "energy.jsonl", "timeline.jsonl", "clocks.jsonl",
        "profile.csv", "profile.json", "plan.json", "loop.jsonl", "turns.jsonl", "summary.json",
        ".lock",
    )  # fmt: skip
    #: The emulated GPUs, what `envpipe report` makes, and the baseline's run.
    folders = ("emulated", "report", "arms")
    claims_file = "summary.json"

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

    def document(self) -> dict[str, Any]:
        """Return what the summary has: claims, and the notes of each run for its report."""
        runs = {}
        for turn in self.turns:
            errors = (stage["clocks"]["error"] for stage in turn["stages"])
            runs[turn["arm"]] = {"notes": [*turn["notes"], *filter(None, errors)]}
        return super().document() | {"runs": runs}

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
        for note in self.document()["runs"][ENVPIPE.name]["notes"]:
            say(f"Note: {note}", console)
        say(f"Everything is in {output}", console)
