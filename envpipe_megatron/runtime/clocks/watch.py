"""Whether the clock was what was asked for.

A lock that the driver accepts is only a request: power and heat come before it, and another program
may have undone it. So the clock is looked at now and then, on a thread of its own, and what was
asked, what was seen, what held the clock back and the power limit are counted apart.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from envpipe_megatron.gpu.base import ClockState, Gpu

#: Steps of NVIDIA's clock tables are 15 MHz at most; the clock seen may be one off.
TOLERANCE_MHZ = 15

#: Throttle reason of a GPU that does nothing, whose clock says nothing.
IDLE = "idle"

#: A share of samples from which on clocks are said not to have followed, and how many it takes.
WARN_SHARE = 0.05
WARN_SAMPLES = 10

#: How long to wait for a look that is under way: a driver may hang.
_JOIN_S = 1.0


class ClockWatch:
    """Looks at one GPU's clock from the moment it is made until `close`.

    Not for a dry run, which has no lock to be followed.

    Args:
        gpu: whose clock is looked at.
        last_change_s: tells when the clock was last changed, on the monotonic clock: the
            controller's `last_change_s`. A function, since it is asked on another thread.
        settling_s: how long after a change the clock is not judged. Where units are shorter than
            that, and each changes the clock, nothing is left to judge: give the GPU's own
            `frequency_change_s` where it is known.
        period_s: how often to look. A look may take milliseconds, and each samples one instant.
        on_sample: told of each look, on the watch's thread: its instant, and what was seen.
    """

    def __init__(
        self,
        gpu: Gpu,
        last_change_s: Callable[[], float],
        settling_s: float = 0.03,
        period_s: float = 0.5,
        on_sample: Callable[[float, ClockState], None] = lambda time_s, state: None,
    ) -> None:
        self._gpu = gpu
        self._on_sample = on_sample
        self._last_change_s = last_change_s
        self._settling_s = settling_s
        self._period_s = period_s
        self._lock = threading.Lock()
        #: What became of each sample; `judged` are above, below or followed.
        self._counts: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()
        self._reasons_below: Counter[str] = Counter()
        #: Samples of each pair (requested, observed) in MHz; both come from the GPU's table.
        self._pairs: Counter[tuple[int, int]] = Counter()
        self._power_limits_w: Counter[float] = Counter()
        self.error: Exception | None = None
        self._stop: SimpleQueue[None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="envpipe-watch", daemon=True)
        self._thread.start()

    def sample(self) -> None:
        """Look once, now. A failure of the back end is counted, and the first is kept."""
        before_s, begin_s = self._last_change_s(), time.monotonic()
        try:
            state = self._gpu.clock_state()
        except Exception as error:  # a driver may fail in any way; training must go on
            with self._lock:
                self.error = self.error or error
                self._counts["failed"] += 1
            return
        settled = self._last_change_s() == before_s and begin_s - before_s >= self._settling_s
        with self._lock:
            self._count(state, settled)
        self._on_sample(begin_s, state)

    def close(self) -> None:
        """Stop looking; a look that a driver does not come back from is left behind."""
        self._stop.put(None)
        self._thread.join(_JOIN_S)

    def summary(self) -> dict[str, Any]:
        """What was seen, for the job's summary.

        Returns:
            `judged`, samples of a locked clock that had settled on a busy GPU, and of them the
            shares `above_share` (the lock was not followed) and `below_share` (something held the
            clock back); `not_judged`, samples by why not; `throttle_reasons` and
            `throttle_reasons_below`, samples of a busy GPU, and those below, by reason;
            `clocks_mhz`, for each request the mean, least and most of what was seen;
            `power_limit_w`, least and most, None where unknown; `error`, a text or None; `warning`,
            one line where clocks did not follow, else None.
        """
        with self._lock:
            above, below = self._counts["above"], self._counts["below"]
            judged = above + below + self._counts["followed"]
            limits_w = self._power_limits_w
            return {
                "judged": judged,
                "above_share": above / judged if judged else 0.0,
                "below_share": below / judged if judged else 0.0,
                "not_judged": {
                    name: self._counts[name]
                    for name in ("unlocked", "unsettled", "idle", "failed")
                    if self._counts[name]
                },
                "throttle_reasons": dict(self._reasons.most_common()),
                "throttle_reasons_below": dict(self._reasons_below.most_common()),
                "clocks_mhz": self._clocks_mhz(),
                "power_limit_w": [min(limits_w), max(limits_w)] if limits_w else None,
                "error": None if self.error is None else str(self.error),
                "warning": self._warning(judged, above, below),
            }

    def _run(self) -> None:
        while True:
            with suppress(Empty):
                self._stop.get(timeout=self._period_s)
                return
            self.sample()

    def _count(self, state: ClockState, settled: bool) -> None:
        if state.power_limit_w is not None:
            self._power_limits_w[state.power_limit_w] += 1
        if IDLE in state.throttle_reasons:
            self._counts["idle"] += 1
            return
        self._reasons.update(state.throttle_reasons)
        if state.requested_mhz is None:
            self._counts["unlocked"] += 1
            return
        if not settled:
            self._counts["unsettled"] += 1
            return
        self._pairs[state.requested_mhz, state.observed_mhz] += 1
        excess_mhz = state.observed_mhz - state.requested_mhz
        if excess_mhz > TOLERANCE_MHZ:
            self._counts["above"] += 1
        elif excess_mhz < -TOLERANCE_MHZ:
            self._counts["below"] += 1
            self._reasons_below.update(state.throttle_reasons)
        else:
            self._counts["followed"] += 1

    def _clocks_mhz(self) -> list[dict[str, float]]:
        rows = []
        for requested in sorted({pair[0] for pair in self._pairs}, reverse=True):
            seen = {mhz: n for (wanted, mhz), n in self._pairs.items() if wanted == requested}
            count = sum(seen.values())
            rows.append(
                {
                    "requested": requested,
                    "samples": count,
                    "mean": sum(mhz * n for mhz, n in seen.items()) / count,
                    "min": min(seen),
                    "max": max(seen),
                }
            )
        return rows

    def _warning(self, judged: int, above: int, below: int) -> str | None:
        if judged < WARN_SAMPLES or max(above, below) < WARN_SHARE * judged:
            return None
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
        return (
            f"The clock of {self._gpu.name} did not follow in all of {judged} samples: it was "
            f"{' and '.join(parts)}"
        )
