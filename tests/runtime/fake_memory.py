"""A device's memory that tests allocate by hand, stages that do so unit by unit, jobs of them."""

import random
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import torch

from emulated_job import Boxes
from envpipe_megatron.core.kinds import Kind, Unit
from envpipe_megatron.core.orders import builders
from envpipe_megatron.runtime.channel.carrier import StageSpecs, TensorSpec
from envpipe_megatron.runtime.channel.collectives import Collectives
from envpipe_megatron.runtime.memory.peak import JobMemory
from envpipe_megatron.runtime.memory.stage import Reading


class FakeMemory:
    """Counts bytes; what does not fit is an error, as on a device."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity = capacity_bytes
        self.allocated = self.peak = self.unusable = self.resets = self.readings = 0
        #: The most at once since somebody set it, whoever resets the peak.
        self.most = 0
        self.reserved = 0

    def take(self, count: int) -> None:
        self.allocated += count
        self.peak, self.most = max(self.peak, self.allocated), max(self.most, self.allocated)
        assert self.allocated + self.unusable <= self.capacity, "out of memory"

    def give(self, count: int) -> None:
        self.allocated -= count
        assert self.allocated >= 0

    def use(self, count: int) -> None:
        self.take(count)
        self.give(count)

    def read(self) -> Reading:
        self.readings += 1
        return Reading(self.allocated, self.peak, self.unusable)

    def reset_peak(self) -> None:
        self.resets += 1
        self.peak = self.allocated

    def capacity_bytes(self) -> int:
        return self.capacity

    def reserve(self, count: int) -> bool:
        self.reserved = max(self.reserved, min(count, self.capacity))
        return count <= self.capacity


@dataclass(frozen=True)
class Sizes:
    """Memory that a stage holds, in bytes.

    Args:
        weights: and all else that is always there.
        activations: of one microbatch in flight.
        message: an output, which waits for its transfer at random.
        input: what comes in for a forward, as `SPECS` say; part of its activations.
        forward: needed while a forward runs.
        backward: needed while a backward runs: with recomputation, far more than `activations`.
        gradients: made in the first backward; kept or made anew in each iteration.
        optimizer: made in the first step that is not skipped.
        step: needed while a step runs.
        holes: the most that fragmentation takes at any time.
        jitter: share by which one microbatch's activations differ from another's.
        pending: of a microbatch between the two parts of its backward.
        layers: how many there are, which a backward passes one after the other.
        chunk_factors: how many times as much chunks hold, of both, as the first one.
        gradient: what comes for a backward, from its first unit's begin on.
    """

    weights: int = 20_000
    activations: int = 3_000
    message: int = 30
    input: int = 10
    forward: int = 400
    backward: int = 900
    gradients: int = 10_000
    keeps_gradients: bool = True
    optimizer: int = 30_000
    step: int = 500
    holes: int = 0
    jitter: float = 0.0
    pending: int = 2_800
    layers: int = 1
    chunk_factors: tuple[float, ...] = (1.0,)
    gradient: int = 0


@dataclass
class FakeStage:
    """One stage's work on fake memory; of all iterations, since gradients outlive one."""

    memory: FakeMemory
    sizes: Sizes
    rng: random.Random
    skipped_steps: int = 0
    is_first: bool = False
    held: dict[tuple[int, int], int] = field(default_factory=dict)
    waiting: deque[int] = field(default_factory=deque)
    #: By chunk, the last microbatch that was forwarded; a model keeps its input until the next.
    forwarded: dict[int, int] = field(default_factory=dict)
    outlived: set[int] = field(default_factory=set)
    gradients: int = 0
    optimizer: int = 0

    def __post_init__(self) -> None:
        self.memory.take(self.sizes.weights)

    def forward(self, unit: Unit, inputs: object = None) -> list[object]:
        sizes = self.sizes
        factor = (1 + sizes.jitter * self.rng.uniform(-1, 1)) * sizes.chunk_factors[unit.chunk]
        own = unit.microbatch, unit.chunk
        self.held[own] = int(factor * sizes.activations)
        if unit.chunk in self.outlived:
            self.outlived.remove(unit.chunk)
            self.memory.give(self._input_bytes(unit.chunk))
        self.forwarded[unit.chunk] = unit.microbatch
        self.memory.use(self.held[own] + sizes.message + sizes.forward)
        self.memory.take(self.held[own])
        return []

    def backward(self, unit: Unit, gradients: object = None) -> list[object]:
        """All of it, or its first part: layer after layer, activations become what is pending."""
        if not self.gradients:
            self.gradients = self.sizes.gradients
            self.memory.take(self.gradients)
        own, layers = (unit.microbatch, unit.chunk), self.sizes.layers
        held, pending = self.held.pop(own), 0
        if unit.kind is Kind.INPUT_GRADIENT:
            pending = int(self.sizes.pending * self.sizes.chunk_factors[unit.chunk])
            self.held[own] = pending
        for layer in range(layers):
            self.memory.use(self.sizes.backward + self.sizes.message)
            for of_all, change in ((held, self.memory.give), (pending, self.memory.take)):
                change(of_all * (layer + 1) // layers - of_all * layer // layers)
        if unit.kind is Kind.BACKWARD:
            self._end(unit)
        return []

    def weight_gradient(self, unit: Unit) -> None:
        self.memory.use(self.sizes.forward)
        self.memory.give(self.held.pop((unit.microbatch, unit.chunk)))
        self._end(unit)

    def _end(self, unit: Unit) -> None:
        """A microbatch has ended: only the model's last input outlives it."""
        if self.forwarded[unit.chunk] == unit.microbatch:
            self.outlived.add(unit.chunk)
            self.memory.take(self._input_bytes(unit.chunk))

    def _input_bytes(self, chunk: int) -> int:
        return 0 if self.is_first and chunk == 0 else self.sizes.input

    def sent(self, unit: Unit) -> None:
        self.memory.unusable = 0
        while self.waiting and self.rng.random() < 0.6:
            self.memory.give(self.waiting.popleft())
        self.memory.take(self.sizes.message)
        self.waiting.append(self.sizes.message)
        room = self.memory.capacity - self.memory.allocated
        self.memory.unusable = min(room, self.rng.randint(0, self.sizes.holes))

    def end_iteration(self) -> None:
        """All messages have left."""
        assert not self.held
        while self.waiting:
            self.memory.give(self.waiting.popleft())
        self.memory.unusable = 0

    def step(self) -> None:
        """The optimizer's step, outside of the iteration."""
        if self.skipped_steps:
            self.skipped_steps -= 1
        elif not self.optimizer:
            self.optimizer = self.sizes.optimizer
            self.memory.take(self.optimizer)
        self.memory.use(self.sizes.step)
        if not self.sizes.keeps_gradients:
            self.memory.give(self.gradients)
            self.gradients = 0


def run_units(
    work: object, units: tuple[Unit, ...], memory: JobMemory, *, watched: bool = True
) -> None:
    """Do what the interpreter does with a stage's work, without messages."""
    unit_ended = memory.watch() if watched else None
    begins_whole = False
    for unit in units:
        whole, begins_whole = begins_whole, unit.combined
        if begins_whole:
            work.memory.take(work.sizes.gradient)  # type: ignore[attr-defined]
        elif unit.kind is Kind.FORWARD:
            work.forward(unit, None)  # type: ignore[attr-defined]
        elif unit.kind is Kind.WEIGHT_GRADIENT and not whole:
            work.weight_gradient(unit)  # type: ignore[attr-defined]
        else:
            if not whole:
                work.memory.take(work.sizes.gradient)  # type: ignore[attr-defined]
            kind = Kind.BACKWARD if whole else unit.kind
            work.backward(replace(unit, kind=kind), None)  # type: ignore[attr-defined]
            work.memory.give(work.sizes.gradient)  # type: ignore[attr-defined]
        work.sent(unit)  # type: ignore[attr-defined]
        if unit_ended is not None:
            unit_ended(unit)


SPECS = StageSpecs.alike(TensorSpec(((5,),), (torch.float16,), torch.device("cpu")))
PLENTY = 10**9


class FakeJob:
    """A job whose ranks are threads of this process."""

    def __init__(
        self, stages, microbatches, sizes, *, seed=0, replicas=1, capacity=PLENTY, chunks=1
    ):
        self.own = builders.framework_order(stages, microbatches, chunks)
        groups = Boxes()
        self.said = []
        self.devices, self.ranks = [], []
        for rank in range(stages * replicas):
            device = FakeMemory(capacity)
            replica, own = divmod(rank, stages)
            stage = FakeStage(device, sizes(rank), random.Random(100 * seed + rank))
            stage.is_first = own == 0
            pipeline = groups.group(("pipeline", replica), own, stages)
            tree = [groups.group(("stage", own), replica, replicas)]
            ranks = Collectives(own, pipeline, tree, replicas, replica)
            memory = JobMemory(device, ranks, self._say(rank))
            self.devices.append(device)
            self.ranks.append((rank % stages, stage, memory))

    def _say(self, rank):
        return self.said.append if rank == 0 else lambda text: None

    def everywhere(self, call):
        with ThreadPoolExecutor(len(self.ranks)) as pool:
            return list(pool.map(lambda rank: call(*rank), self.ranks))

    def iterate(self, schedule, iterations=1, *, watched=True):
        """The peak of each rank's units in the last of them."""

        def run(stage, work, memory):
            for _ in range(iterations):
                memory._source.most = memory._source.allocated
                run_units(work, schedule.stages[stage], memory, watched=watched)
                peak = memory._source.most
                work.end_iteration()
                work.step()
            return peak

        return self.everywhere(run)

    def learn_parts(self, in_place):
        """Learn from an iteration of the framework's order with some backwards in two parts."""
        self.iterate(self.own, 2)
        self.iterate(in_place)
        self.everywhere(lambda stage, work, memory: memory.learn(self.own, SPECS, in_place))
        return self.ranks[0][2].stages

    def learn(self, specs=SPECS):
        """Warm up; the last iteration counts."""
        self.iterate(self.own, 2)

        def run(stage, work, memory):
            run_units(work, self.own.stages[stage], memory)
            memory.learn(self.own, specs)
            work.end_iteration()
            work.step()
            return memory.stages

        found = self.everywhere(run)
        assert all(stages == found[0] for stages in found)
        return found[0]
