"""Results of a proof: page and files of what ranks reported, after each turn, complete or not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console

from envpipe_megatron import __version__
from envpipe_megatron.console import say
from envpipe_megatron.core.plan import Plan, read_plan
from envpipe_megatron.core.profile import read_profile
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.files import replace_files
from envpipe_megatron.report.page.document import page_text
from envpipe_megatron.report.summary import Section, to_markdown
from envpipe_megatron.runtime.job.options import PROFILE_FILE
from envpipe_megatron.trials.claims import Claim, Turns, difference
from envpipe_megatron.trials.run import CLAIMS_FILE, Machine, Trial
from envpipe_megatron.trials.settings import STOCK, Arm, Settings


class Proof(Trial):
    """A proof under way, whose page is written after each turn.

    Args:
        machine: as `run.real_machine` or `emulated_machine` found it to be fit for it.
        checks: doctor's, as JSON, for the page.
    """

    who = "proof"
    leaves = (
        "prove.json", "text.bin", "log.txt", "machine.json", "latency.json", "turns.jsonl",
        CLAIMS_FILE, "summary.md", "index.html", "emulated", "profile", "plans", "arms",
    )  # fmt: skip

    def __init__(
        self, settings: Settings, machine: Machine, checks: Sequence[Mapping[str, Any]]
    ) -> None:
        gpus = f"{len(machine.gpu_names)} x {machine.gpu_names[0]}"
        rounds = f"{settings.rounds} rounds of {len(settings.arms)} arms"
        only = f"\nOrders only, no clock is changed: {machine.missing}" if machine.missing else ""
        super().__init__(settings, machine, f"Training a GPT on {gpus}: {rounds}{only}")
        self._checks = checks

    @property
    def _line(self) -> str:
        return line_to_paste(self.claims, self.machine, self.turns)

    def document(self) -> dict[str, Any]:
        """Return what the file of claims has, and the line to paste."""
        return super().document() | {"line": self._line}

    def write(self) -> None:
        """Write claims and page, as far as they are known."""
        super().write()
        machine, output, line = self.machine, self.settings.output, self._line
        title = "EnvPipe: a proof" + (" (emulated)" if machine.emulated else "")
        if not self.complete:
            title += ", not complete"
        marks = (line, f"No clock was changed: {machine.missing}") if machine.missing else (line,)
        self.put("machine.json", {**asdict(machine), "doctor": list(self._checks)})
        sections = self._sections(line)
        replace_files(
            {
                output / "summary.md": [to_markdown(title, sections, "prove")],
                output / "index.html": [page_text(title, marks, sections, "prove")],
            }
        )

    def show(self, console: Console) -> None:
        """Show the line to paste, and where the page is."""
        say(self._line, console)
        page = self.settings.output / "index.html"
        say(f"The page is {page}, the claims are in {CLAIMS_FILE} beside it.", console)

    def _sections(self, line: str) -> list[Section]:
        """Return all tables, those that are empty left out."""
        machine = self.machine
        gpus = ((f"GPU of rank {rank}", name) for rank, name in enumerate(machine.gpu_names))
        facts = (*gpus, *machine.versions.items(), ("clocks", machine.missing or "changed"))
        known = [
            Section("To paste", lines=(line,)),
            _claims(self.claims),
            _arms(self.turns, self.settings.arms, self._plans()),
            _turns(self.turns, len(machine.gpu_names)),
            Section("Machine", ("", ""), facts),
        ]
        return [section for section in known if section.rows or section.lines]

    def _plans(self) -> dict[str, Plan]:
        """Return the arms' plans, as far as they are there."""
        output = self.settings.output
        files = {arm.name: output / "plans" / f"{arm.name}.json" for arm in self.settings.arms}
        try:
            profile = read_profile(output / "profile" / PROFILE_FILE)
            there = {name: path for name, path in files.items() if path.exists()}
            return {name: read_plan(path, profile) for name, path in there.items()}
        except (EnvPipeError, OSError):  # not yet, or a rank was ended while it wrote
            return {}


def line_to_paste(claims: Sequence[Claim], machine: Machine, turns: Turns) -> str:
    """Return the proof in one line."""
    marks = ["emulated"] if machine.emulated else []
    if machine.missing:
        marks.append("no clock was changed")
    holds, said = None, dict[str, list[str]]()
    for claim in claims:
        if claim.name == "losses_equal":
            holds = claim.holds
        elif claim.takes:
            said.setdefault(claim.name.partition("_")[0], []).append(claim.takes)
    parts = [f"{arm} takes {', and '.join(takes)}" for arm, takes in reversed(said.items())]
    equal = {True: "losses equal to the last bit", False: "losses NOT equal"}
    parts.append("losses not compared" if holds is None else equal[holds])
    rounds = len({turn["round"] for turn in turns})
    mark = f"[{', '.join(marks)}] " if marks else ""
    gpus = f"{len(machine.gpu_names)} x {machine.gpu_names[0]}"
    plural = "" if rounds == 1 else "s"
    return f"{mark}envpipe prove {__version__}, {gpus}, {rounds} round{plural}: {'; '.join(parts)}"


def _claims(claims: Sequence[Claim]) -> Section:
    answers = {True: "yes", False: "NO", None: "not shown"}
    rows = ((c.name, c.shown, answers[c.holds], c.says) for c in claims)
    return Section("Claims", ("", "value, 95 % interval", "holds", "what is claimed"), tuple(rows))


def _arms(turns: Turns, arms: Sequence[Arm], plans: Mapping[str, Plan]) -> Section:
    rows = []
    for arm in arms:
        cells, said, clocks, order = [arm.name], dict[str, str](), "", arm.schedule
        if plan := plans.get(arm.name):
            base, order = plan.baseline.cost, plan.schedule.name
            order += ", backwards split" if plan.schedule.split else ""
            if base.energy_j:  # it may not have been metered
                said["saving"] = f"{plan.cost.saving_percent(base):.2f} %"
            said["slowdown"] = f"{plan.cost.slowdown_percent(base):.2f} %"
            ends = (plan.frequency_mhz.min(), plan.frequency_mhz.max())
            clocks = " to ".join(dict.fromkeys(f"{mhz:.0f}" for mhz in ends))
        for which in ("saving", "slowdown"):
            value, interval = difference(turns, arm.name, STOCK.name, which)
            cells += [Claim("", value, interval, "%", None, "").shown, said.get(which, "")]
        rows.append((*cells, order, clocks if arm.changes_clock else "as they are", arm.says))
    header = (
        "", "saving", "predicted", "slowdown", "predicted", "order", "planned MHz", "what it does"
    )  # fmt: skip
    lines = (
        f"Against {STOCK.name}, by rounds; +- is the 95 % interval.",
        "Predicted from what units and waits take: `envpipe report` draws profile/.",
    )
    return Section("Arms", header, tuple(rows), lines)


def _turns(turns: Turns, num_gpus: int) -> Section:
    def rows() -> Iterator[tuple[str, ...]]:
        for turn in turns:
            step, stages = turn["step"] or {}, turn["stages"]
            energy_j = step.get("energy_j")
            seen = [c for s in stages for c in s["temperature_c"] if c is not None]
            followed = [stage["clocks"]["followed"] or {} for stage in stages]
            looks = (one.get("throttle_reasons", ()) for one in followed)
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
