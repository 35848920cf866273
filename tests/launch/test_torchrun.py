"""What becomes of ranks whose torchrun was killed."""

import os
import signal
import subprocess
import sys

from envpipe_megatron.launch import torchrun

DEAF = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
signal.pause()
"""


def test_what_outlives_a_killed_torchrun_is_told_to_end_then_killed(monkeypatch):
    monkeypatch.setattr(torchrun, "_RANKS_END_S", 0.2)

    def start(mark, *command):
        environment = {**os.environ, torchrun._MARK_VARIABLE: mark}
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)

    with (
        start("its own", sys.executable, "-c", DEAF) as deaf,
        start("its own", "sleep", "60") as rank,
        start("another's", "sleep", "60") as stranger,
    ):
        try:
            assert deaf.stdout.readline() == "ready\n"
            torchrun._end_marked("its own")
            assert rank.poll() == -signal.SIGTERM
            assert deaf.poll() == -signal.SIGKILL
            assert stranger.poll() is None
        finally:
            for process in (deaf, rank, stranger):
                process.kill()
