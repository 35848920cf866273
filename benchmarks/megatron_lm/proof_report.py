"""A table of all that was found, as Markdown and JSON; every figure with its command."""

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.megatron_lm import part_energy, part_equality, part_faults, part_ratio, part_stress
from benchmarks.megatron_lm.proof_jobs import Site
from benchmarks.megatron_lm.proof_state import State

_MIB = 2**20
_GIB = 2**30
#: Of all packed logs; an archive that is too large does not come back from some machines.
_MOST_LOG_BYTES = 40 * _MIB
_MOST_OF_A_LOG = 2 * _MIB

_ERROR = re.compile(r"^(?:\[rank\d+\]: *)?((?!.*ChildFailed)[\w.]*(?:Error|Exit)(?::.*)?)$", re.M)


def report(state: State, site: Site) -> tuple[str, dict[str, Any]]:
    """Markdown, and the same as data."""
    sections = {
        "equality": _equality(state, site),
        "ratio": _ratio(state, site),
        "memory": _memory(state),
        "stress": _stress(state),
        "energy": _energy(state),
        "faults": _faults(state),
        "not well": _failures(state),
    }
    lines = [f"# {state.machine.get('tag', '')}", ""]
    lines += [f"{name}: {value}  " for name, value in state.machine.items()]
    for title, (heads, rows) in sections.items():
        if rows:
            lines += ["", f"## {title}", "", *_table(heads, rows)]
    commands = {name: run["command"] for name, run in sorted(state.runs.items())}
    lines += ["", "## commands", ""]
    lines += [f"- {name}: `{command}`" for name, command in commands.items()]
    data = {
        "machine": state.machine,
        "equality": [asdict(c) for c in part_equality.compare(state, site.cpu)],
        "rounds": part_ratio.measured(state, str(part_ratio.size(site))),
        "memory": [asdict(stage) for stage in part_ratio.memories(state)],
        "commands": commands,
        **{
            title: [dict(zip(heads, row, strict=True)) for row in rows]
            for title, (heads, rows) in sections.items()
            if title not in ("equality", "memory")
        },
    }
    return "\n".join(lines) + "\n", data


_Table = tuple[Sequence[str], list[Sequence[str]]]


def _equality(state: State, site: Site) -> _Table:
    heads = ("setting", "arm", "printed digits", "to the bit", "order was run", "iterations")
    rows: list[Sequence[str]] = []
    for c in part_equality.compare(state, site.cpu):
        skipped = f", {c.skipped} skipped" if c.skipped else ""
        rows.append(
            (
                c.setting,
                c.arm + (", EnvPipe imported" if c.imported and c.arm == "off" else ""),
                "equal" if c.printed else f"DIFFERENT at {c.differs_at}",
                "equal" if c.exact else "different",
                {True: "yes", False: "NO", None: "-"}[c.executed],
                f"{c.iterations}{skipped}",
            )
        )
    return heads, rows


def _ratio(state: State, site: Site) -> _Table:
    heads = ("arm", "rounds", "ratio", "95 % interval", "upper 95 %", "s/iteration", "target")
    rows: list[Sequence[str]] = []
    rounds = part_ratio.measured(state, str(part_ratio.size(site)))
    for arm in part_ratio.ARMS[1:] if rounds else ():
        r = part_ratio.ratio(rounds, arm)
        stock_s, own_s = r.iteration_time_s
        good = r.upper <= part_ratio.TARGET and stock_s >= part_ratio.LEAST_ITERATION_S
        rows.append(
            (
                arm,
                str(len(r.ratios)),
                f"{r.mean:.4f} ({', '.join(f'{x:.4f}' for x in r.ratios)})",
                f"{r.interval[0]:.4f} to {r.interval[1]:.4f}",
                f"{r.upper:.4f}",
                f"{stock_s:.4f} -> {own_s:.4f}",
                "met" if good else "MISSED",
            )
        )
    return heads, rows


def _memory(state: State) -> _Table:
    heads = ("stage", "in flight", "stock", "1f1b", "envpipe", "predicted", "error")
    rows: list[Sequence[str]] = [
        (
            str(s.stage),
            f"{s.in_flight[0]} -> {s.in_flight[1]}",
            *(f"{b / _GIB:.2f} GiB" for b in (s.stock, s.one_f_one_b, s.envpipe, s.predicted)),
            f"{s.error:+.1%}",
        )
        for s in part_ratio.memories(state)
    ]
    return heads, rows


def _stress(state: State) -> _Table:
    rows: list[Sequence[str]] = [
        (name, part_stress.told(run)) for name, run in part_stress.outcomes(state).items()
    ]
    return ("setting", "outcome"), rows


def _energy(state: State) -> _Table:
    heads = ("Megatron J/iter/GPU", "EnvPipe J/iter/GPU", "difference", "over", "target")
    found = part_energy.agreement(state)
    if found is None:
        return heads, []
    good = abs(found.difference) <= part_energy.TARGET and found.duration_s >= 20
    row = (
        f"{found.megatron_j:.2f}",
        f"{found.envpipe_j:.2f}",
        f"{found.difference:+.2%}",
        f"{found.iterations} iterations, {found.duration_s:.1f} s",
        "met" if good else "MISSED",
    )
    return heads, [row]


def _faults(state: State) -> _Table:
    rows: list[Sequence[str]] = [
        (name.split("/")[1], "refused" if run["status"] == "ok" else run["status"])
        for name, run in state.runs.items()
        if name.startswith(f"{part_faults.PART}/")
    ]
    return ("fault", "outcome"), rows


def _failures(state: State) -> _Table:
    rows: list[Sequence[str]] = []
    for name, run in state.runs.items():
        if run["status"] != "ok":
            error = _ERROR.search(run["log"])
            rows.append((name, run["status"], error[1][:200] if error else ""))
    return ("run", "status", "first error in the end of its log"), rows


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(heads) + " |", "| " + " | ".join("---" for _ in heads) + " |"]
    return lines + [
        "| " + " | ".join(cell.replace("|", "/") for cell in row) + " |" for row in rows
    ]


def write(state: State, site: Site, output: Path) -> str:
    """Write report.md and report.json; the Markdown."""
    text, data = report(state, site)
    (output / "report.md").write_text(text)
    (output / "report.json").write_text(json.dumps(data, indent=1) + "\n")
    return text


def pack_logs(site: Site, archive: Path) -> None:
    """Put logs, stacks and EnvPipe's small files of all jobs into one archive, newest first."""
    patterns = ("*/log.txt", "*/stacks-*.txt", "*/envpipe/*.json*")
    files = [f for pattern in patterns for f in site.scratch.glob(pattern) if f.stat().st_size]
    files.sort(key=lambda file: -file.stat().st_mtime)
    room = _MOST_LOG_BYTES
    with tarfile.open(archive, "w:gz") as packed:
        for file in files:
            size = file.stat().st_size
            if size <= min(room, _MOST_OF_A_LOG):
                packed.add(file, file.relative_to(site.scratch))
                room -= size
