"""What an ablation says, one sentence for each ingredient."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks.ablation.rows import CHANGE_TIME_S, Ablation, Checked, Row, Start
from benchmarks.outputs import Claim, span

FIGURE = "ablation"
COMMAND = "python benchmarks/ablation/ablation.py"
#: EnvPipe's authors: no more slowdown than this (%).
_ENVPIPE_SLOWDOWN_PERCENT = 1.0


def ablation_claims(rows: Sequence[Row], basis: str) -> list[Claim]:
    """The claims of rows of any workloads, the same for each."""
    found = _Found(rows)
    return [
        *_order_claims(found, basis),
        *_policy_claims(found, basis),
        _memory_claim(found, basis),
        *_clock_claims(found, basis),
        *_waiting_claims(found, basis),
    ]


def runtime_claims(checked: Sequence[Checked]) -> list[Claim]:
    """How far the simulator was from the runtime; nothing where nothing was run."""
    if not checked:
        return []
    time_error, energy_error = (
        max(abs(getattr(one, name)) for one in checked)
        for name in ("time_error_percent", "energy_error_percent")
    )
    names = "; ".join(one.name for one in checked)
    return [
        _claim(
            f"The runtime takes what the simulator says, to {time_error:.2f} % in time and "
            f"{energy_error:.2f} % in energy as its meters see it ({names})",
            "emulated A100 (fitted), four gloo ranks with empty units",
        )
    ]


class _Found:
    """Rows by what was switched where."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._rows: dict[tuple[Ablation, Start, str], list[Row]] = {}
        for row in rows:
            self._rows.setdefault((row.ablation, row.start, row.setting), []).append(row)

    def rows(self, ablation: Ablation, setting: str, start: Start = Start.FULL) -> list[Row]:
        return self._rows.get((ablation, start, setting), [])

    def saved(self, ablation: Ablation, setting: str, start: Start = Start.FULL) -> list[float]:
        return [row.saving_percent for row in self.rows(ablation, setting, start)]

    def slower(self, ablation: Ablation, setting: str, start: Start = Start.FULL) -> list[float]:
        return [row.slowdown_percent for row in self.rows(ablation, setting, start)]


def _differences(more: Sequence[float], less: Sequence[float]) -> list[float]:
    return [one - other for one, other in zip(more, less, strict=True)]


def _claim(claim: str, basis: str, paper: str = "", agrees: bool | None = None) -> Claim:
    return Claim(FIGURE, COMMAND, claim, basis, paper, agrees)


def _order_claims(found: _Found, basis: str) -> list[Claim]:
    on = {name: found.saved(Ablation.ORDER, name) for name in ("1F1B", "EnvPipe's", "auto")}
    alone = found.saved(Ablation.ORDER, "EnvPipe's", Start.BASELINE)
    worth = _differences(on["EnvPipe's"], on["1F1B"])
    searched = _differences(on["auto"], on["EnvPipe's"])
    return [
        _claim(
            f"With the best clocks, EnvPipe's order saves {span(worth)} points more than 1F1B "
            f"({span(on['1F1B'])} % there), and a searched order {span(searched, 2)} points more "
            f"again; at the highest clocks the order alone saves {span(alone)} %",
            basis,
            "EnvPipe, section 4: extra forwards move bubbles behind units that can be stretched "
            "into them",
            agrees=min(worth) > 0,
        )
    ]


