"""A pipeline over one-sided copies on fake GPUs, whose units check what they get when they run."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_device import DeviceSpec, FakeDevice
from taking_turns import Turns

from envpipe_megatron.core.kinds import MESSAGES, Kind
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.runtime.channel import puts
from envpipe_megatron.runtime.channel.carrier import Peers, StageSpecs
from envpipe_megatron.runtime.channel.flag_page import FlagPage, create_page_file
from envpipe_megatron.runtime.channel.p2p import P2PChannel
from envpipe_megatron.runtime.channel.puts import PutCarrier, PutSide

SHAPE = (2, 3)


class LivePage(FlagPage):
    """A page whose other side is of this process too."""

    def __init__(self, path: Path, side: int, peers: Peers, lives: Callable[[], bool]) -> None:
        super().__init__(path, side, peers)
        self.other_lives = lives  # type: ignore[method-assign]


class PutPipeline:
    """The channels of all stages.

    Args:
        seed: of who goes on when.
        timeout_s: of a silent neighbour.
        budget_bytes: for the slots of a boundary.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        stages: int,
        *,
        seed: int = 0,
        one_queue: bool = False,
        wraps: bool = False,
        timeout_s: float = 10.0,
        budget_bytes: int = 2**20,
    ) -> None:
        self.turns = turns = Turns(seed)
        monkeypatch.setattr(puts, "time", turns)
        self.devices = tuple(FakeDevice(turns, s, one_queue=one_queue) for s in range(stages))
        timeout = timedelta(seconds=timeout_s)
        self.sides = [PutSide(device, timeout, budget_bytes) for device in self.devices]
        carriers: list[dict[Kind, PutCarrier]] = [{} for _ in range(stages)]
        self.pages: list[FlagPage] = []
        for first in range(stages - (not wraps)):
            second = (first + 1) % stages
            path = create_page_file()
            pairs = ((first, second, Kind.BACKWARD), (second, first, Kind.FORWARD))
            for side, (own, other, receives) in enumerate(pairs):
                peers = Peers(own, other, 10 + other, receives)
                page = LivePage(path, side, peers, lambda other=other: other not in turns.dead)
                carrier = PutCarrier(page, self.sides[own], first)
                carriers[own][receives] = carrier
                self.pages.append(page)
            path.unlink()
        for stage, side in enumerate(self.sides):
            side.carriers = list(carriers[stage].values())
            turns.watchers[stage] = [side.loss]
        ranks = range(10, 10 + stages)
        self.channels = [
            P2PChannel(ranks, stage, carriers[stage], side=self.sides[stage])
            for stage in range(stages)
        ]
        #: Units of each stage that its device has run, by their place, in all steps.
        self.ran: list[list[int]] = [[] for _ in range(stages)]
        #: What units got that was not theirs.
        self.wrong: list[str] = []
        spec = DeviceSpec.on(self.devices, torch.empty(SHAPE))
        self.specs = StageSpecs.alike(spec)

    def unless_lost(self, stage: int, done: Callable[[], bool]) -> None:
        """Wait as `executor.wait_for` does."""
        self.turns.pause(lambda: done() or self.sides[stage]._loss is not None)
        if not done():
            self.channels[stage].check()

    def train(
        self, schedules: Sequence[Schedule], *, syncs: float = 0.0
    ) -> list[BaseException | None]:
        """Run a step of each schedule on all stages; how each ended.

        Args:
            syncs: how often a unit waits for the whole device.
        """

        def host(stage: int) -> None:
            for step, schedule in enumerate(schedules):
                self.step(stage, schedule, 1000 * step, syncs)
            self.unless_lost(stage, self.devices[stage].idle)

        stages = range(len(self.devices))
        return self.turns.run(*(lambda stage=stage: host(stage) for stage in stages))

    def step(self, stage: int, schedule: Schedule, base: int, syncs: float) -> None:
        channel, device = self.channels[stage], self.devices[stage]
        channel.begin_step(schedule, self.specs)
        leaves = {
            position + unit.combined: unit
            for position, unit in enumerate(schedule.stages[stage])
            if schedule.sends[stage, position]
        }
        for position, unit in enumerate(schedule.stages[stage]):
            place = stage * schedule.units_per_stage + position
            source = int(schedule.cross_dependency[place])
            got = channel.receive(unit) if source >= 0 else []
            made: list[torch.Tensor] = []
            if position in leaves:
                made = self.specs.sends[MESSAGES[leaves[position].kind]].make()
            self._compute(stage, str(unit), got, made, base + source, base + place)
            if self.turns.random.random() < syncs:
                device.synchronize()
            if made:
                channel.send(leaves[position], made)
            del got, made  # their memory is used again
        self.unless_lost(stage, device.units_done)
        channel.end_step()
        # What follows, as an optimizer, takes memory that the step has let go.
        after = [device.seen(t) for t in self.specs.sends[Kind.FORWARD].make()]
        device.units().run(lambda: [t.fill_(-1) for t in after])

    def _compute(
        self, stage: int, unit: str, got: Any, made: Any, wanted: int, number: int
    ) -> None:
        device = self.devices[stage]
        inputs, outputs = [device.seen(t.detach()) for t in got], [device.seen(t) for t in made]

        def compute() -> None:
            self.ran[stage].append(number)
            self.wrong += [f"{unit}: {t}" for t in inputs if not bool((t == wanted).all())]
            for tensor in outputs:
                tensor.fill_(number)

        device.units().run(compute)
