"""A job that is started again goes on with its profile, plan and baseline."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from envpipe_megatron.formats.energy import Phase
from envpipe_megatron.gpu.base import Gpu
from envpipe_megatron.runtime.channel.collectives import Collectives
from envpipe_megatron.runtime.channel.p2p import P2PChannel
from envpipe_megatron.runtime.energy.steps import BaselineEnergy
from envpipe_megatron.runtime.going_on import in_words
from envpipe_megatron.runtime.job.context import SessionConfig, SessionState, least_warmup
from envpipe_megatron.runtime.job.job_file import PLAN_FILE, PROFILE_FILE, JobKeeper, StoredJob

logger = logging.getLogger(__name__)

#: Of a plan's request, what is the job's own or follows from what the fingerprint holds.
_NO_WISHES = ("num_microbatches", "blocking_power_w", "conditions", "channel_capacity")


@dataclass(frozen=True)
class Resumed:
    """What a start of a job found, the same on every rank; without a job file, nothing.

    Args:
        config: what the job wants, with what need not be made again.
        found: what an earlier start left.
        started: this start's instant, by which its energy is told from that of others.
        keeper: of the job file, on the rank that writes it.
    """

    config: SessionConfig
    found: StoredJob | None = None
    started: str = ""
    keeper: JobKeeper | None = None

    @property
    def baseline(self) -> BaselineEnergy | None:
        """The baseline that was measured before."""
        return self.found.baseline if self.found else None

    def labels(self, labels: Mapping[str, object]) -> dict[str, object]:
        """A job's labels with a `run` that is this start's alone.

        After a restart, iterations since the last checkpoint run once more, and are paid for twice.
        """
        if not self.started:
            return dict(labels)
        run = f"{labels.get('run', '')} {self.started}".strip()
        return {**labels, "run": run}

    def tell(self, state: SessionState, say: Callable[[str], None]) -> None:
        """Put what need not be done again into the job's state, and say it."""
        found = self.found
        if found is None or not found.phases_done:
            return
        state.reconfigure_steps = found.reconfigure_steps
        state.reconfigure_ended = found.reconfigure_ended
        done = ", ".join(found.phases_done)
        say(f"resumed: {done} of the job started {found.starts[0]} are done")

    def keep(self, state: SessionState, phase: Phase, baseline: BaselineEnergy | None) -> None:
        """Keep what is new since the last iteration.

        A new profile from which no plan could be made is kept, as the next start may have more
        memory or a newer package. One of an earlier start is not: the next one measures anew.
        """
        if self.keeper is None:
            return
        made_plan = self.config.plan_file is None or (self.found is not None and self.found.plan)
        try:
            if state.profile is not None and self.config.profile_file is None:
                self.keeper.keep_profile(state.profile)
            if phase is Phase.STEADY and state.plan is not None and made_plan:
                self.keeper.keep_plan(state.plan, state.reconfigure_steps, state.reconfigure_ended)
            if phase is Phase.STEADY and state.plan is None and self.found is not None:
                self.keeper.forget_profile()
            if baseline is not None:
                self.keeper.keep_baseline(baseline)
        except Exception as error:
            # Each of them is tried once.
            logger.error("What was found is not kept for another start: %s", in_words(error))


def resume(
    config: SessionConfig,
    fingerprint: Mapping[str, Any],
    num_stages: int,
    channel: P2PChannel,
    gpu: Gpu,
    collectives: Collectives,
) -> Resumed:
    """Look for what an earlier start of this job left; every rank of the job calls it.

    Where the stored job is another one or damaged, the job starts over, with a warning, and the
    stored one is kept under other names.

    Raises:
        CollectivesError: a rank is gone or silent.
    """
    folder = config.output_dir
    if folder is None:
        return Resumed(config)
    keepers: list[JobKeeper] = []

    def look() -> tuple[StoredJob | None, str]:
        wishes = {key: v for key, v in asdict(config.request).items() if key not in _NO_WISHES}
        clocks = gpu.supported_frequencies_mhz
        own = {
            **wishes,
            "num_stages": num_stages,
            "channel_capacity": channel.capacity,
            "clocks_mhz": [max(clocks), min(clocks)],
            "num_clocks": len(clocks),
            "clock_backend": gpu.address.backend,
            "profile_sha256": _digest(config.profile_file),
            "plan_sha256": _digest(config.plan_file),
        }
        everything = {**fingerprint, **{f"envpipe_{key}": value for key, value in own.items()}}
        keeper = JobKeeper(folder, everything, config.profile_file, config.plan_file)
        keepers.append(keeper)
        return keeper.found, keeper.job.starts[-1]

    found, started = collectives.agreed(look)
    keeper = keepers[0] if keepers else None
    return Resumed(_with(config, found, folder), found, started, keeper)


def _with(config: SessionConfig, found: StoredJob | None, folder: Path) -> SessionConfig:
    if found is None:
        return config
    if found.baseline is not None:
        config = replace(config, warmup_iterations=least_warmup(config.request))
    if found.profile and config.profile_file is None:
        config = replace(config, profile_file=folder / PROFILE_FILE)
    if found.plan and config.plan_file is None:
        config = replace(config, plan_file=folder / PLAN_FILE)
    return config


def _digest(path: Path | None) -> str | None:
    """SHA-256 of a file that was given; whether it can be read is found out by who needs it."""
    if path is None:
        return None
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None
