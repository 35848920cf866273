"""Training that waits for its plans: they come at the same step however busy the host is."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from envpipe_megatron.tuning.background import Background

_start = Background.start


def _start_and_wait(self: Background[Any], make: Callable[[], Any]) -> None:
    _start(self, make)
    assert self._child is not None
    self._child[0].wait()


def plans_are_waited_for() -> AbstractContextManager[Any]:
    """While it lasts, work beside training has ended when it was begun."""
    return patch.object(Background, "start", _start_and_wait)
