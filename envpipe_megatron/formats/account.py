"""A bill in words: what a job took and what it saved, in a few sentences for whoever pays for it.

A job's last lines, bills and reports print these. Money and CO2 are said only where the user gives
a price and an intensity: nobody knows these for another's machines.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from envpipe_megatron.core.fields import AMOUNT, JOULES_PER_KWH
from envpipe_megatron.core.plan import NORMAL_95
from envpipe_megatron.formats.bill import Bill
from envpipe_megatron.formats.energy import KEEP_CLOCKS, EnergyWindow
from envpipe_megatron.formats.steps import Comparison

logger = logging.getLogger(__name__)

#: Variables that say what a kWh costs, and its g of CO2, to jobs and commands alike.
PRICE_VARIABLE, INTENSITY_VARIABLE = "ENVPIPE_PRICE", "ENVPIPE_GRID_INTENSITY"
#: What follows a comparison where an operator's budget had steps take longer, and less energy.
UNDER_BUDGETS = "; steps under a power budget, slower as asked, are among these"
#: What the names of emulated GPUs end in.
_EMULATED = "(emulated)"
#: A smaller share of a step is what is left by rounding where steps are equal.
_ROUNDING = 1e-9
_SECONDS = ("us", 1e-6), ("ms", 1e-3), ("s", 1.0)
_JOULES = ("uJ", 1e-6), ("mJ", 1e-3), ("J", 1.0)


@dataclass(frozen=True)
class Tariff:
    """Cost of a kWh, in any currency, and its g of CO2; None if not known."""

    price_per_kwh: float | None = None
    grid_g_per_kwh: float | None = None

    @classmethod
    def of_environment(cls, environment: Mapping[str, str], price: float | None = None) -> Tariff:
        """Read variables; a price that is given goes before its own. A wrong one is logged."""
        values: list[float | None] = []
        for variable in (PRICE_VARIABLE, INTENSITY_VARIABLE):
            value, text = None, environment.get(variable, "")
            try:
                value = float(AMOUNT.of_text(text)) if text else None
            except ValueError as wrong:
                logger.warning("%s is %s, not %r: it is left out", variable, wrong, text)
            values.append(value)
        return cls(price or values[0], values[1])

    def facts(self, energy_j: float) -> dict[str, float]:
        """Cost and CO2 of an energy; those that are known."""
        kwh = energy_j / JOULES_PER_KWH
        known = {"cost": self.price_per_kwh, "co2_g": self.grid_g_per_kwh}
        return {name: kwh * per_kwh for name, per_kwh in known.items() if per_kwh is not None}

    def in_words(self, energy_j: float) -> str:
        """Say what an energy costs, and its CO2; those that are known."""
        said, facts = [], self.facts(energy_j)
        if "cost" in facts:
            said.append(f"cost {facts['cost']:.4g} at {self.price_per_kwh:g} a kWh")
        if "co2_g" in facts:
            co2 = _scaled(facts["co2_g"], ("g", 1), ("kg", 1e3), ("t", 1e6))
            said.append(f"{co2} of CO2 at {self.grid_g_per_kwh:g} g a kWh")
        return ", ".join(said)


def account_lines(
    bill: Bill, tariff: Tariff, compared: Mapping[str, Comparison], where: str = ""
) -> Iterator[str]:
    """Yield a line for each size that is compared, what it saved, and what all of it took.

    Args:
        compared: an average steady step of one GPU, by the size of the batch; empty: of full size.
        where: follows the number of GPUs.
    """
    steady = bill.steady()
    num_gpus = len({window.member for window in steady})
    for batch, each in compared.items():
        of_batch, tokens = (f", batches of {batch}", 0.0) if batch else ("", bill.tokens)
        line = f"against the job's own baseline{of_batch}: {_step(each, num_gpus, tokens)}"
        line += UNDER_BUDGETS if bill.facts.get("power") else ""
        kept = all(window.clock_backend in KEEP_CLOCKS for window in steady)
        yield f"{line}; no clock was changed" if kept else line
        yield from _saved(each, num_gpus, tokens, tariff)
    total = bill.total()
    said = [
        f"energy of {len(total.gpus)} GPUs{where}: {total.energy_j:.0f} J, "
        f"{_energy(total.energy_j)}, {total.average_power_w:.1f} W each on average",
        tariff.in_words(total.energy_j),
        _how([sums.last for sums in bill.phases.values() if sums.windows and sums.last]),
    ]
    yield "; ".join(filter(None, said))


def _step(each: Comparison, num_gpus: int, tokens: float) -> str:
    """Say what a step takes beside the baseline's, and a token, if their number is not 0."""
    took = [(each.time_s, _SECONDS, "", "", 1)]
    if each.energy_j is not None:
        took.append((each.energy_j, _JOULES, " a GPU", f" on {num_gpus} GPUs", num_gpus))
    parts = zip(took, each.parts(), strict=True)
    step = (f"{_scaled(v, *units)}{of} ({said})" for (v, units, of, *_), said in parts)
    line = f"a step takes {' and '.join(step)}"
    if tokens:
        token = (f"{_scaled(n * v / tokens, *units)}{of}" for v, units, _, of, n in took)
        line += f"; a token {' and '.join(token)}"
    return line


