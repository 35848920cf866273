"""A proof in words and tables, and the line to paste."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from envpipe_megatron import __version__
from envpipe_megatron.core.profile import Profile
from envpipe_megatron.prove.arms import ARMS, CONSTANT, ENVELOPE, OPTIMAL, RELOCK, STOCK
from envpipe_megatron.prove.claims import Claim, Turns, difference
from envpipe_megatron.prove.machine import Machine
from envpipe_megatron.report.summary import Section


def line_to_paste(claims: Sequence[Claim], machine: Machine, turns: Turns) -> str:
    """The proof in one line."""
    marks = ["emulated"] if machine.emulated else []
    if machine.missing:
        marks.append("clocks were not changed")
    shown = {claim.name: claim for claim in claims}
    parts = []
    if not machine.missing:
        for arm in (OPTIMAL, ENVELOPE, CONSTANT):
            saving, slowdown = (shown[f"{arm.name}_{of}"].shown for of in ("saving", "slowdown"))
            parts.append(f"{arm.name} saves {saving} at {slowdown} more time")
        parts.append(f"{RELOCK.name} costs {shown['relock_slowdown'].shown} time")
    equal = {True: "losses equal to the last bit", False: "losses NOT equal"}
    holds = shown["losses_equal"].holds
    parts.append("losses not compared" if holds is None else equal[holds])
    rounds = len({turn["round"] for turn in turns})
    mark = f"[{', '.join(marks)}] " if marks else ""
    gpus = f"{len(machine.gpu_names)} x {machine.gpu_names[0]}"
    plural = "" if rounds == 1 else "s"
    return f"{mark}envpipe prove {__version__}, {gpus}, {rounds} round{plural}: {'; '.join(parts)}"


def sections_of(
    claims: Sequence[Claim],
    line: str,
    machine: Machine,
    turns: Turns,
    predicted: Mapping[str, Mapping[str, float]],
    latency: Sequence[Mapping[str, Any]] | None,
    profile: Profile | None,
    checks: Sequence[Mapping[str, Any]],
) -> list[Section]:
    """All tables, those that are empty left out."""
    gpus = ((f"GPU of rank {rank}", name) for rank, name in enumerate(machine.gpu_names))
    facts = (*gpus, *machine.versions.items(), ("clocks", machine.missing or "changed"))
    answers = tuple((c["name"], "yes" if c["ok"] else "no", c["evidence"]) for c in checks)
    known = [
        Section("To paste", lines=(line,)),
        _claims(claims),
        _arms(() if machine.missing else turns, predicted),
        _turns(turns, len(machine.gpu_names)),
        _latency(latency or ()),
        *(() if profile is None else (_units(profile), _waits(profile))),
        Section("Machine", ("", ""), facts),
        Section("Doctor", ("", "", "what was seen"), answers),
    ]
    return [section for section in known if section.rows or section.lines]


def _claims(claims: Sequence[Claim]) -> Section:
    answers = {True: "yes", False: "NO", None: "not shown"}
    rows = ((c.name, c.shown, answers[c.holds], c.says) for c in claims)
    return Section("Claims", ("", "value, 95 % interval", "holds", "what is claimed"), tuple(rows))


def _arms(turns: Turns, predicted: Mapping[str, Mapping[str, float]]) -> Section:
    rows = []
    for arm in ARMS:
        cells = [arm.name]
        for which in ("saving", "slowdown"):
            value, interval = difference(turns, arm.name, STOCK.name, which)
            told = predicted.get(arm.name, {}).get(f"{which}_percent")
            cells.append(Claim("", value, interval, "%", None, "").shown)
            cells.append("" if told is None else f"{told:.2f} %")
        ends = [predicted.get(arm.name, {}).get(f"{end}_mhz") for end in ("lowest", "highest")]
        clocks = dict.fromkeys(f"{mhz:.0f}" for mhz in ends if mhz is not None)
        rows.append((*cells, " to ".join(clocks), arm.says))
    header = ("", "saving", "predicted", "slowdown", "predicted", "planned MHz", "what it does")
    text = f"Against {STOCK.name}, by rounds; +- is the 95 % interval."
    return Section("Arms", header, tuple(rows), (text,))


def _turns(turns: Turns, num_gpus: int) -> Section:
    def rows() -> Iterator[tuple[str, ...]]:
        for turn in turns:
            step, stages = turn["step"] or {}, turn["stages"]
            energy_j = step.get("energy_j")
            seen = [c for s in stages for c in s["temperature_c"] if c is not None]
            followed = [stage["clocks"]["followed"] or {} for stage in stages]
            looks = [stage["sampled"]["throttle_reasons"] for stage in stages]
            looks += [one.get("throttle_reasons", ()) for one in followed]
            reasons = dict.fromkeys(reason for look in looks for reason in look)
            errors = [turn["failure"], *(stage["clocks"]["error"] for stage in stages)]
            errors += [one.get("warning") for one in followed] + turn.get("newcomers", [])
            yield (
                f"{turn['round']} {turn['arm']}",
                str(step.get("iterations", "")),
                f"{step['time_s']:.4f}" if step else "",
                f"{num_gpus * energy_j:.1f}" if energy_j is not None else "not known",
                f"{min(seen)} to {max(seen)}" if seen else "",
                ", ".join(reasons) or "nothing",
                str(sum(stage["clocks"]["changes"] for stage in stages)),
                "; ".join(filter(None, errors)),
            )

    header = (
        "round, arm", "iterations", "time (s)", "energy of all GPUs (J)", "temperature (C)",
        "held back by", "clock calls", "notes",
    )  # fmt: skip
    return Section("Turns, in their order", header, tuple(rows()))


def _latency(latency: Sequence[Mapping[str, Any]]) -> Section:
    def median_ms(values: Mapping[str, Any]) -> str:
        return f"{1e3 * values['median']:.2f}" if values["count"] else "not seen"

    names = ("call_s", "settling_s", "shown_s")
    rows = tuple(
        (str(rank), f"{row['from_mhz']} -> {row['to_mhz']}", *(median_ms(row[n]) for n in names))
        for rank, gpu in enumerate(latency)
        for row in gpu["changes"]
    )
    header = ("GPU of rank", "MHz", "call (ms)", "kernels follow (ms)", "driver shows (ms)")
    return Section("Latency of a change of clock, median", header, rows)


def _units(profile: Profile) -> Section:
    rows = tuple(
        (
            str(stage), kind.name.lower(), str(row.frequency_mhz),
            f"{1e3 * row.time_s:.2f}", f"{row.energy_j:.2f}",
            "" if row.energy_uncertainty_j is None else f"{row.energy_uncertainty_j:.2f}",
        )
        for stage, of_stage in enumerate(profile.rows)
        for kind, of_kind in of_stage.items()
        for row in of_kind
    )  # fmt: skip
    header = ("stage", "unit", "MHz", "time (ms)", "energy (J)", "uncertainty (J)")
    return Section("Time and energy of units over clocks", header, rows)


def _waits(profile: Profile) -> Section:
    rows = tuple(
        (str(stage), str(clock), f"{power_w:.1f}")
        for stage, curve in enumerate(profile.sidecar.wait_power_w or ())
        for clock, power_w in curve.items()
    )
    return Section("Waiting power over clocks", ("stage", "MHz", "power (W)"), rows)
