"""What is to be proved, and the files of it. Free of torch: the command imports it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.files import replace_files
from envpipe_megatron.quickstart.settings import Settings

#: How long the measured part of a turn lasts, at least, unless its iterations are given, s.
TURN_S = 15.0
#: Iterations of a turn that its session warms up with, at the highest clock and in 1F1B.
WARMUP_ITERATIONS = 2
#: Iterations behind these in which clocks settle; not measured.
SETTLE_ITERATIONS = 2


class ProveError(EnvPipeError):
    """A machine on which nothing can be shown, or a proof that did not come to its end."""


@dataclass(frozen=True)
class ProveSettings:
    """Handed from the command to its ranks as a JSON file.

    Args:
        job: the model, its data and the output folder; `preset` counts on emulated GPUs alone.
        dry_run: whether no clock is changed.
        rounds: of all arms.
        iterations: measured ones of each turn; None for as many as take `TURN_S`.
    """

    job: Settings
    emulated: bool
    dry_run: bool
    rounds: int
    iterations: int | None

    @property
    def output(self) -> Path:
        """The folder that all is left in."""
        return Path(self.job.output_dir)

    @property
    def profile_folder(self) -> Path:
        """What the session leaves that profiles."""
        return self.output / "profile"

    def arm_folder(self, arm: str) -> Path:
        """What the sessions of an arm leave."""
        return self.output / "arms" / arm

    def plan_file(self, arm: str) -> Path:
        """The plan that all turns of an arm run."""
        return self.output / "plans" / f"{arm}.json"

    def write(self, path: Path) -> None:
        """Write the JSON file."""
        replace_files({path: [json.dumps(asdict(self), indent=1), "\n"]})

    @classmethod
    def read(cls, path: Path) -> ProveSettings:
        """Read the JSON file."""
        data = json.loads(path.read_text())
        return cls(**{**data, "job": Settings(**data["job"])})


def gpt_for_gpus(output_dir: str, text: str, num_stages: int) -> Settings:
    """A GPT whose units last for tens of milliseconds on a large GPU: longer than clocks settle."""
    return Settings(
        output_dir,
        text,
        num_stages=num_stages,
        num_layers=4 * num_stages,
        hidden_size=4096,
        num_attention_heads=32,
        sequence_length=1024,
        microbatch_size=4,
        num_microbatches=4 * num_stages,
        learning_rate=1e-4,
    )
