"""A rank's GPU, under a back end that all ranks can use, and its clock: control, hold and watch."""

from __future__ import annotations

import enum
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from envpipe_megatron.gpu.base import ClockState, DryRunGpu, Gpu, GpuError, ReadOnlyGpu
from envpipe_megatron.gpu.clock.controller import PageController
from envpipe_megatron.gpu.clock.page import ClockPage
from envpipe_megatron.gpu.control import (
    ChosenControl,
    beside_power_profiles,
    choose_control,
    given_up,
    open_controlled,
)
from envpipe_megatron.gpu.guard.hold import Hold, hold_gpu
from envpipe_megatron.gpu.guard.messages import AGENT_VARIABLE, GuardError
from envpipe_megatron.gpu.guard.resetting import that_can_be_undone
from envpipe_megatron.gpu.site import SiteConfig, read_site
from envpipe_megatron.runtime.channel.collectives import Collectives
from envpipe_megatron.runtime.clocks.served import ServedClock, count_by_stream
from envpipe_megatron.runtime.clocks.watch import ClockWatch

logger = logging.getLogger(__name__)


class ClockKind(enum.Enum):
    """How the clock of a rank's GPU is set: requests go into a page, which somebody serves.

    Attributes:
        REAL: a guard serves it, and gives the clock back whatever ends the rank. No rank changes a
            clock where a GPU cannot be held.
        DRY_RUN: the same, and nothing is changed: a job takes what it would take with clocks.
        EMULATED: the rank serves it, at each request: emulated time must not depend on when another
            process gets to it, and there is nothing to guard. Starting a guard takes 0.1 to 0.2 s
            of a core, and tests make hundreds of such ranks.
        READ_ONLY: nobody serves it.
    """

    REAL = "real"
    DRY_RUN = "dry run"
    EMULATED = "emulated"
    READ_ONLY = "read only"

    @classmethod
    def of(cls, gpu: Gpu) -> ClockKind:
        """Return the kind of a GPU; an emulated node with an agent has guards, as a real one."""
        if gpu.read_only:
            return cls.READ_ONLY
        if gpu.address.backend == DryRunGpu.backend:
            return cls.DRY_RUN
        if gpu.drives_hardware or AGENT_VARIABLE in os.environ:
            return cls.REAL
        return cls.EMULATED

    @property
    def is_guarded(self) -> bool:
        """True if a guard serves the page."""
        return self in (ClockKind.REAL, ClockKind.DRY_RUN)


class _Here:
    """Serves a page in the rank, in a guard's place."""

    def __init__(self, gpu: Gpu, page: ClockPage) -> None:
        self._gpu, self._page, self._pid = gpu, page, os.getpid()
        self._controller = PageController(gpu, page)
        self.serve = self._controller.serve
        #: When the last call began that was undone.
        self._undone_s = -math.inf

    def count(self, where: int, number: int) -> None:
        """Note that what a request waits for has ended, and serve it."""
        self._page.count(where, number)
        self.serve()

    def release(self) -> None:
        """Reset the clock, if it was set. Raises GpuError."""
        called_s, _ = self._page.last_call_s
        if os.getpid() == self._pid and called_s > self._undone_s:
            self._gpu.reset_frequency()
            self._undone_s = called_s
            self._controller.close()


