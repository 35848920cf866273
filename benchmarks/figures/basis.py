"""What a claim stands on: the hardware, what of the paper's runs was reduced, and how it went."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.figures.rows import Row


def basis_of(rows: Sequence[Row]) -> str:
    """Of a claim that was made from these runs."""
    parts = [" and ".join(dict.fromkeys(row.hardware for row in rows))]
    if rows[0].emulated:
        parts += ["reduced model", "unit times from operation counts", "no network time"]
    parts.append(" or ".join(dict.fromkeys(f"{row.steps} measured steps" for row in rows)))
    replicas = sorted({row.job.replicas for row in rows if row.replicas_run < row.job.replicas})
    if replicas:
        parts.append(f"one of {' or '.join(map(str, replicas))} replicas")
    overran = [row for row in rows if not row.result.trusted]
    if overran:
        parts.append(_overran(overran, rows))
    return ", ".join(parts)


def overrun_warning(rows: Sequence[Row]) -> str:
    """What it means that runs overran, as `Fidelity` says it; empty where none did."""
    overran = [row for row in rows if not row.result.trusted]
    if not overran:
        return ""
    return (
        f"{_overran(overran, rows)}: this machine's own computation took over half of the emulated "
        "time of these units. Emulated times are arithmetic and do not depend on it. Longer units "
        "(a larger --forward-ms) or a machine with less to do make it go away."
    )


def _overran(overran: Sequence[Row], rows: Sequence[Row]) -> str:
    worst = max(row.result.overrun_percent for row in overran)
    return f"{len(overran)} of {len(rows)} runs overran (at most {worst:.0f} % of units)"
