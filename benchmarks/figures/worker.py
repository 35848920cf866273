"""One rank of the experiments: trains a batch of runs, one after another, and leaves their results.

torchrun --nproc-per-node 4 --module benchmarks.figures.worker BATCH.pickle
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.figures.experiments import MODELS, Model, Precision, reduced
from benchmarks.figures.layers import (
    Stage,
    activation_shapes,
    build_stage,
    inputs_of,
    loss_of,
    targets_of,
)
from benchmarks.figures.requests import (
    PROFILE_FILE,
    RESULT_FILE,
    WARMUP_ITERATIONS,
    Batch,
    RunRequest,
)
from benchmarks.figures.rows import EMULATED, NO_CONTROL, Outcome
from envpipe_megatron.core.kinds import Kind, Unit
from envpipe_megatron.formats.energy import Phase
from envpipe_megatron.gpu.base import Gpu
from envpipe_megatron.gpu.emulated.emulated_gpu import EmulatedGpu
from envpipe_megatron.gpu.registry import uid_of_cuda_device
from envpipe_megatron.runtime.channel.carrier import StageSpecs, TensorSpec
from envpipe_megatron.runtime.channel.collectives import make_collectives
from envpipe_megatron.runtime.channel.links import make_channel
from envpipe_megatron.runtime.clocks.rank_clock import open_rank_gpu
from envpipe_megatron.runtime.execution.executor import CudaExecutor, EmulatedExecutor, Executor
from envpipe_megatron.runtime.execution.stage_run import StageWork
from envpipe_megatron.runtime.job.options import JobOptions
from envpipe_megatron.runtime.job.session import Session
from envpipe_megatron.trials.ranks import emit, report_to_command

_TIMEOUT = timedelta(seconds=120)
#: How long an emulated clock is measured, s: ten looks of the meter, which looks 20 times a second.
_PROFILE_WINDOW_S = 0.5


class TrainingWork(StageWork):
    """Forwards and backwards of one stage in one iteration.

    Args:
        samples: of each microbatch, on the first stage; a later one takes activations.
        targets: of each microbatch, on the last stage, which ends in their loss; an earlier one
            hands over activations.
    """

    def __init__(
        self,
        model: Model,
        stage: Stage,
        samples: Sequence[torch.Tensor] | None,
        targets: Sequence[torch.Tensor] | None,
        num_microbatches: int,
    ) -> None:
        self._model, self._stage = model, stage
        self._samples, self._targets = samples, targets
        self._num_microbatches = num_microbatches
        self._device = next(stage.parameters()).device
        #: Input and output of the microbatches in flight.
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        #: Of each microbatch, on the last stage.
        self.losses: dict[int, torch.Tensor] = {}

    def forward(self, unit: Unit, inputs: list[torch.Tensor] | None) -> list[torch.Tensor]:
        """Run a forward; the last stage's gives nothing to send."""
        if inputs is None:
            assert self._samples is not None
            x = self._samples[unit.microbatch]
        else:
            x = inputs[0]
        with half_precision(self._model, self._device):
            outputs = self._stage(x)
            if self._targets is not None:
                outputs = loss_of(outputs, self._targets[unit.microbatch])
                self.losses[unit.microbatch] = outputs.detach()
                outputs = outputs / self._num_microbatches
        self._kept[unit.microbatch] = x, outputs
        return [outputs.detach()] if self._targets is None else []

    def backward(self, unit: Unit, gradients: list[torch.Tensor] | None) -> list[torch.Tensor]:
        """Run a backward; the first stage's gives nothing to send."""
        x, outputs = self._kept.pop(unit.microbatch)
        torch.autograd.backward(outputs, None if gradients is None else gradients[0])
        if self._samples is not None:
            return []
        assert x.grad is not None
        return [x.grad]


def half_precision(model: Model, device: torch.device) -> AbstractContextManager[object]:
    """Mixed precision where the model has it, on a GPU: a CPU computes in single precision."""
    if model.precision is Precision.FP16 and device.type == "cuda":
        return torch.autocast("cuda", torch.float16)
    return nullcontext()


