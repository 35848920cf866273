r"""Measures this machine's GPUs as they are: profile, memory, hops and tails of real models.

Trains each model through a patched Megatron-LM with clocks left alone: first a job that profiles,
then jobs of other numbers of microbatches, each in Megatron's order and in EnvPipe's, which
`benchmarks/planner/h200_validation.py` predicts from that profile. Run from the checkout:

    ENVPIPE_FORBID_CLOCK_CONTROL=1 python benchmarks/megatron_lm/profiles/measure_profile.py \
        --patched CHECKOUT --output benchmarks/h200/one-sided

Leaves in OUTPUT/MODEL: `profile.csv` with its sidecar `profile.json`, at the one clock there was,
and `measured.json` with what each job took. `--cpu` tries the command on emulated GPUs.
"""

from __future__ import annotations

import json
import math
import platform
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

from benchmarks.megatron_lm.models import (
    CPU_RUN,
    GPT_1_3B,
    NO_EVALUATION,
    ROOT,
    TINY_ON_CPU,
    Size,
    base_arguments,
    joined,
    training,
)
from benchmarks.megatron_lm.running.jobs import emulated_gpus, launch_ranks, prepare
from benchmarks.unmeasured import stepped_order
from envpipe_megatron.core.conditions import make_conditions
from envpipe_megatron.core.kinds import WHOLE
from envpipe_megatron.core.plan import Plan, max_frequencies
from envpipe_megatron.core.profile import Profile, make_profile, read_profile
from envpipe_megatron.core.profile_rows import ProfileRow
from envpipe_megatron.formats.energy import EnergyWindow, read_energy_logs
from envpipe_megatron.formats.timeline import RankIteration, read_timelines
from envpipe_megatron.gpu.base import FORBID_VARIABLE, clock_control_forbidden
from envpipe_megatron.patching.checkout import look_at

FORMAT = "envpipe-measured/1"
#: Iterations in Megatron's own order, and then in EnvPipe's, that are measured.
_EACH = 10
#: Iterations at each "clock" of the profile, and the most that it takes.
_AT_A_CLOCK, _MOST_PROFILED = 4, 40
#: Clocks to ask for in vain: each of them is measured once more at the clock there is.
_ASKED_MHZ = 190


@dataclass(frozen=True)
class Model:
    """A model on two stages; the first number of microbatches is that of the profile."""

    size: Size
    features: str
    microbatches: tuple[int, ...]
    what: str

    def arguments(self, num_stages: int, microbatches: int, iterations: int) -> tuple[str, ...]:
        """Megatron's; the layers of a stage stay the same on any number of stages."""
        layers = self.size.layers // 2 * num_stages
        size = replace(self.size, layers=layers, microbatches=microbatches)
        batch = size.microbatch * microbatches
        return joined(
            [
                f"--num-layers {layers} --hidden-size {size.hidden} --seq-length {size.sequence} "
                f"--num-attention-heads {max(4, size.hidden // 128)} "
                f"--max-position-embeddings {size.sequence} --global-batch-size {batch} "
                f"--micro-batch-size {size.microbatch} --pipeline-model-parallel-size {num_stages}",
                size.mock_data,
                training(iterations, log_interval=10),
                NO_EVALUATION,
                "--bf16",
                self.features,
            ]
        )


_LLAMA = (
    "--swiglu --normalization RMSNorm --group-query-attention --num-query-groups 8 "
    "--ffn-hidden-size 14336 --position-embedding-type rope --disable-bias-linear "
    "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0"
)
#: With a single sample, forwards take what the host takes to launch them, which scatters.
_GPT = replace(GPT_1_3B, microbatch=4)
MODELS = {
    "gpt-1.3b": Model(_GPT, "", (8, 4, 16), "GPT of 1.3B (24 x 2048), 12 layers a stage"),
    "gpt-1.3b-quarters": Model(
        replace(_GPT, layers=12),
        "",
        (8, 14),
        "first and last quarter of the GPT of 1.3B, 6 layers a stage",
    ),
    "llama-8b-shaped": Model(
        Size(8, 4096, 2048, 128256, microbatch=2, microbatches=8),
        _LLAMA,
        (8, 4, 16),
        "layers and output layer of Llama-3 8B (4096, 14336, 8 groups, 128256), 4 layers a stage",
    ),
}
_ON_CPU = {"tiny": Model(TINY_ON_CPU, "", (6, 4), "a try on the CPU")}


