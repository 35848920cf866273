"""Which lines of a folder are of its present job, and how their nodes are called."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from envpipe_megatron.formats.energy import EnergyLogs, EnergyNote, EnergyWindow, name_of_run
from envpipe_megatron.formats.timeline import TimelineLogs


@dataclass(frozen=True)
class RunLines:
    """What ranks appended to the files of a folder, each to its own."""

    timelines: TimelineLogs
    energy: EnergyLogs | None
    clocks: tuple[dict[str, Any], ...]

    def __len__(self) -> int:
        """How many lines, without agents' notes."""
        windows = () if self.energy is None else self.energy.windows
        lines = (self.timelines.iterations, self.timelines.clocks, windows, self.clocks)
        return sum(map(len, lines))


def of_present_job(lines: RunLines, job: Mapping[str, Any]) -> RunLines:
    """Without the lines of earlier jobs: `job`, of `job.json`, has the present one's starts.

    Lines whose run names no start are kept; all are kept where `job` names no starts.
    """
    told = job.get("starts")
    if not isinstance(told, list) or not told:
        return lines
    starts = tuple(str(start) for start in told)

    def own(run: str) -> bool:
        return run.endswith(starts) or name_of_run(run) == run

    timelines, energy = lines.timelines, lines.energy
    if energy is not None:
        kept = (line for line in energy.lines if isinstance(line, EnergyNote) or own(line.run))
        energy = replace(energy, lines=tuple(kept))
    return RunLines(
        replace(
            timelines,
            iterations=tuple(read for read in timelines.iterations if own(read.labels.run)),
            clocks=tuple(read for read in timelines.clocks if own(read.labels.run)),
        ),
        energy,
        tuple(entry for entry in lines.clocks if own(str(entry.get("run", "")))),
    )


def named_as_in(timelines: TimelineLogs, energy: EnergyLogs) -> EnergyLogs:
    """Energies whose nodes are called as the timelines call them, where a GPU's name tells.

    An agent may call its node otherwise than the ranks on it do.
    """
    labels = {read.labels for read in timelines.iterations}
    named = _node_by_gpu((own.gpu_uid, own.node) for own in labels)
    metered = _node_by_gpu((window.gpu_uid, window.node) for window in energy.windows)

    def renamed(line: EnergyWindow | EnergyNote) -> EnergyWindow | EnergyNote:
        if isinstance(line, EnergyNote) or line.gpu_uid not in metered:
            return line
        node = named.get(line.gpu_uid, line.node)
        return line if node == line.node else replace(line, node=node)

    return replace(energy, lines=tuple(renamed(line) for line in energy.lines))


def _node_by_gpu(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The node of each GPU that is named, and on one node alone."""
    nodes: dict[str, set[str]] = {}
    for gpu_uid, node in pairs:
        nodes.setdefault(gpu_uid, set()).add(node)
    return {uid: next(iter(found)) for uid, found in nodes.items() if uid and len(found) == 1}
