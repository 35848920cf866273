"""Linear programs over durations of random jobs, with what their solutions are held against."""

import random

import numpy as np
from core_cases import for_chunks, random_orders, random_schedule
from planning_cases import random_job

from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.profile_rows import SplitBackward
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.core.timeline import Timeline
from envpipe_megatron.policies.optimal.linear_program import DurationProgram, make_choices
from envpipe_megatron.policies.optimal.rounding import Rounding
from envpipe_megatron.policies.problem import order_limits

#: The solver disturbs slopes by up to 0.05 %, of costs that differ far less.
CLOSE = 2e-5


def any_schedule(rng, stages, microbatches):
    """One of the builders' orders, or one that can run and that nobody would build."""
    caps = order_limits(builders.one_f_one_b(stages, microbatches)).most
    extra = [min(rng.randint(0, microbatches), caps[0])]
    for cap in caps[1:]:
        extra.append(min(rng.randint(0, microbatches), cap, extra[-1] + 1))
    schedules = [
        builders.one_f_one_b(stages, microbatches),
        builders.gpipe(stages, microbatches),
        builders.envpipe(stages, microbatches, extra),
        Schedule("random", microbatches, 1, random_orders(rng, stages, microbatches)),
        random_schedule(rng, split=True, num_stages=stages, num_microbatches=microbatches),
    ]
    if microbatches % stages == 0 and stages > 1:
        schedules.append(builders.interleaved(stages, microbatches, rng.choice([2, 3])))
    return rng.choice(schedules)


class Case:
    """A random order of a random job, with a deadline between the fastest iteration and never."""

    def __init__(
        self, seed, max_microbatches=6, factors=(1.0, 1.0, 1.02, 1.2, 2.0, 1000.0), job=None
    ):
        self.rng = random.Random(seed)
        job = (job or self._job)(self.rng, max_microbatches)
        self.schedule = any_schedule(self.rng, job.num_stages, job.num_microbatches)
        self.conditions = job.conditions
        self.tail_s = job.conditions.tail_by_stage_s
        self.profile = for_chunks(self.rng, job.profile, self.schedule.num_chunks)
        if self.schedule.split:
            assumed = SplitBackward(self.rng.uniform(0.2, 0.8), self.rng.choice([0.0, 0.1]))
            self.profile = self.profile.with_split_backwards(assumed)
        self.powers_w = np.array(job.conditions.blocking_power_w)
        self.choices = make_choices(self.profile, self.powers_w, job.conditions.gpus_by_stage)
        self.units = [self.choices.units[key] for key in self.profile.keys(self.schedule).flat]
        self.hulls = [(unit.time_s[unit.hull], unit.cost_j[unit.hull]) for unit in self.units]
        self.fastest_s = self.iteration_s([times[0] for times, _ in self.hulls])
        self.deadline_s = self.rng.choice(factors) * self.fastest_s

    @staticmethod
    def _job(rng, max_microbatches):
        return random_job(rng, (1, 2, 3, 4), max_microbatches, rng.choice([2, 4, 10]))

    def program(self):
        return DurationProgram(self.schedule, self.choices, self.conditions)

    def iteration_s(self, duration_s):
        by_stage = np.reshape(duration_s, self.schedule.is_backward.shape)
        ends = Timeline(self.schedule, by_stage, self.conditions.latency_s).end_s[:, -1]
        return float(np.max(ends + self.tail_s))

    def cost_j(self, duration_s):
        """Of durations between hull points, with waiting until the last unit has ended."""
        units_j = sum(
            float(np.interp(duration, *hull))
            for duration, hull in zip(duration_s, self.hulls, strict=True)
        )
        return units_j + self.choices.waiting_power_w * self.iteration_s(duration_s)

    def rounding(self, chosen):
        return Rounding(self.program(), self.deadline_s, chosen)

    @property
    def fastest(self):
        return [0] * len(self.units)

    @property
    def slowest(self):
        return [len(unit.time_s) - 1 for unit in self.units]

    def any_choices(self):
        return [self.rng.randint(0, slowest) for slowest in self.slowest]

    def chosen_s(self, chosen):
        """Iteration time of a choice for each unit."""
        return self.iteration_s(
            [unit.time_s[at] for unit, at in zip(self.units, chosen, strict=True)]
        )

    def chosen_j(self, chosen):
        return sum(float(unit.cost_j[at]) for unit, at in zip(self.units, chosen, strict=True))
