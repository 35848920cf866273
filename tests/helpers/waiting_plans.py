"""Training that waits for its plans, and for an operator, who asks something of a job.

Both come at the same step however busy the host is.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

from fake_gpu import look_until

from envpipe_megatron.formats.wishes import CONTROL_FILE
from envpipe_megatron.runtime.job import parts
from envpipe_megatron.runtime.job.parts import ControlFile
from envpipe_megatron.runtime.job.session import Session
from envpipe_megatron.tuning.background import Background

_start = Background.start


def _start_and_wait(self: Background[Any], make: Callable[[], Any]) -> None:
    _start(self, make)
    assert self._child is not None
    self._child[0].wait()


def plans_are_waited_for() -> AbstractContextManager[Any]:
    """While it lasts, work beside training has ended when it was begun."""
    return patch.object(Background, "start", _start_and_wait)


_look = ControlFile._look
_looks = 0


def _counted(file: ControlFile) -> None:
    global _looks
    _look(file)
    _looks += 1


@contextmanager
def asked_often() -> Iterator[None]:
    """While it lasts, files are looked at again and again."""
    with (
        patch.object(parts, "_LOOK_S", 0.005),
        patch.object(ControlFile, "_look", _counted),
    ):
        yield


def ask(session: Session, text: str | None) -> None:
    """Put the file there, or take it away, on the planning rank; returns when it was looked at."""
    if not session._collectives.is_planner:
        return
    folder = session.parts.folder.path
    assert folder is not None
    path = folder / CONTROL_FILE
    if text is None:
        path.unlink()
    else:
        path.write_text(text)
    seen = _looks
    look_until(lambda: _looks >= seen + 2)
