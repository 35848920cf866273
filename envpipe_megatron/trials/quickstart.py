"""Results of a quickstart: both runs beside each other, in `summary.json`."""

from __future__ import annotations

from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape

from envpipe_megatron.console import say
from envpipe_megatron.core.plan import read_plan
from envpipe_megatron.core.profile import read_profile
from envpipe_megatron.core.profile_rows import MEASURED_SPLIT
from envpipe_megatron.formats.energy import Phase
from envpipe_megatron.gpu.presets import load_preset
from envpipe_megatron.trials.claims import equality
from envpipe_megatron.trials.run import Event, Results
from envpipe_megatron.trials.settings import BASELINE, ENVPIPE, RUNS, Settings


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
            dict.fromkeys(arm.name for arm in RUNS),
        )
        self._minibatch_size = settings.microbatch_size * settings.num_microbatches
        #: For each run, the losses of its iterations so far.
        self._losses: dict[str, list[float]] = {}
        self._summary: dict[str, Any] = {}

    def take(self, event: Event) -> None:
        """Note an iteration's loss; show phases and what ranks say."""
        progress = self.progress
        match event["event"]:
            case "say" if not event["text"].startswith("warm-up"):
                text = f"[dim]{event['arm']}: {escape(event['text'])}[/dim]"
                progress.console.print(text, highlight=False)
            case "iteration":
                self._losses.setdefault(event["arm"], []).append(event["loss"])
                bar = self.bars[event["arm"]]
                progress.start_task(bar)  # a repeated start changes nothing
                shown = progress.tasks[bar]
                if shown.total is None and event["phase"] == Phase.STEADY:
                    progress.update(
                        bar, total=shown.completed + (self.settings.steady_iterations or 0)
                    )
                note = f"{event['phase']}, loss {event['loss']:.3f}"
                progress.update(bar, advance=1, note=note)
            case "turn":
                bar = self.bars[event["arm"]]
                progress.update(bar, total=progress.tasks[bar].completed, note="done")

    def write(self) -> None:
        """Write the summary of what is known."""
        settings = self.settings
        runs = {turn["arm"]: self._run_facts(turn) for turn in self.turns}
        self._summary = {
            "emulated": True,
            "complete": self.complete,
            "gpu": settings.preset,
            "model": self._model,
            "num_stages": settings.num_stages,
            "num_microbatches": settings.num_microbatches,
            "runs": runs,
            "losses": self._losses,
        }
        if self.complete:
            self._summary |= self._comparison(runs)
        self.put("summary.json", self._summary)

    def _run_facts(self, turn: Event) -> dict[str, Any]:
        energy_j = [stage["metered"]["steady"]["energy_j"] for stage in turn["stages"]]
        times_s, losses = turn["iteration_times_s"], turn["losses"]
        clocks = [stage["clocks"] for stage in turn["stages"]]
        return {
            "steady_iterations": len(times_s),
            "iterations": len(losses),
            "iteration_time_s": sum(times_s) / len(times_s),
            "energy_j": sum(energy_j),
            "energy_per_iteration_j": sum(energy_j) / len(times_s),
            "energy_by_gpu_j": energy_j,
            "average_power_w": sum(energy_j) / sum(times_s),
            "throughput_samples_per_s": self._minibatch_size * len(times_s) / sum(times_s),
            "wall_time_per_iteration_s": float(np.mean(turn["wall_times_s"])),
            "first_loss": float(np.mean(losses[0])),
            "final_loss": float(np.mean(losses[-1])),
            "schedule": turn["schedule"],
            "executed_order": [stage["executed"] for stage in turn["stages"]],
            "clock_changes": sum(each["changes"] for each in clocks),
            "notes": [*turn["notes"], *(each["error"] for each in clocks if each["error"])],
        }

    def _comparison(self, runs: dict[str, Any]) -> dict[str, Any]:
        baseline, envpipe = runs[BASELINE.name], runs[ENVPIPE.name]
        output = self.settings.output
        plan = read_plan(output / "plan.json", read_profile(output / "profile.csv"))
        steps, losses_equal, weights_equal = equality(self.turns)
        saved = 1 - envpipe["energy_per_iteration_j"] / baseline["energy_per_iteration_j"]
        slower = envpipe["iteration_time_s"] / baseline["iteration_time_s"] - 1
        return {
            "saving_percent": 100 * saved,
            "slowdown_percent": 100 * slower,
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
        steps, losses = summary["steps_compared"], self._losses[ENVPIPE.name]
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
