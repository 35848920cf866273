"""The planning rank's store of units: times and powers at every clock, kept up to date.

Times are measured points, with a model between and beyond them (`fit`). A new measurement
replaces the point at its clock, and what it differs by from what was expected moves the points at
other clocks with it: a GPU that became slower became so at all clocks, one that is held by a power
limit at the high ones only, which the clocks measured by then show.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from envpipe_megatron.core.arrays import BoolArray, FloatArray, IntArray
from envpipe_megatron.core.conditions import known_conditions
from envpipe_megatron.core.kinds import SPLIT, WHOLE, Kind
from envpipe_megatron.core.profile import Profile, make_profile
from envpipe_megatron.core.profile_rows import ProfileRow
from envpipe_megatron.core.schedule import Schedule, profiled_kinds
from envpipe_megatron.core.sidecar import Sidecar
from envpipe_megatron.core.timeline import Timeline
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.tuning.commands import Clocked, Window, tail_times_s
from envpipe_megatron.tuning.measured.fit import Lateness, Point, Times
from envpipe_megatron.tuning.measured.powers import WAITING, Powers
from envpipe_megatron.tuning.measured.work import Work

#: What meters said counts this much less after something has changed. If all of it counts on, an
#: iteration under a power cap lasts 8.5 % longer.
_KEEPS = 0.1
#: A clock at which units last no longer than this many times as long as at the highest slows none.
#: Without it a job whose clock was stuck loses 11 iterations more.
_NO_SLOWER = 1.01
#: A unit that takes less than this share of what is known did not run. Without it a job of which
#: one look does not run whole, and does not say so, saves 2.5 points less.
_IMPLAUSIBLE = 0.3
#: Standard error of powers for what their model misses, as a share: on published profiles of A100
#: and A40 it errs by 1.1 % in the mean.
_MODEL_ERRS = 0.014


class Store:
    """Times, powers and surroundings of the units of a job.

    Args:
        schedule: the order whose units are looked at: the framework's, or the same with some of its
            backwards split.
        clocks_mhz: those that plans may use; the highest is the one of the warm-up.
        facts: what else is known of the job, for the sidecar of profiles.
    """

    def __init__(self, schedule: Schedule, clocks_mhz: Sequence[int], facts: Sidecar) -> None:
        num_stages, num_chunks = schedule.num_stages, schedule.num_chunks
        self.schedule = schedule
        self.kinds = profiled_kinds(schedule)
        self.clocks_mhz: FloatArray = np.array(sorted(clocks_mhz), dtype=float)
        self.tail_s: FloatArray = np.zeros(num_stages)
        self.lateness = Lateness()
        #: [num_stages] whether clocks have ceased to mean what they did. Then those that slow
        #: nothing are left out of profiles: some day they may mean something again.
        self.drifted_far: BoolArray = np.zeros(num_stages, dtype=bool)
        self.work = Work()
        #: [num_stages] whether units of the last window were too fast to be true.
        self._refused: BoolArray = np.zeros(num_stages, dtype=bool)
        self.facts = replace(facts, num_chunks=num_chunks)
        #: Keys of the units that the last window ran; none before the first.
        self._seen = set[int]()
        keys = num_stages * num_chunks * len(self.kinds)
        #: For each key (part, then kind), what units take.
        self._times = [Times(self.clocks_mhz) for _ in range(keys)]
        self.powers = Powers(num_stages, clocks_mhz, len(self.kinds))

    @property
    def time_s(self) -> FloatArray:
        """Return what units take, [keys, clocks]."""
        return np.array([times.time_s for times in self._times])

    @property
    def profiled(self) -> bool:
        """True if units were measured at more than one clock."""
        return min((len(t.points) for t in self._times if t.points), default=0) > 1

    def take_profile(self, profile: Profile) -> None:
        """Begin with a profile, as if it had been measured here; kinds that it lacks stay unknown.

        Raises ProfileError if it was measured with another number of chunks.
        """
        profile = profile.for_chunks(self.schedule.num_chunks)
        conditions = known_conditions(profile)
        self.tail_s = conditions.tail_by_stage_s
        self.lateness.change_s = conditions.change_time_s
        for part in range(len(self.tail_s) * self.schedule.num_chunks):
            stage = part // self.schedule.num_chunks
            kinds = profile.rows[stage if profile.listed_chunks == 1 else part]
            for place, kind in enumerate(self.kinds):
                if kind not in kinds:
                    continue
                times = self._times[part * len(self.kinds) + place]
                for row in kinds[kind]:
                    times.points[row.frequency_mhz] = Point(row.time_s, 1.0)
                times.fit()
                for row in kinds[kind]:
                    self.powers.look(stage, place, row.frequency_mhz, row.energy_j / row.time_s)
        waits_w = conditions.waiting_power_w(
            np.tile(self.powers.nodes_mhz, (len(self.tail_s), 1)).astype(np.int64)
        )
        for stage, curve in enumerate(waits_w.tolist()):
            for clock_mhz, power_w in zip(self.powers.nodes_mhz.tolist(), curve, strict=True):
                self.powers.look(stage, WAITING, clock_mhz, power_w)

    def keys(self, schedule: Schedule) -> IntArray:
        """Return each unit's key, [num_stages, units_per_stage]; below zero if it takes no time."""
        return schedule.unit_keys(self.schedule.num_chunks, self.kinds).astype(np.int64)

    def at_top(self, schedule: Schedule) -> Clocked:
        """Return an order at the highest clock."""
        shape = schedule.num_stages, schedule.units_per_stage
        return Clocked(schedule, np.full(shape, int(self.clocks_mhz[-1]), dtype=np.int64))

    def durations_s(self, schedule: Schedule, frequency_mhz: IntArray) -> FloatArray:
        """Return what units take at clocks, no change being late, [num_stages, units_per_stage]."""
        keys, durations_s = self.keys(schedule), np.zeros(frequency_mhz.shape)
        for key in np.unique(keys[keys >= 0]):
            mask, time_s = keys == key, self._times[key].time_s
            durations_s[mask] = np.interp(frequency_mhz[mask], self.clocks_mhz, time_s)
        return durations_s

    def iteration_s(self, schedule: Schedule, frequency_mhz: IntArray) -> float:
        """Return how long an iteration takes, no change being late."""
        durations_s = self.durations_s(schedule, frequency_mhz)
        latency_s = self.facts.p2p_latency_s or 0.0
        return Timeline(schedule, durations_s, latency_s, self.tail_s).iteration_time_s

    def forget(self, drifted_far: BoolArray) -> None:
        """Note that something changed, [num_stages] where so much that it must be measured again.

        What meters said counts for little from now on.
        """
        self.drifted_far = self.drifted_far | drifted_far
        # The counter of a stage whose readings count no more than one may have fallen silent.
        self.powers.sums[self.powers.sums[:, -1, -1] > 1] *= _KEEPS

    def learn(
        self,
        clocked: Clocked,
        window: Window,
        replicas: Sequence[int] = (),
        *,
        fresh: bool = False,
        fades: float = 1.0,
    ) -> FloatArray:
        """Take in what a window of iterations measured.

        Args:
            clocked: what ran.
            window: what came of it.
            replicas: those that ran this; by default all.
            fresh: whether another order ran before the first iteration.
            fades: share of the weight that what meters said before keeps.

        Returns:
            [num_stages] the share by which the kind of units of a stage that changed most takes
                longer than before, below zero if shorter; 0 for what is no more than scatter.
        """
        schedule, frequency_mhz = clocked.schedule, clocked.frequency_mhz
        measured_s = window.unit_s(replicas)
        known_s = self.durations_s(schedule, frequency_mhz)
        odd = self._odd(measured_s, known_s)
        measured_s = np.where(odd, known_s, measured_s)
        if np.isnan(measured_s).any():
            raise EnvPipeError("Units of the framework's order did not run whole")
        timeline = Timeline(schedule, measured_s, self.facts.p2p_latency_s or 0.0)
        self._learn_tails(window)
        asked = clocked.asked_s(timeline, fresh=fresh and len(self.clocks_mhz) > 1)
        clean = self.lateness.at_their_clock(asked, timeline) & ~odd
        keys = self.keys(schedule)
        before = clean & self._was_measured(keys, frequency_mhz)
        common = self.work.learn(window, self.tail_s, measured_s, known_s, before)
        if self.work.grown != 1:
            for times in self._times:
                times.move(np.full_like(self.clocks_mhz, self.work.grown))
        measured_s = measured_s / self.work.now
        drifted = np.full(len(self.tail_s), self.work.grown - 1)
        seen, changed, before_s = set(np.unique(keys[keys >= 0]).tolist()), set[int](), self.time_s
        for key in sorted(seen):
            stage = key // (len(self.kinds) * self.schedule.num_chunks)
            of_key = clean[stage] & (keys[stage] == key)
            new = {
                int(clock): measured_s[stage][of_key & (frequency_mhz[stage] == clock)]
                for clock in np.unique(frequency_mhz[stage][of_key])
            }
            change = self._times[key].learn(new, window.num_iterations, common)
            if change:
                changed.add(key)
            if abs(change) > abs(drifted[stage]):
                drifted[stage] = change
        for key, times in enumerate(self._times):
            if times.points:
                times.fit()
                continue
            kind = self.kinds[key % len(self.kinds)]
            if kind is Kind.COMBINED:  # no such pair is in the order
                first = key - len(self.kinds) + 1
                times.follow(self._times[first : first + len(WHOLE)])
            elif kind not in SPLIT[1:]:  # no such part ran yet
                raise EnvPipeError("A unit of the framework's order was not measured", value=key)
        self._follow_others(seen, changed, before_s)
        self._learn_lateness(clocked, timeline, asked, odd)
        for stage, report in enumerate(window.stages):
            if report.metered:  # in weeks of silence, what is known would fade to nothing
                self.powers.sums[stage] = fades * self.powers.sums[stage] + report.meter
        return drifted

    def _follow_others(self, seen: set[int], changed: set[int], before_s: FloatArray) -> None:
        """Have whole backwards take longer as both parts do where only these ran, or vice versa.

        Else a plan that splits all would be held against what whole ones took before a GPU became
        slow. What ran in the window before is of today, and is left as it is.

        Args:
            seen: keys of the units that ran.
            changed: those of them that take longer or shorter than before, by more than scatter.
            before_s: as `time_s` was.
        """
        as_before, self._seen = self._seen in (set(), seen), seen
        if not as_before or not {Kind.BACKWARD, *SPLIT[1:]} <= {*self.kinds}:
            return
        for first in range(0, len(self._times), len(self.kinds)):
            whole, *parts = (first + self.kinds.index(kind) for kind in (Kind.BACKWARD, *SPLIT[1:]))
            for ran, others in (({whole}, set(parts)), (set(parts), {whole})):
                if ran <= seen and ran & changed and not others & seen:
                    keys = sorted(ran)
                    ratios = self.time_s[keys].sum(axis=0) / before_s[keys].sum(axis=0)
                    for key in others:
                        self._times[key].move(ratios)

    def _odd(self, measured_s: FloatArray, known_s: FloatArray) -> BoolArray:
        """Return which units did not run, in iterations that were not whole, as `measured_s`.

        Or they are too fast for that; a stage's that are so twice in a row are believed.
        """
        with np.errstate(invalid="ignore"):
            fast = measured_s < _IMPLAUSIBLE * known_s
        refused = fast & ~self._refused[:, np.newaxis]
        self._refused = np.asarray(refused.any(axis=1))
        return refused | np.isnan(measured_s)

    def profile(self, *, careful: bool) -> Profile:
        """Return the profile of what is known, of each unit from its lowest measured clock on.

        Args:
            careful: for a new plan: units below the highest clock take as long as they might, and
                clocks that slow nothing are left out where stages drifted far.

        Raises EnvPipeError if meters said too little.
        """
        rows, nodes_mhz = [], self.powers.nodes_mhz
        fitted_w = [self._fitted_w(stage) for stage in range(len(self.tail_s))]
        # Where a stage's parts of a backward have not been seen, plans have whole ones.
        left_out = SPLIT[1:] if np.isnan(self.time_s).any() else ()
        for key, times in enumerate(self._times):
            part, place = divmod(key, len(self.kinds))
            stage, kind = part // self.schedule.num_chunks, self.kinds[place]
            if kind in left_out:
                continue
            used = self.clocks_mhz >= times.lowest_mhz
            if careful and self.drifted_far[stage]:
                used &= times.time_s > _NO_SLOWER * times.time_s[-1]
                used[-1] = True
            clocks, times_s = self.clocks_mhz[used], times.time_s[used]
            joules, scatter_j = (
                times_s * np.interp(clocks, nodes_mhz, of[place]) for of in fitted_w[stage]
            )
            errors_j = np.hypot(scatter_j, _MODEL_ERRS * joules)
            if careful:
                times_s = times_s * (1 + times.errs[used])
            columns = (clocks.astype(int), times_s, joules, errors_j)
            of_clocks = zip(*(column.tolist() for column in columns), strict=True)
            rows += [(part, kind, ProfileRow(*row)) for row in of_clocks]
        waits_w = [
            dict(zip(map(round, nodes_mhz.tolist()), power_w[-1].tolist(), strict=True))
            for power_w, _ in fitted_w
        ]
        sidecar = replace(
            self.facts,
            wait_power_w=tuple(waits_w),
            tail_time_s=tuple(self.tail_s.tolist()),
            frequency_change_s=self.lateness.planned_s,
        )
        return make_profile(
            rows,
            source="what was measured",
            sidecar=sidecar,
            listed_chunks=self.schedule.num_chunks,
        )

    def align(self) -> None:
        """Have all kinds of units of a stage begin at the same clock, in profiles from now on."""
        keys = self.schedule.num_chunks * len(self.kinds)
        for first in range(0, len(self._times), keys):
            of_stage = self._times[first : first + keys]
            lowest_mhz = max(times.lowest_mhz for times in of_stage)
            for times in of_stage:
                times.lowest_mhz = lowest_mhz

    def _fitted_w(self, stage: int) -> tuple[FloatArray, FloatArray]:
        """Return W of a stage's GPU, [kinds + 1, nodes], waiting last, and their errors.

        Raises EnvPipeError without meters.
        """
        keys = self.schedule.num_chunks * len(self.kinds)
        of_stage = self._times[stage * keys : (stage + 1) * keys]
        return self.powers.fit(stage, max(times.limit_mhz for times in of_stage))

    def valley_mhz(self, *, waiting: bool) -> float:
        """Return the lowest clock at which a stage's forward and backward take the least energy.

        With `waiting`, beyond that of waiting as long: the lowest clock that pays where there is
        all the time.
        """
        lowest = float(self.clocks_mhz[-1])
        places = self.schedule.num_chunks * len(self.kinds)
        for stage in range(len(self.tail_s)):
            power_w, _ = self._fitted_w(stage)
            per_clock = np.stack(
                [np.interp(self.clocks_mhz, self.powers.nodes_mhz, power) for power in power_w[:-1]]
            )
            times_s = self.time_s[stage * places : (stage + 1) * places]
            waiting_w = float(power_w[-1].min()) if waiting else 0.0
            beyond_w = np.tile(per_clock - waiting_w, (self.schedule.num_chunks, 1))
            energy_j = (times_s * beyond_w).sum(axis=0)
            lowest = min(lowest, float(self.clocks_mhz[energy_j.argmin()]))
        return lowest

    def _was_measured(self, keys: IntArray, clocks_mhz: IntArray) -> BoolArray:
        """Return which units were measured at clocks, both [..., num_stages, units_per_stage]."""
        # One number for each kind of units and clock.
        known = [(key << 32) + mhz for key, times in enumerate(self._times) for mhz in times.points]
        return np.isin((keys << 32) + clocks_mhz, known)

    def _learn_tails(self, window: Window) -> None:
        ends_s, steps_s = window.last_s
        followed = np.isfinite(steps_s).all(axis=0)
        if followed.any():
            self.tail_s = tail_times_s(ends_s[:, followed], (steps_s - ends_s)[:, followed])

    def _learn_lateness(
        self, clocked: Clocked, timeline: Timeline, asked: FloatArray, odd: BoolArray
    ) -> None:
        """Learn from clocks that were both measured: a model errs by as much as it would show."""
        now_mhz, keys = clocked.frequency_mhz, self.keys(clocked.schedule)
        before_mhz = np.roll(now_mhz, 1, axis=1)
        known = ~odd & self._was_measured(keys, np.stack([now_mhz, before_mhz])).all(axis=0)
        own_s, old_s = (
            self.work.now * self.durations_s(clocked.schedule, mhz) for mhz in (now_mhz, before_mhz)
        )
        self.lateness.learn(own_s, old_s, timeline, asked, known)
