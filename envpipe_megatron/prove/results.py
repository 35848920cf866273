"""What ranks told so far, and the files made of it: complete or not, after each turn."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from envpipe_megatron.core.profile import Profile, read_profile
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.files import replace_files
from envpipe_megatron.prove.arms import ARMS
from envpipe_megatron.prove.claims import Claim, claims_of
from envpipe_megatron.prove.machine import Machine, newcomers
from envpipe_megatron.prove.page import line_to_paste, sections_of
from envpipe_megatron.prove.settings import ProveSettings
from envpipe_megatron.report.page.document import tables_page
from envpipe_megatron.report.summary import to_markdown
from envpipe_megatron.runtime.job.restarts.job_file import PROFILE_FILE

CLAIMS_FORMAT = "envpipe-claims/1"

#: All that a proof leaves in its folder; the first marks the folder as its own.
FILES = (
    "prove.json", "text.bin", "log.txt", "machine.json", "versions.json", "latency.json",
    "turns.jsonl", "claims.json", "summary.md", "index.html",
)  # fmt: skip
EMULATED = "emulated"
FOLDERS = (EMULATED, "profile", "plans", "arms")


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
    #: The process of each rank, which leads its own session.
    rank_pids: list[int] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether all turns came to their end."""
        return len(self.turns) == self.settings.rounds * len(ARMS)

    def take(self, event: Mapping[str, Any]) -> None:
        """Note what a rank told, and write it down."""
        match event["event"]:
            case "rank":
                self.rank_pids.append(event["pid"])
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