@dataclass(frozen=True)
class Site:
    """Where it runs; `patched` is a checkout of Megatron-LM."""

    patched: Path
    num_stages: int
    cpu: bool
    scratch: Path

    def train(self, name: str, arguments: Sequence[str]) -> Path:
        """Run one job to its end; the folder that EnvPipe left."""
        folder = self.scratch / name
        folder.mkdir(parents=True)
        launch = launch_ranks(
            self.num_stages,
            ("--standalone",),
            self._script(folder, arguments),
            {
                "CUDA_DEVICE_MAX_CONNECTIONS": None,
                **(emulated_gpus(folder, 0.02) if self.cpu else {}),
            },
        )
        log = folder / "log.txt"
        if code := launch.start(folder, log).wait():
            tail = log.read_text(errors="replace")[-3000:]
            raise click.ClickException(f"{name} ended with code {code}; the end of {log}:\n{tail}")
        return folder / "envpipe"

    def _script(self, folder: Path, arguments: Sequence[str]) -> list[str]:
        entry = [str(CPU_RUN)] if self.cpu else []
        control = "emulated" if self.cpu else "dry_run"
        return [
            *entry, str(self.patched.resolve() / "pretrain_gpt.py"),
            *base_arguments(self.cpu), *arguments,
            "--envpipe", "--envpipe-type", "envelope", "--envpipe-scheduling", "ours",
            "--envpipe-reconfigure", "default", "--envpipe-baseline-steps", str(_EACH),
            "--envpipe-gpu-control", control, "--envpipe-output", str(folder / "envpipe"),
        ]  # fmt: skip


