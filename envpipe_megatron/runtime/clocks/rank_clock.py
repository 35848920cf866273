"""A rank's GPU, under a back end that all ranks can use, and its clock: control, hold and watch."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from envpipe_megatron.gpu.base import ClockState, DryRunGpu, Gpu, GpuError, ReadOnlyGpu
from envpipe_megatron.gpu.clock.controller import ClockController
from envpipe_megatron.gpu.clock.page import ClockPage
from envpipe_megatron.gpu.control import (
    ChosenControl,
    beside_power_profiles,
    choose_control,
    given_up,
    open_controlled,
)
from envpipe_megatron.gpu.guard.hold import GuardEvent, Hold, hold_gpu
from envpipe_megatron.gpu.guard.messages import AGENT_VARIABLE, GuardError
from envpipe_megatron.gpu.guard.resetting import that_can_be_undone
from envpipe_megatron.gpu.site import SiteConfig, read_site
from envpipe_megatron.runtime.channel.collectives import Collectives
from envpipe_megatron.runtime.clocks.served import Clock, Count, ServedClock, count_by_stream
from envpipe_megatron.runtime.clocks.watch import ClockWatch
from envpipe_megatron.runtime.execution.executor import same_device

logger = logging.getLogger(__name__)


class RankClock:
    """The clock of a rank's GPU, which is reset whatever ends the rank.

    A real GPU gets a guard before its first lock, and its clock is looked at twice a second; one
    that is opened for reading alone is only watched. Control ends before the right to it does, as a
    token for zeusd has an end. Where the GPU's streams can count in memory,
    the guard sets the clock, and else a thread of this process; a dry run does as the GPU would,
    if nobody holds it.

    Args:
        guarded: by default whether the GPU is real, or emulated on a node with an agent.
        count_by: what counts in a page, or None if nothing can; by default the current stream does
            for a GPU that is not emulated.

    Raises GpuError if another job holds the GPU, or no guard could be had.
    """

    def __init__(
        self,
        gpu: Gpu,
        min_dwell_s: float = 0.0,
        *,
        relock: bool = False,
        guarded: bool | None = None,
        on_sample: Callable[[float, ClockState], None] = lambda time_s, state: None,
        count_by: Callable[[ClockPage], Count | None] | None = None,
    ) -> None:
        self._gpu = gpu
        self.controller: Clock
        self._hold: Hold | None = None
        self._watch: ClockWatch | None = None
        self._ending: threading.Timer | None = None
        as_if_real = guarded is None and gpu.address.backend == DryRunGpu.backend
        if guarded is None or gpu.read_only:
            on_agents_node = AGENT_VARIABLE in os.environ
            guarded = gpu.drives_hardware or (gpu.changes_clock and on_agents_node)
        if count_by is None and (gpu.drives_hardware or as_if_real):
            count_by = count_by_stream
        served = None
        if (guarded or as_if_real) and count_by is not None:
            served = self._hold_served(min_dwell_s, relock, count_by, must=guarded)
        self.controller = served or ClockController(
            gpu, min_dwell_s, relock=relock, on_start=same_device()
        )
        try:
            if guarded and self._hold is None:
                self._hold = hold_gpu(gpu.address, on_event=self._hear)
            if guarded and (end_s := gpu.control_ends_s()) < math.inf:
                left_s = min(max(0.0, end_s - time.time()), threading.TIMEOUT_MAX)
                self._ending = threading.Timer(left_s, self._end)
                self._ending.daemon = True
                self._ending.start()
            if gpu.drives_hardware or gpu.read_only:
                self._watch = ClockWatch(
                    gpu,
                    lambda: self.controller.last_change_s,
                    on_sample=on_sample,
                    requested_mhz=None if served is None else lambda: served.page.set_mhz,
                )
        except BaseException:
            self.close()
            raise

    def _hold_served(
        self,
        min_dwell_s: float,
        relock: bool,
        count_by: Callable[[ClockPage], Count | None],
        *,
        must: bool,
    ) -> ServedClock | None:
        try:
            page = ClockPage.create(min_dwell_s, relock=relock)
        except OSError as error:
            logger.info("Clocks are set by a thread of this process: %s", error)
            return None
        try:
            count = count_by(page)
            if count is None:
                return None
            served = self.controller = ServedClock(self._gpu, page, count)
            self._hold = hold_gpu(self._gpu.address, on_event=self._hear, page=page)
        except GpuError:
            if must:
                raise
            return None
        finally:
            page.close_file()
        return served

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
        """Return the controller's summary, with the watch's as `followed`.

        `set_by` is "guard" or "rank", whose process sets the clock.
        """
        return {
            "backend": self._gpu.address.backend,
            "set_by": "guard" if isinstance(self.controller, ServedClock) else "rank",
            **self.controller.summary(),
            "followed": None if self._watch is None else self._watch.summary(),
        }

    def _release(self) -> None:
        if self._hold is None:
            return
        if self.controller.in_driver:
            # The lock may still come, and a guard that has got the release would not undo it.
            logger.error(
                "A call that locks the clock of %s does not return: the guard resets the clock "
                "when this process has ended",
                self._gpu.name,
            )
            return
        self._hold.release(late=self.controller.error is not None)

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

    def _hear(self, event: GuardEvent) -> None:
        if event is GuardEvent.WAS_RESET:
            self.controller.forget()
            return
        reason = "is gone" if event is GuardEvent.LOST else "was told to end the job"
        self.controller.stop(
            GuardError(
                f"The guard of this GPU's clock {reason}",
                remedy="The clock is at its default from here on; see the guard's log",
            )
        )
        if event is GuardEvent.STOP:
            self._release()


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
