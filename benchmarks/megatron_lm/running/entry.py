"""Runs a checkout's pretrain_gpt.py and reports on it; the same for every run that is compared.

    torchrun ... entry.py JOB.json MEGATRON-ARGUMENTS...

No file of the checkout is touched: `train_step` is wrapped in memory, to take turns with the ranks
of other jobs and to record losses and gradient norms. envpipe_megatron is imported only where
--envpipe is among the arguments, so that what a checkout imports by itself can be seen. What
EnvPipe refuses until it is proven is lifted here, in memory, for jobs that are to prove it.
"""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import inspect
import json
import math
import os
import runpy
import signal
import socket
import sys
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1


class Turns:
    """This rank's side of taking turns, so that jobs which share GPUs never compute together.

    Turn k begins when `turns.Referee` says so and ends at the beginning of the iteration after its
    last, when the device has done all of it. While a job waits, its ranks sleep in a read of a
    socket. The first turn begins before the first iteration: jobs whose transfers wait on the same
    GPUs take two minutes for what one alone does in three seconds. Without `lengths`, the
    iterations of each turn, one turn lasts until training ends.
    """

    def __init__(
        self, path: str, run: str, rank: int, lengths: Sequence[int], iterations: int
    ) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._replies = self._socket.makefile("r")
        self._boundaries = [0]
        for length in lengths:
            self._boundaries.append(self._boundaries[-1] + length)
        self._ends = {*self._boundaries[1:], iterations}
        self._iterations = iterations
        self._turn = 0
        #: When iterations of the present turn began, as the host sees it.
        self._begins_s: list[float] = []
        self._gone = False
        #: Iterations that have begun.
        self.begun = 0
        #: Called when a turn has ended, before the next one begins.
        self.between: Callable[[], None] = lambda: None
        self._tell(hello=run, rank=rank, pid=os.getpid())

    @property
    def turn(self) -> int:
        """The turn of the iteration that has begun last; the first is 0."""
        return bisect_right(self._boundaries, self.begun - 1) - 1

    @property
    def next_turn(self) -> int:
        """The turn of the iteration that begins next."""
        return bisect_right(self._boundaries, self.begun) - 1

    @property
    def at_end_of_turn(self) -> bool:
        """Whether the present iteration is the last of a turn."""
        return self.begun in self._ends

    def before_iteration(self) -> bool:
        """Tell that an iteration begins, when it is this job's turn; whether it is to begin."""
        if self.begun in self._boundaries[self._turn :]:
            end = self._end_of_turn()
            self.between()
            self._tell(ready=self._turn, **end)
            answer = json.loads(self._replies.readline() or '{"gone": true}')
            if "gone" in answer:
                raise SystemExit("The script that runs the comparison is gone")
            if "end" in answer:
                return False
            self._turn += 1
            self._begins_s.clear()
        self._begins_s.append(time.monotonic())
        self.at(self.begun)
        self.begun += 1
        return True

    def at(self, iteration: int, unit: str = "") -> None:
        """Tell where this rank stands."""
        self._tell(at=iteration, unit=unit)

    def after_iteration(self) -> None:
        """Tell that the last iteration has ended, where this was it."""
        if self.begun == self._iterations:
            self._tell(finished=True, **self._end_of_turn())

    def _end_of_turn(self) -> dict[str, Any]:
        synchronize()
        return {"begins_s": self._begins_s, "end_s": time.monotonic(), "memory": memory()}

    def _tell(self, **message: Any) -> None:
        if self._gone:
            return
        try:
            self._socket.sendall((json.dumps(message) + "\n").encode())
        except OSError:  # the run was given up; it is being killed
            self._gone = True


class Recorder:
    """What a rank's train steps returned, kept without waiting for the device."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._steps: list[tuple[dict[str, Any], Any, Any]] = []
        self.last_returned: Sequence[Any] = ()
        #: Most bytes allocated in the forward-backward function at the end of a turn.
        self.forward_backward_bytes: int | None = None
        #: Of the last training iteration that EnvPipe's session executed.
        self.executed: list[str] = []
        self.phase: str | None = None
        #: Iterations of each phase, and how many different orders they ran on this rank.
        self.orders: dict[str, int] = {}
        self.different_orders: set[tuple[str, ...]] = set()
        #: How often units waited for the whole device, on purpose.
        self.device_waits = 0
        self._records: list[Any] = []

    def add(self, returned: Sequence[Any]) -> None:
        """Keep one step's losses, whether it was skipped, and its gradient norm."""
        self.last_returned = returned
        self._steps.append((dict(returned[0]), returned[1], returned[5]))

    def add_times(self, record: Any) -> None:
        """Keep EnvPipe's record of an iteration, which is not to be read yet."""
        self._records.append(record)

    def count_device_wait(self) -> None:
        """A unit has waited for the whole device."""
        self.device_waits += 1

    def result(self) -> dict[str, Any]:
        """Everything as JSON, numbers to the last bit."""
        return {
            "rank": self._rank,
            "losses": [{k: _hex(v) for k, v in losses.items()} for losses, _, _ in self._steps],
            "skipped": sum(bool(skipped) for _, skipped, _ in self._steps),
            "grad_norms": [_hex(norm) for _, _, norm in self._steps],
            "forward_backward_bytes": self.forward_backward_bytes,
            "executed": self.executed,
            "phase": self.phase,
            "orders": self.orders,
            "different_orders": len(self.different_orders),
            "device_waits": self.device_waits,
            # Of each iteration that is measured, when it began, and its units began and ended.
            "times": [
                (each.begin_s, each.start_s.round(7).tolist(), each.end_s.round(7).tolist())
                for each in self._records
            ],
            "imported_envpipe": any(n.split(".")[0] == "envpipe_megatron" for n in sys.modules),
        }


