"""The arms of a comparison: unmodified Megatron-LM, and the patched one in its ways."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.megatron_lm.proof_jobs import Site
from benchmarks.megatron_lm.proof_models import Mapping
from envpipe_megatron.core import builders
from envpipe_megatron.core.channel_model import fit_to_channel
from envpipe_megatron.core.conditions import Conditions
from envpipe_megatron.core.plan import Plan
from envpipe_megatron.core.profile import ProfileRow, make_profile, read_profile
from envpipe_megatron.core.schedule import Kind, Schedule
from envpipe_megatron.gpu.emulated.presets import load_preset
from envpipe_megatron.policies.frequencies import envelope

STOCK, OFF, ONE_F_ONE_B, ENVPIPE = "stock", "off", "1f1b", "envpipe"
ARMS = (STOCK, OFF, ONE_F_ONE_B, ENVPIPE)
#: A second run of unmodified Megatron, made where an arm differs.
AGAIN = "stock-again"
_PRESET = "h200"


@dataclass(frozen=True)
class Planned:
    """The order that an arm runs by file, with clocks that go with it.

    Args:
        mapping: of the job.
        num_microbatches: M.
        arm: ONE_F_ONE_B or ENVPIPE.
    """

    mapping: Mapping
    num_microbatches: int
    arm: str

    @property
    def extra_forwards(self) -> tuple[int, ...]:
        """One more than the next stage's, as far as batch and channel allow; none for 1F1B."""
        p, m = self.mapping.pipeline, self.num_microbatches
        if self.arm == ONE_F_ONE_B:
            return (0,) * p
        wanted = [min(p - 1 - stage, m - p + stage) for stage in range(p)]
        capacity = 1 if self.mapping.environment else None
        return fit_to_channel(p, m, wanted, capacity).extra_forwards

    @property
    def schedule(self) -> Schedule:
        """The order."""
        p, m = self.mapping.pipeline, self.num_microbatches
        if self.arm == ONE_F_ONE_B:
            return builders.one_f_one_b(p, m)
        return builders.envpipe(p, m, self.extra_forwards)

    @property
    def name(self) -> str:
        """Of its plan file, without suffix."""
        return (
            f"{self.arm}-pp{self.mapping.pipeline}-tp{self.mapping.tensor}-m{self.num_microbatches}"
        )

    def arguments(self, warmup_iterations: int) -> str:
        """EnvPipe's flags; the folder is filled in when the job starts."""
        scheduling = "1f1b" if self.arm == ONE_F_ONE_B else "ours"
        return (
            f"--envpipe --envpipe-type envelope --envpipe-scheduling {scheduling} "
            f"--envpipe-reconfigure default --envpipe-baseline-steps {warmup_iterations} "
            f"--envpipe-profile {{scratch}}/plans/pp{self.mapping.pipeline}.csv "
            f"--envpipe-plan {{scratch}}/plans/{self.name}.json "
            "--envpipe-gpu-control {control} --envpipe-output {folder}/envpipe"
        )

    def write(self, site: Site) -> None:
        """Write profile and plan where `arguments` says."""
        folder = site.scratch / "plans"
        folder.mkdir(parents=True, exist_ok=True)
        profile_file = folder / f"pp{self.mapping.pipeline}.csv"
        _write_profile(profile_file, self.mapping.pipeline)
        profile = read_profile(profile_file)
        conditions = Conditions((0.0,) * self.mapping.pipeline)
        clocks = envelope(self.schedule, profile)
        plan = Plan("envelope", self.schedule, clocks, profile, conditions)
        plan.write(folder / f"{self.name}.json")


def _write_profile(path: Path, num_stages: int) -> None:
    """Clocks to ask for; no run is made at them, so times and energies stand for nothing."""
    preset = load_preset(_PRESET)
    rows = [
        (stage, kind, ProfileRow(f, preset.unit_time_s(kind.value, f, 0.01), f / 100))
        for stage in range(num_stages)
        for kind in Kind
        for f in preset.supported_frequencies_mhz[:60:6]
    ]
    make_profile(rows, source="clocks to ask for").write(path)
