"""Plans under times that vary, and how sure what they save is.

*Drawn times.* A unit takes its time by the profile x a factor of its own x a factor that all units
of the iteration share. Both are lognormal with mean 1 and the standard deviations of
`Conditions.spread`; draws come in pairs of opposite normals, so that means are found with fewer of
them. A microbatch of a stage gets the same factors in every order, so plans and baselines are
compared by the same draws. A unit's power stays, so its energy varies with its time.
Latencies and tails do not vary, and late clocks take what they take at mean times. Waits that
are parked in are billed as if two changes always fitted.

*Energies.* Errors of a profile's rows are taken as independent. A row's error is that of all the
units that it prices, and what plan and baseline both take from a row cancels.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from envpipe_megatron.core.arrays import FloatArray
from envpipe_megatron.core.conditions import Spread
from envpipe_megatron.core.kinds import SPLIT, WHOLE, Kind
from envpipe_megatron.core.longest_path import LongestPath
from envpipe_megatron.core.plan import Plan
from envpipe_megatron.core.profile import Profile
from envpipe_megatron.core.profile_rows import ProfileError, ProfileRow

#: Half of the 95 % interval of a normal distribution, in standard deviations.
NORMAL_95 = 1.96
#: Draws that a plan is judged by.
NUM_DRAWS = 10_000
#: Units x draws at a time, of each kind: 32 MB.
_NUMBERS_AT_ONCE = 1 << 22
_QUANTILE = 0.95


@dataclass(frozen=True)
class Drawn:
    """Iterations of one plan.

    Args:
        time_s: [2, num_draws / 2], each above the one of opposite normals.
        energy_j: the same, of all GPUs.
    """

    time_s: FloatArray
    energy_j: FloatArray


@dataclass(frozen=True)
class Estimate:
    """A mean over draws, in percent, and its standard error."""

    percent: float
    error: float


@dataclass(frozen=True)
class Expected:
    """What a plan takes in the mean of drawn iterations, against its baseline by the same draws.

    Args:
        slowdown: of the mean time.
        saving: of the mean energy.
        time_s: mean time of the plan and the baseline.
        late_time_s: the time that 95 % of the plan's iterations keep, and of the baseline's.
    """

    slowdown: Estimate
    saving: Estimate
    time_s: tuple[float, float]
    late_time_s: tuple[float, float]


def expected(plan: Plan, num_draws: int = NUM_DRAWS, seed: int = 0) -> Expected:
    """Draw a plan and its baseline; ProfileError if the profile does not know its spread."""
    own, base = (draw(one, num_draws, seed) for one in (plan, plan.baseline))
    saving = excess(own.energy_j, base.energy_j)
    return Expected(
        excess(own.time_s, base.time_s),
        Estimate(-saving.percent, saving.error),
        (float(own.time_s.mean()), float(base.time_s.mean())),
        (float(np.quantile(own.time_s, _QUANTILE)), float(np.quantile(base.time_s, _QUANTILE))),
    )


def excess(own: FloatArray, base: FloatArray) -> Estimate:
    """By how much the mean of draws lies above that of others by the same numbers."""
    own, base = own.mean(axis=0), base.mean(axis=0)
    ratio = own.mean() / base.mean()
    error = (own - ratio * base).std(ddof=1) / math.sqrt(own.size) / base.mean()
    return Estimate(100 * float(ratio - 1), 100 * float(error))


def draw(plan: Plan, num_draws: int, seed: int) -> Drawn:
    """Drawn iterations, an even number of them; ProfileError as `expected`."""
    schedule = plan.schedule
    at_once = _NUMBERS_AT_ONCE // (
        schedule.num_stages * schedule.num_microbatches * schedule.num_chunks
    )
    parts: list[FloatArray] = []
    left = math.ceil(num_draws / 2)
    while left > 0:
        pairs = min(left, max(1, at_once // 2))
        factors = draw_factors(plan, pairs, seed, len(parts))
        path = drawn_path(plan, factors)
        time_s = iteration_times_s(plan, path)
        parts.append(np.stack([time_s, _energy_j(plan, factors, path, time_s)]))
        left -= pairs
    time_s, energy_j = np.concatenate([part.reshape(2, 2, -1) for part in parts], axis=2)
    return Drawn(time_s, energy_j)


def draw_factors(plan: Plan, num_pairs: int, seed: int, part: int = 0) -> FloatArray:
    """[num_units, 2 x num_pairs] by what each unit's time is multiplied in each draw.

    The second half of the draws is of normals opposite to those of the first. Other numbers for
    each `part` of a long row of draws. The W that ends a whole backward has the factor that this
    has where none is split: the one of I. ProfileError as `expected`.
    """
    schedule, spread = plan.schedule, plan.conditions.spread or Spread(0.0)
    stages = schedule.num_stages
    block = schedule.num_microbatches * schedule.num_chunks
    by_kind = np.stack(
        [
            np.random.default_rng([seed, part, at]).standard_normal((stages, block, num_pairs))
            for at in range(len(schedule.unit_kinds))
        ],
        axis=1,
    ).reshape(stages, -1, num_pairs)
    ends_whole = np.roll(schedule.combined, 1, axis=1) & (schedule.places >= len(WHOLE) * block)
    places = schedule.places - block * ends_whole
    normal = by_kind[np.arange(stages)[:, None], places].reshape(-1, num_pairs)
    shared = np.random.default_rng([seed, part, len(SPLIT)]).standard_normal((1, num_pairs))
    own = _lognormal(_relative_spread(plan, spread)[:, None], normal)
    return own * _lognormal(np.array(spread.common), shared)


def _lognormal(spread: FloatArray, normal: FloatArray) -> FloatArray:
    """Factors with mean 1 and a standard deviation, for normals and their opposites."""
    variance = np.log1p(spread**2)
    exponent = np.sqrt(variance) * normal
    return np.exp(np.concatenate([exponent, -exponent], axis=1) - variance / 2)


def _relative_spread(plan: Plan, spread: Spread) -> FloatArray:
    """[num_units] standard deviation of each unit's time as a fraction of it."""
    if spread.unit is not None:
        return np.full(plan.schedule.num_units, spread.unit)
    profile = plan.profile
    keys, relative = profile.keys(plan.schedule), np.zeros(plan.frequency_mhz.shape)
    kinds = (of_kind for part in profile.rows for of_kind in part.items())
    for key, (kind, rows) in enumerate(kinds):
        if kind is Kind.NOTHING:
            continue
        known = [row.time_spread_s / row.time_s for row in rows if row.time_spread_s is not None]
        if len(known) < len(rows):
            raise ProfileError(
                f"{profile.source} does not say by how much times vary: a row has no time_spread_s",
                remedy="Profile again, or give the spread itself.",
            )
        mask = keys == key
        relative[mask] = np.interp(plan.frequency_mhz[mask], profile.curves[key][0], known[::-1])
    return relative.ravel()


