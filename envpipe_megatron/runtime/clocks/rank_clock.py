"""A rank's GPU, under a back end that all ranks can use, and its clock: requests, hold and watch.

A request that wakes a thread of this process hands Python's lock over and gets it back, and where
the host has no lead over the GPU, each unit is that much longer. Here a request is a store in a
page, and a word there that the stream counts up after the unit before. Where units run on no
stream they have ended when their Python has, and the host counts.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from envpipe_megatron.formats.energy import IDLE
from envpipe_megatron.gpu.base import ClockState, DryRunGpu, Gpu, GpuError, ReadOnlyGpu
from envpipe_megatron.gpu.clock.controller import PageController, spread
from envpipe_megatron.gpu.clock.page import BEGUN, DUE, GIVEN_BACK, ClockPage
from envpipe_megatron.gpu.control import Control, choose_for, open_controlled
from envpipe_megatron.gpu.guard.hold import Hold, hold_gpu
from envpipe_megatron.gpu.guard.messages import AGENT_VARIABLE
from envpipe_megatron.runtime.channel.collectives import Collectives
from envpipe_megatron.runtime.channel.cuda_device import counter_in_stream
from envpipe_megatron.runtime.clocks.watch import TOLERANCE_MHZ, ClockWatch

logger = logging.getLogger(__name__)

#: How often one who waits for the guard looks, and how long at most at the end, s.
_LOOK_S, _LAST_ANSWER_S = 2e-4, 2.0
#: How long `confirm` waits for the device to come to the request, and for the clock then, s.
_DEVICE_S, _SETTLES_S = 60.0, 0.25

#: Pages kept alive: a stream may still write to them.
_pages: list[ClockPage] = []


class _Here(PageController):
    """Serves a page in the rank, in a guard's place."""

    def count(self, where: int, number: int) -> None:
        """Note that what a request waits for has ended, and serve it."""
        self._page.count(where, number)
        self.serve()

    def release(self) -> None:
        """Reset the clock, if it was set. Raises GpuError."""
        if self._page.set_mhz is not None:
            self._gpu.reset_frequency()
            self.close()


def count_by_stream(page: ClockPage) -> Callable[[int, int], None]:
    """Return what has the current stream count a word up; GpuError if it cannot."""
    try:
        count = counter_in_stream(page)
        _pages.append(page)
        count(DUE, 0)
        torch.cuda.current_stream().synchronize()
    except RuntimeError as refused:
        raise GpuError(
            f"A stream of this GPU can mark no unit: {refused}",
            remedy="Clocks stay at their default. A newer driver can",
        ) from refused
    return count


