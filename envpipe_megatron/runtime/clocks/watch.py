"""Watches whether the clock is what was requested.

A lock that the driver accepts is only a request: power and heat come before it, and another program
may have undone it. So a thread looks at the clock now and then, and more rarely at the power
profiles and limits, which an operator may change while a job runs.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from queue import Empty, SimpleQueue
from typing import Any

from envpipe_megatron.formats.energy import IDLE
from envpipe_megatron.gpu.base import ClockState, Gpu, PowerState
from envpipe_megatron.gpu.clock.page import ClockPage

#: Steps of NVIDIA's clock tables are 15 MHz at most; the clock seen may be one off.
TOLERANCE_MHZ = 15
#: The least share of samples, and the least number, with which clocks are said not to have
#: followed.
_WARN_SHARE = 0.05
_WARN_SAMPLES = 10
#: After this many looks in a row above the request, something else has undone it.
_UNDONE_LOOKS = 3
#: Most states of power profiles and limits that are kept, and that a warning names.
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
        #: Looks at a busy GPU by what held its clock back, and those that are judged by what was
        #: seen: the clock had settled at a request.
        self._reasons: Counter[str] = Counter()
        self._judged: Counter[ClockState] = Counter()
        #: The judged looks that `held_back` has taken in.
        self._taken_in: Counter[ClockState] = Counter()
        #: Judged looks above the request since the last one that was not, or `was_undone`.
        self._above = 0
        self._begin_s = self._power_due_s = time.monotonic()
        #: When power profiles and limits were seen to be others, in s from the begin, and the last.
        self._power: list[tuple[float, PowerState]] = []
        self._last_power: PowerState | None = None
        #: The change that `held_back` has yet to report.
        self._power_news = ""
        self._error: Exception | None = None
        self._stop: SimpleQueue[None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="envpipe-watch", daemon=True)
        with suppress(RuntimeError):  # threads are used up: nobody looks
            self._thread.start()

    def sample(self) -> None:
        """Look once, now. A back end that fails ends nothing; the first failure is kept."""
        before_s, begin_s = self._page.last_change_s, time.monotonic()
        try:
            state = replace(self._gpu.clock_state(), requested_mhz=self._page.set_mhz)
            settled = self._page.last_change_s == before_s and begin_s - before_s >= _SETTLING_S
            self._count(state, settled and state.requested_mhz is not None)
            self._on_sample(begin_s, state)
            if begin_s >= self._power_due_s:
                self._power_due_s = begin_s + _POWER_PERIOD_S
                self._see_power(begin_s, self._gpu.power_state())
        except Exception as error:  # a driver may fail in any way; training must go on
            self._error = self._error or error

    def was_undone(self) -> bool:
        """Return whether something else has undone the request since the last call."""
        undone = self._above >= _UNDONE_LOOKS
        if undone:
            self._above = 0
        return undone

    def held_back(self) -> str:
        """Say what held the clock below its requests or changed since the last call."""
        with self._lock:
            recent, self._taken_in = self._judged - self._taken_in, self._judged.copy()
            news, self._power_news = self._power_news, ""
        sides, below = _sides(recent)
        held = ""
        if sides[-1]:
            looks = f"{sides[-1]} of {recent.total()} looks"
            named = ", ".join(below) or "no reason reported"
            held = f"the clock was held below its request in {looks} ({named})"
        return "; ".join(filter(None, (news, held)))

    def close(self) -> None:
        """Stop looking; a look that a driver does not come back from is left behind."""
        self._stop.put(None)
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)

    def summary(self) -> dict[str, Any]:
        """Return what was seen, for the job's summary.

        Returns:
            `judged`, samples of a locked clock that had settled on a busy GPU, and of them the
                shares `above_share` (the lock was not followed) and `below_share` (something held
                the clock back); `throttle_reasons`, samples of a busy GPU by reason; `clocks_mhz`,
                for each request what was seen; `power_profiles`, what was seen of profiles and
                limits, an entry for each change: `after_s` (from the begin of the watch), the
                fields of `PowerState`, and `text`; `warning`, one line if clocks did not follow, or
                if profiles or limits changed, else None.
        """
        with self._lock:
            judged, reasons, power = self._judged.copy(), self._reasons.copy(), [*self._power]
        by_request: defaultdict[int, Counter[int]] = defaultdict(Counter)
        for state, count in judged.items():
            by_request[state.requested_mhz or 0][state.observed_mhz] += count
        sides, below = _sides(judged)
        warnings = [*self._power_warnings(power), *self._clock_warnings(sides, below)]
        return {
            "judged": judged.total(),
            "above_share": sides[1] / max(judged.total(), 1),
            "below_share": sides[-1] / max(judged.total(), 1),
            "throttle_reasons": dict(reasons.most_common()),
            "clocks_mhz": [
                {
                    "requested": mhz,
                    "samples": seen.total(),
                    "mean": sum(observed * n for observed, n in seen.items()) / seen.total(),
                    "min": min(seen),
                    "max": max(seen),
                }
                for mhz, seen in sorted(by_request.items(), reverse=True)
            ],
            "power_profiles": [
                {"after_s": after_s, **asdict(state), "text": str(state)}
                for after_s, state in power
            ],
            "error": None if self._error is None else str(self._error),
            "warning": "; ".join(warnings) or None,
        }

    def _run(self) -> None:
        while True:
            with suppress(Empty):
                self._stop.get(timeout=_PERIOD_S)
                return
            self.sample()

    def _count(self, state: ClockState, judged: bool) -> None:
        if IDLE in state.throttle_reasons:
            return
        with self._lock:
            self._reasons.update(state.throttle_reasons)
            if judged:
                self._judged[state] += 1
                self._above = self._above + 1 if _excess_mhz(state) > TOLERANCE_MHZ else 0

    def _see_power(self, time_s: float, state: PowerState) -> None:
        with self._lock:
            if state == self._last_power:
                return
            if self._last_power is not None:
                self._power_news = f"power profiles or limits changed: {state}"
            self._last_power = state
            if len(self._power) < _MOST_POWER_STATES:
                self._power.append((time_s - self._begin_s, state))

    def _power_warnings(self, power: list[tuple[float, PowerState]]) -> Iterator[str]:
        if len(power) > 1:
            seen = list(dict.fromkeys(str(state) for _, state in power))
            more = f", and {len(seen) - _MOST_SAID} more" if len(seen) > _MOST_SAID else ""
            said = ", then ".join(seen[:_MOST_SAID]) + more
            yield f"Power profiles or limits of {self._gpu.name} changed while the job ran: {said}"

    def _clock_warnings(self, sides: Counter[int], below: Counter[str]) -> Iterator[str]:
        judged = sides.total()
        if judged < _WARN_SAMPLES or max(sides[1], sides[-1]) < _WARN_SHARE * judged:
            return
        parts = []
        if sides[1]:
            parts.append(
                f"above the one requested in {sides[1] / judged:.0%} (the lock had no effect: "
                "something else sets or resets clocks, or the GPU ignores locks)"
            )
        if sides[-1]:
            named = (f"{name} {count / judged:.0%}" for name, count in below.most_common())
            reasons = ", ".join(named) or "no reason reported"
            parts.append(f"below it in {sides[-1] / judged:.0%} ({reasons})")
        yield (
            f"The clock of {self._gpu.name} did not follow in all of {judged} samples: it was "
            f"{' and '.join(parts)}"
        )


def _sides(judged: Counter[ClockState]) -> tuple[Counter[int], Counter[str]]:
    """Return the looks above (1), at (0) and below (-1) the request, and what held these below."""
    sides: Counter[int] = Counter()
    below: Counter[str] = Counter()
    for state, count in judged.items():
        excess_mhz = _excess_mhz(state)
        side = (excess_mhz > TOLERANCE_MHZ) - (excess_mhz < -TOLERANCE_MHZ)
        sides[side] += count
        below.update(dict.fromkeys(state.throttle_reasons if side < 0 else (), count))
    return sides, below


def _excess_mhz(state: ClockState) -> int:
    return state.observed_mhz - (state.requested_mhz or 0)
