"""Collects what ranks report, and writes page and files of it after each turn, complete or not."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from envpipe_megatron import __version__
from envpipe_megatron.core.profile import Profile, read_profile
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.files import replace_files
from envpipe_megatron.prove.claims import Claim, Turns, claims_of, difference
from envpipe_megatron.prove.settings import (
    ARMS,
    CONSTANT,
    ENVELOPE,
    OPTIMAL,
    RELOCK,
    STOCK,
    Machine,
    ProveSettings,
    newcomers,
)
from envpipe_megatron.report.page.document import tables_page
from envpipe_megatron.report.summary import Section, to_markdown
from envpipe_megatron.runtime.job.restarts.job_file import PROFILE_FILE

CLAIMS_FORMAT = "envpipe-claims/1"

#: All that a proof leaves in its folder; the first marks the folder as its own.
FILES = (
    "prove.json", "text.bin", "log.txt", "machine.json", "versions.json", "latency.json",
    "turns.jsonl", "claims.json", "summary.md", "index.html",
)  # fmt: skip
EMULATED = "emulated"
FOLDERS = (EMULATED, "profile", "plans", "arms")


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


@dataclass
class Proof:
    """A proof under way.

    Args:
        settings: what was asked for.
        machine: what it runs on.
        checks: doctor's, as JSON.
    """

    settings: ProveSettings
    machine: Machine
    checks: Sequence[Mapping[str, Any]]
    turns: list[dict[str, Any]] = field(default_factory=list)
    latency: list[dict[str, Any]] | None = None
    predicted: dict[str, dict[str, float]] = field(default_factory=dict)
    #: Of the ranks' own.
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """True if all turns came to their end."""
        return len(self.turns) == self.settings.rounds * len(ARMS)

    def take(self, event: Mapping[str, Any]) -> None:
        """Note what a rank told, and write it down."""
        match event["event"]:
            case "versions":
                self.versions = {"torch": event["torch"], "CUDA": event["cuda"]}
            case "latency":
                self.latency = event["gpus"]
                self._put("latency.json", self.latency)
            case "planned":
                self.predicted = event["predicted"]
            case "turn":
                turn = {**event, "newcomers": newcomers(self.machine)}
                self.turns.append(turn)
                with (self.settings.output / "turns.jsonl").open("a") as file:
                    file.write(json.dumps(turn) + "\n")
                self.write()

    def write(self) -> list[Claim]:
        """Write claims and page, as far as they are known; returns the claims."""
        machine, output = self.machine, self.settings.output
        claims = claims_of(
            self.turns, self.latency, missing=machine.missing, emulated=machine.emulated
        )
        line = line_to_paste(claims, machine, self.turns)
        sections = sections_of(
            claims,
            line,
            machine,
            self.turns,
            self.predicted,
            self.latency,
            self._profile(),
            self.checks,
        )
        title = "EnvPipe: a proof" + (" (emulated)" if machine.emulated else "")
        if not self.complete:
            title += ", not complete"
        marks = (line, f"No clock was changed: {machine.missing}") if machine.missing else (line,)
        document = {
            "format": CLAIMS_FORMAT,
            "complete": self.complete,
            "emulated": machine.emulated,
            "clocks_changed": not machine.missing,
            "line": line,
            "claims": [asdict(claim) for claim in claims],
        }
        self._put("claims.json", document)
        self._put("machine.json", {**asdict(machine), "doctor": list(self.checks)})
        self._put("versions.json", {**machine.versions, **self.versions})
        replace_files(
            {
                output / "summary.md": [to_markdown(title, sections, "prove")],
                output / "index.html": [tables_page(title, marks, sections, "prove")],
            }
        )
        return claims

    def _profile(self) -> Profile | None:
        path = self.settings.profile_folder / PROFILE_FILE
        try:
            return read_profile(path) if path.exists() else None
        except EnvPipeError:  # a rank was ended while it wrote
            return None

    def _put(self, name: str, data: object) -> None:
        replace_files({self.settings.output / name: [json.dumps(data, indent=1), "\n"]})
