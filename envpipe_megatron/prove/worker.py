"""One rank of a proof, under torchrun: measures, trains all turns, and reports to the command.

Each turn of an arm starts from the same state, on the same data, as all others.
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state

from envpipe_megatron.core.plan import Plan
from envpipe_megatron.formats.energy import Phase
from envpipe_megatron.gpu.base import DryRunGpu, Gpu, ReadOnlyGpu
from envpipe_megatron.gpu.devices import read_temperature_c
from envpipe_megatron.gpu.emulated.emulated_gpu import EmulatedGpu
from envpipe_megatron.integrations.device import FORWARD_VARIABLE, Device, open_device, use_cpu
from envpipe_megatron.integrations.megatron.core import ForwardBackward
from envpipe_megatron.policies.request import PlanRequest
from envpipe_megatron.prove.settings import (
    CONSTANT,
    OPTIMAL,
    SETTLE_ITERATIONS,
    TURN_S,
    WARMUP_ITERATIONS,
    Arm,
    ProveError,
    ProveSettings,
    constant_plan,
    order_of_round,
)
from envpipe_megatron.quickstart import model as gpt
from envpipe_megatron.quickstart import ranks
from envpipe_megatron.quickstart.model import joined_pipeline
from envpipe_megatron.runtime.channel.collectives import Collectives, make_collectives
from envpipe_megatron.runtime.channel.links import make_channel
from envpipe_megatron.runtime.clocks.latency import (
    CudaKernelTimer,
    EmulatedKernelTimer,
    KernelTimer,
    measure_latency,
    usual_clocks_mhz,
)
from envpipe_megatron.runtime.energy.steps import IntervalEnergy
from envpipe_megatron.runtime.execution.executor import METER_MARGIN_S
from envpipe_megatron.runtime.job.restarts.job_file import PROFILE_FILE, plan_file
from envpipe_megatron.runtime.job.session import Session, SessionConfig

#: The profile's own warm-up: what it loads and compiles is not measured.
_PROFILE_WARMUP = 5

#: A rank may measure the latency of its clock while others have done so.
_TIMEOUT = timedelta(seconds=300)
#: Changes between every two clocks, each way.
_LATENCY_REPEATS = 10


class Trainer:
    """A rank's state over all turns: the model, its first weights, and the way to its neighbours.

    Args:
        settings: of the proof.
        device: this rank's GPU.
        collectives: to all ranks.
        timeout: after which a silent neighbour is an error.
        tell: tells the command something; on every rank.
    """

    def __init__(
        self,
        settings: ProveSettings,
        device: Device,
        collectives: Collectives,
        timeout: timedelta,
        tell: Callable[..., None],
    ) -> None:
        self._settings, self._job = settings, settings.job
        self._device = device
        self._collectives = collectives
        self._tell = tell
        self._text = settings.job.text_copy.read_bytes()
        self._channel = make_channel(
            parallel_state.get_pipeline_model_parallel_group(), collectives, timeout=timeout
        )
        self._model = gpt.build_model(settings.job)
        self._first_state = [p.detach().to("cpu", copy=True) for p in self._model.parameters()]

    def profile(self) -> float:
        """Train until the job has its profile and the optimal plan; every rank calls it.

        Writes the plans of the arms that have one by file. Returns how long an iteration lasts in
        the framework's order at the highest clock, s. Raises ProveError if there is no plan.
        """
        config = SessionConfig(
            PlanRequest(self._job.num_microbatches, schedule="auto", policy="optimal"),
            warmup_iterations=_PROFILE_WARMUP,
            output_dir=self._settings.profile_folder,
            labels=self._labels("profile"),
        )
        session, step = self._begin(config, self._device.gpu, framework_iterations=None)
        try:
            while session.state.phase is not Phase.STEADY:
                step()
            ran = session.iterations.latest
            times_s = [time_s for phase, time_s, _ in ran if phase is Phase.WARMUP]
            plan = session.state.plan
        finally:
            session.close()
        if plan is None:
            raise ProveError(
                f"No plan could be made: {' '.join(session.state.notes)}",
                remedy="The profile, as far as it came, is in the output folder.",
            )
        if self._collectives.is_planner:
            folder = self._settings.profile_folder
            target = self._settings.plan_file(OPTIMAL.name)
            target.parent.mkdir()
            target.write_bytes((folder / plan_file("")).read_bytes())
            constant = constant_plan(plan)
            constant.write(self._settings.plan_file(CONSTANT.name))
            self._tell(
                "planned",
                predicted={OPTIMAL.name: _predicted(plan), CONSTANT.name: _predicted(constant)},
            )
        self._collectives.on_all(True)  # the files are there
        return statistics.median(times_s[1:])

    def train(self, arm: Arm, number: int, iterations: int) -> None:
        """Train a turn of an arm in a round, and tell what it took; every rank calls it."""
        gpu = self._device.gpu if arm.changes_clock else ReadOnlyGpu(self._device.gpu)
        settings = self._settings
        config = SessionConfig(
            PlanRequest(self._job.num_microbatches, schedule=arm.schedule, policy=arm.policy),
            warmup_iterations=WARMUP_ITERATIONS,
            profile_file=settings.profile_folder / PROFILE_FILE if arm.from_profile else None,
            plan_file=settings.plan_file(arm.name) if arm.own_plan else None,
            output_dir=settings.arm_folder(arm.name),
            relock=arm.relock,
            labels=self._labels(f"{arm.name} {number}"),
        )
        before_c = self._temperature_c()
        session, step = self._begin(config, gpu, framework_iterations=0)
        try:
            losses = [step() for _ in range(WARMUP_ITERATIONS + SETTLE_ITERATIONS)]
            session.pause()
            _lap(session)
            losses += [step() for _ in range(iterations)]
            sampled = gpu.clock_state()  # before the last unit has ended
            told = session.iterations.latest  # waits for it
            own = _lap(session)
            mean = session.gather(own)
        finally:
            session.close()
        stages = self._collectives.in_pipeline(
            {
                "energy_j": own.step.energy_j if own.step else None,
                "temperature_c": (before_c, self._temperature_c()),
                "sampled": asdict(sampled),
                "clocks": session.clock_summary(),
                "weights_sha256": gpt.digest_of_weights(self._model),
                "losses": [[float(loss) for loss in of_step] for of_step in losses],
            }
        )
        if self._collectives.is_planner:
            assert mean is not None
            self._tell(
                "turn",
                arm=arm.name,
                round=number,
                step=asdict(mean.step) if mean.step else None,
                iteration_times_s=[time_s for _, time_s, _ in told][-iterations:],
                losses=stages[-1].pop("losses"),
                stages=[{k: v for k, v in stage.items() if k != "losses"} for stage in stages],
                # Without a plan, the framework's order went on at the highest clock.
                failure="; ".join(session.state.notes)
                if arm.from_profile and session.state.plan is None
                else "",
            )

    def _begin(
        self, config: SessionConfig, gpu: Gpu, framework_iterations: int | None
    ) -> tuple[Session, Callable[[], list[torch.Tensor]]]:
        """A session that starts from the first state, and what trains its next iteration."""
        with torch.no_grad():
            for parameter, first in zip(self._model.parameters(), self._first_state, strict=True):
                parameter.copy_(first)
        optimizer = torch.optim.AdamW(self._model.parameters(), lr=self._job.learning_rate)
        session = Session(
            config,
            gpu,
            self._device.make_executor,
            self._channel,
            self._collectives,
            say=lambda text: self._tell("say", text=text),
        )
        forward_backward = ForwardBackward(session, framework_iterations)
        numbers = itertools.count()

        def step() -> list[torch.Tensor]:
            session.begin_step()
            losses = gpt.train_step(
                forward_backward, self._model, optimizer, self._job, self._text, next(numbers)
            )
            session.end_step()
            if self._collectives.is_planner:
                self._tell("step")  # who listens no more ends this rank
            return losses

        return session, step

    def _labels(self, run: str) -> dict[str, object]:
        return {"run": run, **({"emulated": True} if self._settings.emulated else {})}

    def _temperature_c(self) -> int | None:
        return None if self._settings.emulated else read_temperature_c(self._device.gpu.address.uid)


def _lap(session: Session) -> IntervalEnergy:
    """Energy of training since the last lap; the counter has passed its end, and was read since."""
    session.executor.idle(METER_MARGIN_S)
    session.meter.catch_up()
    return session.lap()


def _predicted(plan: Plan) -> dict[str, float]:
    return {
        "saving_percent": plan.cost.saving_percent(plan.baseline.cost),
        "slowdown_percent": plan.cost.slowdown_percent(plan.baseline.cost),
        "lowest_mhz": float(plan.frequency_mhz.min()),
        "highest_mhz": float(plan.frequency_mhz.max()),
    }


def emit(event: str, **fields: Any) -> None:
    """Tell the command something."""
    ranks.emit(Path(sys.argv[1]), event, **fields)


def main() -> None:
    """Run as one rank under torchrun: `worker.py SETTINGS.json`."""
    ranks.leave_on_sigterm()
    emit("rank", pid=os.getpid())
    settings = ProveSettings.read(Path(sys.argv[1]))
    if settings.emulated:
        os.environ[FORWARD_VARIABLE] = ",".join(map(str, settings.job.forward_times_s))
        use_cpu()
    else:
        # Losses are compared to the last bit: no kernel may add in an order of its own.
        torch.use_deterministic_algorithms(True)
        # It takes kernels of its own.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    with joined_pipeline(settings.job.num_stages, _TIMEOUT):
        prove(settings)


def prove(settings: ProveSettings) -> None:
    """All that a rank does, between joining its pipeline and leaving it."""
    job = settings.job
    collectives = make_collectives([range(job.num_stages)], _TIMEOUT)
    wanted = "dry_run" if settings.dry_run and not settings.emulated else "auto"
    device = open_device(
        collectives,
        job.num_stages,
        wanted,
        job.preset if settings.emulated else None,
        require=wanted == "auto" and not settings.emulated,
    )
    if settings.dry_run and settings.emulated:
        device = replace(device, gpu=DryRunGpu(device.gpu))
    if collectives.is_planner:
        emit("versions", torch=torch.__version__, cuda=torch.version.cuda or "none")
    if not settings.dry_run:
        found = collectives.in_pipeline(_latency(device, collectives))
        if collectives.is_planner:
            emit("latency", gpus=found)
    trainer = Trainer(settings, device, collectives, _TIMEOUT, emit)
    iteration_s = trainer.profile()
    iterations = settings.iterations or collectives.from_planner(
        max(3, math.ceil(TURN_S / iteration_s))
    )
    for number in range(settings.rounds):
        for arm in order_of_round(number):
            trainer.train(arm, number, iterations)


def _latency(device: Device, collectives: Collectives) -> dict[str, Any]:
    """How long a change of this rank's clock takes; a guard holds the GPU meanwhile."""
    if collectives.is_planner:
        emit("say", text="latency of a change of clock")
    gpu = device.gpu
    timer: KernelTimer = (
        EmulatedKernelTimer(gpu) if isinstance(gpu, EmulatedGpu) else CudaKernelTimer()
    )
    return collectives.everywhere(
        lambda: measure_latency(gpu, timer, usual_clocks_mhz(gpu), _LATENCY_REPEATS)
    )


if __name__ == "__main__":
    main()
