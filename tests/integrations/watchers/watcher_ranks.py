"""Ranks whose emulated GPUs are judged between steps and by times of training, by others' code.

What a product takes is up to the emulated GPU's clock: torch is replaced by a stand-in where that
code launches work, records events or asks for a device.
"""

from __future__ import annotations

import ast
import importlib.util
import logging
import queue
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import median
from types import ModuleType, SimpleNamespace
from typing import Any, Union
from unittest.mock import patch

import plain_stages
import torch
import torch.distributed as dist

from envpipe_megatron.core.kinds import Kind
from envpipe_megatron.core.orders import builders
from envpipe_megatron.formats.energy import Phase
from envpipe_megatron.gpu.emulated.emulated_gpu import EmulatedGpu
from envpipe_megatron.integrations.hooking import between_steps
from envpipe_megatron.runtime.job.options import JobOptions, Level

STAGES, MICROBATCHES = 3, 3
TIMES_S = {Kind.FORWARD: 0.02, Kind.BACKWARD: 0.04}
#: Of one of the products that are timed, at the highest clock, s, and of anything else in ms.
PRODUCT_S, OTHER_MS = 0.004, 1.0


class Job:
    """A session that trains by the plan in a folder, or at one clock, as a leveled job has it."""

    def __init__(self, rank: int, root: Path, level: Level = Level.ORDER) -> None:
        by_plan = level is Level.ORDER
        options = JobOptions(
            num_microbatches=MICROBATCHES if by_plan else 1,
            type="baseline" if by_plan else "uniform",
            level=level,
            baseline_steps=1 if by_plan else 2,
            profile_steps=1,
            max_slowdown=None if by_plan else 20.0,
            profile=root / "profile.csv" if by_plan else None,
            plan=root / "plan.json" if by_plan else None,
        )
        self.rank, self.level = rank, level
        self.session, self.gpu = plain_stages.session(
            rank, options, root, time_at_max_s=TIMES_S if by_plan else {Kind.FORWARD: 0.2}
        )
        self.job, self.pause, self.close = self, self.session.pause, self.session.close

    def step(self) -> Mapping[str, list[float]]:
        """Train an iteration; what its units took, s."""
        session = self.session
        session.begin_step()
        if self.level is Level.ORDER:
            session.run_iteration(MICROBATCHES, plain_stages.SPECS, self._work)
        else:
            run = session.open_iteration(builders.whole_iteration(STAGES), plain_stages.SPECS)
            run.begin_unit()
            run.end_unit()
        session.end_step()
        record = session.iterations.last_record
        assert record is not None
        took_s = zip(session.executed, record.end_s - record.start_s, strict=True)
        units: dict[str, list[float]] = {}
        for unit, time_s in took_s:
            units.setdefault(unit[0], []).append(float(time_s))
        return units

    def _work(self, schedule: Any) -> Any:
        return plain_stages.PlainWork(schedule, self.rank)


class Torch:
    """In place of torch: makes tensors of one element, whose products take the GPU's time."""

    def __init__(self, gpu: EmulatedGpu, instants_s: Iterator[float] | None = None) -> None:
        class Event:
            def __init__(self, **_: Any) -> None:
                self.at_s = 0.0

            def record(self) -> None:
                self.at_s = gpu.committed_end_s() if instants_s is None else next(instants_s)

            def elapsed_time(self, end: Event) -> float:
                return 1000 * (end.at_s - self.at_s) or OTHER_MS

        def synchronize() -> None:
            gpu.advance_to(gpu._instant_s(gpu._file.read()))  # time has gone by on the host

        def clock_mhz() -> int:
            synchronize()
            return gpu.clock_state().observed_mhz

        self.cuda = SimpleNamespace(
            Event=Event,
            synchronize=synchronize,
            is_available=lambda: True,
            clock_rate=clock_mhz,
            temperature=lambda: 50,
            power_draw=lambda: 400_000,
            utilization=lambda: 100,
        )
        self.mm = lambda *_: gpu.run_unit("forward", PRODUCT_S, 0.0)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def randn(self, *_: Any, **__: Any) -> torch.Tensor:
        return torch.zeros(1)

    def tensor(self, values: Any, **named: Any) -> torch.Tensor:
        return torch.tensor(values, **{**named, "device": "cpu"})

    def zeros(self, *size: int, **named: Any) -> torch.Tensor:
        return torch.zeros(*size, **{**named, "device": "cpu"})


