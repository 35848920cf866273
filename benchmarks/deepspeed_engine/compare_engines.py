"""DeepSpeed's own pipeline engine against the same under EnvPipe: losses, weights, step time.

    torchrun --nproc-per-node 4 benchmarks/deepspeed_engine/compare_engines.py --output results.json

One process a GPU holds an engine for each arm: DeepSpeed's own, EnvPipe in DeepSpeed's order, and
EnvPipe in its own. All are fed the same batches and random numbers, first with deterministic
kernels to compare losses and weights, then in turns to compare times. Clocks stay as they are.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import deepspeed
import torch
import torch.distributed as dist
from scipy import stats

from benchmarks.models.configs import NAMES, config_of
from benchmarks.planner.workloads import preset_profile
from envpipe_megatron.core.kinds import Kind
from envpipe_megatron.gpu.presets import load_preset
from envpipe_megatron.integrations.deepspeed import initialize
from envpipe_megatron.integrations.huggingface import split_model
from envpipe_megatron.integrations.huggingface.deepspeed_stages import pipeline_module

OWN, ONE_F_ONE_B, OURS = "own", "envpipe, 1f1b", "envpipe, ours"
#: Those that take token numbers alone.
MODELS = [name for name in NAMES if name.startswith(("gpt", "llama"))]
#: Steps of an arm before its first turn: orders change, kernels are loaded.
_WARMUP_STEPS = 6


class Arm:
    """An engine and its data; with `vary`, sequences get shorter by microbatch and long again."""

    def __init__(
        self,
        name: str,
        config: Any,
        sizes: tuple[int, ...],
        precision: str,
        vary: bool,
        profile: Path,
    ) -> None:
        microbatch, length, microbatches = sizes
        torch.manual_seed(1)
        model = split_model(config)
        self.module = pipeline_module(model, dist.get_world_size(), dynamic_shape=vary)
        settings: dict[str, Any] = {"gpu_control": "dry_run" if torch.cuda.is_available() else None}
        if name == ONE_F_ONE_B:
            settings |= {"type": "baseline"}
        else:
            settings |= {"reconfig": "default", "profile": str(profile), "baseline_steps": 2}
        self.engine, *_ = initialize(
            model=self.module,
            model_parameters=[p for p in self.module.parameters() if p.requires_grad],
            config={
                "train_micro_batch_size_per_gpu": microbatch,
                "gradient_accumulation_steps": microbatches,
                "optimizer": {"type": "Adam", "params": {"lr": 1e-4, "torch_adam": True}},
                "gradient_clipping": 1.0,
                "steps_per_print": 1_000_000,
                **({} if precision == "fp32" else {precision: {"enabled": True}}),
            },
            envpipe=False if name == OWN else settings,
        )
        lengths = [length - length // 8 * (n % 5 if vary else 0) for n in range(microbatches)]
        self._batches = self._data(config.vocab_size, microbatch, lengths)

    def _data(self, words: int, microbatch: int, lengths: list[int]) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(2)
        while True:
            for length in lengths:
                text = torch.randint(words, (microbatch, length + 1), generator=generator)
                yield text[:, :-1], text[:, 1:]

    def step(self, number: int) -> float:
        """Train a step, and give its loss."""
        torch.manual_seed(number)  # the same dropout in every arm
        return float(self.engine.train_batch(self._batches))

    def turn(self, steps: range) -> float:
        """The time of some steps, in s."""
        _wait()
        begin_s = time.monotonic()
        for number in steps:
            self.step(number)
        _wait()
        return time.monotonic() - begin_s


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()


def compare_results(arms: dict[str, Arm], num_steps: int) -> dict[str, Any]:
    """Train each arm the same steps by deterministic kernels; what differs from DeepSpeed's own."""
    torch.use_deterministic_algorithms(True)
    losses = {name: [arm.step(number) for number in range(num_steps)] for name, arm in arms.items()}
    torch.use_deterministic_algorithms(False)
    own = list(arms[OWN].module.parameters())
    equal = {}
    for name, arm in arms.items():
        same = all(map(torch.equal, own, arm.module.parameters()))
        everyone: list[bool] = [False] * dist.get_world_size()
        dist.all_gather_object(everyone, same)
        equal[name] = {
            "losses": losses[name] == losses[OWN],
            "weights": all(everyone),
            "largest_difference_of_losses": max(
                abs(a - b) for a, b in zip(losses[name], losses[OWN], strict=True)
            ),
        }
    return {"steps": num_steps, "equal": equal, "losses": losses[OWN]}