def main() -> None:
    """Run the script of the job file with the arguments after it."""
    job = json.loads(Path(sys.argv[1]).read_text())
    rank = int(os.environ["RANK"])
    folder, script = Path(job["folder"]), Path(job["script"])
    die_with_parent()
    sys.argv = [str(script), *sys.argv[2:]]
    sys.path.pop(0)  # as if the script had been named on the command line
    sys.path.insert(0, str(script.parent))
    turns = Turns(job["socket"], job["run"], rank, job["turns"], job["iterations"])
    recorder = Recorder(rank)

    def prepare() -> None:
        stacks = (folder / f"stacks-{rank}.txt").open("w")
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        if job["mark_norms"] is not None:
            runpy.run_path(job["mark_norms"])["let_torch_norm_be_sequence_parallel"]()
        wrap_train_step(turns, recorder)
        if "--envpipe" in sys.argv:
            # The first turn is the warm-up.
            first = job["turns"][0] if job["turns"] else math.inf
            observe_session(recorder, lambda: turns.begun > first)
        if job["rests"]:
            from benchmarks.megatron_lm.running.rest import let_megatron_rest, rests_in

            turns.between = let_megatron_rest(
                lambda: rests_in(turns.turn), lambda: rests_in(turns.next_turn)
            )
        if job["stress"] is not None:
            from benchmarks.megatron_lm.stress import install

            install(
                job["stress"],
                rank,
                turns.at,
                lambda: turns.begun - 1,
                recorder.count_device_wait,
            )

    try:
        if job["cpu_run"] is None:
            prepare()
            runpy.run_path(str(script), run_name="__main__")
        else:
            _run_on_cpu(job["cpu_run"], prepare)
    finally:
        (folder / f"rank-{rank}.json").write_text(json.dumps(recorder.result()))


def _run_on_cpu(cpu_run: str, prepare: Callable[[], None]) -> None:
    run_path = runpy.run_path

    def prepared(*args: Any, **kwargs: Any) -> Any:
        if "run_name" in kwargs:  # the script, not a stand-in for a module
            prepare()
        return run_path(*args, **kwargs)

    main_of_cpu_run = run_path(cpu_run)["main"]
    sys.argv.insert(0, cpu_run)
    runpy.run_path = prepared  # until the process ends
    main_of_cpu_run()


def wrap_train_step(turns: Turns, recorder: Recorder) -> None:
    """Take turns around Megatron's train step, and record what it returns."""
    from megatron.training import training

    inner: Callable[..., Any] = training.train_step
    position = list(inspect.signature(inner).parameters).index("forward_backward_func")

    @functools.wraps(inner)
    def train_step(*args: Any, **kwargs: Any) -> Any:
        if not turns.before_iteration():
            return _asking_to_exit(recorder.last_returned)
        if turns.at_end_of_turn:
            measured = list(args)
            measured[position] = _measuring(args[position], recorder)
            args = tuple(measured)
        returned = inner(*args, **kwargs)
        recorder.add(returned)
        turns.after_iteration()
        return returned

    training.train_step = train_step


def _asking_to_exit(returned: Sequence[Any]) -> tuple[Any, ...]:
    """What a train step returns when it has trained nothing and wants training to end well.

    TimeoutError: none has trained anything, so nobody knows what one returns.
    """
    if not returned:
        raise TimeoutError("No time was left for this job's first turn")
    _, skipped, _, _, _, *rest = returned
    return ({}, skipped, False, True, 0, *rest)


def observe_session(recorder: Recorder, measures: Callable[[], bool]) -> None:
    """Keep the units that EnvPipe's session executed last, in which phase, and measured times."""
    from envpipe_megatron.runtime.job.session import Session

    inner = Session.close_iteration

    def close_iteration(self: Session) -> None:
        before = self.iterations.last_record
        inner(self)
        record = self.iterations.last_record
        if record is None or record is before:
            return
        recorder.executed, recorder.phase = self.executed, self.state.phase.value
        recorder.orders[recorder.phase] = recorder.orders.get(recorder.phase, 0) + 1
        recorder.different_orders.add(tuple(self.executed))
        if measures():
            recorder.add_times(record)

    Session.close_iteration = close_iteration  # type: ignore[method-assign]  # seen from outside


def synchronize() -> None:
    """Wait for the device, where there is one."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.synchronize()


def memory() -> dict[str, int]:
    """Bytes allocated now and at most since the last call."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return {}
    now, most = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return {"allocated_bytes": now, "max_allocated_bytes": most}


def _measuring(function: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    def measured(*args: Any, **kwargs: Any) -> Any:
        memory()
        result = function(*args, **kwargs)
        recorder.forward_backward_bytes = memory().get("max_allocated_bytes")
        return result

    return measured


def _hex(value: Any) -> Any:
    if hasattr(value, "tolist"):
        value = value.detach().double().tolist()
    if isinstance(value, list):
        return [_hex(part) for part in value]
    return value.hex() if isinstance(value, float) else value


def die_with_parent() -> None:
    """Die when the parent dies: torchrun starts workers in sessions that no group kill reaches."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main()
