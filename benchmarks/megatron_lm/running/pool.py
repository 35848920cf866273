"""Starts jobs side by side, lets them take turns, ends what hangs, and keeps what they found."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks.megatron_lm.running.jobs import Job, Launch, Site, State, make_launch
from benchmarks.megatron_lm.running.turns import Referee
from benchmarks.megatron_lm.unit_times import median_times

#: The thread that trains is the last in a dump.
_KEPT_OF_A_LOG, _KEPT_OF_STACKS = 1500, 6000
#: A rank in a call of the driver does not hear signals until that returns.
_FOR_STACKS_S = 10.0


@dataclass(frozen=True)
class Limits:
    """When to end what.

    Args:
        deadline_s: on the monotonic clock.
        start_s: until a job's first turn.
        hang_s: without a word of a job that has its turn.
        most_failures: after this many no job is started, since all would fail alike.
        least_s: with less than this left no job is started.
    """

    deadline_s: float
    start_s: float
    hang_s: float
    most_failures: int
    concurrency: int
    least_s: float

    @property
    def left_s(self) -> float:
        """Time until the deadline."""
        return self.deadline_s - time.monotonic()


@dataclass
class _Running:
    job: Job
    launch: Launch
    process: subprocess.Popen[bytes]
    began_s: float

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.began_s


class Pool:
    """Runs jobs and records each in the state as it ends."""

    def __init__(self, site: Site, state: State, referee: Referee, limits: Limits) -> None:
        self._site = site
        self._state = state
        self._referee = referee
        self._limits = limits
        self._running: list[_Running] = []
        self._failures = 0

    def run(self, jobs: Sequence[Job]) -> None:
        """Run what is not done yet, until the deadline at most."""
        waiting = [job for job in jobs if not self._state.done(job)]
        try:
            while waiting or self._running:
                self._start_some(waiting)
                if not self._running:
                    break  # what waits can't begin
                self._referee.poll(0.1)
                for running in list(self._running):
                    self._look_at(running)
        finally:
            for running in list(self._running):
                self._end(running, "interrupted")

    def _start_some(self, waiting: list[Job]) -> None:
        for job in list(waiting):
            full = len(self._running) >= self._limits.concurrency
            late = self._limits.left_s < self._limits.least_s
            if full or late or self._failures >= self._limits.most_failures:
                return
            if job.after is None or self._state.runs.get(job.after, {}).get("status") == "ok":
                waiting.remove(job)
                self._start(job)

    def _start(self, job: Job) -> None:
        folder = job.folder(self._site)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        launch = make_launch(job, self._site, self._referee.path)
        process = launch.start(folder, folder / "torchrun.log")
        self._referee.expect(job.name, job.num_ranks)
        self._running.append(_Running(job, launch, process, time.monotonic()))

    def _look_at(self, running: _Running) -> None:
        job, referee = running.job, self._referee
        limit_s = self._site.ranks_per_gpu * job.limit_s
        if running.process.poll() is not None:
            self._end(running, None)
        elif self._limits.left_s <= 0:
            self._end(running, "out of time")
        elif running.age_s > limit_s:
            self._end(running, f"took more than {limit_s:.0f} s")
        elif not referee.started(job.name) and running.age_s > self._limits.start_s:
            self._end(running, f"trained nothing for {self._limits.start_s:.0f} s")
        elif referee.started(job.name) and referee.silent_s(job.name) > self._limits.hang_s:
            self._end(running, f"hung: no progress for {self._limits.hang_s:.0f} s")

    def _end(self, running: _Running, why: str | None) -> None:
        """Record how a job ended; `why` it is ended, if it has not ended by itself."""
        job = running.job
        ranks = self._referee.ranks(job.name)
        where = {str(rank): [at.at, at.unit] for rank, at in sorted(ranks.items())}
        if why is not None:
            self._kill(running, {rank: at.pid for rank, at in ranks.items()})
        self._running.remove(running)
        self._referee.drop(job.name)
        folder = job.folder(self._site)
        logs = _logs(folder)
        log = "\n".join(logs.values())
        (folder / "log.txt").write_text(log)
        code = running.process.returncode
        status = why or ("ok" if code == 0 else f"exit {code}")
        summary = _read_json(folder / "envpipe" / "summary.json")
        if summary:
            del summary["ranks"]
        ranks_json = (_read_json(folder / f"rank-{rank}.json") for rank in range(job.num_ranks))
        reported = [found for found in ranks_json if found]
        times = median_times(reported)
        for rank in reported:
            del rank["times"]
        found: dict[str, Any] = {
            "status": status,
            "wall_s": round(running.age_s, 1),
            "command": running.launch.shown(),
            "printed": printed_results(log),
            "energies": printed_energies(log),
            "summary": summary,
            "ranks": reported,
            "times": times,
            "blocks": [asdict(block) for block in self._referee.blocks(job.name)],
        }
        if status != "ok":
            self._failures += 1
            found |= {
                "exit": code,
                "stood_at": where,
                "log": _ends(logs),
                "stacks": {
                    path.stem: path.read_text(errors="replace")[-_KEPT_OF_STACKS:]
                    for path in sorted(folder.glob("stacks-*.txt"))
                },
            }
        self._state.keep(job, **found)
        click.echo(f"{job.name}: {status} ({running.age_s:.0f} s)")

    def _kill(self, running: _Running, pids: Mapping[int, int]) -> None:
        """Let the ranks write their stacks, then end all processes of the job."""
        folder = running.job.folder(self._site)
        for pid in pids.values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
        stacks = [folder / f"stacks-{rank}.txt" for rank, pid in pids.items() if _lives(pid)]
        give_up_s = time.monotonic() + _FOR_STACKS_S
        while time.monotonic() < give_up_s and not all(_told(path) for path in stacks):
            time.sleep(0.1)
        # The ranks die with torchrun (`entry`).
        with suppress(ProcessLookupError):
            os.killpg(running.process.pid, signal.SIGKILL)
        running.process.wait()


def _lives(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def _told(stacks: Path) -> bool:
    """Whether a dump is there to its end: the thread that trains is the last in it."""
    return stacks.exists() and "in <module>" in stacks.read_text(errors="replace")[-200:]


def _logs(folder: Path) -> dict[str, str]:
    files = sorted(folder.glob("ranks/*/attempt_0/*/std*.log"))
    named = {f"rank {file.parent.name}, {file.stem}": file for file in files}
    named = {"torchrun": folder / "torchrun.log", **named}
    return {name: file.read_text(errors="replace") for name, file in named.items()}


def _ends(logs: Mapping[str, str]) -> str:
    return "\n".join(f"--- {name}\n{text[-_KEPT_OF_A_LOG:]}" for name, text in logs.items() if text)


def _read_json(path: Path) -> Any:
    """None where it is not there, or not whole."""
    with suppress(OSError, ValueError):
        return json.loads(path.read_text())
    return None


def run_jobs(site: Site, state: State, jobs: Sequence[Job], limits: Limits, **turns: Any) -> None:
    """Run jobs; `turns` are options of `Referee`."""
    site.scratch.mkdir(parents=True, exist_ok=True)
    path = site.scratch / "turns"
    path.unlink(missing_ok=True)
    referee = Referee(path, **turns)
    try:
        Pool(site, state, referee, limits).run(jobs)
    finally:
        referee.close()


def printed_results(log: str) -> list[dict[str, str]]:
    """Names and digits that Megatron prints of iterations and evaluations, but time and energy."""
    lines = []
    for line in log.splitlines():
        iteration = re.search(r"\] iteration +(\d+)/ *\d+ \|(.*)", line)
        evaluation = re.search(r"validation loss at ([^|]*)\|(.*)", line)
        if iteration:
            lines.append({"iteration": iteration[1], **_numbers(iteration[2])})
        elif evaluation:
            lines.append({"evaluated": evaluation[1].strip(), **_numbers(evaluation[2])})
    return lines


#: The last are of lines of other ranks that may get in between where ranks share a log.
_NOT_A_RESULT = re.compile(
    r"elapsed time|throughput|energy|power|envpipe|footprint|parameters in|in-flight", re.IGNORECASE
)


def _numbers(text: str) -> dict[str, str]:
    pairs = [part.rsplit(":", 1) for part in text.split("|") if ":" in part]
    return {name.strip(): value.strip() for name, value in pairs if not _NOT_A_RESULT.search(name)}


def printed_energies(log: str) -> list[dict[str, Any]]:
    """What Megatron's monitor and EnvPipe print of a log interval, J an iteration and GPU."""
    lines = []
    for number, text in re.findall(r"\] iteration +(\d+)/ *\d+ \|(.*)", log):
        megatron = re.search(r"\| energy per GPU \(J/iter/GPU\): ([\d.]+)", text)
        envpipe = re.search(r"envpipe energy per GPU \(J/iter/GPU\): ([\d.]+)", text)
        elapsed = re.search(r"elapsed time per iteration \(ms\): ([\d.]+)", text)
        if megatron and elapsed:
            envpipe_j = float(envpipe[1]) if envpipe else None
            found = int(number), float(megatron[1]), envpipe_j, float(elapsed[1])
            names = "iteration", "megatron_j", "envpipe_j", "iteration_ms"
            lines.append(dict(zip(names, found, strict=True)))
    return lines