def rehearse(model: Model, stage: Stage, inputs: torch.Tensor) -> None:
    """Run a stage once by itself, so that a GPU has loaded its kernels before a receive spins."""
    with half_precision(model, inputs.device):
        outputs = stage(inputs)
    torch.autograd.backward(outputs, torch.zeros_like(outputs))


class Rank:
    """This process's place in the pipelines of a batch: it outlives the runs."""

    def __init__(self, stages: int, *, emulated: bool) -> None:
        cuda = not emulated
        if cuda:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        self.device = torch.device("cuda" if cuda else "cpu")
        dist.init_process_group("nccl" if cuda else "gloo", timeout=_TIMEOUT)
        self.rank, self.stages = dist.get_rank(), stages
        self.replica, self.stage = divmod(self.rank, stages)
        replicas = dist.get_world_size() // stages
        pipelines = [range(r * stages, (r + 1) * stages) for r in range(replicas)]
        pipeline = [_group(members) for members in pipelines][self.replica]
        peers = [_group(range(s, replicas * stages, stages)) for s in range(stages)]
        self.peers = peers[self.stage]
        self.collectives = make_collectives(pipelines, _TIMEOUT)
        self.channel = make_channel(pipeline, self.collectives, timeout=_TIMEOUT)

        self.first, self.last = self.stage == 0, self.stage == stages - 1


def _group(members: range) -> dist.ProcessGroup:
    group: dist.ProcessGroup | None = dist.new_group(list(members), timeout=_TIMEOUT)
    assert group is not None
    return group