def compare_times(arms: dict[str, Arm], rounds: int, steps: int, first: int) -> dict[str, Any]:
    """Step time of each arm over that of DeepSpeed's own, by turns."""
    for arm in arms.values():
        arm.turn(range(first, first + _WARMUP_STEPS))
    first += _WARMUP_STEPS
    names = list(arms)
    times_s: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        sums_s = dict.fromkeys(names, 0.0)
        for turn in (names, names[::-1]):
            for name in turn:
                sums_s[name] += arms[name].turn(range(first, first + steps))
            first += steps
        for name in names:
            times_s[name].append(sums_s[name] / (2 * steps))
        _say(f"round {number + 1}: " + ", ".join(f"{n} {times_s[n][-1]:.4f} s" for n in names))
    return {"rounds": rounds, "steps_of_a_round": 2 * steps, "step_time_s": times_s}


def ratio(times_s: dict[str, list[float]], name: str) -> dict[str, float]:
    """Geometric mean of the rounds' ratios, and its one-sided 95 % bound by Student's t."""
    logs = [math.log(a / b) for a, b in zip(times_s[name], times_s[OWN], strict=True)]
    upper = stats.ttest_1samp(logs, 0.0, alternative="less").confidence_interval(0.95).high
    return {"mean": math.exp(statistics.fmean(logs)), "upper_95": math.exp(upper)}


@click.command()
@click.option("--model", type=click.Choice(MODELS), default="gpt-350m")
@click.option("--tiny", is_flag=True, help="The same kind of model, small enough for a CPU.")
@click.option("--precision", type=click.Choice(["bf16", "fp16", "fp32"]), default="bf16")
@click.option("--microbatch-size", default=4)
@click.option("--num-microbatches", default=16)
@click.option("--sequence-length", default=1024)
@click.option("--varying-lengths", is_flag=True, help="Messages of dynamic shape.")
@click.option("--equal-steps", default=30, help="Steps whose results are compared.")
@click.option("--rounds", default=10, help="Rounds whose times are compared.")
@click.option("--steps", default=10, help="Steps of a turn; two turns make a round.")
@click.option("--output", type=click.Path(path_type=Path), required=True, help="Results JSON.")
def main(**options: Any) -> None:
    """Compare the three arms; started by torchrun, a process a stage."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    deepspeed.init_distributed()
    output = options.pop("output")
    equal_steps, rounds, steps = (options.pop(name) for name in ("equal_steps", "rounds", "steps"))
    profile = output.with_suffix(".profile.csv")
    if dist.get_rank() == 0:
        # Nobody measured its times: it is for an order of EnvPipe's without profiling first.
        highest = load_preset("h200").max_frequency_mhz
        times_s = {Kind.FORWARD: 0.01, Kind.BACKWARD: 0.02}
        clocks_mhz = (highest, highest - 300)
        preset_profile("h200", dist.get_world_size(), times_s, clocks_mhz).write(profile)
    dist.barrier()
    sizes = tuple(
        options[name] for name in ("microbatch_size", "sequence_length", "num_microbatches")
    )
    arms = {
        name: Arm(
            name, config_of(options["model"], options["tiny"]), sizes, options["precision"],
            options["varying_lengths"], profile,
        )
        for name in (OWN, ONE_F_ONE_B, OURS)
    }  # fmt: skip
    results: dict[str, Any] = {
        **options,
        "num_stages": dist.get_world_size(),
        "versions": {"deepspeed": deepspeed.__version__, "torch": torch.__version__},
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "results": compare_results(arms, equal_steps),
    }
    _say(json.dumps(results["results"]["equal"]))
    if rounds:
        results["times"] = compare_times(arms, rounds, steps, equal_steps)
        results["ratios"] = {
            name: ratio(results["times"]["step_time_s"], name) for name in (ONE_F_ONE_B, OURS)
        }
        _say(json.dumps(results["ratios"]))
    for name in (ONE_F_ONE_B, OURS):
        results[f"units of {name}"] = arms[name].engine.session.executed
        arms[name].engine.end_training()
    if dist.get_rank() == 0:
        output.write_text(json.dumps(results, indent=1) + "\n")


def _say(text: str) -> None:
    if dist.get_rank() == 0:
        click.echo(text)


if __name__ == "__main__":
    main()