@click.command(help=(__doc__ or "").replace("\n\n    ENV", "\n\n\b\n    ENV"))
@click.option("--patched", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--output", type=click.Path(path_type=Path), required=True, help="Folder.")
@click.option("--model", "names", multiple=True, help="Of those there are; default: all.")
@click.option("--gpus", type=int, help="Default: those of this machine; 4 on the CPU.")
@click.option("--cpu", is_flag=True, help="gloo, emulated GPUs, a tiny model.")
@click.option("--scratch", type=click.Path(path_type=Path), help="Logs and runs. [a new one]")
def main(
    patched: Path,
    output: Path,
    names: tuple[str, ...],
    gpus: int | None,
    cpu: bool,
    scratch: Path | None,
) -> None:
    """Measure the models that are named."""
    if not clock_control_forbidden():
        raise click.ClickException(f"Set {FORBID_VARIABLE}=1: this only reads.")
    models = _ON_CPU if cpu else MODELS
    unknown = set(names) - set(models)
    if unknown:
        raise click.ClickException(f"No model {sorted(unknown)}; there are: {', '.join(models)}.")
    prepare(patched)
    scratch = scratch or Path(tempfile.mkdtemp(prefix="envpipe-measured-"))
    stages = gpus or (4 if cpu else torch.cuda.device_count())
    for name in names or models:
        site = Site(patched, stages, cpu, scratch / name)
        measured = measure(site, models[name])
        folder = output / name
        folder.mkdir(parents=True, exist_ok=True)
        measured.pop("profile").write(folder / "profile.csv")
        (folder / "measured.json").write_text(as_lines(measured))
        for run in measured["runs"]:
            click.echo(
                f"{name}: {run['order']}, M={run['num_microbatches']}: "
                f"{run['iteration_time_s']:.4f} s, {run['energy_j']:.1f} J"
            )
    click.echo(f"Logs and runs are in {scratch}")


def measure(site: Site, model: Model) -> dict[str, Any]:
    """Profile a model, and run the jobs that the profile is to predict."""
    first, *others = model.microbatches
    given = ["--envpipe-profile-steps", str(_AT_A_CLOCK)]
    given += ["--envpipe-gpu", str(_few_clocks(site.scratch))]
    iterations = 2 + 2 * _EACH + _MOST_PROFILED
    folder = site.train(f"m{first}", (*model.arguments(site.num_stages, first, iterations), *given))
    profile = at_its_clock(read_profile(folder / "profile.csv"), every_row=not site.cpu)
    runs = runs_of(folder, first)
    for count in others:
        files = _plan_files(site, profile, count)
        arguments = model.arguments(site.num_stages, count, 2 + 2 * _EACH)
        runs += runs_of(site.train(f"m{count}", (*arguments, *files)), count)
    return {
        "format": FORMAT,
        "model": model.what,
        "machine": _machine(site),
        "profile": profile,
        "memory": json.loads((folder / "summary.json").read_text())["memory"],
        "runs": runs,
    }


def _plan_files(site: Site, profile: Profile, num_microbatches: int) -> tuple[str, ...]:
    """EnvPipe's order at the clock there is, as the arguments that hand it over."""
    folder = site.scratch / "plans"
    folder.mkdir(parents=True, exist_ok=True)
    schedule = stepped_order(profile.num_stages, num_microbatches, capacity=None)
    plan = Plan(
        "baseline",
        schedule,
        max_frequencies(schedule, profile),
        profile,
        make_conditions(profile, blocking_power_w=0.0),
    )
    files = folder / f"m{num_microbatches}.csv", folder / f"m{num_microbatches}-plan.json"
    profile.write(files[0])
    plan.write(files[1])
    return ("--envpipe-profile", str(files[0]), "--envpipe-plan", str(files[1]))


def _few_clocks(scratch: Path) -> Path:
    """A preset whose sweep asks for few clocks, since none of them comes."""
    text = (ROOT / "configs" / "gpus" / "h200.toml").read_text()
    preset = scratch / "h200-few-clocks.toml"
    scratch.mkdir(parents=True, exist_ok=True)
    lowest = 1980 - _ASKED_MHZ
    if "[control]" not in text:
        text += '\n[control]\nnvml_names = ["NVIDIA H200*"]\n'
    preset.write_text(f"{text}profile_max_mhz = 1980\nprofile_min_mhz = {lowest}\n")
    return preset


def _machine(site: Site) -> dict[str, Any]:
    return {
        "gpus": f"{site.num_stages} emulated H200" if site.cpu else torch.cuda.get_device_name(0),
        "num_gpus": site.num_stages,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "checkout": f"{look_at(site.patched).patch.name}, patched",
        "clocks": "emulated" if site.cpu else "left alone",
    }


def at_its_clock(profile: Profile, *, every_row: bool) -> Profile:
    """The profile at its highest clock alone; with `every_row`, made of all rows.

    A dry run asks for clocks and changes none, so each row is one more measurement at the clock
    there is: times and the energy of a pair are their means, and the pair's energy is split as if
    both kinds drew the same power.
    """
    rows = []
    for stage, kinds in enumerate(profile.rows):
        taken = {kind: kinds[kind] if every_row else kinds[kind][:1] for kind in WHOLE}
        time_s = {kind: float(np.mean([r.time_s for r in taken[kind]])) for kind in WHOLE}
        pairs = list(zip(*taken.values(), strict=True))
        pairs_j = [forward.energy_j + backward.energy_j for forward, backward in pairs]
        metering_j = [row.energy_uncertainty_j or 0.0 for pair in pairs for row in pair]
        error_j = math.hypot(_scatter(pairs_j), math.hypot(*metering_j) / len(pairs))
        for kind in WHOLE:
            share = time_s[kind] / sum(time_s.values())
            row = ProfileRow(
                kinds[kind][0].frequency_mhz,
                time_s[kind],
                float(np.mean(pairs_j)) * share,
                error_j * share,
            )
            rows.append((stage, kind, row))
    sidecar = replace(profile.sidecar, frequency_change_s=None, frequency_change_j=None)
    return make_profile(rows, source="measured at one clock", sidecar=sidecar)


def _scatter(values: Sequence[float]) -> float:
    """Standard uncertainty of a mean, by how the values scatter; 0 for a single one."""
    return float(np.std(values, ddof=1) / len(values) ** 0.5) if len(values) > 1 else 0.0


def runs_of(folder: Path, num_microbatches: int) -> list[dict[str, Any]]:
    """What a job took: its warm-up in Megatron's order, and its steady phase in EnvPipe's.

    Times and energies are medians over iterations: some are held up by what happens once.
    """
    summary = json.loads((folder / "summary.json").read_text())
    windows = read_energy_logs(sorted(folder.glob("energy*.jsonl"))).windows
    recorded = read_timelines(sorted(folder.glob("timeline*.jsonl"))).iterations
    runs = []
    for phase, order in (("warm-up", "1f1b"), ("steady", "envpipe")):
        gpus = [rank["gpu"]["phases"][phase] for rank in summary["ranks"]]
        memory = summary["memory"] or [{}] * len(gpus)
        steps = [one for one in recorded if one.phase == phase]
        known = "baseline_in_flight", "baseline_peak_bytes"
        if phase == "steady":
            known = "in_flight", "measured_peak_bytes"
        runs.append(
            {
                "order": order,
                "num_microbatches": num_microbatches,
                "iterations": gpus[0]["iterations"],
                "iteration_time_s": _median_step_s(steps),
                "mean_iteration_time_s": max(gpu["time_s"] for gpu in gpus),
                "energy_j": _median_energy_j([one for one in windows if one.phase == phase]),
                "mean_energy_j": sum(gpu["energy_j"] for gpu in gpus),
                "in_flight": [stage.get(known[0]) for stage in memory],
                "peak_bytes": [stage.get(known[1]) for stage in memory],
                "timeline": _median_timeline(steps),
            }
        )
    return runs


def _median_step_s(iterations: Sequence[RankIteration]) -> float:
    """From the begin of an iteration to the next one's, on the first stage."""
    begun_s = {one.iteration: one.begin_s for one in iterations if one.labels.stage == 0}
    steps_s = [begun_s[i + 1] - begun_s[i] for i in begun_s if i + 1 in begun_s]
    return float(np.median(steps_s))


def _median_energy_j(windows: Sequence[EnergyWindow]) -> float:
    by_rank: dict[int | None, list[float]] = {}
    for one in windows:
        steps = 1 + (one.last_iteration or 0) - (one.first_iteration or 0)
        by_rank.setdefault(one.rank, []).append(one.energy_j / steps)
    return sum(float(np.median(energies_j)) for energies_j in by_rank.values())


def _median_timeline(iterations: Sequence[RankIteration]) -> list[dict[str, Any]]:
    """For each stage, its units with median starts and ends after the iteration's first unit.

    The first iteration of a phase is left out: what is used for the first time takes longer.
    """
    by_number: dict[int, list[RankIteration]] = {}
    for one in iterations:
        by_number.setdefault(one.iteration, []).append(one)
    whole = [
        sorted(ranks, key=lambda one: one.labels.stage)
        for number, ranks in sorted(by_number.items())[1:]
        if len(ranks) == len(by_number[min(by_number)])
    ]
    starts, ends = [], []
    for ranks in whole:
        first_s = min(one.begin_s + 1e-6 * one.start_us[0] for one in ranks)
        starts.append([one.begin_s - first_s + 1e-6 * one.start_us for one in ranks])
        ends.append([one.begin_s - first_s + 1e-6 * one.end_us for one in ranks])
    start_s, end_s = np.median(starts, axis=0), np.median(ends, axis=0)
    return [
        {
            "units": one.order,
            "start_s": np.round(start_s[stage], 6).tolist(),
            "end_s": np.round(end_s[stage], 6).tolist(),
        }
        for stage, one in enumerate(whole[0])
    ]


def as_lines(measured: Mapping[str, Any]) -> str:
    """JSON with a line for each field and run."""
    runs = ",\n".join(f"  {json.dumps(run)}" for run in measured["runs"])
    rest = [
        f" {json.dumps(k)}: {json.dumps(value)}" for k, value in measured.items() if k != "runs"
    ]
    return "{\n" + ",\n".join([*rest, f' "runs": [\n{runs}\n ]']) + "\n}\n"


if __name__ == "__main__":
    main()
