"""One rank of the quickstart: trains both runs, one after the other, and reports to the command."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from envpipe_megatron.core.kinds import Kind
from envpipe_megatron.formats.energy import Phase
from envpipe_megatron.gpu.emulated.emulated_gpu import EmulatedGpu
from envpipe_megatron.integrations.device import use_cpu
from envpipe_megatron.integrations.megatron.core import ForwardBackward
from envpipe_megatron.policies.request import PlanRequest
from envpipe_megatron.quickstart import model as quickstart_model
from envpipe_megatron.quickstart import ranks
from envpipe_megatron.quickstart.model import joined_pipeline
from envpipe_megatron.quickstart.settings import RUNS, Settings
from envpipe_megatron.runtime.channel.collectives import make_collectives
from envpipe_megatron.runtime.channel.links import make_channel
from envpipe_megatron.runtime.execution.emulated_executor import EmulatedExecutor
from envpipe_megatron.runtime.job.session import Session, SessionConfig

_TIMEOUT = timedelta(seconds=60)


def emit(event: str, **fields: Any) -> None:
    """Tell the command something."""
    ranks.emit(Path(sys.argv[1]), event, **fields)


class QuickstartRank:
    """A rank's state over both runs."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.output = Path(settings.output_dir)
        self.text = settings.text_copy.read_bytes()
        self.rank = dist.get_rank()
        self.stage = parallel_state.get_pipeline_model_parallel_rank()
        self.last = parallel_state.is_pipeline_last_stage()
        self.collectives = make_collectives([range(settings.num_stages)], _TIMEOUT)
        self.gpu = EmulatedGpu.create(settings.preset, self.rank)
        #: For each run, the losses of its iterations' microbatches (on the last stage).
        self.losses: dict[str, list[list[float]]] = {}

    def train(self, run: str, policy: str, schedule: str, reconfigure: str) -> None:
        """Train one run, and emit its result."""
        settings = self.settings
        model = quickstart_model.build_model(settings)
        optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate)
        session = self._session(run, policy, schedule, reconfigure)
        session.describe_job(
            {
                "model": settings.model_name,
                "tokens_per_iteration": settings.minibatch_size * settings.sequence_length,
                "samples_per_iteration": settings.minibatch_size,
                "microbatch_size": settings.microbatch_size,
                "type": policy,
                "scheduling": schedule,
                "reconfigure": reconfigure,
            }
        )
        forward_backward = ForwardBackward(session)
        losses = self.losses[run] = []
        digest = ""
        steady = 0
        try:
            while steady < settings.steady_iterations:
                iteration = len(losses)
                step_losses = quickstart_model.train_step(
                    forward_backward, model, optimizer, settings, self.text, iteration
                )
                losses.append([float(loss) for loss in step_losses])
                phase, record = session.state.phase, session.iterations.last_record
                assert record is not None
                steady += phase is Phase.STEADY
                if self.last:
                    emit(
                        "iteration",
                        run=run,
                        phase=phase.value,
                        iteration=iteration,
                        loss=float(np.mean(losses[-1])),
                        iteration_time_s=record.iteration_time_s,
                        wall_time_s=record.wall_time_s,
                    )
                if len(losses) == settings.baseline_iterations:
                    digest = quickstart_model.digest_of_weights(
                        model
                    )  # after as many steps as the baseline makes
        finally:
            session.close()
        self._emit_result(run, session, digest)

    def _session(self, run: str, policy: str, schedule: str, reconfigure: str) -> Session:
        settings = self.settings
        forward_s = settings.forward_times_s[self.stage]
        times = {Kind.FORWARD: forward_s, Kind.BACKWARD: settings.backward_ratio * forward_s}
        return Session(
            SessionConfig(
                PlanRequest(
                    num_microbatches=settings.num_microbatches,
                    schedule=schedule,
                    policy=policy,
                    reconfigure=reconfigure,
                ),
                warmup_iterations=settings.warmup_iterations,
                closed_loop=policy == "optimal",
                output_dir=self.output,
                labels={"run": run, "emulated": True},
            ),
            self.gpu,
            lambda settle: EmulatedExecutor(self.gpu, times, self.collectives, settle),
            make_channel(
                parallel_state.get_pipeline_model_parallel_group(),
                self.collectives,
                timeout=_TIMEOUT,
            ),
            self.collectives,
            say=lambda text: emit("say", run=run, text=text),
        )

    def _emit_result(self, run: str, session: Session, digest: str) -> None:
        baseline = RUNS[0][0]
        common = min(len(self.losses[run]), len(self.losses[baseline]))
        mine: dict[str, Any] = {
            "metered": {phase: asdict(t) for phase, t in session.energy_log.totals.items()},
            "clock_error": str(session.clock.error or ""),
            "clock_changes": session.clock_summary()["changes"],
            "executed": session.executed,
            "losses": self.losses[run],
            "weights_sha256": digest,
            "losses_bit_equal": self.losses[run][:common] == self.losses[baseline][:common],
        }
        stages = self.collectives.in_pipeline(mine)
        state = session.state
        if self.collectives.is_planner:
            emit(
                "result",
                run=run,
                stages=[{**stage, "losses": None} for stage in stages],
                losses=[float(np.mean(step)) for step in stages[-1]["losses"]],
                steps_compared=common,
                iterations=[
                    {"phase": phase.value, "iteration_time_s": time_s, "wall_time_s": wall_s}
                    for phase, time_s, wall_s in session.iterations.latest
                ],
                schedule=state.plan.schedule.name if state.plan else "1f1b",
                notes=[*state.notes, *(s["clock_error"] for s in stages if s["clock_error"])],
            )


def main() -> None:
    """Run as one rank under torchrun: `worker.py SETTINGS.json`."""
    ranks.leave_on_sigterm()
    emit("rank", run="", pid=os.getpid())
    settings = Settings.read(Path(sys.argv[1]))
    use_cpu()
    with joined_pipeline(settings.num_stages, _TIMEOUT):
        rank = QuickstartRank(settings)
        for run in RUNS:
            rank.train(*run)


if __name__ == "__main__":
    main()
