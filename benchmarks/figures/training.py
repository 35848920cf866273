"""Starts ranks for the runs that nobody has done yet, and shows how far they are."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.figures.outcome import Outcome
from benchmarks.figures.requests import RESULT_FILE, Batch, RunRequest
from benchmarks.figures.unit_times import write_scaled_preset
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.quickstart.ranks import (
    ended_like_ctrl_c,
    events_of,
    rank_environment,
    started_ranks,
    torchrun_command,
)

_CHECKOUT = Path(__file__).resolve().parents[2]


def train(requests: Iterable[RunRequest], folder: Path, console: Console) -> None:
    """Do those of the runs that have no result in a folder yet, and the profiles they need.

    Raises EnvPipeError where a rank failed; runs that ended before keep their results.
    """
    wanted = list(requests)
    missing = [request for request in wanted if read_result(folder, request) is None]
    for request in wanted:
        if request not in missing:
            _say(console, f"{request.key}: done before", "dim")
    for batch in batches(missing, folder):
        _train_batch(batch, console)


def batches(requests: Sequence[RunRequest], folder: Path) -> list[Batch]:
    """The runs in the order in which ranks do them, with missing profiles before their users."""
    by_ranks: dict[tuple[int, int], list[RunRequest]] = {}
    for request in requests:
        runs = by_ranks.setdefault((request.job.stages, request.job.replicas), [])
        profiling = request.profiling()
        is_missing = request.needs_profile and read_result(folder, profiling) is None
        if is_missing and profiling not in runs:
            runs.append(profiling)
        if request not in runs:
            runs.append(request)
    return [Batch(tuple(runs), folder) for runs in by_ranks.values()]


def read_result(folder: Path, request: RunRequest) -> Outcome | None:
    """The outcome of a run; None if it did not end."""
    path = folder / request.key / RESULT_FILE
    return Outcome.read(path) if path.is_file() else None


def _train_batch(batch: Batch, console: Console) -> None:
    batch.folder.mkdir(parents=True, exist_ok=True)
    for request in batch.requests:
        run = batch.folder / request.key
        shutil.rmtree(run, ignore_errors=True)  # what was left half done would be appended to
        if request.emulated:
            write_scaled_preset(request.job.gpu, request.emulated.factor, run)
    path, log_path = batch.folder / "batch.pickle", batch.folder / "log.txt"
    path.write_bytes(pickle.dumps(batch))
    job = batch.requests[0].job
    command = torchrun_command(
        job.stages * job.replicas, ["--module", "benchmarks.figures.worker", str(path)]
    )
    pids: list[int] = []
    with (
        ended_like_ctrl_c(signal.SIGTERM, signal.SIGHUP),
        tempfile.TemporaryDirectory() as emulated,
        log_path.open("w") as log,
        started_ranks(command, _environment(Path(emulated)), log, Path(emulated), pids) as ranks,
    ):
        done = 0
        for event in events_of(ranks, log):
            match event["event"]:
                case "rank":
                    pids.append(event["pid"])
                case "begun":
                    done += 1
                    _say(console, f"{done} of {len(batch.requests)}: {event['key']}")
                case "say":
                    _say(console, f"  {event['text']}", "dim")
        code = ranks.wait()
    if code != 0:
        raise EnvPipeError(
            f"A rank failed (exit code {code})", remedy=f"The first error is in {log_path}."
        )


def _say(console: Console, text: str, style: str | None = None) -> None:
    console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)


def _environment(emulated: Path) -> dict[str, str]:
    environment = rank_environment(emulated)
    paths = [str(_CHECKOUT), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    # On GPUs, kernels must be loaded before any receive spins, and receives need queues.
    environment.setdefault("CUDA_MODULE_LOADING", "EAGER")
    environment.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    return environment
