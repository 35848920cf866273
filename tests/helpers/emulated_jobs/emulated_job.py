"""A job in one process: the real phases of every rank, on emulated GPUs whose time costs nothing.

Each rank is a thread that runs `run_phases`; one of them runs at a time, and only between
iterations. The iterations themselves are worked out unit by unit on the emulated GPUs' own state,
so that clocks come late, waits cost their power and counters refresh as for a real rank.

    pipelines = Pipelines(load_preset("a100-sxm"), [0.03] * 4)
    with EmulatedJob(pipelines, JobOptions(num_microbatches=24)) as job:
        iterations = job.run(100)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, repeat
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

from emulated_pipelines import Iteration, Pipelines, VirtualMeter
from envpipe_megatron.core.kinds import Kind
from envpipe_megatron.core.orders.builders import framework_order
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.runtime.channel.collectives import Collectives, tree_groups
from envpipe_megatron.runtime.execution.stage_run import IterationOrder
from envpipe_megatron.runtime.job.options import JobOptions
from envpipe_megatron.runtime.job.parts import PhaseParts, SessionState
from envpipe_megatron.runtime.job.phases import run_phases
from envpipe_megatron.runtime.job.restarts import JobFolder
from envpipe_megatron.runtime.memory.peak import JobMemory
from envpipe_megatron.tuning.background import Background


class MemoryGroup:
    """`HostGroup` between threads: `boxes[sender, receiver]` carry values in their order.

    The first leads.
    """

    def __init__(
        self, index: int, size: int, boxes: dict[tuple[int, int], SimpleQueue[Any]]
    ) -> None:
        self._index, self._size, self._boxes = index, size, boxes
        self.leads = index == 0

    def gather(self, value: Any) -> list[Any]:
        """As `HostGroup.gather`."""
        if not self.leads:
            self._boxes[self._index, 0].put(value)
            return []
        return [value, *(self._get(index) for index in range(1, self._size))]

    def broadcast(self, value: Any) -> Any:
        """As `HostGroup.broadcast`."""
        if not self.leads:
            return self._get(0)
        for index in range(1, self._size):
            self._boxes[0, index].put(value)
        return value

    def _get(self, sender: int) -> Any:
        value = self._boxes[sender, self._index].get(timeout=_PATIENCE_S)
        if value is _FAILED:
            raise RuntimeError("a rank of the job has failed")
        return value


_FAILED = object()
#: For ranks to end, and for what another rank says, s.
_END_S, _PATIENCE_S = 20.0, 300.0


class Immediate(Background[Any]):
    """Work beside training that takes no time, or is looked for in vain: each so many times."""

    _make: Callable[[], Any] | None = None

    def __init__(self, looks: Iterator[int] | None = None) -> None:
        super().__init__()
        self._looks, self._left = looks or repeat(0), 0

    @property
    def busy(self) -> bool:
        """As `Background.busy`."""
        return self._make is not None

    def start(self, make: Callable[[], Any]) -> None:
        """Begin; it is done when its result is taken."""
        self._make, self._left = make, next(self._looks)

    def take(self) -> Any:
        """As `Background.take`."""
        if self._make is not None and self._left:
            self._left -= 1
            return None
        make, self._make = self._make, None
        return make and make()


class EmulatedJob:
    """The phases of all ranks of a job on `Pipelines`.

    Close it, or use it as a context: its ranks are threads.

    Raises, out of `run`, what a rank's phases raise.

    Args:
        own_order: of a framework that runs its units itself.
        late: how many times each plan is looked for in vain, one plan after the other; all that
            follow as the last.
        rooms: whether plans of other orders than the framework's find memory for their messages,
            likewise.
    """

    def __init__(
        self,
        pipelines: Pipelines,
        config: JobOptions,
        own_order: Schedule | None = None,
        *,
        late: Sequence[int] = (0,),
        rooms: Sequence[bool] = (True,),
    ) -> None:
        self.pipelines = pipelines
        self.said: list[tuple[int, str]] = []
        self._replicas, self._stages = len(pipelines.gpus), len(pipelines.gpus[0])
        self._late, self._rooms = late, rooms
        self._groups = Boxes()
        self._inboxes = [
            [SimpleQueue[Any]() for _ in range(self._stages)] for _ in range(self._replicas)
        ]
        self._outbox: SimpleQueue[tuple[int, int, IterationOrder | Exception]] = SimpleQueue()
        self.planner: PhaseParts | None = None
        self._ranks: list[threading.Thread] = []
        for replica in range(self._replicas):
            for stage in range(self._stages):
                collectives = self._collectives(replica, stage)
                parts = partial(self._parts, replica, stage, collectives, config, own_order)
                self._ranks.append(
                    threading.Thread(
                        target=self._run_rank, args=(replica, stage, parts), daemon=True
                    )
                )
                self._ranks[-1].start()

    def __enter__(self) -> EmulatedJob:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def run(self, iterations: int) -> list[Iteration]:
        """Run so many more iterations; what each took."""
        for _ in range(iterations):
            orders: dict[tuple[int, int], IterationOrder] = {}
            while len(orders) < self._replicas * self._stages:
                replica, stage, order = self._outbox.get()
                if isinstance(order, Exception):
                    self.close()
                    raise order
                orders[replica, stage] = order
            records = self.pipelines.run([orders[r, 0] for r in range(self._replicas)])
            for replica, of_replica in enumerate(records):
                for stage, record in enumerate(of_replica):
                    self._inboxes[replica][stage].put(record)
        return self.pipelines.iterations[-iterations:]

    def close(self) -> None:
        """End all ranks; what they keep is written then."""
        for box in self._groups.all():
            box.put(_FAILED)
        for inboxes in self._inboxes:
            for box in inboxes:
                box.put(None)
        for rank in self._ranks:
            rank.join(_END_S)

    def _run_rank(self, replica: int, stage: int, make: Callable[[], PhaseParts]) -> None:
        parts: PhaseParts | None = None
        try:
            parts = make()  # on all ranks together
            phases = run_phases(parts)
            order = next(phases)
            while True:
                self._outbox.put((replica, stage, order))
                record = self._inboxes[replica][stage].get()
                if record is None:
                    return
                parts.meter.catch_up()
                parts.state.iteration += 1
                order = phases.send(record)
        except Exception as error:
            self._outbox.put((replica, stage, error))
        finally:
            if parts is not None:
                parts.folder.close()

    def _collectives(self, replica: int, stage: int) -> Collectives:
        groups = self._groups
        tree = [
            groups.group((stage, tuple(members)), members.index(replica), len(members))
            for members in tree_groups(replica, self._replicas)
        ]
        pipeline = groups.group(("pipeline", replica), stage, self._stages)
        return Collectives(stage, pipeline, tree, self._replicas, replica)  # type: ignore[arg-type]

    def _parts(
        self,
        replica: int,
        stage: int,
        collectives: Collectives,
        config: JobOptions,
        own_order: Schedule | None,
    ) -> PhaseParts:
        gpu = self.pipelines.gpus[replica][stage]

        def said(text: str) -> None:
            self.said.append((self.pipelines.begun, text))

        counts = config.num_microbatches, config.num_chunks, config.group_size
        own = framework_order(self._stages, *counts)
        rooms = chain(self._rooms, repeat(self._rooms[-1]))
        late = chain(self._late, repeat(self._late[-1]))
        channel = SimpleNamespace(
            capacity=None,
            make_room=lambda schedule, specs: schedule.stages == own.stages or next(rooms),
            expect=_nothing,
            send=_nothing,
            receive=_nothing,
            end_step=_nothing,
        )
        folder = JobFolder(config.output, collectives)
        folder.resume(config, self._stages, gpu)  # type: ignore[arg-type]
        executor = SimpleNamespace(
            now_s=lambda: gpu.state.end_s,
            idle=lambda time_s: gpu.advance_to(gpu.state.end_s + time_s),
        )
        message = SimpleNamespace(make=_nothing)
        parts = PhaseParts(
            options=config,
            state=SessionState(wishes=config.power_budget),
            folder=folder,
            batch="",
            stage=stage,
            num_stages=self._stages,
            specs=SimpleNamespace(sends=dict.fromkeys(Kind, message)),  # type: ignore[arg-type]
            own_order=own_order,
            gpu=gpu,  # type: ignore[arg-type]
            clocks_mhz=[{*gpu.supported_frequencies_mhz}] * self._stages,
            channel=channel,  # type: ignore[arg-type]
            executor=executor,
            clock=SimpleNamespace(  # type: ignore[arg-type]
                request=lambda mhz, after: gpu.request(mhz), problems=tuple, error=None
            ),
            meter=VirtualMeter(gpu),
            energy=SimpleNamespace(baselines={}),  # type: ignore[arg-type]
            collectives=collectives,
            memory=JobMemory(None, collectives, said),
            say=said if collectives.is_planner else _nothing,
            background=lambda: Immediate(late),
        )
        if collectives.is_planner:
            self.planner = parts
        return parts


class Boxes:
    """The groups of a job, by what they are of."""

    def __init__(self) -> None:
        self._by_name: dict[object, dict[tuple[int, int], SimpleQueue[Any]]] = {}

    def group(self, name: object, index: int, size: int) -> MemoryGroup:
        """A rank's end of a group."""
        boxes = self._by_name.get(name)
        if boxes is None:
            pairs = [(a, b) for a in range(size) for b in range(size)]
            boxes = self._by_name[name] = {pair: SimpleQueue() for pair in pairs}
        return MemoryGroup(index, size, boxes)

    def all(self) -> list[SimpleQueue[Any]]:
        """The boxes of all groups."""
        return [box for boxes in self._by_name.values() for box in boxes.values()]


def _nothing(*args: object, **named: object) -> None:
    """Stands in for parts that have no say here."""