def drawn_path(plan: Plan, factors: FloatArray) -> LongestPath:
    """The ends of all units in each draw; durations and ends are arrays over draws."""
    durations_s = plan.timeline.duration_s.reshape(-1, 1) * factors
    path = LongestPath(plan.schedule, list(durations_s), plan.conditions.latency_s)
    path.find_ends(np.maximum)
    return path


def iteration_times_s(plan: Plan, path: LongestPath) -> FloatArray:
    """[num_draws] when the last stage has ended its tail."""
    last = path.end_s[plan.schedule.units_per_stage - 1 :: plan.schedule.units_per_stage]
    ends_s = np.array(last) + plan.conditions.tail_by_stage_s[:, None]
    latest_s: FloatArray = ends_s.max(axis=0)
    return latest_s


def _energy_j(plan: Plan, factors: FloatArray, path: LongestPath, time_s: FloatArray) -> FloatArray:
    """[num_draws] energy as `evaluation.evaluate` bills it.

    A wait's power is that of the unit after it, so the sum over waits is one over ends: each end
    is where a wait at one power gives way to a unit, and later to a wait at another.
    """
    conditions, result = plan.conditions, plan.evaluation
    power_w = conditions.waiting_power_w(plan.frequency_mhz)
    fixed_j = conditions.change_energy_j * result.clock_changes
    if plan.park_mhz is not None:
        parked = plan.park_mhz > 0
        parked_w = np.where(parked, conditions.waiting_power_w(plan.park_mhz), power_w)
        fixed_j = fixed_j + 2 * conditions.change_time_s * (power_w - parked_w).sum(axis=1)
        power_w = parked_w
    gpus = conditions.gpus_by_stage[:, None]
    busy_j = gpus * (result.unit_energy_j - power_w * result.timeline.duration_s)
    by_end_w = gpus * (power_w - np.roll(power_w, -1, axis=1))
    energy_j: FloatArray = busy_j.ravel() @ factors + gpus[:, 0] @ fixed_j
    energy_j += (gpus * power_w)[:, 0].sum() * time_s
    if by_end_w.any():
        energy_j += by_end_w.ravel() @ np.array(path.end_s)
    return energy_j


def saving_uncertainty_percent(plan: Plan) -> float | None:
    """Standard uncertainty of the saving, in points, from that of the profile's energies.

    Linear: the saving changes with a row's energy by how many units the row prices, in the plan
    and in the baseline. Late clocks count as the clocks that come. None if a row that is used has
    no uncertainty.
    """
    profile, base_j = plan.profile, plan.baseline.cost.energy_j
    gpus = plan.conditions.gpus_by_stage
    own, base = _row_uses(plan), _row_uses(plan.baseline)
    net = own - plan.cost.energy_j / base_j * base
    errors_j: dict[tuple[int, Kind, int], float] = defaultdict(float)
    for at, (part, kind, row) in enumerate(_rows(profile)):
        if kind is Kind.NOTHING or not (own[at] or base[at]):
            continue
        if row.energy_uncertainty_j is None:
            return None
        # Both parts of a backward that were priced by assumption share its row's error.
        measured = Kind.BACKWARD if profile.assumed and kind in SPLIT[1:] else kind
        error_j = net[at] * gpus[part // profile.listed_chunks] * row.energy_uncertainty_j
        errors_j[part, measured, row.frequency_mhz] += error_j
    return 100 * math.hypot(*errors_j.values()) / base_j


def _rows(profile: Profile) -> list[tuple[int, Kind, ProfileRow]]:
    """All rows with their part and kind, in the order of `Profile.curves`."""
    return [
        (part, kind, row)
        for part, kinds in enumerate(profile.rows)
        for kind, rows in kinds.items()
        for row in reversed(rows)
    ]


def _row_uses(plan: Plan) -> FloatArray:
    """How many units each of `_rows` prices; between two clocks, a share of a unit each."""
    keys = plan.profile.keys(plan.schedule)
    uses = []
    for key, (clocks, *_) in enumerate(plan.profile.curves):
        used_mhz = plan.frequency_mhz[keys == key]
        uses += [np.interp(used_mhz, clocks, row).sum() for row in np.eye(len(clocks))]
    return np.array(uses)
