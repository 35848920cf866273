"""A line of the job's bill every N iterations, while it trains."""

from __future__ import annotations

from collections.abc import Callable

from envpipe_megatron.formats.energy import BETWEEN
from envpipe_megatron.launch.bill.bill import Bill
from envpipe_megatron.runtime.energy.steps import percent


class LiveLine:
    """Says where the bill stands, every N iterations.

    Args:
        interval: N.
        tell: called with each line and the bill.
    """

    def __init__(self, interval: int, tell: Callable[[str, Bill], None]) -> None:
        self._interval = interval
        self._tell = tell
        self._told = 0
        #: For each GPU, its steps and J in training when the last line was told.
        self._before: dict[tuple[str, str], tuple[int, float]] = {}

    def look(self, bill: Bill) -> None:
        """The bill has grown."""
        now: dict[tuple[str, str], tuple[int, float]] = {}
        for phase in bill.phases.values():
            gpu = phase.window.gpu_key
            if phase.window.phase != BETWEEN:
                steps, energy_j = now.get(gpu, (0, 0.0))
                now[gpu] = steps + phase.steps, energy_j + phase.energy_j
        counts = [steps for steps, _ in now.values()]
        if len(counts) < (bill.fact("num_gpus") or 0):
            counts.append(0)  # of GPUs that have sent nothing yet
        # All GPUs together; but one that is cut off ends no lines.
        done = max(min(counts, default=0), max(counts, default=0) - 2 * self._interval)
        if done - self._told < self._interval:
            return
        each_j = 0.0
        for gpu, (steps, energy_j) in now.items():
            steps_before, energy_before_j = self._before.get(gpu, (0, 0.0))
            if steps > steps_before:
                each_j += (energy_j - energy_before_j) / (steps - steps_before)
        job = bill.total()
        line = f"{done} iterations: {each_j:.1f} J each since the last line, {job.energy_j:.0f} J "
        line += f"in all on {job.num_gpus} GPUs, {job.average_power_w:.1f} W each"
        compared = bill.comparison()
        if compared is not None and compared.saving_percent is not None:
            line += f"; saved {percent(compared.saving_percent, None)}"
            line += f", slower {percent(compared.slowdown_percent, None)}"
        self._tell(line, bill)
        self._told, self._before = done, now
