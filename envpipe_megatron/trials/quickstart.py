"""Results of a quickstart: both runs beside each other, in `summary.json`."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from envpipe_megatron.console import say
from envpipe_megatron.core.plan import read_plan
from envpipe_megatron.core.profile import read_profile
from envpipe_megatron.core.profile_rows import MEASURED_SPLIT
from envpipe_megatron.gpu.presets import load_preset
from envpipe_megatron.trials.claims import difference, equality
from envpipe_megatron.trials.run import Event, Results
from envpipe_megatron.trials.settings import BASELINE, ENVPIPE, Settings


class Quickstart(Results):
    """A quickstart under way."""

    who = "quickstart"
    files = (
        "settings.json", "text.bin", "log.txt", "energy.jsonl", "timeline.jsonl", "clocks.jsonl",
        "profile.csv", "profile.json", "plan.json", "loop.jsonl", "summary.json",
        ".lock",
    )  # fmt: skip
    #: The emulated GPUs, and what `envpipe report` makes.
    folders = ("emulated", "report")

    def __init__(self, settings: Settings) -> None:
        layers, width = settings.num_layers, settings.hidden_size
        self._model = f"quickstart GPT ({layers} layers, width {width})"
        super().__init__(
            settings,
            f"Training a {self._model} on {settings.text}\n"
            f"{settings.num_stages} pipeline ranks on this machine's CPU, "
            f"{settings.num_microbatches} microbatches, emulated GPUs ({settings.preset}).\n"
            "They load torch and build the model first, which takes up to a minute ...",
        )
        self._summary: dict[str, Any] = {}

    def write(self) -> None:
        """Write the summary of what is known."""
        settings = self.settings
        self._summary = {
            "emulated": True,
            "complete": self.complete,
            "gpu": settings.preset,
            "model": self._model,
            "num_stages": settings.num_stages,
            "num_microbatches": settings.num_microbatches,
            "runs": {turn["arm"]: _run_facts(turn) for turn in self.turns},
            "losses": self.losses,
        }
        if self.complete:
            self._summary |= self._comparison()
        self.put("summary.json", self._summary)

    def _comparison(self) -> dict[str, Any]:
        output = self.settings.output
        plan = read_plan(output / "plan.json", read_profile(output / "profile.csv"))
        (saved, _), (slower, _) = (
            difference(self.turns, ENVPIPE.name, BASELINE.name, which)
            for which in ("saving", "slowdown")
        )
        steps, losses_equal, weights_equal = equality(self.turns)
        return {
            "saving_percent": saved,
            "slowdown_percent": slower,
            "predicted_saving_percent": plan.cost.saving_percent(plan.baseline.cost),
            "predicted_slowdown_percent": plan.cost.slowdown_percent(plan.baseline.cost),
            "losses_bit_equal": losses_equal,
            "weights_bit_equal": weights_equal,
            "steps_compared": steps,
            "extra_forwards": list(plan.schedule.extra_forwards),
            "peak_in_flight": list(plan.schedule.peak_in_flight),
        }

    def show(self, console: Console) -> None:
        """Show what was saved, and that training was the same; a report has both runs' figures."""
        summary = self._summary
        steps, losses = summary["steps_compared"], self.losses[ENVPIPE.name]
        equal = "equal to the last bit" if summary["losses_bit_equal"] else "NOT equal"
        console.print(
            f"[bold]Saving {summary['saving_percent']:.2f} %, slowdown "
            f"{summary['slowdown_percent']:.2f} %[/bold] (envpipe simulate says "
            f"{summary['predicted_saving_percent']:.2f} % and "
            f"{summary['predicted_slowdown_percent']:.2f} %). Losses of the {steps} steps both "
            f"runs made, {losses[0]:.4f} to {losses[steps - 1]:.4f}: {equal}.",
            highlight=False,
        )
        preset = load_preset(summary["gpu"])
        basis = "fitted to published" if preset.fitted else "not fitted to any"
        console.print(
            "These joules are emulated: no GPU was used. Times and energies are those of a model "
            f"of the {preset.gpu}, {basis} measurements, in emulated time. A backward in two parts "
            f"takes {100 * MEASURED_SPLIT.overhead:g} % more, as was measured on an H200.",
            highlight=False,
        )
        for note in summary["runs"][ENVPIPE.name]["notes"]:
            say(f"Note: {note}", console)
        say(f"Everything is in {self.settings.output}", console)


def _run_facts(turn: Event) -> dict[str, Any]:
    step, clocks = turn["step"], [stage["clocks"] for stage in turn["stages"]]
    return {
        "iterations": len(turn["losses"]),
        "steady_iterations": step["iterations"],
        "iteration_time_s": step["time_s"],
        "energy_per_iteration_j": len(clocks) * step["energy_j"],
        "schedule": turn["schedule"],
        "executed_order": [stage["executed"] for stage in turn["stages"]],
        "clock_changes": sum(each["changes"] for each in clocks),
        "notes": [*turn["notes"], *(each["error"] for each in clocks if each["error"])],
    }