class Run:
    """One run on this rank; `number` in the batch tells its emulated GPUs from other runs'."""

    def __init__(self, rank: Rank, request: RunRequest, folder: Path, number: int) -> None:
        self.rank, self.request, self.number = rank, request, number
        self.folder = folder / request.key
        profile = folder / request.profiling().key / PROFILE_FILE
        own_profile = not request.needs_profile or request == request.profiling()
        self.profile_file = None if own_profile else profile
        model = MODELS[request.job.model]
        self.model = reduced(model, rank.stages) if request.emulated else model
        self.layers = build_stage(self.model, rank.stages, rank.stage).to(rank.device)
        self._shapes = activation_shapes(self.model, rank.stages, request.job.microbatch_size)
        self.losses: list[list[float]] = []
        self._executor: Executor | None = None

    def train(self) -> Outcome | None:
        """Train until all steps are measured; return the outcome on the first rank."""
        rehearse(self.model, self.layers, self._any_input())
        gpu, control = self._open_gpu()
        session = self._session(gpu)
        specs = self._specs()
        optimizer = torch.optim.Adam(self.layers.parameters(), lr=1e-3)
        steady = 0
        try:
            while steady < self.request.steps:
                optimizer.zero_grad()
                losses = self._run_iteration(session, specs)
                self._average_gradients()
                optimizer.step()
                self.losses.append([losses[m].item() for m in sorted(losses)])
                steady += session.state.phase is Phase.STEADY
        finally:
            session.close()
        return self._outcome(session, gpu.name, control)

    def _run_iteration(self, session: Session, specs: StageSpecs) -> dict[int, torch.Tensor]:
        work = self._work(len(self.losses))
        session.run_iteration(self.request.job.num_microbatches, specs, lambda _: work)
        return work.losses

    def _work(self, iteration: int) -> TrainingWork:
        """An iteration's work; its data are drawn now, so that no unit is timed with drawing."""
        job, rank, model, device = self.request.job, self.rank, self.model, self.rank.device
        first_seed = (iteration * job.replicas + rank.replica) * job.num_microbatches
        seeds = range(first_seed, first_seed + job.num_microbatches)
        samples = targets = None
        if rank.first:
            samples = [inputs_of(model, job.microbatch_size, seed, device) for seed in seeds]
        if rank.last:
            targets = [targets_of(model, self._shapes[-1], seed, device) for seed in seeds]
        return TrainingWork(model, self.layers, samples, targets, job.num_microbatches)

    def _average_gradients(self) -> None:
        replicas = dist.get_world_size(self.rank.peers)
        if replicas == 1:
            return
        for parameter in self.layers.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad, group=self.rank.peers)
            parameter.grad /= replicas

    def _open_gpu(self) -> tuple[Gpu, str]:
        rank, request = self.rank, self.request
        if request.emulated is None:
            uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
            uid = uid_of_cuda_device(uuid)
            gpu, chosen = open_rank_gpu(uid, rank.collectives, request.backend)
            return gpu, chosen.backend or NO_CONTROL
        index = self.number * dist.get_world_size() + rank.rank
        return EmulatedGpu.create(str(self._preset()), index), EMULATED

    def _preset(self) -> Path:
        return self.folder / f"{self.request.job.gpu}.toml"

    def _session(self, gpu: Gpu) -> Session:
        request, rank, setting = self.request, self.rank, self.request.setting
        emulated = request.emulated

        def make_executor(settle: Callable[[], None]) -> Executor:
            if emulated is None:
                self._executor = CudaExecutor()
            else:
                assert isinstance(gpu, EmulatedGpu)
                times = {
                    Kind.FORWARD: emulated.forward_s[rank.stage],
                    Kind.BACKWARD: emulated.backward_s[rank.stage],
                }
                self._executor = EmulatedExecutor(gpu, times, rank.collectives, settle)
            return self._executor

        return Session(
            JobOptions(
                num_microbatches=request.job.num_microbatches,
                type=setting.type,
                scheduling=setting.scheduling,
                reconfigure=setting.reconfigure,
                baseline_steps=WARMUP_ITERATIONS,
                **self._profiler(),
                profile=self.profile_file,
                output=self.folder,
                gpu=str(self._preset()) if emulated else None,
                run=request.key,
            ),
            gpu,
            make_executor,
            rank.channel,
            rank.collectives,
            say=lambda text: emit("say", text=text),
        )

    def _profiler(self) -> dict[str, Any]:
        # Emulated units take the same time whenever they run.
        quick = {"profile_steps": 2, "window_s": _PROFILE_WINDOW_S}
        return {} if self.request.emulated is None else quick

    def _any_input(self) -> torch.Tensor:
        rank, samples = self.rank, self.request.job.microbatch_size
        if rank.first:
            return inputs_of(self.model, samples, 0, rank.device)
        shape = self._shapes[rank.stage - 1]
        return torch.zeros(shape, device=rank.device, requires_grad=True)

    def _specs(self) -> StageSpecs:
        rank, shapes = self.rank, self._shapes
        spec = partial(TensorSpec, dtypes=(torch.float32,), device=rank.device)
        receives, sends = {}, {}
        # A gradient is as large as what it is the gradient of.
        if not rank.first:
            receives[Kind.FORWARD] = sends[Kind.BACKWARD] = spec((shapes[rank.stage - 1],))
        if not rank.last:
            sends[Kind.FORWARD] = receives[Kind.BACKWARD] = spec((shapes[rank.stage],))
        return StageSpecs(receives, sends)

    def _outcome(self, session: Session, gpu: str, control: str) -> Outcome | None:
        totals = session.energy.log.totals[Phase.STEADY.value]
        mine = totals, str(session.clock.error or "")
        gathered = self.rank.collectives.all_to_planner((mine, self.losses))
        if not gathered:
            return None
        everyone = [found for stage in gathered for found, _ in stage]
        return Outcome.of_ranks(everyone, gathered[-1][0][1], session.state, gpu, control)


def main() -> None:
    """Run as one rank under torchrun."""
    report_to_command()
    batch: Batch = pickle.loads(Path(sys.argv[1]).read_bytes())
    torch.set_num_threads(1)
    # Its convolutions take milliseconds to begin.
    torch.backends.mkldnn.set_flags(False)  # type: ignore[no-untyped-call]  # torch's
    # Losses are compared to the last bit.
    torch.backends.cudnn.deterministic = True
    request = batch.requests[0]
    rank = Rank(request.job.stages, emulated=request.emulated is not None)
    for number, request in enumerate(batch.requests):
        if rank.rank == 0:
            emit("begun", key=request.key)
        run = Run(rank, request, batch.folder, number)
        outcome = run.train()
        if outcome is not None:
            outcome.write(run.folder / RESULT_FILE)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
