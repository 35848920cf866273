"""Running `envpipe launch` and its parts."""

import json
import os
import select
import subprocess
import sys
import time
from functools import partial

import commands
import pytest

from envpipe_megatron.launch.options import read

LONG_S = 120
needs_shutdown_timeout = pytest.mark.skipif(
    not hasattr(read(["a.py"]), "shutdown_timeout"), reason="torch 2.11's torchrun has none"
)


run, run_well, run_badly = (
    partial(of, "launch") for of in (commands.run, commands.run_well, commands.run_badly)
)


_RUN_NODES = """
import json, sys
from envpipe_megatron.launch import hosts
grace_s, hosts._LAST_GRACE_S = float(sys.argv[2]), float(sys.argv[3])
sys.exit(hosts.run_nodes(json.loads(sys.argv[1]), grace_s))
"""


class Launcher:
    """A process that runs nodes, given as {host: command}, whose output a test waits for."""

    def __init__(self, nodes, grace_s=LONG_S, last_grace_s=LONG_S, before_exec=None):
        arguments = [json.dumps(nodes), str(grace_s), str(last_grace_s)]
        self.process = subprocess.Popen(
            [sys.executable, "-c", _RUN_NODES, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=before_exec,
        )
        self.read = {self.process.stdout: b"", self.process.stderr: b""}
        self._open = list(self.read)

    @property
    def output(self):
        return self.read[self.process.stdout].decode(errors="surrogateescape")

    @property
    def messages(self):
        return self.read[self.process.stderr].decode(errors="surrogateescape")

    def wait_for(self, *texts):
        """Read until all of these were printed."""
        self._read_until(lambda: all(text in self.output + self.messages for text in texts))

    def end(self):
        """Read to the end; the exit status."""
        self._read_until(lambda: not self._open)
        return self.process.wait(LONG_S)

    def close_output(self):
        self.process.stdout.close()
        self._open.remove(self.process.stdout)

    def _read_until(self, done):
        give_up_s = time.monotonic() + LONG_S
        while not done():
            left_s = max(0, give_up_s - time.monotonic())
            ready, _, _ = select.select(self._open, [], [], left_s)
            assert ready, (self.output, self.messages)
            for pipe in ready:
                chunk = os.read(pipe.fileno(), 1 << 16)
                self.read[pipe] += chunk
                if not chunk:
                    self._open.remove(pipe)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.process.kill()
        self.process.communicate()
