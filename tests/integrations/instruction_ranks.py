"""What the ranks of the tests of instrumented pipelines run."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import plain_stages
import torch
import torch.distributed as dist
from waiting_plans import plans_are_waited_for

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.gpu.base import GpuError
from envpipe_megatron.gpu.emulated.emulated_gpu import EmulatedGpu
from envpipe_megatron.gpu.guard.messages import AGENT_VARIABLE
from envpipe_megatron.integrations.device import FORWARD_VARIABLE
from envpipe_megatron.integrations.instructions import InstrumentedPipeline
from envpipe_megatron.integrations.leveled import LeveledJob
from envpipe_megatron.runtime.channel import collectives
from envpipe_megatron.runtime.job.session import Session

#: Of each stage: the last one has most to do.
FORWARD_S = (0.03, 0.03, 0.03, 0.05)
EXAMPLE = Path(__file__).parents[2] / "launch" / "examples" / "torch_pipelining.py"


class FastPipeline(InstrumentedPipeline):
    """One whose emulated GPU does not let the host sleep."""

    made: list[FastPipeline]

    def _begin_job(self, recorded: Any) -> Any:
        job = super()._begin_job(recorded)
        if job.job is not None:
            plain_stages.run_fast(job.session)
        self.made.append(self)
        return job

    @property
    def job(self) -> LeveledJob:
        assert self._job is not None
        return self._job


def emulate(rank: int, root: Path, preset: Path) -> None:
    """Let this process find an emulated GPU, as a launcher's environment does."""
    plain_stages.emulate(rank, root, preset, FORWARD_S)
    FastPipeline.made = []


def seen(session: Session) -> dict[str, Any]:
    """Results of a job."""
    plan = session.state.plan
    return {
        "iterations": [(phase.value, time_s) for phase, time_s in session.iterations.latest],
        "executed": session.executed,
        "schedule": None if plan is None else plan.schedule.name,
        "frequency_mhz": None if plan is None else plan.frequency_mhz.tolist(),
        "summary": session.summary(),
        "sums": session.energy.sums(),
    }


