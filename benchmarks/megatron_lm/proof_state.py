"""What has been done: one JSON file that a second call reads and goes on from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.megatron_lm.proof_jobs import Job


class State:
    """Results of runs and blocks, written at every change.

    Args:
        path: the file; it need not be there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._data: dict[str, Any] = {"runs": {}, "rounds": [], "machine": {}}
        if path.exists():
            self._data |= json.loads(path.read_text())

    @property
    def runs(self) -> dict[str, dict[str, Any]]:
        """For each job's name how it ended, its command, and what its ranks told."""
        runs: dict[str, dict[str, Any]] = self._data["runs"]
        return runs

    @property
    def rounds(self) -> list[dict[str, Any]]:
        """Each a set of blocks that are compared with each other, an arm each."""
        rounds: list[dict[str, Any]] = self._data["rounds"]
        return rounds

    @property
    def machine(self) -> dict[str, Any]:
        """What the runs were made on."""
        machine: dict[str, Any] = self._data["machine"]
        return machine

    def take_in(self, other: State) -> None:
        """Add what another call found, where this one knows nothing better."""
        for name, run in other.runs.items():
            if self.runs.get(name, {}).get("status") != "ok":
                self.runs[name] = run
        self.rounds.extend(found for found in other.rounds if found not in self.rounds)
        self._data["machine"] = {**other.machine, **self.machine}

    def done(self, job: Job) -> bool:
        """Whether this very job ended as it should."""
        run = self.runs.get(job.name)
        return run is not None and run["identity"] == job.identity and run["status"] == "ok"

    def keep(self, job: Job, **found: Any) -> None:
        """Record how a job ended."""
        self.runs[job.name] = {"identity": job.identity, **found}
        self.save()

    def save(self) -> None:
        """Replace the file in one step."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_suffix(".draft")
        draft.write_text(json.dumps(self._data, indent=None, separators=(",", ":")))
        draft.replace(self.path)
