"""Parts that the phases of one rank work with, and their findings so far."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.plan import Plan
from envpipe_megatron.core.profile import Profile
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.files import read_text
from envpipe_megatron.formats.energy import Phase
from envpipe_megatron.formats.wishes import CONTROL_FILE, NO_WISHES, Wishes, parse_wishes
from envpipe_megatron.gpu.base import Gpu
from envpipe_megatron.policies.frequencies import Ended
from envpipe_megatron.runtime.channel.carrier import StageSpecs
from envpipe_megatron.runtime.channel.collectives import Collectives
from envpipe_megatron.runtime.channel.p2p import P2PChannel
from envpipe_megatron.runtime.clocks.rank_clock import RankClock
from envpipe_megatron.runtime.energy.meter import EnergyMeter
from envpipe_megatron.runtime.energy.training import TrainingEnergy
from envpipe_megatron.runtime.execution.executor import Executor
from envpipe_megatron.runtime.job.options import JobOptions
from envpipe_megatron.runtime.job.restarts import JobFolder
from envpipe_megatron.runtime.memory.peak import JobMemory
from envpipe_megatron.tuning.background import Background

logger = logging.getLogger(__name__)

#: How often the control file is read, s.
_LOOK_S = 1.0


class ControlFile:
    """Reads a job's control file every second until `close`, on a thread: nobody waits for a disk.

    What it asks for is logged as it changes: a job that starts again may find what was asked of an
    earlier one. A file that is broken, or cannot be read, is logged once, and changes nothing. On
    the planning rank, `iterations.Switch` asks it.

    Args:
        folder: the job's.
        without: what is asked for while there is no file.
    """

    def __init__(self, folder: Path, without: Wishes) -> None:
        self.wishes = self._without = without
        self.path = folder / CONTROL_FILE
        self._failure, self._over = "", False
        with suppress(RuntimeError):  # threads are used up: nobody is heard
            threading.Thread(target=self._run, name="envpipe-control", daemon=True).start()

    def about(self) -> dict[str, Any]:
        """Return what the node's agent needs, to ask in an operator's name."""
        return {"file": str(self.path), "asked": self._without.to_json()}

    def close(self) -> None:
        """Read it no more; returns at once."""
        self._over = True

    def _run(self) -> None:
        while not self._over:
            self._look()
            time.sleep(_LOOK_S)

    def _look(self) -> None:
        wishes, failure = self.wishes, ""
        try:
            wishes = parse_wishes(read_text(self.path), self.path)
        except FileNotFoundError:
            wishes = self._without
        except Exception as error:  # a disk or a text may be bad in any way
            failure = str(error)
            if failure != self._failure:
                logger.error("What was asked before is kept, training goes on: %s", failure)
        if wishes != self.wishes:
            logger.warning("Asked for from now on, by %s: %s", self.path, wishes.to_json())
        self.wishes, self._failure = wishes, failure


@dataclass
class SessionState:
    """State of a session, read by reporters."""

    phase: Phase = Phase.WARMUP
    iteration: int = -1
    #: The user's profile and plan, once they are read.
    given: tuple[Profile, Plan | None] | None = None
    profile: Profile | None = None
    #: The order that the profile was measured on; None if it was read.
    profiled: Schedule | None = None
    plan: Plan | None = None
    #: Whether batches of several sizes have come.
    several_sizes: bool = False
    reconfigure_steps: int = 0
    reconfigure_ended: Ended | None = None
    notes: tuple[str, ...] = ()
    #: Why backwards are not split from now on, though the job's may be; empty for no reason.
    whole: str = ""
    #: What an operator asks for, the same on every rank.
    wishes: Wishes = NO_WISHES
    #: How batches of full size kept a power budget so far; None if there was none.
    power: Mapping[str, float | None] | None = None


@dataclass(frozen=True, kw_only=True)
class PhaseParts:
    """The parts of one rank of a job, and of its phases for batches of one size.

    Args:
        options: profile and plan are the user's; an earlier start's are in `folder`. The number of
            microbatches is the batch's.
        clocks_mhz: for each stage, those that all its GPUs have.
        background: makes what runs work of the planning rank beside training.
        batch: name of the batch whose iterations these phases run; empty for that of full size.
            Profile and memory are of the job, not of a batch.
        specs: what messages carry, once iterations run.
        own_order: order of a framework that runs its units and sends their messages itself; None if
            EnvPipe does.
        control: by which an operator asks, on the planning rank, if the job has a folder.
    """

    options: JobOptions
    state: SessionState
    folder: JobFolder
    stage: int
    num_stages: int
    gpu: Gpu
    clocks_mhz: Sequence[set[int]]
    channel: P2PChannel
    executor: Executor
    clock: RankClock
    meter: EnergyMeter
    energy: TrainingEnergy
    collectives: Collectives
    memory: JobMemory
    say: Callable[[str], None]
    background: Callable[[], Background[Any]] = Background
    batch: str = ""
    specs: StageSpecs = field(default_factory=lambda: StageSpecs({}, {}))
    own_order: Schedule | None = None
    control: ControlFile | None = None

    @cached_property
    def megatron_order(self) -> Schedule:
        """Return Megatron's own order of the job; ScheduleError: it cannot run."""
        asked = self.options
        counts = asked.num_microbatches, asked.num_chunks, asked.group_size
        return builders.framework_order(self.num_stages, *counts)

    @property
    def schedule(self) -> Schedule:
        """Return the framework's order: Megatron's, if EnvPipe runs the units."""
        return self.own_order or self.megatron_order

    @property
    def kept_order(self) -> Schedule | None:
        """Return the framework's order, if it runs no other."""
        return None if self.options.reorders else self.own_order

    @property
    def top_mhz(self) -> int:
        """Return the highest clock of this rank's GPU."""
        return max(self.gpu.supported_frequencies_mhz)

    @property
    def num_microbatches(self) -> int:
        """Return the number of microbatches of the batch."""
        return self.options.num_microbatches

    def named(self, text: str) -> str:
        """Return a text after the batch's name, if it has one."""
        return f"{self.batch}: {text}" if self.batch else text

    def of_batch(self, name: str, num_microbatches: int) -> PhaseParts:
        """Return the same parts for batches of another size."""
        options = replace(self.options, num_microbatches=num_microbatches)
        job = replace(self, batch=name, options=options)
        return replace(job, say=lambda text: self.say(job.named(text)))


def note(job: PhaseParts, *notes: str) -> None:
    """Say notes, and have the bill say them after those of before, each once."""
    own = tuple(map(job.named, notes))
    kept = (note for note in job.state.notes if note not in own)
    job.state.notes = (*kept, *dict.fromkeys(own))
    for note in notes:
        job.say(note)