class RankClock:
    """The clock of a rank's GPU, which is reset whatever ends the rank.

    A real GPU gets a guard before its first lock, and its clock is looked at twice a second; one
    that is opened for reading alone is only watched. Control ends before the right to it does, as a
    token for zeusd has an end.

    Args:
        min_dwell_s: least time between two changes; see `ClockPage.create`.
        on_sample: see `ClockWatch`.

    Raises GpuError if another job holds the GPU, no guard could be had, or the GPU's streams cannot
    say when a unit has ended.
    """

    def __init__(
        self,
        gpu: Gpu,
        kind: ClockKind,
        min_dwell_s: float = 0.0,
        *,
        on_sample: Callable[[float, ClockState], None] = lambda time_s, state: None,
    ) -> None:
        self._gpu = gpu
        self._hold: Hold | _Here | None = None
        self._watch: ClockWatch | None = None
        self._ending: threading.Timer | None = None
        try:
            page = ClockPage.create(min_dwell_s, shared=kind.is_guarded)
        except OSError as error:
            raise GpuError(
                f"There is no memory to share with a guard: {error}",
                value="/dev/shm",
                remedy="Give the job, or its container, half a MiB for each rank",
            ) from error
        try:
            self.controller, self._hold = self._serve(page, kind)
        finally:
            page.close_file()
        try:
            if (end_s := gpu.control_ends_s()) < math.inf:
                left_s = min(max(0.0, end_s - time.time()), threading.TIMEOUT_MAX)
                self._ending = threading.Timer(left_s, self._end)
                self._ending.daemon = True
                self._ending.start()
            if gpu.drives_hardware or gpu.read_only:
                self._watch = ClockWatch(gpu, page, on_sample)
        except BaseException:
            page.end()  # nobody waits for an answer
            self.close()
            raise

    def _serve(self, page: ClockPage, kind: ClockKind) -> tuple[ServedClock, Hold | _Here | None]:
        """Return both ends of the page: the rank's, and what gives the clock back."""
        if kind is ClockKind.EMULATED:
            here = _Here(self._gpu, page)
            return ServedClock(self._gpu, page, here.count, here.serve), here
        by_stream = kind.is_guarded and torch.cuda.is_available()
        count = count_by_stream(page) if by_stream else page.count
        self.controller = ServedClock(self._gpu, page, count, waits=not by_stream)
        if kind.is_guarded:
            return self.controller, hold_gpu(self._gpu.address, on_end=self._guard_ended, page=page)
        page.end()
        return self.controller, None

    def close(self) -> None:
        """Reset the clock, and tell the guard; safe to call twice. What fails is logged."""
        if self._ending is not None:
            self._ending.cancel()
        self.controller.close()
        try:
            self._release()
        except GpuError as error:
            self.controller.error = self.controller.error or error
            logger.error("%s", error)
        if self._watch is not None:
            self._watch.close()

    def problems(self) -> tuple[str, ...]:
        """Say what was wrong with the clock since the last call; empty if nothing was."""
        if self.controller.error is not None:
            return (str(self.controller.error),)
        held = self._watch.held_back() if self._watch is not None else ""
        return (held,) if held else ()

    def summary(self) -> dict[str, Any]:
        """Return the summary of `ServedClock`, with the watch's as `followed`."""
        return {
            "backend": self._gpu.address.backend,
            **self.controller.summary(),
            "followed": None if self._watch is None else self._watch.summary(),
        }

    def _release(self) -> None:
        if self._hold is not None:
            self._hold.release()

    def _end(self) -> None:
        self.controller.stop(
            GpuError(
                "The right to change clocks ends soon",
                remedy="The clock stays at its default; give a job a token that outlives it",
            )
        )
        try:
            self._release()
        except GpuError as error:
            logger.error("%s", error)

    def _guard_ended(self) -> None:
        self.controller.stop(
            GuardError(
                "The guard of this GPU's clock has ended",
                remedy="The clock is at its default from here on; see the guard's log",
            )
        )


def hold_everywhere(
    gpu: Gpu, collectives: Collectives, make: Callable[[Gpu], RankClock], *, required: bool
) -> tuple[RankClock, Gpu, str]:
    """The clock of each rank's GPU, that GPU, and why it is only read; empty if it is not.

    If one rank is refused, all of them only read theirs, or raise that where it is `required`.
    """
    made: list[RankClock] = []
    try:
        collectives.everywhere(lambda: made.append(make(gpu)))
    except BaseException as error:
        for clock in made:
            clock.close()
        if required or not isinstance(error, Exception):
            raise
        why, gpu = str(error), ReadOnlyGpu(gpu)
        return hold_everywhere(gpu, collectives, make, required=True)[0], gpu, why
    return made[0], gpu, ""


def open_rank_gpu(
    uid: str,
    collectives: Collectives,
    wanted: str,
    *,
    require: bool = False,
    one_clock: bool = False,
) -> tuple[Gpu, ChosenControl]:
    """Open this rank's GPU by the back end that its node allows; every rank of the job calls it.

    A pipeline follows one plan, so clocks are controlled on all of its GPUs or on none: if one
    rank has no control, or a site configuration that cannot be used, every rank opens its GPU for
    reading alone, and the planner logs why.
    Nothing is locked or held yet; the clock was reset, to see that it can be.

    Args:
        uid: the GPU's UUID (`gpu.devices.uid_of_cuda_device`); of an emulated one its
            folder and index.
        wanted: one of `gpu.control.CHOICES`.
        require: whether a job without control is an error instead of a warning.
        one_clock: whether the whole job has one clock, which a power profile does not stand
            against; see `gpu.control.beside_power_profiles`.

    Raises GpuError for a GPU that cannot be opened, or if control is required and not available;
    CollectivesError if another rank raised that.
    """

    def choose() -> tuple[SiteConfig, ChosenControl]:
        try:
            site = SiteConfig() if wanted == "emulated" else read_site()
        except GpuError as error:
            none, remedies = ChosenControl(wanted, None, ""), (f"{error.remedy}.",)
            return SiteConfig(), given_up(none, error.what, remedies, require=require)
        allowed = choose_control(wanted, site, require=require)
        if not one_clock:
            allowed = beside_power_profiles(allowed, uid, site, require=require)
        return site, allowed

    site, chosen = collectives.everywhere(choose)
    backends = collectives.to_planner({str(chosen.backend)}, lambda found: set().union(*found))
    first = collectives.first(chosen if chosen.backend is None else None)
    if first is None:  # all may lock; can all reset?
        chosen = collectives.everywhere(
            lambda: that_can_be_undone(chosen, uid, site, require=require)
        )
        first = collectives.first(chosen if chosen.backend is None else None)
    if first is not None:
        _, chosen = first
        if collectives.is_planner and chosen.warning is not None:
            logger.warning("%s", chosen.warning)
    gpu = collectives.everywhere(lambda: open_controlled(uid, chosen, site))
    if collectives.is_planner and chosen.backend is not None:
        names = ", ".join(sorted(set().union(*backends)))
        logger.info("clocks are controlled by %s: %s", names, chosen.why)
    return gpu, chosen