@contextmanager
def logged(name: str) -> Iterator[list[str]]:
    """Lines that a logger gets meanwhile."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(name)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield lines
    logger.removeHandler(handler)


def define(path: Path, names: set[str], into: dict[str, Any]) -> None:
    """Have some definitions of a file, without its imports, in a namespace."""
    tree = ast.parse(path.read_text())
    tree.body = [node for node in tree.body if getattr(node, "name", None) in names]
    exec(compile(tree, path, "exec"), into)


@contextmanager
def megatron(checkout: Path, gpu: EmulatedGpu) -> Iterator[Callable[[str], None]]:
    """Megatron's own check of GPUs, called as its loop does, by its name in that module."""
    folder = checkout / "megatron" / "training"
    name = "megatron.training.gpu_sniff_test"
    spec = importlib.util.spec_from_file_location(name, folder / "gpu_sniff_test.py")
    assert spec is not None
    assert spec.loader is not None
    sniff = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sniff)
    sniff.torch = Torch(gpu)  # type: ignore[attr-defined]
    parts = ("", ".core", ".core.process_groups_config", ".training", ".training.global_vars")
    modules = {f"megatron{part}": ModuleType(f"megatron{part}") for part in parts}
    training = modules["megatron.training.training"] = ModuleType("megatron.training.training")
    groups = SimpleNamespace(ep=None, dp=None, tp=None)
    vars(modules["megatron.core.process_groups_config"])["ProcessGroupCollection"] = (
        SimpleNamespace(use_mpu_process_groups=lambda **_: groups)
    )
    args = SimpleNamespace(hidden_size=None, ffn_hidden_size=None)
    vars(modules["megatron.training.global_vars"])["get_args"] = lambda: args
    timer = SimpleNamespace(start=lambda **_: None, stop=lambda **_: None)
    timers = type("", (), {"__call__": lambda *_, **__: timer, "log": lambda *_: None})
    vars(training).update(get_timers=timers, print_datetime=lambda text: None)
    define(folder / "training.py", {"_run_gpu_sniff_test"}, vars(training))
    with patch.dict(sys.modules, {**modules, name: sniff}):
        yield lambda tag: training._run_gpu_sniff_test(tag)


def sniff(rank: int, root: Path, checkout: Path) -> Any:
    """Check GPUs before and with EnvPipe's pauses; what was logged, and what the next step took."""
    with ExitStack() as stack:
        job = stack.enter_context(closing(Job(rank, root)))
        run = stack.enter_context(megatron(checkout, job.gpu))
        said = stack.enter_context(logged("megatron.training.gpu_sniff_test"))
        job.step(), job.step()
        run("before")
        before = said.copy()
        with between_steps("Megatron-LM", job):  # type: ignore[arg-type]
            job.step()
            run("after")
            after = said[len(before) :]
        return before, after, job.step()


def score(rank: int, root: Path, nvrx: str, sick: int | None) -> Any:
    """NVRx's stragglers, of GPUs and of those against their own past, before and with EnvPipe.

    A sick GPU takes three times as long for all that it does.
    """
    sys.path.append(nvrx)
    from nvidia_resiliency_ext.straggler.reporting import ReportGenerator
    from nvidia_resiliency_ext.straggler.statistics import Statistic

    scores = ReportGenerator(["relative_perf_scores", "individual_perf_scores"])
    times = 3.0 if rank == sick else 1.0

    def kernels(units: Mapping[str, list[float]]) -> Any:
        of = (Statistic.MED, Statistic.AVG, Statistic.NUM)
        return {
            name: dict(zip(of, (times * median(s), times * sum(s) / len(s), len(s)), strict=True))
            for name, s in units.items()
        }

    def found(report: Any) -> Any:
        if rank:
            return None
        stragglers = report.identify_stragglers(gpu_rel_threshold=0.7, gpu_indiv_threshold=0.7)
        return [
            {each.rank for each in stragglers[f"straggler_gpus_{kind}"]}
            for kind in ("relative", "individual")
        ]

    with closing(Job(rank, root)) as job:
        scores.generate_report({}, kernels(job.step()))  # at the highest clock
        before = found(scores.generate_report({}, kernels(job.step())))
        with between_steps("Megatron-LM", job):  # type: ignore[arg-type]
            return before, found(scores.generate_report({}, kernels(job.step())))


def report_stragglers(rank: int, root: Path, checkout: Path, level: Level) -> Any:
    """Megatron's detector of stragglers, at a level: what it says of throughput and clocks."""
    names: dict[str, Any] = {
        **{"logger": logging.getLogger("stragglers"), "dataclass": dataclass, "time": time},
        **{"queue": queue, "socket": socket, "threading": threading, "sys": sys, "List": list},
        **{"datetime": datetime, "Tuple": tuple, "Union": Union, "Type": type},
        "__name__": __name__,
    }
    with closing(Job(rank, root, level)) as job, logged("stragglers") as said:
        instants_s: list[float] = []
        names["torch"] = Torch(job.gpu, iter(lambda: instants_s.pop(0), None))
        wanted = {"_ValueWithRank", "_StragglerData", "StragglerDetector"}
        define(checkout / "megatron" / "core" / "utils.py", wanted, names)
        detector = names["StragglerDetector"]()
        detector._controller = lambda: None  # no socket
        detector.configure(dist.get_world_size(), rank, enabled=True)
        job.step(), job.step()
        while job.session.state.phase is not Phase.STEADY:
            job.step()
        units = job.step()
        for time_s in units["F"]:
            instants_s += [0.0, time_s]
            with detector:
                pass
        detector.report(total_flops=1e15, log_interval=1)
        (line,) = said or ("",)
        return {name: float(value) for name, value in re.findall(r"(\w+)/Rnk: ([\d.]+)", line)}
