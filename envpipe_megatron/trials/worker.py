"""One rank of a quickstart or a proof under torchrun: trains all turns, reports to the command.

Each turn of an arm starts from the same state, on the same data, as all others.
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.pipeline_parallel import get_forward_backward_func

from envpipe_megatron.core.plan import Plan
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.formats.energy import Phase
from envpipe_megatron.formats.steps import IntervalEnergy
from envpipe_megatron.gpu.base import Gpu, ReadOnlyGpu
from envpipe_megatron.gpu.registry import look_at
from envpipe_megatron.integrations.device import FORWARD_VARIABLE, open_device, use_cpu
from envpipe_megatron.integrations.framework_units import UnitFollower
from envpipe_megatron.integrations.leveled import end_of_job
from envpipe_megatron.integrations.megatron.core import ForwardBackward
from envpipe_megatron.policies.objective import SHORTEST
from envpipe_megatron.policies.planner import make_plan
from envpipe_megatron.policies.request import BY_MEMORY, PlanRequest
from envpipe_megatron.runtime.channel.collectives import make_collectives
from envpipe_megatron.runtime.channel.links import make_channel
from envpipe_megatron.runtime.clocks import latency
from envpipe_megatron.runtime.execution.executor import METER_MARGIN_S
from envpipe_megatron.runtime.job.options import PROFILE_FILE, JobOptions
from envpipe_megatron.runtime.job.restarts import plan_file
from envpipe_megatron.runtime.job.session import Session
from envpipe_megatron.runtime.memory.stage import in_flight_limit, knows_memory
from envpipe_megatron.trials import model as gpt
from envpipe_megatron.trials.ranks import emit, report_to_command
from envpipe_megatron.trials.settings import (
    CONSTANT,
    OPTIMAL,
    SPLIT,
    WHOLE,
    Arm,
    Settings,
    constant_plan,
)

#: How long the measured part of a turn lasts, at least, unless its iterations are given, s.
TURN_S = 10.0
#: The profile's own warm-up: what it loads and compiles is not measured.
_PROFILE_WARMUP = 5
#: A rank may measure the latency of its clock while others have done so.
_TIMEOUT = timedelta(seconds=300)
#: Changes between every two clocks, each way.
_LATENCY_REPEATS = 10


class Rank:
    """A rank's state over all turns: its GPU, the model and its first weights, its neighbours."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._collectives = make_collectives([range(settings.num_stages)], _TIMEOUT)
        options = JobOptions(
            gpu_control="auto" if settings.changes_clocks else "none",
            gpu=settings.preset,
            require_control=settings.changes_clocks,
        )
        self._device = open_device(self._collectives, settings.num_stages, options)
        self._text = settings.text_copy.read_bytes()
        self._channel = make_channel(
            parallel_state.get_pipeline_model_parallel_group(), self._collectives, timeout=_TIMEOUT
        )
        self._model = gpt.build_model(settings)
        self._first_state = [p.detach().to("cpu", copy=True) for p in self._model.parameters()]

    def run(self) -> None:
        """Train all turns, after what a proof measures before them; every rank calls it."""
        settings, iterations = self._settings, self._settings.steady_iterations
        if settings.proof:
            self._report("versions", torch=torch.__version__, cuda=torch.version.cuda or "none")
            if settings.changes_clocks:
                self._measure_latency()
            iteration_s = self._profile()
            iterations = iterations or self._collectives.from_planner(
                max(3, math.ceil(TURN_S / iteration_s))
            )
        assert iterations is not None
        for number, arm in settings.turns:
            self._train(arm, number, iterations)

    def _measure_latency(self) -> None:
        """Report how long a change of each rank's clock takes; a guard holds the GPU meanwhile."""
        self._report("say", arm="latency", text="how long a change of clock takes is measured")
        found = self._collectives.everywhere(
            lambda: latency.measure_latency(self._device.gpu, None, _LATENCY_REPEATS)
        )
        self._report("latency", gpus=self._collectives.in_pipeline(found))

    def _profile(self) -> float:
        """Train until the job has its profile and a plan: the optimal one, or the shortest.

        Writes the plans of the arms that have one by file. Returns how long an iteration lasts in
        the framework's order at the highest clock, s. Raises EnvPipeError if there is no plan.
        """
        orders = not self._settings.changes_clocks
        session, step = self._begin(
            SPLIT if orders else OPTIMAL,
            "profile",
            self._device.gpu,
            framework_iterations=None,
            baseline_steps=_PROFILE_WARMUP,
            output=self._settings.profile_folder,
            sweep=not orders,
        )
        try:
            while session.state.plan is None and session.state.phase is not Phase.STEADY:
                step()
            times_s = [
                time_s for phase, time_s in session.iterations.latest if phase is Phase.WARMUP
            ]
            plan = session.state.plan
        finally:
            session.close()
        if plan is None:
            raise EnvPipeError(
                f"No plan could be made: {' '.join(session.state.notes)}",
                remedy="The profile, as far as it came, is in the output folder.",
            )
        if self._collectives.is_planner:
            best, other = (SPLIT, WHOLE) if orders else (OPTIMAL, CONSTANT)
            target = self._plan_file(best)
            target.parent.mkdir()
            target.write_bytes((self._settings.profile_folder / plan_file("")).read_bytes())
            (_whole_plan if orders else constant_plan)(plan).write(self._plan_file(other))
        self._collectives.on_all(True)  # the files are there
        return statistics.median(times_s[1:])

    def _train(self, arm: Arm, number: int, iterations: int) -> None:
        """Train a turn of an arm in a round, and report what it took."""
        settings, own_plan = self._settings, self._plan_file(arm)
        gpu = self._device.gpu if arm.changes_clock else ReadOnlyGpu(self._device.gpu)
        from_profile = settings.proof and arm.policy != "baseline"
        before_c = self._temperature_c()
        session, step = self._begin(
            arm,
            f"{arm.name} {number}" if settings.proof else arm.name,
            gpu,
            framework_iterations=0,
            baseline_steps=settings.warmup_iterations,
            profile=settings.profile_folder / PROFILE_FILE if from_profile else None,
            plan=own_plan if own_plan.exists() else None,
            output=settings.output_of(arm),
            sweep=from_profile,
        )
        session.clock.repeats = arm.relock
        # A closed loop measures between warm-up and steady iterations: its run is longer.
        wanted = settings.settle_iterations + iterations
        compared = settings.warmup_iterations + wanted
        losses: list[list[torch.Tensor]] = []
        steady, weights_sha256 = 0, ""
        try:
            while steady < wanted:
                if steady == settings.settle_iterations:
                    session.pause()
                    _lap(session)
                if len(losses) == compared:
                    weights_sha256 = gpt.digest_of_weights(self._model)
                losses.append(step(last=steady == wanted - 1))
                steady += session.state.phase is Phase.STEADY
            own = _lap(session)
            mean = session.energy.gather(own)
        finally:
            session.close()
        end_of_job(session, None)  # its folder is any job's
        stages: list[dict[str, Any]] = self._collectives.in_pipeline(
            {
                "energy_j": own.step.energy_j if own.step else None,
                "temperature_c": (before_c, self._temperature_c()),
                "clocks": session.clock.summary(),
                "executed": session.executed,
                "weights_sha256": weights_sha256 or gpt.digest_of_weights(self._model),
                "losses": [[float(loss) for loss in of_step] for of_step in losses],
            }
        )
        state, of_steps = session.state, stages[-1]["losses"]
        self._report(
            "turn",
            arm=arm.name,
            round=number,
            step=asdict(mean.step) if mean.step else None,
            losses=of_steps,
            stages=[{k: v for k, v in stage.items() if k != "losses"} for stage in stages],
            schedule=state.plan.schedule.name if state.plan else "1f1b",
            split=state.plan is not None and state.plan.schedule.split,
            notes=list(state.notes),
            # Without a plan, the framework's order went on at the highest clock.
            failure="; ".join(state.notes) if from_profile and state.plan is None else "",
        )

    def _begin(
        self, arm: Arm, run: str, gpu: Gpu, framework_iterations: int | None, **options: Any
    ) -> tuple[Session, Callable[..., list[torch.Tensor]]]:
        """Return a session that starts from the first state, and what trains an iteration of it.

        That waits for the GPU's end of the `last` one. `options` are those of `JobOptions`.
        """
        settings = self._settings
        # Only the interpreter makes time of emulated GPUs.
        by_framework = arm.by_framework and settings.preset is None
        with torch.no_grad():
            for parameter, first in zip(self._model.parameters(), self._first_state, strict=True):
                parameter.copy_(first)
        optimizer = torch.optim.AdamW(self._model.parameters(), lr=settings.learning_rate)
        session = Session(
            JobOptions(
                num_microbatches=settings.num_microbatches,
                type=arm.policy,
                scheduling=arm.schedule,
                reconfigure="default",
                why_whole="",
                run=run,
                **options,
            ),
            gpu,
            self._device.make_executor,
            self._channel,
            self._collectives,
            say=lambda text: emit("say", arm=arm.name, text=text),
        )
        forward_backward = (
            get_forward_backward_func()
            if by_framework
            else ForwardBackward(session, framework_iterations)
        )
        numbers = itertools.count()

        def step(*, last: bool = False) -> list[torch.Tensor]:
            number = next(numbers)
            session.begin_step()
            whole = UnitFollower.whole_step(session) if by_framework else None
            optimizer.zero_grad()
            reduced = forward_backward(
                forward_step_func=gpt.forward_step,
                data_iterator=gpt.microbatches(settings, self._text, number),
                model=self._model,
                num_microbatches=settings.num_microbatches,
                seq_length=settings.sequence_length,
                micro_batch_size=settings.microbatch_size,
            )
            optimizer.step()
            if whole is not None:
                whole.complete()
            if last and torch.cuda.is_available():
                torch.cuda.synchronize()
            session.end_step()
            losses = [entry["loss"] for entry in reduced]  # of each microbatch, on the last stage
            if losses:  # a command that is gone ends this rank
                # A GPU is ahead of its host: nothing waits for its losses.
                loss = None if losses[0].is_cuda else float(np.mean([float(m) for m in losses]))
                phase = session.state.phase.value
                emit("iteration", arm=arm.name, number=number + 1, phase=phase, loss=loss)
            return losses

        return session, step

    def _report(self, event: str, **fields: Any) -> None:
        """Report an event of the whole pipeline: from one rank."""
        if self._collectives.is_planner:
            emit(event, **fields)

    def _plan_file(self, arm: Arm) -> Path:
        """Return the file of the plan that all turns of an arm run, if it has one."""
        return self._settings.output / "plans" / f"{arm.name}.json"

    def _temperature_c(self) -> int | None:
        return look_at(self._device.gpu.address.uid).activity().temperature_c


