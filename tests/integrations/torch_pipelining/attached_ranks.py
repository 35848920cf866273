"""What the ranks of the tests of attached schedules run."""

import contextlib
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import plain_stages
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from waiting_plans import plans_are_waited_for

from envpipe_megatron.core.kinds import Kind
from envpipe_megatron.core.plan import one_clock_plans
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.formats.energy import Phase
from envpipe_megatron.integrations import leveled
from envpipe_megatron.integrations.device import PRESET_VARIABLE
from envpipe_megatron.integrations.job import open_job
from envpipe_megatron.integrations.torch_pipelining import attach, orders, units
from envpipe_megatron.runtime.execution.stage_run import constant_order
from envpipe_megatron.runtime.job import phases
from envpipe_megatron.runtime.job.session import Session
from envpipe_megatron.tuning.commands import Clocked, Command, Run
from envpipe_megatron.tuning.shortest import ShortestOrder

LAYERS, WIDTH, MICROBATCH = 8, 8, 2
V_SHAPED = "ScheduleZBVZeroBubble", "ScheduleDualPipeV"


@dataclass(frozen=True)
class Case:
    """A schedule of torch's by name, and what it trains."""

    schedule: str
    microbatches: int = 4
    chunks: int = 1
    dropout: float = 0.0
    steps: int = 12
    settings: dict[str, Any] = field(default_factory=dict)
    forward_s: Sequence[float] = (0.03,)
    #: Steps before which an evaluation runs.
    evaluated: Collection[int] = (3,)
    #: A step of which the loss raises once, on all ranks, before anything is sent.
    fails: int | None = None
    draws_in_backward: bool = False
    #: How layers use their weights: "twice", in a function of one's "own", "again" in backwards.
    weights: str = ""
    #: What keeps two replicas of each stage alike, "fsdp" or "ddp"; empty for one. With "slices"
    #: they add up gradients within each backward, as those of tensor parallelism do.
    replicated: str = ""
    #: A rank that lacks memory to try a backward in two parts.
    full: int | None = None
    #: Names of arguments that every stage takes beside its input, and adds to it.
    named: Sequence[str] = ()
    #: Of some steps, the number of microbatches and their size; `others_of` has the replicas whose.
    others: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    others_of: Collection[int] = (0, 1)
    #: A step from which on the user's own function computes losses.
    own_loss_from: int | None = None
    #: How many microbatches the second replica has more.
    more: int = 0
    #: Orders that steps run one after another, so many times each, in place of what a plan says.
    turns: Sequence[tuple[Schedule, int]] = ()
    #: The iteration from which on the first rank is late in the middle of orders that are not own.
    late_from: int | None = None

    def replica(self, rank: int) -> int:
        """Replicas of a stage are neighbours."""
        return rank % 2 if self.replicated else 0

    def virtual(self, rank: int, ranks: int) -> list[int]:
        """The stages of a rank."""
        if self.replicated:
            rank, ranks = rank // 2, ranks // 2
        if self.schedule in V_SHAPED:
            return [rank, 2 * ranks - 1 - rank]
        return [rank + chunk * ranks for chunk in range(self.chunks)]


