"""Results of a quickstart or a proof, of what ranks reported: a line to paste, and tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from envpipe_megatron import __version__
from envpipe_megatron.core.plan import Plan
from envpipe_megatron.report.summary import Section
from envpipe_megatron.trials.claims import Claim, Turns, difference
from envpipe_megatron.trials.machine import Machine
from envpipe_megatron.trials.settings import Settings


def line_to_paste(
    claims: Sequence[Claim], machine: Machine, turns: Turns, command: str = "prove"
) -> str:
    """Return all claims in one line."""
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
    count = f"{rounds} round{'' if rounds == 1 else 's'}"
    return f"{mark}envpipe {command} {__version__}, {machine.gpus}, {count}: {'; '.join(parts)}"


def claims_section(claims: Sequence[Claim]) -> Section:
    """Show the claims, and which of them hold."""
    answers = {True: "yes", False: "NO", None: "not shown"}
    rows = ((c.name, c.shown, answers[c.holds], c.says) for c in claims)
    return Section("Claims", ("", "value, 95 % interval", "holds", "what is claimed"), tuple(rows))


def arms_section(turns: Turns, settings: Settings, plans: Mapping[str, Plan]) -> Section:
    """Show for each arm what it saved, and what its plan predicts."""
    rows, first = [], settings.arms[0].name
    for arm in settings.arms:
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
            value, interval = difference(turns, arm.name, first, which)
            cells += [Claim("", value, interval, "%", None, "").shown, said.get(which, "")]
        rows.append((*cells, order, clocks if arm.changes_clock else "as they are"))
    header = ("", "saving", "predicted", "slowdown", "predicted", "order", "planned MHz")
    lines = (
        *(f"{arm.name}: {arm.says}" for arm in settings.arms),
        f"Against {first}, by rounds; +- is the 95 % interval.",
        "Predicted from what units and waits take: `envpipe report` draws profile/.",
    )
    return Section("Arms", header, tuple(rows), lines)


def turns_section(turns: Turns, num_gpus: int) -> Section:
    """Show what each turn took, and what held it back."""

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


def machine_section(machine: Machine) -> Section:
    """Show what was measured on."""
    gpus = ((f"GPU of rank {rank}", name) for rank, name in enumerate(machine.gpu_names))
    facts = (*gpus, *machine.versions.items(), ("clocks", machine.missing or "changed"))
    return Section("Machine", ("", ""), facts)
