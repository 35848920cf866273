"""A GPU whose clock a site's own command changes: for sites that grant only a sudo script.

The command is an argv of the site configuration (`gpu.site`), run without a shell, without standard
input, in its own environment. What is put into it cannot carry anything else: the UUID must match a
strict pattern, index and clock are numbers. Everything is read through the back end that lists the
GPU, which needs no rights for that.

A command should end within the site's time limit by itself: this process stops one that runs on,
but a program that sudo started belongs to root, and its caller may have no right to stop it.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from envpipe_megatron.child import open_memory
from envpipe_megatron.gpu.base import SAFE_UID, GpuError, ReadThroughGpu
from envpipe_megatron.gpu.registry import Device, VendorGpu
from envpipe_megatron.gpu.site import PLACEHOLDER, SiteConfig

_ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
"""All that a command gets: nothing of the training job's environment reaches what sudo runs."""

_TAIL_BYTES = 2000
_STOP_S = 1.0


class CommandGpu(ReadThroughGpu):
    """One GPU under a site's commands.

    Where a command names it by index, that is looked up each time: a reset or a reboot may change
    it. Raises GpuError if the site has no commands, or the GPU's uid is not a UUID.
    """

    backend = "command"

    def __init__(self, reader: VendorGpu, site: SiteConfig) -> None:
        super().__init__(reader)
        if not site.lock_command:
            raise GpuError(
                "This site has no commands that change clocks",
                value=str(site.path) if site.path else None,
                remedy="Set lock_command and reset_command in the site configuration",
            )
        if not SAFE_UID.fullmatch(reader.address.uid):
            raise GpuError("Not the UUID of a whole GPU", value=reader.address.uid)
        self._site, self._listed = site, reader
        # The limit and the time for stopping: how long a command of a killed caller may run.
        self.late_request_s = site.command_time_limit_s + 2 * _STOP_S

    @classmethod
    def rights(cls, site: SiteConfig, devices: Sequence[Device]) -> str:
        """Return the evidence that this user can run the site's commands; GpuError if not."""
        if not site.lock_command:
            where = f"in {site.path}" if site.path else "(there is no site configuration)"
            raise GpuError(
                f"no lock_command is set {where}",
                remedy="Set lock_command and reset_command in the site configuration",
            )
        for program in (site.lock_command[0], site.reset_command[0]):
            if not os.access(program, os.X_OK) or not Path(program).is_file():
                raise GpuError(
                    f"this user cannot run {program}",
                    remedy=f"Correct the command in {site.path}, or make it executable",
                )
        return f"{site.path} names commands that this user can run"

    def _lock(self, frequency_mhz: int) -> None:
        self._run(self._site.lock_command, {"mhz": str(int(frequency_mhz))})

    def _reset(self) -> None:
        self._run(self._site.reset_command, {})

    def _run(self, command: Sequence[str], more: Mapping[str, str]) -> None:
        values = {"uuid": self.address.uid, **more}
        if any("{index}" in part for part in command):
            values["index"] = str(int(self._listed.device().index))
        # In one pass, so that nothing that was put in is read as a placeholder again.
        argv = [PLACEHOLDER.sub(lambda match: values[match[1]], part) for part in command]
        what, path = f"The site's command for {self.name}", self._site.path
        if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:  # as in a rank without a guard
            raise GpuError(
                f"{what} is not run where SIGCHLD is ignored: nobody would learn that it failed",
                remedy="Guards, the job's next start and `envpipe clocks reset` run it",
            )
        # A file and not a pipe: a pipe stays open as long as any descendant lives. In memory, so
        # that a full disk does not keep a clock locked.
        with os.fdopen(open_memory(), "rb") as errors:
            try:
                process = subprocess.Popen(
                    argv,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                    env=_ENVIRONMENT,
                    cwd="/",
                    start_new_session=True,
                )
            except OSError as error:
                raise GpuError(
                    f"{what} cannot be run: {error.strerror}",
                    value=argv[0],
                    remedy=f"Correct the command in {path}, or make it executable",
                ) from error
            limit_s = self._site.command_time_limit_s
            try:
                status = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                end = "was stopped" if _stop(process) else "could not be stopped: it may still act"
                raise GpuError(
                    f"{what} took longer than its limit of {limit_s:g} s and {end}"
                    f"{_tail(errors.fileno())}",
                    value=argv,
                    remedy=f"Run it by hand, or raise command_time_limit_s in {path}",
                ) from None
            if status != 0:
                raise GpuError(
                    f"{what} failed with status {status}{_tail(errors.fileno())}",
                    value=argv,
                    remedy="Run it by hand as this user; a sudo rule must not ask for a password",
                )


def _stop(process: subprocess.Popen[bytes]) -> bool:
    """End a command and its descendants; return whether it is gone.

    Politely first: sudo hands SIGTERM on to what it runs, and cannot hand on SIGKILL.
    """
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        give_up_s = time.monotonic() + _STOP_S
        # Seen but not reaped, so that the group's number cannot become another's before SIGKILL.
        seen = os.WEXITED | os.WNOWAIT | os.WNOHANG
        while os.waitid(os.P_PID, process.pid, seen) is None and time.monotonic() < give_up_s:
            time.sleep(0.01)
    return process.poll() is not None


def _tail(errors: int) -> str:
    """Return the end of what a command wrote to standard error, for a message."""
    size = os.fstat(errors).st_size
    text = os.pread(errors, _TAIL_BYTES, max(0, size - _TAIL_BYTES)).decode(errors="replace")
    # One line, and no control characters: this ends up in logs and on terminals.
    shown = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return f"; it said: {shown}" if shown else ""
