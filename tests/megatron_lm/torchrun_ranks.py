"""Starts ranks under torchrun on the CPU, and ends all that they started."""

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

# The variable by which everything that a run started is found again.
_MARK = "ENVPIPE_TEST_RUN"


@dataclass(frozen=True)
class Ended:
    """Ranks that have ended.

    Attributes:
        returncode: Of torchrun; None when the run was ended since it took too long. The stacks of
            all threads of all ranks are then in `outputs`.
        outputs: What each rank printed, to stdout and stderr.
        torchrun: What torchrun printed.
        folder: The working directory.
    """

    returncode: int | None
    outputs: tuple[str, ...]
    torchrun: str
    folder: Path

    def require_success(self) -> Self:
        """The same; an AssertionError with what the ranks said where they failed."""
        if self.returncode != 0:
            ended = "took too long" if self.returncode is None else f"exit {self.returncode}"
            tails = [
                f"--- rank {rank}\n{output[-2500:]}" for rank, output in enumerate(self.outputs)
            ]
            raise AssertionError("\n".join([ended, *tails, "--- torchrun", self.torchrun[-1000:]]))
        return self


def run_ranks(
    program: Sequence[str],
    script: Path,
    folder: Path,
    *,
    nproc: int,
    env: Mapping[str, str],
    timeout_s: float,
) -> Ended:
    """Run ranks under torchrun, until they end.

    Args:
        program: What goes after torchrun's options.
        script: What of it prints the stacks of its threads on SIGUSR1.
        folder: A new folder for the logs; also the working directory.
        nproc: Number of ranks.
        env: Environment variables on top of this process's.
        timeout_s: After this time the ranks print their stacks, and all are killed.
    """
    folder.mkdir(parents=True)
    mark = uuid.uuid4().hex
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(nproc), "--redirects", "3", "--log-dir", "logs", *program]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPYCACHEPREFIX": str(folder.parent / "pycache"),
        **env,
        _MARK: mark,
    }
    torchrun = folder / "torchrun.txt"
    with torchrun.open("w") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
        returncode: int | None = None
        try:
            returncode = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            _print_stacks(mark, script, folder)
        finally:
            _kill(process, mark)
    outputs = tuple(_output(folder, rank) for rank in range(nproc))
    return Ended(returncode, outputs, torchrun.read_text(errors="replace"), folder)


def _output(folder: Path, rank: int) -> str:
    found = sorted(folder.glob(f"logs/*/attempt_0/{rank}/std*.log"), reverse=True)
    return "\n".join(file.read_text(errors="replace") for file in found)


def started_by(mark: str) -> list[int]:
    """All processes of a run; no process group holds them: torchrun's ranks lead their own."""
    pids = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"{_MARK}={mark}".encode() in environ.read_bytes().split(b"\0"):
                pids.append(int(environ.parent.name))
    return pids


def _print_stacks(mark: str, script: Path, folder: Path) -> None:
    """Let each rank print the stacks of its threads, which the script does on SIGUSR1."""
    ranks = list(folder.glob("logs/*/attempt_0/*/stderr.log"))
    for pid in started_by(mark):
        with contextlib.suppress(OSError):
            if str(script).encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:5]:
                os.kill(pid, signal.SIGUSR1)
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and not all("Current thread" in r.read_text() for r in ranks):
        time.sleep(0.1)


def _kill(process: subprocess.Popen[bytes], mark: str) -> None:
    while pids := [pid for pid in started_by(mark) if process.poll() is None or pid != process.pid]:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.poll()
    process.wait()
