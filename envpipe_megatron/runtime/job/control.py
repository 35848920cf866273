"""Hears an operator while a job runs: `ControlFile` reads, `Switch` has all ranks know.

A disk that hangs holds up a thread that nobody waits for. The ranks exchange what they hear by one
small broadcast a second of training, or an iteration if that is longer.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from envpipe_megatron.files import read_text
from envpipe_megatron.runtime.job.parts import NO_POWER, PhaseParts
from envpipe_megatron.tuning.wishes import Wishes, parse_wishes

logger = logging.getLogger(__name__)

#: How often the file is read, and the planning rank is asked, s.
_LOOK_S, _HEARD_S = 1.0, 1.0
#: The shortest iteration that is looked for, s: so many pass at most before ranks are told.
_LEAST_STEP_S = 1e-3
#: So many of the latest stretches the bill names.
_MOST_STRETCHES = 8


class ControlFile:
    """Reads a job's control file every second, on a thread of its own, from now until `close`.

    A file that is broken, or cannot be read, is logged once, and what it said before stays.

    `without` is what is asked for while there is none.

    Attributes:
        path: of the file.
        wishes: what is asked for by now.
    """

    def __init__(self, path: Path, without: Wishes) -> None:
        self.wishes = self._without = without
        self.path = path
        self._failure = ""
        self._stop: SimpleQueue[None] = SimpleQueue()
        thread = threading.Thread(target=self._run, name="envpipe-control", daemon=True)
        with suppress(RuntimeError):  # threads are used up: nobody is heard
            thread.start()

    def close(self) -> None:
        """Read it no more; a disk that hangs is left behind."""
        self._stop.put(None)

    def _run(self) -> None:
        while True:
            self._look()
            with suppress(Empty):
                self._stop.get(timeout=_LOOK_S)
                return

    def _look(self) -> None:
        failure = ""
        try:
            self.wishes = parse_wishes(read_text(self.path), self.path)
        except FileNotFoundError:
            self.wishes = self._without
        except Exception as error:  # a disk or a text may be bad in any way
            failure = str(error)
            if failure != self._failure:
                logger.error("What was asked before is kept, training goes on: %s", failure)
        self._failure = failure


class Switch:
    """Turns the whole job off and on again, on all ranks in the same iteration.

    Args:
        job: this rank's parts, of which `asked` says what is asked for by now.
        describe_job: has the bill say when the job was off.
    """

    def __init__(self, job: PhaseParts, describe_job: Callable[[Mapping[str, Any]], None]) -> None:
        self._job, self._describe_job = job, describe_job
        #: Iterations before the planning rank is asked again, those since, and when it was, s.
        self._pause, self._since, self._asked_s = 0, 0, -math.inf
        self._stretches: deque[str] = deque(maxlen=_MOST_STRETCHES)
        self._begun = ""

    def hear(self) -> bool:
        """Return whether the iteration that begins is off; every rank calls it before each."""
        job, state = self._job, self._job.state
        if job.asked is None:
            return False
        if job.options.measures_alone():  # other ranks need not know
            if job.collectives.is_planner and job.asked() != state.wishes:
                state.wishes = job.asked()
                self._say("This job changes no clock and no order: it is as if off", state.notes)
            return False
        self._since += 1
        if self._since > self._pause:
            before, told = state.wishes, self._told() if job.collectives.is_planner else None
            state.wishes, self._pause, now = job.collectives.from_planner(told)
            self._since = 0
            if state.wishes.off != before.off:
                self._turn(now)
            if state.wishes.power_budget != before.power_budget and not job.options.keeps_power:
                self._say(NO_POWER, state.notes)
        return state.wishes.off

    def _told(self) -> tuple[Wishes, int, str]:
        """What the planning rank says: wishes, iterations until it says so again, and the time."""
        assert self._job.asked is not None
        now_s = self._job.executor.now_s()
        step_s = (now_s - self._asked_s) / self._since
        self._asked_s = now_s
        now = datetime.now(UTC).isoformat(timespec="seconds")
        return self._job.asked(), int(_HEARD_S / max(step_s, _LEAST_STEP_S)), now

    def _turn(self, now: str) -> None:
        state = self._job.state
        others = [text for text in state.notes if text not in self._stretches]
        if state.wishes.off:
            self._begun = f"Off from iteration {state.iteration} ({now})"
            self._stretches.append(f"{self._begun} on")
        else:
            self._stretches[-1] = f"{self._begun} to {state.iteration - 1} ({now})"
        self._say(self._stretches[-1], (*others, *list(self._stretches)[:-1]))

    def _say(self, text: str, others: Iterable[str]) -> None:
        state = self._job.state
        state.notes = (*dict.fromkeys((*others, text)),)
        self._job.say(text)
        self._describe_job({"notes": [*self._job.folder.notes, *state.notes]})
