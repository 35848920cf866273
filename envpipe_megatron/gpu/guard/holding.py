"""A GPU on a guard's list, from the request to hold it until its clock is surely back."""

import enum
import logging
import queue
import threading
from collections.abc import Callable

from envpipe_megatron.gpu.base import (
    FORBID_VARIABLE,
    ClockControlForbiddenError,
    Gpu,
    GpuAddress,
    clock_control_forbidden,
)
from envpipe_megatron.gpu.guard.lease import Lease, OpenGpu
from envpipe_megatron.gpu.guard.process_identity import ProcessIdentity
from envpipe_megatron.gpu.guard.protocol import GuardSettings

_LOG = logging.getLogger(__name__)

_FIRST_RETRY_S = 0.05
_LONGEST_RETRY_S = 5.0


class Phase(enum.Enum):
    """Where a holding stands."""

    TAKING = "taking"
    HELD = "held"
    ENDING = "ending"
    OVER = "over"


class Holding:
    """One GPU that is held for one rank.

    All that may block, which is what touches driver and files, runs on a thread of its own: a
    driver that hangs on one GPU must not keep another one from its reset. Everything else runs on
    the guard's main thread, which hands in the results by `on_taken` and `on_reset`.

    Args:
        address: the GPU.
        job: the job's name.
        rank: the process that it is held for; None where the guard cannot see it.
        settings: how patient to be.
        open_gpu: opens a GPU by its address.
        post: called on that thread with what the main thread is to do when a task is done.

    Attributes:
        phase: where it stands.
        undone: whether, when it is over, the lease is gone.
        on_answer: called when the GPU is held, or with the error for which it is not.
        on_was_reset: called when a GPU that its rank may still lock was reset.
        on_over: called when it is over.
    """

    def __init__(
        self,
        address: GpuAddress,
        job: str,
        rank: ProcessIdentity | None,
        settings: GuardSettings,
        open_gpu: OpenGpu,
        post: Callable[[Callable[[float], None]], None],
    ) -> None:
        self.address = address
        self.rank = rank
        self.phase = Phase.TAKING
        self.undone = True
        self.on_answer: Callable[[BaseException | None], None] = lambda _: None
        self.on_was_reset: Callable[[], None] = lambda: None
        self.on_over: Callable[[], None] = lambda: None
        self._job = job
        self._settings = settings
        self._open_gpu = open_gpu
        self._post = post
        self._gpu: Gpu | None = None
        self._late_request_s = 0.0
        self._lease: Lease | None = None
        self._ends_late: bool | None = None
        self._resets_under_way = 0
        self._backoff_s = _FIRST_RETRY_S
        self._retry_at_s: float | None = None
        self._late_at_s: float | None = None
        self._abandon_at_s: float | None = None
        self._tasks: queue.SimpleQueue[Callable[[], Callable[[float], None]]] = queue.SimpleQueue()
        self._idle = threading.Event()
        threading.Thread(target=self._work, daemon=True).start()
        self._tasks.put(self._take)

    # --- the main thread's ----------------------------------------------------------------------

    @property
    def ends(self) -> bool:
        """Whether nobody will lock this GPU any more through this holding."""
        return self.phase in (Phase.ENDING, Phase.OVER) or self._ends_late is not None

    def end(self, now_s: float, *, late: bool) -> None:
        """Bring the clock back for good, and delete the lease: nobody will lock it any more.

        Args:
            now_s: the present instant, s.
            late: reset once more after the GPU's `late_request_s`: the rank was killed, and may
                have left requests under way.
        """
        if self.phase is Phase.TAKING:
            self._ends_late = late
            self._abandon_at_s = now_s + self._settings.give_up_s  # the driver may hang
        elif self.phase is Phase.HELD:
            self.phase = Phase.ENDING
            late_s = self._late_request_s if late else 0.0
            self._late_at_s = now_s + late_s if late_s > 0 else None
            self._abandon_at_s = now_s + late_s + self._settings.give_up_s
            self._reset_from_now_on()

    def reset(self) -> None:
        """Bring the clock back now; the rank may lock it again.

        Nothing is added to two that are under way: the rank of a driver that hangs is silent for
        long.
        """
        if self._resets_under_way < 2:
            self._reset_from_now_on()

    def _reset_from_now_on(self) -> None:
        """Reset once more, whatever is under way: that may have begun before the last lock."""
        self._resets_under_way += 1
        self._tasks.put(self._reset)

    def next_instant_s(self) -> float | None:
        """Return when `on_time` is due, None while nothing is."""
        times_s = (self._retry_at_s, self._late_at_s, self._abandon_at_s)
        return min((time_s for time_s in times_s if time_s is not None), default=None)

    def on_time(self, now_s: float) -> None:
        """Do what is due."""
        if self._retry_at_s is not None and now_s >= self._retry_at_s:
            self._retry_at_s = None
            self.reset()
        if self._late_at_s is not None and now_s >= self._late_at_s:
            self._late_at_s = None
            self._reset_from_now_on()
        if self._abandon_at_s is not None and now_s >= self._abandon_at_s:
            _LOG.error("%s: given up; its lease stays and says what to undo", self.address.uid)
            self.leave()

    def leave(self) -> None:
        """Leave the lease as it is for others to undo."""
        if self._lease is not None:
            self._lease.abandon()
            self._lease = None
            self.undone = False
        self._over()

    def reset_in_distress(self) -> threading.Event:
        """Ask for a reset with as little memory as may be; return what is set when it is done."""
        self._idle.clear()
        self._tasks.put(self._reset)
        self._tasks.put(self._say_idle)
        return self._idle

    def _on_taken(self, error: BaseException | None, now_s: float) -> None:
        if self.phase is Phase.OVER:  # left meanwhile: no rank was promised anything
            self._delete_lease()
            return
        if error is not None:
            _LOG.warning("%s: not held: %s", self.address.uid, error)
            self.on_answer(error)
            self._over()
            return
        _LOG.info("%s: held for %s", self.address.uid, self.rank)
        self.phase = Phase.HELD
        self.on_answer(None)
        if self._ends_late is not None:
            self.end(now_s, late=self._ends_late)

    def _on_reset(self, error: BaseException | None, now_s: float) -> None:
        self._resets_under_way -= 1
        if self.phase is Phase.OVER:
            return
        if error is not None:
            # Said at each failure: retries are rare, and an administrator wants to see them.
            _LOG.error("%s: reset failed: %s", self.address.uid, error)
            self._retry_at_s = now_s + self._backoff_s
            self._backoff_s = min(2 * self._backoff_s, _LONGEST_RETRY_S)
            return
        _LOG.info("%s: reset", self.address.uid)
        self._backoff_s = _FIRST_RETRY_S
        self._retry_at_s = None
        if self.phase is Phase.HELD:
            self.on_was_reset()
        elif self._resets_under_way == 0 and self._late_at_s is None:
            self._delete_lease()
            self._over()

    def _delete_lease(self) -> None:
        lease, self._lease = self._lease, None
        try:
            if lease is not None:
                lease.release()
        except Exception as error:
            _LOG.error("%s: %s", self.address.uid, error)
            self.undone = False

    def _over(self) -> None:
        self.phase = Phase.OVER
        self._retry_at_s = self._late_at_s = self._abandon_at_s = None
        self._tasks.put(self._stop)
        self.on_over()

    # --- its own thread's -----------------------------------------------------------------------

    def _work(self) -> None:
        try:
            while True:
                self._post(self._tasks.get()())
        except SystemExit:
            return

    def _take(self) -> Callable[[float], None]:
        error: BaseException | None = None
        try:
            # Opened now and not when it is needed: what is missing shows before a clock is locked.
            self._gpu = self._open_gpu(self.address)
            if self._gpu.drives_hardware and clock_control_forbidden():
                raise ClockControlForbiddenError(
                    f"A guard that may not change clocks cannot hold {self._gpu.name}: "
                    f"{FORBID_VARIABLE} is set"
                )
            self._late_request_s = self._gpu.late_request_s
            self._lease = Lease.take(
                self.address, self._job, rank=self.rank, open_gpu=self._open_gpu
            )
        except BaseException as caught:
            error = caught
        return lambda now_s: self._on_taken(error, now_s)

    def _reset(self) -> Callable[[float], None]:
        error: BaseException | None = None
        try:
            if self._gpu is None:
                self._gpu = self._open_gpu(self.address)
            self._gpu.reset_frequency()
        except BaseException as caught:
            error = caught
            self._gpu = None  # a driver that was reloaded needs to be opened again
        return lambda now_s: self._on_reset(error, now_s)

    def _say_idle(self) -> Callable[[float], None]:
        self._idle.set()
        return lambda _: None

    def _stop(self) -> Callable[[float], None]:
        raise SystemExit