class Stage(torch.nn.Sequential):
    """Layers of one stage."""

    def forward(self, x: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = super().forward(sum(named.values(), x))
        return made


class DrawsInBackward(torch.nn.Module):
    """Draws other numbers when it is computed again for a backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = checkpoint(
            lambda x: torch.nn.functional.dropout(x, 0.1),
            x,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        return made


class OwnLinear(torch.autograd.Function):
    """A linear layer as users write one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight.T, x.T @ gradient


class Linear(torch.nn.Linear):
    """One that uses its weights as a case says."""

    def __init__(self, how: str) -> None:
        super().__init__(WIDTH, WIDTH)
        self._how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._how == "own":
            made: torch.Tensor = OwnLinear.apply(x, self.weight)
            return made
        if self._how == "twice":
            x = super().forward(x)
        return super().forward(x)


class Again(torch.nn.Sequential):
    """Layers that are computed again in their backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return made


def layer(at: int, case: Case) -> torch.nn.Module:
    torch.manual_seed(at)
    last = DrawsInBackward() if case.draws_in_backward else torch.nn.Dropout(case.dropout)
    kind = Again if case.weights == "again" else torch.nn.Sequential
    return kind(Linear(case.weights), torch.nn.Tanh(), last)


def open_fast(late_from: int | None, *args: Any, **kwargs: Any) -> Session:
    """A job whose emulated GPU does not let the host sleep.

    As by torch, the model's first stage runs nothing in the first part of a backward.
    """
    session, own = open_job(*args, **kwargs), kwargs["framework"].framework_order
    plain_stages.run_fast(session)
    if session.parts.collectives.stage == 0 and own is not None and own.num_chunks == 1:
        times_s: dict[Kind, float] = session.executor._time_at_max_s  # type: ignore[attr-defined]
        times_s[Kind.WEIGHT_GRADIENT] = times_s[Kind.BACKWARD]
        times_s[Kind.INPUT_GRADIENT] = 2e-5
    if own is not None and late_from is not None:
        plain_stages.be_late(session.executor, own, late_from)
    return session


def make(case: Case, rank: int, ranks: int) -> tuple[Any, dict[int, torch.nn.Module]]:
    """A schedule of small stages, and their layers."""
    from torch.distributed.pipelining import PipelineStage, schedules

    mine = case.virtual(rank, ranks)
    group, replicate = dist.group.WORLD, lambda module: module
    if case.replicated:
        mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("stages", "replicas"))
        group, ranks = mesh["stages"].get_group(), ranks // 2
        replicate = partial(_replicated, case.replicated, mesh["replicas"])
    num_virtual = ranks * case.chunks
    each = LAYERS // num_virtual
    layers = {at: layer(at, case) for v in mine for at in range(v * each, (v + 1) * each)}
    stages = [
        PipelineStage(
            replicate(Stage(*(layers[v * each + n] for n in range(each)))),
            v, num_virtual, torch.device("cpu"), group=group,
        )
        for v in mine
    ]  # fmt: skip
    kind = getattr(schedules, case.schedule)
    own = stages if issubclass(kind, schedules.PipelineScheduleMulti) else stages[0]
    count = case.microbatches + case.more * case.replica(rank)
    return kind(own, count, loss_fn=torch.nn.functional.mse_loss), layers


class Slices(Stage):
    """Layers whose backwards send each other gradients."""

    group: dist.ProcessGroup

    def forward(self, x: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        summed: torch.Tensor = Summed.apply(x, self.group)
        return super().forward(summed, **named)


class Summed(torch.autograd.Function):
    """Gives what it gets, and sums gradients over a group."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        summed = gradient.clone()
        dist.all_reduce(summed, group=ctx.group)
        return summed, None


def _replicated(how: str, mesh: DeviceMesh, module: torch.nn.Module) -> torch.nn.Module:
    if how == "slices":
        slices = Slices(*module)  # type: ignore[misc]  # torch's can be iterated
        slices.group = mesh.get_group()
        return slices
    if how == "ddp":
        return DistributedDataParallel(module, process_group=mesh.get_group())
    sharded: torch.nn.Module = fully_shard(module, mesh=mesh)
    return sharded


def emulate(rank: int, case: Case, root: Path, preset: str = "a100-sxm") -> None:
    """Let this process find an emulated GPU, as a launcher's environment does."""
    plain_stages.emulate(rank, root, preset, case.forward_s)
    leveled.open_job = partial(open_fast, case.late_from)
    tuner = partial(Turning, case.turns) if case.turns else ShortestOrder
    phases.ShortestOrder = tuner  # type: ignore[misc, assignment]


class Turning:
    """Run orders as a test lists them, again and again, in place of what measurements tell."""

    def __init__(self, turns: Sequence[tuple[Schedule, int]], *made_of: Any) -> None:
        self.turns, (_, self.store, _) = turns, made_of

    def run(self, first: object) -> Run[None]:
        for order, times in cycle(self.turns):
            at_top = constant_order(Phase.STEADY, order, int(max(self.store.clocks_mhz)))
            clocked = Clocked(order, at_top.frequency_mhz)
            yield Command(Phase.STEADY, times, orders=(clocked,), note=f"turns to {order.name}")


def step_of_ones(schedule: Any, case: Case, rank: int) -> None:
    """A step on data of ones."""
    mine, last = case.virtual(rank, dist.get_world_size()), dist.get_world_size() - 1
    data = torch.ones(2, case.microbatches * MICROBATCH, WIDTH)
    inputs, target = [data[0]] if 0 in mine else [], data[1] if last in mine else None
    schedule.step(*inputs, target=target)


def attach_again(rank: int, case: Case, root: Path) -> tuple[str, list[str], list[str]]:
    """What is said of facts without names, and of others while one is attached; levels of those."""
    emulate(rank, case, root)
    schedule, _ = make(case, rank, dist.get_world_size())
    another, _ = make(case, rank, dist.get_world_size())
    facts, said, levels = "", list[str](), []
    try:
        attach(schedule, facts=["GPT", 24])  # type: ignore[arg-type]
    except EnvPipeError as error:
        facts = str(error)
    for _ in range(2):
        pipeline = attach(schedule, say=lambda text: None)
        steps = schedule.step, another.step
        others = [attach(each, say=said.append) for each in (schedule, another)]
        assert (schedule.step, another.step) == steps
        for _ in range(2):
            step_of_ones(schedule, case, rank)
            step_of_ones(another, case, rank)
        levels.append(str(pipeline.level))
        assert pipeline.phase != "framework" == others[0].phase
        for each in (*others, pipeline):
            each.end_training()
    return facts, said, levels


def wrap_behind_attach(rank: int, case: Case, root: Path) -> Sequence[str]:
    """The notes of a job whose stages are wrapped between `attach` and the first step."""
    emulate(rank, case, root)
    schedule, _ = make(case, rank, dist.get_world_size())
    pipeline = attach(schedule, say=lambda text: None)
    groups = [dist.new_group([each]) for each in range(dist.get_world_size())]
    for stage in orders.stages_of(schedule):
        stage.submod = DistributedDataParallel(stage.submod, process_group=groups[rank])
    step_of_ones(schedule, case, rank)
    notes: Sequence[str] = pipeline.session.state.notes
    pipeline.end_training()
    return notes


def look_at_memory(rank: int, case: Case, root: Path) -> list[str]:
    """What a job does with memory in its first step."""
    emulate(rank, case, root)
    schedule, _ = make(case, rank, dist.get_world_size())
    events = list[str]()
    pipeline = attach(schedule, say=lambda text: None)

    def look(*graph: object) -> str:
        events.append("looked")
        return "memory has no room"

    with (
        patch.object(torch.cuda, "empty_cache", lambda: events.append("emptied")),
        patch.object(units, "_reason_of_graph", look),
    ):
        for _ in range(2):
            step_of_ones(schedule, case, rank)
    pipeline.end_training()
    return events


def run_orders(
    rank: int, case: Case, tables: Sequence[Schedule], refused: bool = False
) -> list[list[bytes]]:
    """The bits of losses and gradients of a step in torch's own order, and in each of others.

    `refused`: torch has refused the first of these before.
    """
    schedule, layers = make(case, rank, dist.get_world_size())
    schedule._backward_requires_autograd = torch.is_grad_enabled()
    runner = orders.Runner(schedule, orders.torch_order(schedule))
    if refused:
        refuse = Mock(side_effect=RuntimeError("not in this order"))
        refuses = patch.object(
            orders._PipelineScheduleRuntime, "_prepare_schedule_with_comms", refuse
        )
        with refuses, contextlib.suppress(RuntimeError):
            runner.turn_to(tables[0])
    mine, last = case.virtual(rank, dist.get_world_size()), dist.get_world_size() * case.chunks - 1
    data = torch.randn(
        2, case.microbatches * MICROBATCH, WIDTH, generator=torch.Generator().manual_seed(5)
    )
    inputs, target = [data[0]] if 0 in mine else [], data[1] if last in mine else None
    weights = [weight for module in layers.values() for weight in module.parameters()]
    found = []
    for order in (orders.torch_order(schedule), *tables):
        losses: list[torch.Tensor] = []
        for weight in weights:
            weight.grad = None
        runner.turn_to(order).step(*inputs, target=target, losses=losses)
        found.append([bits(each) for each in (*losses, *(weight.grad for weight in weights))])
    return found


def run_orders_without_autograd(
    rank: int, case: Case, tables: Sequence[Schedule]
) -> list[list[bytes]]:
    """As `run_orders`, where the stages and the loss ask for gradients by themselves."""
    from torch.distributed.pipelining import PipelineStage

    units = "forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"
    with contextlib.ExitStack() as stack:
        for of, name in (
            *((PipelineStage, unit) for unit in units),
            (torch.nn.functional, "mse_loss"),
        ):
            stack.enter_context(patch.object(of, name, torch.enable_grad()(getattr(of, name))))
        stack.enter_context(torch.no_grad())
        return run_orders(rank, case, tables)


def train_where_no_gpu_is_read(
    rank: int, case: Case, root: Path, *, later: bool, refused: bool
) -> Any:
    """What a schedule and what is attached to it do where rank 1's GPU is not there, or no more.

    It may be found gone where torch refuses an order, in a step that infers shapes.
    """
    emulate(rank, case, root)
    schedule, _ = make(case, rank, dist.get_world_size())
    own, said = schedule.step, []
    refuse = Mock(side_effect=RuntimeError("not in this order"))
    with patch.dict(os.environ), patch.object(orders.Runner, "turn_to", refuse):
        pipeline = attach(schedule, say=said.append) if later else None
        if refused:
            step_of_ones(schedule, case, rank)
            infer_anew(schedule)
        if rank == 1:
            del os.environ[PRESET_VARIABLE]
        pipeline = pipeline or attach(schedule, say=said.append)
        for _ in range(2):
            step_of_ones(schedule, case, rank)
            pipeline.pause()
    untouched = schedule.step == own
    told = pipeline.phase, pipeline.report().line(), said
    pipeline.end_training()
    pipeline.close()
    return untouched, *told


def train(rank: int, case: Case, root: Path | None, preset: str = "a100-sxm") -> dict[str, Any]:
    """Train with EnvPipe attached, or by torch alone where there is no `root`.

    Training waits for its plans: they come at the same step however busy the host is.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(plans_are_waited_for())
        if rank == case.full:
            full = Mock(side_effect=torch.OutOfMemoryError)
            stack.enter_context(patch.object(units, "_reason_of_graph", full))
        return _train(rank, case, root, preset)


def _train(rank: int, case: Case, root: Path | None, preset: str) -> dict[str, Any]:
    ranks = dist.get_world_size()
    schedule, layers = make(case, rank, ranks)
    mine = case.virtual(rank, ranks)
    last = ranks * case.chunks // (2 if case.replicated else 1) - 1
    said: list[str] = []
    pipeline = None
    if root is not None:
        emulate(rank, case, root, preset)
        pipeline = attach(schedule, say=said.append, **case.settings)
    weights = [weight for module in layers.values() for weight in module.parameters()]
    optimizer = torch.optim.Adam(weights, lr=1e-3)
    generator = torch.Generator().manual_seed(5 + case.replica(rank))
    torch.manual_seed(100 + rank)
    losses: list[bytes] = []
    lines, ran = list[str](), list[list[str]]()
    usual = before = schedule._n_microbatches, MICROBATCH
    others = case.others if case.replica(rank) in case.others_of else {}
    for step in range(case.steps):
        schedule._n_microbatches, size = count_and_size = others.get(step, usual)
        if size != before[1] or count_and_size > usual or before > usual:
            infer_anew(schedule)
        before = count_and_size
        if step == case.own_loss_from:
            schedule._compute_loss = lambda output, target, *_: (output - target).abs().mean()
        data = torch.randn(2, schedule._n_microbatches * size, WIDTH, generator=generator)
        inputs = [data[0]] if 0 in mine else []
        target = data[1] if last in mine else None
        also = dict.fromkeys(case.named, data[0])
        of_microbatches: list[torch.Tensor] = []
        if step in case.evaluated:
            schedule.eval(*inputs, target=target, **also, losses=of_microbatches)
            losses += [bits(loss) for loss in of_microbatches]
        optimizer.zero_grad()
        if step == case.fails:
            with contextlib.suppress(RuntimeError), torch.no_grad():
                schedule.step(*inputs, target=target, **also)
        schedule.step(*inputs, target=target, **also, losses=of_microbatches)
        optimizer.step()
        losses += [bits(loss) for loss in of_microbatches]
        if pipeline is not None and pipeline.job is not None:
            ran.append(pipeline.session.executed)
        if pipeline is not None and step % 10 == 9:
            lines.append(pipeline.report().line())
    found = {
        "losses": losses,
        "weights": {at: [bits(w) for w in m.parameters()] for at, m in layers.items()},
    }
    if pipeline is not None:
        session = pipeline.session
        pipeline.end_training()
        found["released"] = not any(
            callable(vars(of).get(name))
            for of in (schedule, *orders.stages_of(schedule))
            for name in ("_maybe_compute_loss", "forward_one_chunk", "backward_one_chunk")
        )
        plan = session.state.plan
        found |= {
            "level": str(pipeline.level),
            "said": said,
            "lines": lines,
            "ran": ran,
            "notes": session.state.notes,
            "phases": [phase.value for phase, _ in session.iterations.latest],
            "times": [time_s for _, time_s in session.iterations.latest],
            "executed": session.executed,
            "plan": None if plan is None else plan.schedule,
            "predicted": None if plan is None else (plan.cost, plan.baseline.cost),
            "clocks": None if plan is None else sorted(set(plan.frequency_mhz.ravel().tolist())),
            "at_one_clock": [] if plan is None else [each.cost for each in one_clock_plans(plan)],
            "summary": session.summary(),
            "energy": session.energy.sums(),
        }
    return found


def infer_anew(schedule: Any) -> None:
    """Have torch infer the shapes of messages in the next step."""
    name = "_stages" if hasattr(schedule, "_stages") else "_stage"
    for way in ("forward", "backward"):
        setattr(schedule, f"{name}_{way}_initialized", False)


def bits(tensor: torch.Tensor) -> bytes:
    own = tensor.detach()
    return (own.to_local() if isinstance(own, DTensor) else own).numpy().tobytes()