def _policy_claims(found: _Found, basis: str) -> list[Claim]:
    policy = Ablation.POLICY
    uniform = found.slower(policy, "uniform", Start.BASELINE)
    default = found.slower(policy, "envelope, default")
    balanced = found.slower(policy, "envelope, balanced")
    worst = max(balanced)
    lead = _differences(found.saved(policy, "optimal"), found.saved(policy, "envelope, balanced"))
    on_1f1b = _differences(
        found.saved(policy, "optimal", Start.BASELINE),
        found.saved(policy, "envelope, balanced", Start.BASELINE),
    )
    greedy = _differences(
        found.saved(policy, "envelope, balanced"), found.saved(policy, "envelope, greedy")
    )
    return [
        _claim(
            f"A uniform clock on 1F1B costs {span(uniform)} % of time and the envelope without "
            f"reconfiguring {span(default)} %; reconfigured in the balanced way the envelope "
            f"costs {span([max(0.0, slow) for slow in balanced])} %",
            basis,
            f"EnvPipe: less than {_ENVPIPE_SLOWDOWN_PERCENT:g} % of throughput is lost",
            agrees=worst < _ENVPIPE_SLOWDOWN_PERCENT,
        ),
        _claim(
            "On the same order and in the same time, the optimal policy saves "
            f"{span(lead)} points more than the balanced envelope (on 1F1B {span(on_1f1b)}), and "
            f"the balanced envelope {span(greedy)} points more than the greedy one",
            basis,
            "expected: balanced reconfiguring saves at least as much as greedy",
            agrees=min(greedy) >= 0,
        ),
    ]


def _memory_claim(found: _Found, basis: str) -> Claim:
    memory = Ablation.MEMORY
    none, one, four, free = (
        found.saved(memory, name) for name in ("1F1B's", "1F1B's + 1", "1F1B's + 4", "no limit")
    )
    first, most = _differences(one, none), _differences(four, none)
    every = _differences(free, none)
    peaks = [row.peak_in_flight for row in found.rows(memory, "no limit")]
    return _claim(
        f"In the memory that 1F1B takes, {span(none)} % are saved; one microbatch more in flight "
        f"adds {span(first)} points, four add {span(most)}, and no limit "
        f"({span([float(peak) for peak in peaks], 0)} in flight) {span(every)}",
        basis,
    )


def _clock_claims(found: _Found, basis: str) -> Iterable[Claim]:
    none = found.saved(Ablation.DWELL, "0 ms")
    costs = [
        f"{span(_differences(none, found.saved(Ablation.DWELL, setting)), 2)} points at {setting}"
        for setting in ("50 ms", "100 ms", "200 ms", "500 ms")
        if len(found.saved(Ablation.DWELL, setting)) == len(none)
    ]
    yield _claim(
        f"Keeping each clock for a while costs {', '.join(costs)}; the units of these pipelines "
        f"last {_unit_times(found)} ms at the highest clock",
        basis,
    )
    setting = f"{1e3 * CHANGE_TIME_S:g} ms"
    lost = _differences(none, found.saved(Ablation.CHANGE, setting))
    late = found.slower(Ablation.CHANGE, f"{setting}, not planned for")
    yield _claim(
        f"Clocks that come {setting} late cost {span(lost, 2)} points where the plan knows of it, "
        f"in no more time; a plan that does not know of it takes {span(late, 2)} % more time",
        basis,
        "Perseus: a change of clock takes about 10 ms",
    )


def _unit_times(found: _Found) -> str:
    times_ms = [
        1e3 * rows[0].time_s
        for row in found.rows(Ablation.DWELL, "0 ms")
        for kinds in row.plan.profile.rows
        for rows in kinds.values()
    ]
    return span(times_ms, 0)


def _waiting_claims(found: _Found, basis: str) -> Iterable[Claim]:
    waiting = Ablation.WAITING
    free, known = found.saved(waiting, "0 W"), found.saved(waiting, "as measured")
    unaware = _differences(known, found.saved(waiting, "as measured, planned as if 0"))
    yield _claim(
        f"If waiting took no power, {span(free)} % would be saved in place of {span(known)} %; "
        f"a plan made as if waiting were free saves {span(unaware, 2)} points less than one that "
        "knows what it takes",
        basis,
    )
    parked = _differences(
        found.saved(waiting, "by clock, parked"), found.saved(waiting, "by clock (assumed)")
    )
    alone = found.saved(waiting, "by clock, parked", Start.BASELINE)
    yield _claim(
        f"Parking the clock in waits, with changes of {1e3 * CHANGE_TIME_S:g} ms, adds "
        f"{span(parked, 2)} points to the full configuration and saves {span(alone, 2)} % of "
        "1F1B at the highest clock by itself",
        f"{basis}; waiting power by clock assumed from an H200's two measured idle states",
    )