class RankClock:
    """The clock of a rank's GPU: asked for by a page, and reset however the rank ends.

    A real GPU gets a guard before its first lock, which gives the clock back however the rank ends.
    Its clock is looked at twice a second, as that of a GPU opened for reading only.
    A dry run has a guard too, so that it takes what a job with clocks would.

    Args:
        min_dwell_s: least time between two changes; see `ClockPage.create`.
        guarded: whether a guard serves the page, else the rank does, at each request: as for an
            emulated GPU, whose time must not depend on when another process gets to it, unless its
            node has an agent. By default what the GPU needs.
        on_sample: see `ClockWatch`.

    Attributes:
        waits: whether requests wait for units that an executor has timed; else for what the stream
            holds, or there are none, as of a GPU opened for reading only.
        repeats: whether clocks are asked for at each request, even if it is for the same one.
        given_back: whether each request gives the clock back to the driver, for any clock: the GPU
            stays held, and the next request that finds it False takes the clock again.

    Raises GpuError if another job holds the GPU, no guard could be had, or the GPU's streams cannot
    say when a unit has ended.
    """

    def __init__(
        self,
        gpu: Gpu,
        min_dwell_s: float = 0.0,
        *,
        guarded: bool | None = None,
        on_sample: Callable[[float, ClockState], None] = lambda time_s, state: None,
    ) -> None:
        self._gpu = gpu
        self.repeats = self.given_back = False
        self._asked_mhz: int | None = None
        #: Whether that clock was waited for, and whether it was said that one was not read.
        self._waited_for = self._warned = False
        self._error: Exception | None = None
        self._pid = os.getpid()
        self._hold: Hold | _Here | None = None
        self._watch: ClockWatch | None = None
        if guarded is None:
            is_dry_run = gpu.address.backend == DryRunGpu.backend
            real = gpu.drives_hardware or is_dry_run or AGENT_VARIABLE in os.environ
            guarded = real and not gpu.read_only
        try:
            self.page = page = ClockPage.create(min_dwell_s, shared=guarded)
        except OSError as error:
            raise GpuError(
                f"There is no memory to share with a guard: {error}",
                remedy="Give the job, or its container, half a MiB for each rank",
            ) from error
        on_stream = torch.cuda.is_available()
        self.waits = not (on_stream and (guarded or gpu.read_only))
        self._look: Callable[[], object] = partial(time.sleep, _LOOK_S)
        try:
            self._count = count_by_stream(page) if guarded and on_stream else page.count
            if guarded:
                self._hold = hold_gpu(gpu.address, page)
        finally:
            page.close_file()
        if gpu.read_only:
            page.end()
        elif not guarded:
            self._hold = here = _Here(gpu, page)
            self._count, self._look = here.count, here.serve
        try:
            if gpu.drives_hardware or gpu.read_only:
                self._watch = ClockWatch(gpu, page, on_sample)
        except BaseException:
            page.end()  # nobody waits for an answer
            self.close()
            raise

    def request(
        self, frequency_mhz: int, delay_s: float | None = None
    ) -> Callable[[], None] | None:
        """Set the clock once the GPU has come to here, or so long after; returns at once.

        Here is after all that the current stream holds. Called by one thread. What it returns of a
        request with a delay is to be called where the GPU may not wait for any longer. The clock of
        the last request is not asked for again, unless something else has undone that.
        """
        if self.given_back:
            frequency_mhz = GIVEN_BACK
        again = self.repeats or (self._watch is not None and self._watch.was_undone())
        # Whether the guard has failed is seen by whoever asks for `error`, in each iteration.
        if (frequency_mhz == self._asked_mhz and not again) or self._error is not None:
            return None
        self._asked_mhz, self._waited_for = frequency_mhz, False
        number = self.page.ask(frequency_mhz, delay_s or 0.0)
        if number is None:
            self.stop(GpuError("The guard takes no requests", remedy="See its log"))
            return None
        self._mark(DUE, number)
        return None if delay_s is None else partial(self._mark, BEGUN, number)

    def confirm(self) -> None:
        """Wait until the clock that was asked for last, or a higher one, is read from a real GPU.

        From where the device has come to the request, once, `_SETTLES_S` and the dwell time at
        most: a power cap, heat or another program may hold it back, which is logged once. A thread
        reads, since a driver may hang.
        """
        asked_mhz, state, is_read = self._asked_mhz or 0, None, False
        sets = self._gpu.drives_hardware and asked_mhz in self._gpu.supported_frequencies_mhz
        if self._waited_for or not sets:
            return
        self._waited_for = True
        self.wait_idle(_DEVICE_S)
        until_s = time.monotonic() + _SETTLES_S + self.page.min_dwell_s

        def read() -> None:
            nonlocal state, is_read
            while not (is_read or self.page.is_over or time.monotonic() >= until_s):
                time.sleep(_LOOK_S)
                with suppress(Exception):  # it may fail in any way; training must go on
                    state = self._gpu.clock_state()
                    is_read = state.observed_mhz >= asked_mhz - TOLERANCE_MHZ

        reading = threading.Thread(target=read, name="envpipe-confirm", daemon=True)
        with suppress(RuntimeError):  # threads are used up
            reading.start()
            reading.join(until_s - time.monotonic())
        # Of one that idles, the next kernel may get it.
        held = state is not None and IDLE not in state.throttle_reasons
        if held and not (is_read or self.page.is_over or self._warned):
            self._warned = True
            where = f"{self._gpu.name} was not at {asked_mhz} MHz between training steps"
            logger.warning("%s, so that GPU checks may find it slow: %s", where, state)

    def stop(self, error: Exception) -> None:
        """Give up control for this reason: nothing is locked any more, and the guard resets."""
        if os.getpid() != self._pid:
            return
        self.page.end()
        if self.error is None:
            self._error = error
            logger.error("Clock control of %s stops, training goes on: %s", self._gpu.name, error)

    def close(self) -> None:
        """Set no clock from here on, and have it reset; what fails is logged.

        A GPU that does not come to its last request, and a guard that hangs, are left after a
        while. Safe to call twice. In a forked child nothing happens.
        """
        if os.getpid() != self._pid:
            return
        self.wait_idle(_LAST_ANSWER_S)
        self.page.end()
        try:
            if self._hold is not None:
                self._hold.release()
        except Exception as error:  # a driver may fail in any way; training must go on
            self._error = self.error or error
            logger.error("%s", error)
        if self._watch is not None:
            self._watch.close()

    @property
    def error(self) -> Exception | None:
        """Return why no clock is set any more, as the rank or the guard knows it."""
        if self._error is None and (failure := self.page.failure) is not None:
            self._error = GpuError(failure)
            logger.error(
                "Clock control of %s stopped, training goes on: %s", self._gpu.name, self._error
            )
        return self._error

    def problems(self) -> tuple[str, ...]:
        """Say what was wrong with the clock since the last call; empty if nothing was."""
        if self.error is not None:
            return (str(self.error),)
        held = self._watch.held_back() if self._watch is not None else ""
        return (held,) if held else ()

    def summary(self) -> dict[str, Any]:
        """Return how many changes were made and how fast, by `PageController`, and what was seen.

        While the job runs, changes are as of the call before; a guard whose rank was silent counts
        from 0 again. `followed` is the watch's summary.
        """
        self._question()
        said: dict[str, Any] = {}
        with suppress(ValueError):  # the guard has said nothing, or just says it
            said = json.loads(self.page.summary)
        none = spread(())
        return {
            "backend": self._gpu.address.backend,
            "changes": 0,
            "coalesced": 0,
            "wake_to_lock_s": none,
            "lock_call_s": none,
            **said,
            "error": None if self.error is None else str(self.error),
            "followed": None if self._watch is None else self._watch.summary(),
        }

    def wait_idle(self, limit_s: float = math.inf) -> None:
        """Return when every request made so far was applied, held back or given up, or in time."""
        question, until_s = self._question(), time.monotonic() + limit_s
        while question is not None and self.error is None and not self.page.is_over:
            if self.page.is_answered(question) or time.monotonic() >= until_s:
                return
            self._look()

    def _question(self) -> int | None:
        """Ask for an answer; None where there will be none.

        A forked child asks nothing: it would take its parent's next number, in the parent's page.
        """
        if self.page.is_over or os.getpid() != self._pid:
            return None
        return self.page.ask(0)  # none where too many wait, which nobody serves

    def _mark(self, where: int, number: int) -> None:
        try:
            self._count(where, number)
        except RuntimeError as refused:
            self.stop(GpuError(f"A stream can mark no unit: {refused}"))


