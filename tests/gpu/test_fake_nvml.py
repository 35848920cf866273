"""The fake library itself: a caller that is killed leaves a whole state behind."""

import os
import signal
import subprocess
import sys

LOCK_FOREVER = """
import sys, pynvml
pynvml.nvmlInit()
handle = pynvml.nvmlDeviceGetHandleByUUID(sys.argv[1])
print("ready", flush=True)
clock = 210
while True:
    clock = 210 + (clock - 195) % 1200
    pynvml.nvmlDeviceSetGpuLockedClocks(handle, clock, clock)
"""


def test_killed_callers_leave_a_state_that_agrees_with_the_history(fake_nvml):
    uuid = fake_nvml.uuids[0]
    for round_number in range(3):
        before = len(fake_nvml.changes())
        caller = subprocess.Popen(
            [sys.executable, "-c", LOCK_FOREVER, uuid],
            env={**os.environ, **fake_nvml.environment},
            stdout=subprocess.PIPE,
            text=True,
        )
        caller.stdout.readline()
        while len(fake_nvml.changes()) < before + 20 * (round_number + 1):
            pass
        caller.send_signal(signal.SIGKILL)
        caller.wait()
        changes = fake_nvml.changes()
        # A killed caller may have written its last line and not yet made the change.
        last = [call.arguments for call in changes[-2:]]
        assert fake_nvml.locked_mhz(uuid) in last