def _whole_plan(plan: Plan) -> Plan:
    """Return the plan of the shortest order of whole backwards; a shortest plan has the job."""
    profile, most = plan.profile.whole(), None
    if knows_memory(profile.sidecar):
        most = in_flight_limit(BY_MEMORY, plan.baseline.schedule, profile, None)
    request = PlanRequest(
        plan.schedule.num_microbatches, "auto", "optimal", max_in_flight=most,
        conditions=plan.conditions, objective=SHORTEST, runnable=True,
    )  # fmt: skip
    return make_plan(profile, request).plan


def _lap(session: Session) -> IntervalEnergy:
    """Return the energy of training since the last lap, whose end the counter has passed."""
    session.executor.idle(METER_MARGIN_S)
    session.parts.meter.catch_up()
    return session.energy.lap()


def main() -> None:
    """Run as one rank under torchrun: `worker.py SETTINGS.json`."""
    report_to_command()
    settings = Settings.read(Path(sys.argv[1]))
    if settings.preset is not None:
        os.environ[FORWARD_VARIABLE] = ",".join(map(str, settings.forward_times_s))
        use_cpu()
    else:
        # Losses are compared to the last bit: no kernel may add in an order of its own.
        torch.use_deterministic_algorithms(True)
        # It takes kernels of its own.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.set_num_threads(1)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", timeout=_TIMEOUT)
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=settings.num_stages)
    tensor_parallel.random.initialize_rng_tracker(inference_rng_tracker=True)
    Rank(settings).run()
    # Only at the end: after a failure peers may be gone, and leaving waits.
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