def hold_everywhere(
    gpu: Gpu, collectives: Collectives, make: Callable[[Gpu], RankClock], *, required: bool
) -> tuple[RankClock, Gpu, str]:
    """Return this rank's clock, its GPU, and why that is only read; empty if it is not.

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
) -> tuple[Gpu, Control]:
    """Open this rank's GPU by the back end that its node allows; every rank of the job calls it.

    A pipeline follows one plan, so clocks are controlled on all of its GPUs or on none: if one
    rank has no control, or a site configuration that cannot be used, every rank opens its GPU for
    reading only, and the planner logs why.
    Nothing is locked or held yet: that the clock can be reset is seen by `hold_everywhere`.

    Args:
        uid: the GPU's UUID (`gpu.registry.uid_of_cuda_device`); of an emulated one its
            folder and index.
        wanted: one of `gpu.control.CHOICES`.
        require: whether a job without control is an error instead of a warning.
        one_clock: whether the whole job has one clock, which goes with any power profile; see
            `gpu.control.choose_for`.

    Raises GpuError for a GPU that cannot be opened, or if control is required and not available;
    CollectivesError if another rank raised that.
    """

    def choose() -> Control:
        own = choose_for(uid, wanted, one_clock=one_clock)
        return own.required() if require else own

    chosen = collectives.everywhere(choose)
    backends = collectives.to_planner({str(chosen.backend)}, lambda found: set().union(*found))
    first = collectives.first(chosen if chosen.backend is None else None)
    if first is not None:
        _, chosen = first
        if collectives.is_planner and chosen.warning is not None:
            logger.warning("%s", chosen.warning)
    gpu = collectives.everywhere(lambda: open_controlled(uid, chosen))
    if collectives.is_planner and chosen.backend is not None:
        names = ", ".join(sorted(set().union(*backends)))
        logger.info("clocks are controlled by %s: %s", names, chosen.why)
    return gpu, chosen
