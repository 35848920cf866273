"""The rival planner: `lowtime` (PyPI) on 1F1B, called as Perseus calls it.

Chung et al., "Reducing Energy Bloat in Large Model Training", SOSP'24: the cost of a unit is its
energy less what the GPU would burn waiting for as long; an exponential is fitted to each stage's
forward and backward; from the slowest plan on, the cheapest cut of the critical graph is sped up by
one unit of time again and again, and each step is a plan. So the fastest plan comes last. Curves
are fitted to the rows that are efficient in time and cost, as Zeus's
`examples/pipeline_frequency_optimizer` does. The paper's artifact takes those efficient in time and
energy, which saves up to half a point less at the fastest.

Three things are left out in lowtime's favour: it draws nothing, logs nothing, and gets its
dependencies without a comparison of all pairs.

lowtime runs in its own process under a limit of CPU time. Each plan is appended to a file as
it is found, so that a run that ends at its limit keeps what it has; a run that is stored is read
instead of repeated. Times are CPU seconds without imports: lowtime is single-threaded, so on an
idle machine they are wall time, and on a busy one they do not charge lowtime for others' work.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import resource
import shutil
import signal
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from envpipe_megatron.core.kinds import Kind
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.profile import Profile
from envpipe_megatron.core.profile_rows import ProfileRow
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.errors import EnvPipeError

_PLANS, _RESULT = "plans.bin", "result.json"
_SOURCE, _SINK = 0, 1
#: Zeus loosens the choice of efficient rows by this where noise leaves three or fewer.
_NOISE_FACTOR, _FEW_OPTIONS = 0.95, 3


@dataclass(frozen=True)
class LowtimeRun:
    """What one run of lowtime found, in the order it found it: slowest plan first.

    Args:
        plans: for each plan, the iteration time that lowtime states (sums of durations that it
            rounded down, so the plan takes a little longer) in s, and [num_stages, units_per_stage]
            MHz in 1F1B's order.
        stated_energy_j: [num_plans] from lowtime's fitted curves.
        finished: whether lowtime ended by itself; if not, the fastest plans are missing.
    """

    plans: list[tuple[float, NDArray[np.int64]]]
    stated_energy_j: NDArray[np.float64]
    seconds_total: float
    finished: bool


@dataclass(frozen=True)
class _Request:
    """What lowtime is asked, all that a stored run depends on."""

    profile: Profile
    num_microbatches: int
    blocking_power_w: float
    unit_time_s: float

    @property
    def schedule(self) -> Schedule:
        return builders.one_f_one_b(self.profile.num_stages, self.num_microbatches)

    @property
    def key(self) -> str:
        return (
            f"{self.profile.sha256[:16]}_M{self.num_microbatches}_{self.unit_time_s * 1e6:g}us_"
            f"{self.blocking_power_w:g}W_zeus"
        )

    @property
    def record(self) -> np.dtype[np.void]:
        """One plan in the file."""
        shape = (self.schedule.num_stages, self.schedule.units_per_stage)
        numbers = [(name, "f8") for name in ("stated_time_s", "stated_energy_j", "cpu_s")]
        return np.dtype([*numbers, ("frequency_mhz", "u2", shape)])


def run_lowtime(
    profile: Profile,
    num_microbatches: int,
    blocking_power_w: float,
    *,
    unit_time_s: float = 0.001,
    time_limit_s: float,
    output_dir: Path,
) -> LowtimeRun:
    """Plan 1F1B with lowtime, or read the run where it is stored.

    EnvPipeError: lowtime failed, or ended before its first plan, or no run is stored and there is
    no time for one.

    Args:
        unit_time_s: the step of time that lowtime counts in; 1 ms is Zeus's default.
        time_limit_s: CPU time after which the run is ended. A stored run that ended at a lower
            limit is repeated; 0 takes what is stored.
        output_dir: holds one folder for each question.
    """
    request = _Request(profile, num_microbatches, blocking_power_w, unit_time_s)
    folder = output_dir / request.key
    stored = _stored_result(folder)
    if stored is None and not time_limit_s:
        raise EnvPipeError(f"no run is stored in {output_dir}")
    if stored is None or not (stored["finished"] or stored["time_limit_s"] >= time_limit_s):
        output_dir.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{request.key}_", dir=output_dir))
        try:
            _run_in_process(request, time_limit_s, scratch)
            shutil.rmtree(folder, ignore_errors=True)
            scratch.rename(folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return _read_run(folder, request)


def _stored_result(folder: Path) -> dict[str, Any] | None:
    try:
        result: dict[str, Any] = json.loads((folder / _RESULT).read_text())
    except FileNotFoundError:
        return None
    return result


def _run_in_process(request: _Request, time_limit_s: float, folder: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(
        target=_plan_to_files, args=(request, time_limit_s, folder)
    )
    start = time.perf_counter()
    process.start()
    process.join()
    wall_s = time.perf_counter() - start
    if process.exitcode == 0:
        outcome = {"finished": True} | json.loads((folder / _RESULT).read_text())
    elif process.exitcode == -signal.SIGXCPU:
        outcome = {"finished": False, "cpu_s": time_limit_s, "wall_s": wall_s}
    else:
        raise EnvPipeError(
            f"lowtime failed on {request.profile.source}",
            value=process.exitcode,
            remedy="Its own message stands above.",
        )
    question = {
        "profile": Path(request.profile.source).name,
        "profile_sha256": request.profile.sha256,
        "num_microbatches": request.num_microbatches,
        "blocking_power_w": request.blocking_power_w,
        "unit_time_s": request.unit_time_s,
        "time_limit_s": time_limit_s,
    }
    (folder / _RESULT).write_text(json.dumps(question | outcome, indent=1))


def _read_run(folder: Path, request: _Request) -> LowtimeRun:
    result = _stored_result(folder)
    complete = (folder / _PLANS).stat().st_size // request.record.itemsize
    if result is None or complete == 0:
        raise EnvPipeError(
            f"lowtime found no plan in its time: {folder}", remedy="Raise the time limit."
        )
    found = np.fromfile(folder / _PLANS, dtype=request.record, count=complete)
    return LowtimeRun(
        plans=[
            (float(row["stated_time_s"]), row["frequency_mhz"].astype(np.int64)) for row in found
        ],
        stated_energy_j=found["stated_energy_j"],
        seconds_total=result["cpu_s"],
        finished=result["finished"],
    )


def _plan_to_files(request: _Request, time_limit_s: float, folder: Path) -> None:
    """What the process of lowtime does."""
    from lowtime.solver import PhillipsDessouky

    cpu_start, wall_start = time.process_time(), time.perf_counter()
    _, hard_limit = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(cpu_start + time_limit_s), hard_limit))
    graph, instructions = _dependency_graph(request)
    num_stages, record = request.profile.num_stages, request.record
    with (folder / _PLANS).open("wb", buffering=0) as plans:
        for step in PhillipsDessouky(graph).run():
            plan = np.empty((), dtype=record)
            waiting_j = num_stages * step.real_time * request.blocking_power_w
            plan["stated_time_s"], plan["stated_energy_j"] = step.real_time, step.cost + waiting_j
            plan["cpu_s"] = time.process_time() - cpu_start
            plan["frequency_mhz"] = [
                [instruction.assigned_knob for instruction in stage] for stage in instructions
            ]
            plans.write(plan.tobytes())
    spent = {
        "cpu_s": time.process_time() - cpu_start,
        "wall_s": time.perf_counter() - wall_start,
    }
    (folder / _RESULT).write_text(json.dumps(spent))


def _dependency_graph(request: _Request) -> tuple[Any, list[list[Any]]]:
    """lowtime's graph of the pipeline, and for each stage its instructions in order."""
    import networkx as nx
    from lowtime.graph_utils import add_sink_node, add_source_node
    from lowtime.perseus.instruction import Backward, Forward
    from lowtime.perseus.schedule import Synchronous1F1B

    instruction_type = {Kind.FORWARD: Forward, Kind.BACKWARD: Backward}
    schedule = request.schedule
    instructions: list[list[Any]] = []
    for stage, kinds in enumerate(request.profile.rows):
        specs = {
            instruction_type[kind]: _operation_spec(rows, request) for kind, rows in kinds.items()
        }
        order = list(Synchronous1F1B(schedule.num_stages, schedule.num_microbatches, stage, specs))
        ours = [(instruction_type[unit.kind], unit.microbatch) for unit in schedule.stages[stage]]
        if [(type(instruction), instruction.micro_batch_id) for instruction in order] != ours:
            raise EnvPipeError(f"lowtime's 1F1B has another order on stage {stage}")
        instructions.append(order)
    graph = nx.DiGraph(source_node=_SOURCE, sink_node=_SINK)
    first_node = _SINK + 1
    for node in range(schedule.num_units):
        stage, position = divmod(node, schedule.units_per_stage)
        graph.add_node(first_node + node, op=instructions[stage][position])
        if position:
            graph.add_edge(first_node + node - 1, first_node + node)
    for node, sender in enumerate(schedule.cross_dependency.tolist()):
        if sender >= 0:
            graph.add_edge(first_node + sender, first_node + node)
    add_source_node(graph, _SOURCE)
    add_sink_node(graph, _SINK)
    return graph, instructions


def _operation_spec(rows: tuple[ProfileRow, ...], request: _Request) -> Any:
    """lowtime's choices and fitted cost of one stage's forward or backward."""
    from lowtime.cost_model import ExponentialModel
    from lowtime.operation import CandidateExecutionOptions, ExecutionOption, OperationSpec

    options = []
    for row in rows:
        option = ExecutionOption[int](
            real_time=row.time_s,
            unit_time=request.unit_time_s,
            cost=row.energy_j,
            knob=row.frequency_mhz,
        )
        option.cost -= request.blocking_power_w * option.quant_time * request.unit_time_s
        options.append(option)
    efficient = CandidateExecutionOptions[int](options=options)
    if len(efficient.options) <= _FEW_OPTIONS:
        efficient = CandidateExecutionOptions[int](options=options, noise_factor=_NOISE_FACTOR)
    model = ExponentialModel(efficient, search_strategy="best")
    return OperationSpec[int](options=efficient, cost_model=model)
