"""Work beside training, on a thread."""

from __future__ import annotations

import threading

import pytest

from envpipe_megatron.control.background import Background


def test_what_never_ends_is_given_up_and_makes_room():
    background: Background[str] = Background(limit_s=0.0)
    hangs, ended = threading.Event(), threading.Event()

    def hang() -> str:
        hangs.wait(10)
        ended.set()
        return "late"

    background.start(hang)
    with pytest.raises(TimeoutError, match="no end in 0 s"):
        list(iter(background.take, "made"))
    assert not background.busy
    hangs.set()
    assert ended.wait(10)
    assert background.take() is None, "nobody waits for it any more"
    background.start(lambda: "made")
    background._thread.join(10)
    assert background.take() == "made"
