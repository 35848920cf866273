"""One rank is killed or stopped in mid-training: when do the others end, and what had they made?

The ranks are started without torchrun, whose agent would end them all, and their store is ours, so
that no rank takes it along.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import click
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch does not list it

from benchmarks.megatron_lm.equality import size_of
from benchmarks.megatron_lm.models import (
    ENVPIPE,
    NO_EVALUATION,
    PP2,
    PP4,
    Planned,
    job_arguments,
    training,
)
from benchmarks.megatron_lm.running.jobs import Job, Launch, Site, State, free_port, make_launch
from benchmarks.megatron_lm.running.pool import Limits
from benchmarks.megatron_lm.running.turns import Referee

PART = "lost"
_WARMUP = 3
#: Without a sign of a neighbour, for the channel and for NCCL's watchdog.
_TIMEOUT_MINUTES = 1
#: How long ranks may go on after the loss of one, s.
_MOST_S = 240.0
_POLL_S = 0.01
_KEPT_OF_A_LOG, _KEPT_OF_AN_ERROR = 4000, 200
#: The channel's, or any.
_LOSS, _ERROR = re.compile(r"Stage \d+ lost .*"), re.compile(r"\w*Error: .*")


def jobs(site: Site) -> list[Job]:
    """An undisturbed job, and one for each rank that is killed, and for one that is stopped."""
    size, iterations = size_of(site.cpu), 14 if site.cpu else 40
    mapping = PP4 if site.num_ranks >= PP4.num_ranks else PP2
    plan = Planned(mapping, size.microbatches, ENVPIPE)
    undisturbed = Job(
        name=f"{PART}/{mapping.name}/undisturbed",
        arguments=job_arguments(
            site.cpu,
            size,
            mapping,
            size.mock_data,
            training(iterations),
            f"--distributed-timeout-minutes {_TIMEOUT_MINUTES} {NO_EVALUATION} --bf16",
            plan.arguments(_WARMUP),
        ),
        num_ranks=mapping.num_ranks,
        iterations=iterations,
        patched=True,
        plan=plan,
        lost={"signal": None},
    )
    source = random.Random(20)
    losses = [("SIGKILL", rank) for rank in range(mapping.num_ranks)] + [("SIGSTOP", 1)]
    return [undisturbed] + [
        replace(
            undisturbed,
            name=f"{PART}/{mapping.name}/{name.lower()} of rank {rank}",
            after=undisturbed.name,
            lost={
                "signal": name,
                "rank": rank,
                "iteration": source.randint(iterations // 2, iterations - 4),
                # Amid the units of its host: else all may stand in a collective of Megatron's, for
                # which NCCL waits twice its time-out (121 s were seen).
                "unit": source.randint(2, size.microbatches),
            },
        )
        for name, rank in losses
    ]


def run_jobs(site: Site, state: State, made: Sequence[Job], limits: Limits) -> None:
    """Run what is not done yet, one job after the other."""
    for job in made:
        before = state.runs.get(job.after, {}) if job.after else {"status": "ok"}
        if state.done(job) or before.get("status") != "ok" or limits.left_s < limits.least_s:
            continue
        began_s = time.monotonic()
        found = _Run(job, site, limits).run(before.get("steps"))
        state.keep(job, wall_s=round(time.monotonic() - began_s, 1), **found)
        click.echo(f"{job.name}: {found['status']} ({time.monotonic() - began_s:.0f} s)")


class _Run:
    def __init__(self, job: Job, site: Site, limits: Limits) -> None:
        self._job = job
        self._limit_s = site.ranks_per_gpu * job.limit_s
        self._limits = limits
        self._folder = job.folder(site)
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        path = site.scratch / "turns"
        path.unlink(missing_ok=True)
        self._referee = Referee(path)
        self._referee.expect(job.name, job.num_ranks)
        self._launch = make_launch(job, site, path, by_torchrun=False)
        port = free_port()
        timeout = timedelta(minutes=5)
        self._store = TCPStore("127.0.0.1", port, None, True, timeout, wait_for_workers=False)
        self._processes = [
            _start(self._launch, rank, job.num_ranks, port, self._folder)
            for rank in range(job.num_ranks)
        ]
        #: When each rank's end was seen.
        self._ended_s: dict[int, float] = {}

    def run(self, undisturbed: Sequence[Any] | None) -> dict[str, Any]:
        """How it ended; `undisturbed` are the steps that are made if no rank is lost."""
        found: dict[str, Any] = {"command": self._launch.shown()}
        try:
            if self._job.lost is None or self._job.lost["signal"] is None:
                self._poll(lambda: len(self._ended_s) == self._job.num_ranks, self._limit_s)
                codes = [process.returncode for process in self._processes]
                found["status"] = "ok" if set(codes) == {0} else f"exits {codes}"
                found["steps"] = self._steps()
            else:
                found |= self._lose(self._job.lost, undisturbed or ())
        finally:
            for process in self._processes:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            self._referee.close()
        logs = [self._log(rank) for rank in range(self._job.num_ranks)]
        (self._folder / "log.txt").write_text("\n".join(logs))
        if found["status"] != "ok":
            found["log"] = "\n".join(log[-_KEPT_OF_A_LOG:] for log in logs)
        return found

    def _lose(self, lost: Any, undisturbed: Sequence[Any]) -> dict[str, Any]:
        """Send the signal at a unit of an iteration, and see what the others do."""
        rank = lost["rank"]
        wanted = lost["iteration"], lost.get("unit", 0)
        self._poll(lambda: self._at(rank) >= wanted or bool(self._ended_s), self._limit_s)
        if self._at(rank) < wanted or self._ended_s:
            return {"status": "ended or hung before anything was lost"}
        os.kill(self._processes[rank].pid, signal.Signals[lost["signal"]])
        lost_s = time.monotonic()
        others = [other for other in range(self._job.num_ranks) if other != rank]
        self._poll(lambda: all(other in self._ended_s for other in others), _MOST_S)
        after_s = {
            other: self._ended_s[other] - lost_s for other in others if other in self._ended_s
        }
        (at, unit), steps = self._at(rank), self._steps()
        found = {
            "iteration": at,
            "unit": unit,
            "ended_after_s": after_s,
            "exits": {other: self._processes[other].returncode for other in after_s},
            "errors": {other: _error(self._log(other)) for other in others},
            "steps": [len(made) for made in steps],
        }
        # The iteration that the lost rank was in may have been ended by the others.
        beyond = [one for one in range(len(steps)) if len(steps[one]) > at + 1]
        different = [
            one
            for one, (made, known) in enumerate(zip(steps, undisturbed, strict=True))
            if made != known[: len(made)]
        ]
        still = [other for other in others if other not in after_s]
        went_on_s = time.monotonic() - lost_s
        wrong = [
            *["out of time"] * (self._limits.left_s <= 0),
            *[f"ranks {still} went on for {went_on_s:.0f} s"] * bool(still),
            *[f"ranks {beyond} made a step without the lost rank"] * bool(beyond),
            *[f"ranks {different} made other steps"] * bool(different),
        ]
        return found | {"status": "; ".join(wrong) or "ok"}

    def _poll(self, reached: Callable[[], bool], most_s: float) -> None:
        give_up_s = time.monotonic() + min(most_s, self._limits.left_s)
        while not reached() and time.monotonic() < give_up_s:
            self._referee.poll(_POLL_S)
            for rank, process in enumerate(self._processes):
                if process.poll() is not None:
                    self._ended_s.setdefault(rank, time.monotonic())

    def _at(self, rank: int) -> tuple[int, int]:
        """The iteration that a rank is in, and how many of its units have begun, if it tells."""
        ranks = self._referee.ranks(self._job.name)
        return (ranks[rank].at, int(ranks[rank].unit or 0)) if rank in ranks else (-1, 0)

    def _steps(self) -> list[list[Any]]:
        """What each rank has kept of each step; a line that was not ended is none."""
        files = [self._folder / f"steps-{rank}.jsonl" for rank in range(self._job.num_ranks)]
        texts = [file.read_text() if file.exists() else "" for file in files]
        return [[json.loads(line) for line in text.split("\n")[:-1]] for text in texts]

    def _log(self, rank: int) -> str:
        return _log_file(self._folder, rank).read_text(errors="replace")


def _log_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.log"


def _start(
    launch: Launch, rank: int, num_ranks: int, port: int, folder: Path
) -> subprocess.Popen[bytes]:
    return launch.start(
        folder,
        _log_file(folder, rank),
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(num_ranks),
        LOCAL_WORLD_SIZE=str(num_ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        # The store is there already.
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT="0",
    )


def _error(log: str) -> str:
    """The channel's error of a log, else its first one."""
    found = _LOSS.search(log) or _ERROR.search(log)
    return found[0][:_KEPT_OF_AN_ERROR] if found else ""


def rows(state: State) -> list[dict[str, Any]]:
    """For each loss, how long until all others had ended, and what they had made by then."""
    found = []
    for name, run in state.runs.items():
        if name.startswith(f"{PART}/") and "ended_after_s" in run:
            setting, loss = name.split("/")[1:]
            found.append(
                {
                    "setting": setting,
                    "loss": loss,
                    "in iteration": run["iteration"],
                    "units begun": run.get("unit"),
                    "last end after (s)": max(run["ended_after_s"].values(), default=None),
                    "exits": ", ".join(f"{r}: {code}" for r, code in run["exits"].items()),
                    "steps made": ", ".join(map(str, run["steps"])),
                    "outcome": run["status"],
                    "errors": "; ".join(f"{r}: {e}" for r, e in run["errors"].items()),
                }
            )
    return found