def _saved(each: Comparison, num_gpus: int, tokens: float, tariff: Tariff) -> Iterator[str]:
    """Yield what all compared steps took less or more than baselines expect."""
    if not (each.iterations and each.time_s) or each.slowdown_percent is None:
        return
    parts = []
    # A counter that does not move meters 0 J, of which nothing follows for what was expected.
    if each.energy_j and each.saving_percent is not None and each.saving_percent < 100:
        saved_j, half_j = _less(
            each.energy_j, -each.saving_percent, each.saving_uncertainty_percent
        )
        count = each.iterations * num_gpus
        parts.append(f"{_energy(count * abs(saved_j), count * half_j)} {_word(saved_j)} energy")
        if money := tariff.in_words(count * abs(saved_j)):
            parts[-1] += f" ({money})"
    saved_s, half_s = _less(each.time_s, each.slowdown_percent, each.slowdown_uncertainty_percent)
    count = each.iterations
    parts.append(f"{_time(count * abs(saved_s), count * half_s)} {_word(saved_s)} time")
    said = f"in {each.iterations} such steps: {', '.join(parts)}"
    if tokens and each.energy_j:
        per_joule = tokens / (each.energy_j * num_gpus)
        said += f"; {per_joule:.4g} tokens a joule"
        if each.saving_percent is not None:
            said += f", {per_joule * (1 - each.saving_percent / 100):.4g} before"
    yield said


def _how(windows: Sequence[EnergyWindow]) -> str:
    if not windows:
        return ""
    emulated = any(window.gpu.endswith(_EMULATED) for window in windows)
    how = "emulated: no GPU was used" if emulated else "measured by the GPUs' counters"
    since = min(filter(None, (window.started for window in windows)), default="")
    return f"{how}, since {since}" if since else how


def _less(own: float, more_percent: float, error_percent: float | None) -> tuple[float, float]:
    """Return how much less a step takes than expected, and half of the 95 % interval (0: unknown).

    Of `own = expected * (1 + more)`, above 0; the step itself is known far better than what was
    expected.
    """
    expected = own / (1 + more_percent / 100)
    half = NORMAL_95 * (error_percent or 0.0) / 100 * expected**2 / own
    less = expected - own
    return (0.0 if abs(less) < _ROUNDING * own else less), half


def _word(less: float) -> str:
    return "less" if less >= 0 else "more"


def _energy(energy_j: float, half_j: float = 0.0) -> str:
    return _scaled(energy_j, ("Wh", 3.6e3), ("kWh", JOULES_PER_KWH), ("MWh", 3.6e9), half=half_j)


def _time(time_s: float, half_s: float = 0.0) -> str:
    return _scaled(time_s, ("s", 1.0), ("h", 3.6e3), half=half_s)


def _scaled(value: float, *units: tuple[str, float], half: float = 0.0) -> str:
    """Write a value in the largest unit of which it has one, with its interval if that is known."""
    name, size = next((unit for unit in reversed(units) if value >= unit[1]), units[0])
    said = f"{value / size:{'.4g' if value < 1e3 * size else '.0f'}}"
    if 0 < half < math.inf:
        digits = max(0, 1 - math.floor(math.log10(half / size)))
        said = f"{value / size:.{digits}f} +- {half / size:.{digits}f}"
    return f"{said} {name}"
