"""Timelines and windows of a job that was never run: those of a plan, shifted on."""

import numpy as np

from envpipe_megatron.core.kinds import Kind
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.profile import make_profile
from envpipe_megatron.core.profile_rows import ProfileRow
from envpipe_megatron.core.timeline import Timeline
from envpipe_megatron.formats.energy import EnergyWindow
from envpipe_megatron.formats.timeline import GpuLabels, RankIteration

FORWARD_S, BACKWARD_S = 0.010, 0.020


def profile(num_stages, rows):
    """Stages that are alike; of (MHz, s, J) of a forward, and a backward takes twice that."""
    return make_profile(
        [
            (stage, kind, ProfileRow(mhz, weight * time_s, weight * energy_j))
            for stage in range(num_stages)
            for kind, weight in ((Kind.FORWARD, 1), (Kind.BACKWARD, 2))
            for mhz, time_s, energy_j in rows
        ],
        source="made for a test",
    )


def labels(stage, node="n1", run=""):
    return GpuLabels(node, "NVIDIA A100", f"GPU-{stage}", stage, stage, run)


def iterations(
    stages=3, microbatches=4, phases=("warm-up", "steady"), begin_s=100.0, nodes=None, run=""
):
    """One iteration of 1F1B a phase; a stage may be on another node, whose clock is ahead."""
    schedule = builders.one_f_one_b(stages, microbatches)
    timeline = Timeline(schedule, np.where(schedule.is_backward, BACKWARD_S, FORWARD_S))
    length_s = timeline.iteration_time_s
    made = []
    for index, phase in enumerate(phases):
        for stage in range(stages):
            node, ahead_s = (nodes or {}).get(stage, ("n1", 0.0))
            clock = 1410 if phase == "warm-up" else 1200
            made.append(
                RankIteration(
                    labels(stage, node, run),
                    phase,
                    index,
                    begin_s + ahead_s + index * length_s,
                    length_s,
                    " ".join(schedule.labels()[stage]),
                    np.rint(1e6 * timeline.start_s[stage]).astype(np.int64),
                    np.rint(1e6 * timeline.end_s[stage]).astype(np.int64),
                    np.full(schedule.units_per_stage, clock),
                )
            )
    return made


def windows(recorded, power_w=200.0):
    """One a recorded iteration, as if each were metered alone."""
    return [
        EnergyWindow(
            node=one.labels.node,
            gpu_uid=one.labels.gpu_uid,
            gpu=one.labels.gpu,
            rank=one.labels.rank,
            stage=one.labels.stage,
            run=one.labels.run,
            phase=one.phase,
            first_iteration=one.iteration,
            last_iteration=one.iteration,
            energy_j=power_w * one.iteration_time_s,
            duration_s=one.iteration_time_s,
            energy_uncertainty_j=0.1,
            shares_s=(
                0.5 * one.iteration_time_s,
                0.3 * one.iteration_time_s,
                0.2 * one.iteration_time_s,
            ),
            begin_s=one.begin_s,
        )
        for one in recorded
    ]
