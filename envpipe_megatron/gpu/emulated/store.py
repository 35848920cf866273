"""Files of the emulated GPUs of a node: one state file a GPU, shared by every process.

A writer holds an exclusive `flock` on a lock file, writes the whole state beside the state file and
renames it over. The rename is atomic, so a reader needs no lock and never sees half a state, and a
process that is killed at any point leaves the old state or the new one; its lock dies with it.
Nothing is synced to disk: the state need not survive the machine.
"""

import fcntl
import os
import re
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from envpipe_megatron.gpu.base import GpuError
from envpipe_megatron.gpu.emulated.state import EmulatedState, parse_state

ROOT_VARIABLE = "ENVPIPE_EMULATED_ROOT"
_STATE_NAME = re.compile(r"gpu(0|[1-9][0-9]*)\.json")

Result = TypeVar("Result")


def default_root() -> Path:
    """Return the folder of this node's GPUs: ENVPIPE_EMULATED_ROOT, or one per machine and user."""
    given = os.environ.get(ROOT_VARIABLE)
    if given:
        return Path(given)
    # The host's name, because the temporary folder may be one that several machines share.
    name = f"envpipe-emulated-{socket.gethostname()}-{os.getuid()}"
    return Path(tempfile.gettempdir()) / name


def stored_indices(root: Path) -> tuple[int, ...]:
    """Return the indices of the GPUs that have a state file in a folder, ascending."""
    matches = (_STATE_NAME.fullmatch(path.name) for path in root.glob("gpu*.json"))
    return tuple(sorted(int(match[1]) for match in matches if match))


class StateFile:
    """The state file of one emulated GPU, in the folder of its node."""

    def __init__(self, root: Path, index: int) -> None:
        self.path = root / f"gpu{index}.json"
        self._lock_path = root / f"gpu{index}.lock"
        self._new_path = root / f"gpu{index}.json.new"

    def read(self) -> EmulatedState:
        """Return the state; GpuError if there is none, or the file is not one."""
        try:
            text = self.path.read_bytes()
        except FileNotFoundError as error:
            known = stored_indices(self.path.parent)
            raise GpuError(
                "There is no such emulated GPU",
                value=str(self.path),
                remedy=f"Known in this folder: {', '.join(map(str, known)) or 'none'}. Create it "
                f"with EmulatedGpu.create, or point {ROOT_VARIABLE} at the right folder",
            ) from error
        except OSError as error:
            raise self._broken(f"cannot be read: {error}") from error
        try:
            return parse_state(text)
        except ValueError as error:
            raise self._broken(str(error)) from error

    def change(self, work: Callable[[EmulatedState], Result]) -> Result:
        """Have `work` change the state, alone, and write it when that ends without error.

        Raises GpuError if the state is missing or wrong, or cannot be written.
        """

        def change_state() -> Result:
            state = self.read()
            result = work(state)
            self._write(state)
            return result

        return self._alone(change_state)

    def create(self, fresh: EmulatedState) -> EmulatedState:
        """Write `fresh` if no state exists; return the state that is there then.

        Raises GpuError if the folder cannot be used, or holds a foreign file there.
        """
        try:
            # Private to the user: other processes trust what is written here.
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise self._unusable(error) from error

        def write_unless_there() -> EmulatedState:
            if self.path.exists():
                return self.read()
            self._write(fresh)
            return fresh

        return self._alone(write_unless_there)

    def _alone(self, work: Callable[[], Result]) -> Result:
        """Do `work` under the lock.

        Not a context manager: a signal handler may raise between its lines and the block, and what
        its traceback then keeps locked is what the way out, which resets the clock, waits for. In
        one frame Python looks for signals only if `finally` follows or nothing is locked.
        """
        descriptor = self._open_lock()
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            return work()
        finally:
            # Closing alone would not do: a child that was forked meanwhile keeps file and lock.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def _open_lock(self) -> int:
        # Opened each time: a lock belongs to the opened file, so threads exclude each other.
        try:
            return os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if not self.path.parent.exists():
                self.read()  # says that there is no such GPU
            raise self._unusable(error) from error

    def _write(self, state: EmulatedState) -> None:
        # One name for the new file is enough under the lock, and what a killed writer left of it
        # is overwritten instead of piling up.
        try:
            self._new_path.write_bytes(state.to_json())
            self._new_path.replace(self.path)
        except OSError as error:
            raise self._unusable(error) from error

    def _broken(self, problem: str) -> GpuError:
        return GpuError(
            f"The state of an emulated GPU is unusable: {problem}",
            value=str(self.path),
            remedy="End the jobs that use it and delete the file; the GPU starts afresh",
        )

    def _unusable(self, error: OSError) -> GpuError:
        return GpuError(
            f"Cannot write the state of an emulated GPU: {error}",
            value=str(self.path),
            remedy=f"Point {ROOT_VARIABLE} at a folder of your own with free space",
        )
