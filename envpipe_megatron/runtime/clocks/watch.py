"""Watches whether the clock is what was requested.

A lock that the driver accepts is only a request: power and heat come before it, and another program
may have undone it. So a thread looks at the clock now and then, and more rarely at the power
profiles and limits, which an operator may change while a job runs.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from queue import Empty, SimpleQueue
from typing import Any

from envpipe_megatron.formats.energy import IDLE
from envpipe_megatron.gpu.base import ClockState, Gpu, PowerState
from envpipe_megatron.gpu.clock.page import ClockPage

#: Steps of NVIDIA's clock tables are 15 MHz at most; the clock seen may be one off.
_TOLERANCE_MHZ = 15
#: The least share of samples, and the least number, with which clocks are said not to have
#: followed.
_WARN_SHARE = 0.05
_WARN_SAMPLES = 10
#: So many of the latest looks are kept for `held_back`.
_RECENT = 64
#: So many states of power profiles and limits are kept, and so many named in a warning.
_MOST_POWER_STATES, _MOST_SAID = 50, 3
#: How often to look, s: a look may take milliseconds, and each samples one instant; and how often a
#: look takes in power profiles and limits.
_PERIOD_S, _POWER_PERIOD_S = 0.5, 10.0
#: How long after a change the clock is not judged, s. Where units are shorter than that, and each
#: changes the clock, nothing is left to judge.
_SETTLING_S = 0.03
#: How long to wait for a look that is under way: a driver may hang.
_JOIN_S = 1.0


class ClockWatch:
    """Looks at one GPU's clock from the moment it is made until `close`. Not for a dry run.

    Args:
        page: by which the clock is asked for and set, in another process.
        on_sample: called after each look, on the watch's thread: its instant, and what was seen.
    """

    def __init__(
        self,
        gpu: Gpu,
        page: ClockPage,
        on_sample: Callable[[float, ClockState], None] = lambda time_s, state: None,
    ) -> None:
        self._gpu, self._page = gpu, page
        self._on_sample = on_sample
        self._lock = threading.Lock()
        #: Samples that are judged, by requested and observed clock in MHz, and the others by why.
        self._judged: defaultdict[int, Counter[int]] = defaultdict(Counter)
        self._not_judged: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()
        self._reasons_below: Counter[str] = Counter()
        #: Of each judged look, what held the clock below its request; None if nothing did.
        self._recent: deque[tuple[str, ...] | None] = deque(maxlen=_RECENT)
        self._power_limits_w: set[float] = set()
        self._begin_s = self._power_due_s = time.monotonic()
        #: When power profiles and limits were seen to be others, in s from the begin, and the last.
        self._power: list[tuple[float, PowerState]] = []
        self._last_power: PowerState | None = None
        #: The change that `held_back` is to say.
        self._power_news: str = ""
        self.error: Exception | None = None
        self._stop: SimpleQueue[None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="envpipe-watch", daemon=True)
        self._thread.start()

    def sample(self) -> None:
        """Look once, now. A failure of the back end is counted, and the first is kept."""
        before_s, begin_s = self._page.last_change_s, time.monotonic()
        try:
            state = replace(self._gpu.clock_state(), requested_mhz=self._page.set_mhz)
        except Exception as error:  # a driver may fail in any way; training must go on
            with self._lock:
                self.error = self.error or error
                self._not_judged["failed"] += 1
            return
        settled = self._page.last_change_s == before_s and begin_s - before_s >= _SETTLING_S
        with self._lock:
            self._count(state, settled)
        self._on_sample(begin_s, state)
        if begin_s >= self._power_due_s:
            self._power_due_s = begin_s + _POWER_PERIOD_S
            self._look_at_power(begin_s)

    def held_back(self) -> str:
        """Say what held the clock below its requests or changed since the last call."""
        with self._lock:
            recent, below = len(self._recent), [why for why in self._recent if why is not None]
            self._recent.clear()
            said, self._power_news = [self._power_news] * bool(self._power_news), ""
        if below:
            reasons = dict.fromkeys(name for why in below for name in why)
            named = ", ".join(reasons) or "no reason reported"
            count = f"{len(below)} of {recent} looks ({named})"
            said.append(f"the clock was held below its request in {count}")
        return "; ".join(said)

    def close(self) -> None:
        """Stop looking; a look that a driver does not come back from is left behind."""
        self._stop.put(None)
        self._thread.join(_JOIN_S)

    def summary(self) -> dict[str, Any]:
        """Return what was seen, for the job's summary.

        Returns:
            `judged`, samples of a locked clock that had settled on a busy GPU, and of them the
                shares `above_share` (the lock was not followed) and `below_share` (something held
                the clock back); `not_judged`, samples by why not; `throttle_reasons` and
                `throttle_reasons_below`, samples of a busy GPU, and those below, by reason;
                `clocks_mhz`, for each request what was seen; `power_limit_w`, least and most, None
                if unknown; `power_profiles`, what was seen of profiles and limits, an entry for
                each change: `after_s` (from the begin of the watch), the fields of `PowerState`,
                and `text`; `warning`, one line if clocks did not follow, or if profiles or limits
                changed, else None.
        """
        with self._lock:
            sides: Counter[int] = Counter()
            for mhz, seen in self._judged.items():
                for observed_mhz, count in seen.items():
                    sides[_side(mhz, observed_mhz)] += count
            judged, above, below = sides.total(), sides[1], sides[-1]
            limits_w = self._power_limits_w
            return {
                "judged": judged,
                "above_share": above / judged if judged else 0.0,
                "below_share": below / judged if judged else 0.0,
                "not_judged": dict(self._not_judged),
                "throttle_reasons": dict(self._reasons.most_common()),
                "throttle_reasons_below": dict(self._reasons_below.most_common()),
                "clocks_mhz": [
                    {
                        "requested": mhz,
                        "samples": seen.total(),
                        "mean": sum(observed * n for observed, n in seen.items()) / seen.total(),
                        "min": min(seen),
                        "max": max(seen),
                    }
                    for mhz, seen in sorted(self._judged.items(), reverse=True)
                ],
                "power_limit_w": [min(limits_w), max(limits_w)] if limits_w else None,
                "power_profiles": [
                    {"after_s": after_s, **asdict(state), "text": str(state)}
                    for after_s, state in self._power
                ],
                "error": None if self.error is None else str(self.error),
                "warning": "; ".join(self._warnings(judged, above, below)) or None,
            }

    def _run(self) -> None:
        while True:
            with suppress(Empty):
                self._stop.get(timeout=_PERIOD_S)
                return
            self.sample()

    def _look_at_power(self, time_s: float) -> None:
        try:
            state = self._gpu.power_state()
        except Exception as error:  # as for the clock
            with self._lock:
                self.error = self.error or error
            return
        with self._lock:
            if state == self._last_power:
                return
            if self._last_power is not None:
                self._power_news = f"power profiles or limits changed: {state}"
            self._last_power = state
            if len(self._power) < _MOST_POWER_STATES:
                self._power.append((time_s - self._begin_s, state))

    def _count(self, state: ClockState, settled: bool) -> None:
        if state.power_limit_w is not None:
            self._power_limits_w.add(state.power_limit_w)
        if IDLE in state.throttle_reasons:
            self._not_judged[IDLE] += 1
            return
        self._reasons.update(state.throttle_reasons)
        if state.requested_mhz is None:
            self._not_judged["unlocked"] += 1
        elif not settled:
            self._not_judged["unsettled"] += 1
        else:
            self._judged[state.requested_mhz][state.observed_mhz] += 1
            below = _side(state.requested_mhz, state.observed_mhz) < 0
            if below:
                self._reasons_below.update(state.throttle_reasons)
            self._recent.append(state.throttle_reasons if below else None)

    def _warnings(self, judged: int, above: int, below: int) -> Iterator[str]:
        if len(self._power) > 1:
            seen = list(dict.fromkeys(str(state) for _, state in self._power))
            more = len(seen) - _MOST_SAID
            yield (
                f"Power profiles or limits of {self._gpu.name} changed while the job ran: "
                + ", then ".join(seen[:_MOST_SAID])
                + (f", and {more} more" if more > 0 else "")
            )
        if judged < _WARN_SAMPLES or max(above, below) < _WARN_SHARE * judged:
            return
        parts = []
        if above:
            parts.append(
                f"above the one requested in {above / judged:.0%} (the lock had no effect: "
                "something else sets or resets clocks, or the GPU ignores locks)"
            )
        if below:
            reasons = ", ".join(
                f"{name} {count / judged:.0%}" for name, count in self._reasons_below.most_common()
            )
            parts.append(f"below it in {below / judged:.0%} ({reasons or 'no reason reported'})")
        yield (
            f"The clock of {self._gpu.name} did not follow in all of {judged} samples: it was "
            f"{' and '.join(parts)}"
        )


def _side(requested_mhz: int, observed_mhz: int) -> int:
    """Return 1 for a clock above the one requested, -1 below it, 0 if it followed."""
    excess_mhz = observed_mhz - requested_mhz
    return (excess_mhz > _TOLERANCE_MHZ) - (excess_mhz < -_TOLERANCE_MHZ)