def train_example(
    rank: int, root: Path, preset: Path, microbatches: int, steps: int, settings: Any
) -> Any:
    """The example: its losses and weights with EnvPipe and without, and what the job came to."""
    # Takes over a second to import, which nobody pays who only collects tests.
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    emulate(rank, root, preset)
    spec = importlib.util.spec_from_file_location("torch_pipelining", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    example.InstrumentedPipeline = FastPipeline
    example.MICROBATCHES = microbatches
    torch.manual_seed(3)
    data = torch.randn(example.MICROBATCHES * example.MICROBATCH, example.WIDTH)

    def model() -> torch.nn.Module:
        torch.manual_seed(rank)
        layer = torch.nn.Linear(example.WIDTH, example.WIDTH)
        return torch.nn.Sequential(layer, torch.nn.Tanh(), torch.nn.Dropout(0.1))

    ours = model()
    said: list[str] = []
    with plans_are_waited_for():
        losses = example.train(ours, data, steps, say=said.append, **settings)
    (pipeline,) = FastPipeline.made
    own = model()
    stage = PipelineStage(own, rank, dist.get_world_size(), data.device)
    schedule = Schedule1F1B(stage, example.MICROBATCHES, loss_fn=torch.nn.functional.mse_loss)
    optimizer = torch.optim.Adam(own.parameters(), lr=1e-3)
    own_losses: list[float] = []
    of_microbatches: list[torch.Tensor] = []
    for _ in range(steps):
        optimizer.zero_grad()
        inputs = [data] if rank == 0 else []
        schedule.step(*inputs, target=data.roll(1, 1), losses=of_microbatches)
        optimizer.step()
        if of_microbatches:
            own_losses.append(torch.stack(of_microbatches).mean().item())
    return {
        **seen(pipeline.job.session),
        "said": said,
        "losses": losses,
        "own_losses": own_losses,
        "weights_equal": all(
            torch.equal(a, b) for a, b in zip(ours.parameters(), own.parameters(), strict=True)
        ),
        "trained": not torch.equal(model()[0].weight, own[0].weight),
    }


def step(pipeline: InstrumentedPipeline, letters: str) -> None:
    """A step of a framework without a model."""
    with pipeline.step():
        for letter in letters:
            with pipeline.instruction("forward" if letter == "F" else "backward"):
                pass


def train_letters(
    rank: int,
    root: Path,
    preset: Path,
    letters: Sequence[str],
    steps: int,
    settings: Any,
    stages: int | None = None,
) -> Any:
    """Steps in an order of units; what the job came to, or the error.

    Args:
        letters: for each stage; ranks beyond are replicas of the first stages. Or for each rank of
            pipelines of so many stages.
    """
    emulate(rank, root, preset)
    stages, own = stages or len(letters), letters[rank % len(letters)]
    os.environ[FORWARD_VARIABLE] = ",".join(map(str, FORWARD_S[-stages:]))
    pipelines = [list(range(at, at + stages)) for at in range(0, dist.get_world_size(), stages)]
    groups = [dist.new_group(ranks) for ranks in pipelines]
    microbatches = own.count("F")
    group = groups[rank // stages]
    pipeline = FastPipeline(group, microbatches, say=lambda text: None, **settings)
    reports = []
    try:
        for _ in range(steps):
            with plans_are_waited_for():
                step(pipeline, own)
            pipeline.pause()
            with pipeline.instruction("forward"):
                pass  # an evaluation
            reports.append(pipeline.report())
        phase = pipeline.phase
        pipeline.end_training()
        return {"phase": phase, "reports": reports, **seen(pipeline.job.session)}
    except EnvPipeError as error:
        return str(error)
    finally:
        pipeline.close()


def train_on(rank: int, root: Path, preset: Path, letters: Sequence[str]) -> dict[str, Any]:
    """Steps among which some are none, and calls that tell of none; what was said of each."""
    emulate(rank, root, preset)
    own, said = letters[rank], []
    pipeline = FastPipeline(
        dist.group.WORLD,
        letters[0].count("F"),
        type="baseline",
        baseline_steps=2,
        say=lambda text: None,
    )
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("envpipe_megatron.integrations").addHandler(handler)
    told: dict[str, Any] = {}

    def tell(name: str, call: Callable[[], Any]) -> None:
        with suppress(ValueError):
            call()
        step(pipeline, own)
        told[name], said[:] = [*said], []

    def failing() -> None:
        with pipeline.step(), pipeline.instruction("forward" if own[0] == "F" else "backward"):
            raise ValueError

    def failing_before_an_evaluation() -> None:
        with suppress(ValueError):
            failing()
        pipeline.pause()
        with pipeline.instruction("forward"):
            pass

    def unfinished() -> None:
        pipeline.on_step_begin()
        pipeline.on_instruction_begin("forward" if own[0] == "F" else "backward")

    def evaluation() -> None:
        for _ in range(2):
            pipeline.on_instruction_begin("forward")
            pipeline.on_instruction_end("forward")

    def other_order() -> None:
        step(pipeline, own[::-1])

    def paused_within() -> None:
        with pipeline.step():
            pipeline.pause()
            pipeline.on_instruction_end("backward")
            pipeline.on_instruction_begin("recompute")

    tell("failed first", failing)
    tell("failed", failing)
    tell("failed, evaluation", failing_before_an_evaluation)
    tell("unfinished", unfinished)
    tell("short", lambda: step(pipeline, own[:-2]))
    tell("short again", lambda: step(pipeline, own[:-2]))
    tell("evaluation", evaluation)
    tell("other order", other_order)
    tell("within", paused_within)
    tell("end", pipeline.on_step_end)
    told["iterations"] = [phase.value for phase, _ in pipeline.job.session.iterations.latest]
    pipeline.on_step_begin()
    pipeline.end_training()  # the step's units may never end
    told["at the end"] = len(pipeline.job.session.iterations.latest)
    step(pipeline, own)
    told["closed"] = said
    return told


def start_with_fault(
    rank: int, root: Path, preset: Path, letters: Sequence[str], fault: str, settings: Any
) -> Any:
    """Steps of a job whose start fails on rank 1: phase, report, what was said, notes, changes."""
    emulate(rank, root, preset)
    runtime, said = root / f"run-{rank}", list[str]()
    (runtime / "envpipe").mkdir(parents=True)
    (runtime / "envpipe").chmod(0o755 if rank == 1 else 0o700)  # a guard refuses the first
    variables = {"XDG_RUNTIME_DIR": str(runtime), "ENVPIPE_LEASE_DIR": str(root / "leases")}
    if fault == "guard":  # emulated GPUs have one on nodes with an agent
        variables[AGENT_VARIABLE] = str(root / "none")
    faults: dict[str, Any] = {
        "reading": patch.object(EmulatedGpu, "create", side_effect=GpuError("NVML is not there")),
        "gloo": patch.object(dist, "ProcessGroupGloo", side_effect=RuntimeError("no route")),
        "emulation": patch.dict(os.environ, {FORWARD_VARIABLE: "fast"}),
    }
    quick = timedelta(seconds=0.2) if fault == "gloo" else collectives._CONNECT
    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, variables))
        stack.enter_context(patch.object(collectives, "_CONNECT", quick))
        if rank == 1 and fault in faults:
            stack.enter_context(faults[fault])
        pipeline = FastPipeline(dist.group.WORLD, 4, say=said.append, **settings)
        try:
            for _ in range(3):
                step(pipeline, letters[rank])
            pipeline.pause()
            pipeline.on_instruction_begin("recompute")  # no such unit, which ends nothing by now
            told = pipeline.phase, pipeline.report(), said
            pipeline.end_training()
        except EnvPipeError as error:
            return str(error)
    if pipeline.job.job is None:
        return told
    summary = pipeline.job.session.summary()
    return *told, summary["notes"], summary["clocks"]["changes"]
