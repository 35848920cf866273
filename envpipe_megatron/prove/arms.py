"""The arms that train in turns, and the constant clock that rivals a plan. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from envpipe_megatron.core.plan import Plan


@dataclass(frozen=True)
class Arm:
    """One way to train the same model on the same data.

    Args:
        says: what it does, for people.
        policy: as `PlanRequest` takes it, with `schedule`.
        relock: as `SessionConfig` takes it.
        changes_clock: without, the GPU is opened for reading alone.
        own_plan: whether a file in the folder of plans, named as the arm, says order and clocks.
        from_profile: whether it needs the profile.
    """

    name: str
    says: str
    policy: str = "baseline"
    schedule: str = "1f1b"
    relock: bool = False
    changes_clock: bool = True
    own_plan: bool = False
    from_profile: bool = False


STOCK = Arm(
    "stock", "the framework's order, 1F1B, and no call that sets a clock", changes_clock=False
)
RELOCK = Arm(
    "relock",
    "as stock, with the highest clock locked again at every unit: what the calls alone cost",
    relock=True,
)
CONSTANT = Arm(
    "constant",
    "1F1B at the one lower clock that should take as much energy as optimal: what any operator "
    "could do",
    policy="uniform",
    own_plan=True,
    from_profile=True,
)
ENVELOPE = Arm(
    "envelope",
    "EnvPipe's own: type envelope, scheduling ours, reconfigure default",
    policy="envelope",
    schedule="ours",
    from_profile=True,
)
OPTIMAL = Arm(
    "optimal",
    "order and clocks planned together",
    policy="optimal",
    schedule="auto",
    own_plan=True,
    from_profile=True,
)
#: In the order of a round. A power profile of the vendor is no arm: EnvPipe never changes one.
ARMS = (STOCK, RELOCK, CONSTANT, ENVELOPE, OPTIMAL)


def order_of_round(number: int) -> tuple[Arm, ...]:
    """The arms of a round, from 0: every other round goes backwards, so that a drift cancels."""
    return ARMS if number % 2 == 0 else ARMS[::-1]


def constant_plan(optimal: Plan) -> Plan:
    """The framework's own order at one clock, whose energy is nearest to that of a plan.

    Among the clocks that all stages were profiled at, below the highest and down to that of least
    energy: a lower one would be slower and take more.
    """
    base = optimal.baseline
    stages = range(base.schedule.num_stages)
    *clocks, _ = sorted(set.intersection(*(set(base.profile.clocks_mhz(s)) for s in stages)))
    plans = [
        Plan(
            "uniform",
            base.schedule,
            np.full_like(base.frequency_mhz, clock),
            base.profile,
            base.conditions,
        )
        for clock in clocks
    ]
    least = min(range(len(plans)), key=lambda at: plans[at].cost.energy_j)
    wanted_j = optimal.cost.energy_j
    # The highest first: of clocks that are as near, the faster one is the harder rival.
    return min(reversed(plans[least:]), key=lambda plan: abs(plan.cost.energy_j - wanted_j))
